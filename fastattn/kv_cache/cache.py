"""Keys and values that are kept from one call to the next: decoding, and prompts in chunks.

This file manages pages and their users; it has no kernel. A contiguous cache has one page per item,
as long as the capacity.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import Unpack  # torch depends on it

from ..api import attention_packed, draws, prepare_packed
from ..backends.native.marshalling import append_rows, kind
from ..backends.shared.value_checks import checks_values
from ..call.int4 import BLOCK, INT4
from ..call.need import flag, need_a_tensor, need_constant, whole
from ..call.packed_layout import rows_first
from ..call.quantisation import STORAGE
from ..call.spec import CacheArguments
from ..call.validation import DTYPES
from ..dispatch import fast_path
from ..dispatch.torch_function import is_compiling, is_dynamo_compiling, is_plain
from . import key_offset
from .block_pool import Claim, Pool, indexable, used
from .new_rows import Put, put, put_stored, step

Counts = int | Sequence[int] | Tensor
F = TypeVar("F", bound=Callable[..., Any])
# Arguments of `attention_packed` that a cache gives.
_SUPPLIED = dict.fromkeys(("key_lengths", "block_table", "cu_k", "max_k", "k_scale", "v_scale"))
_any_autocast = torch._C._is_any_autocast_enabled


class Items(NamedTuple):
    """The pages and lengths of the items, on the host, where all bookkeeping is done."""

    table: Tensor  # (B,blocks) int64: the pages of each item
    lengths: Tensor  # (B,) int64: the number of keys of each item
    goes_on: Tensor  # (B,) bool: may append to its last page, where no fork reads past its keys


class Change(NamedTuple):
    """The state of a cache after a call."""

    items: Items
    capacity: int
    claim: Claim

    @property
    def page(self) -> int:
        return self.claim.kept["k"].shape[1]


def _kept(method: F) -> F:
    """Run `method` with gradients and inference mode off, so that calls in any mode may use the
    tensors that it makes."""
    return torch.inference_mode(False)(torch.no_grad()(method))


class KVCache:
    """Keep the keys (B,Hk,N,D) and values (B,Hk,N,Dv) of B items, each with its own length.

    `fork` shares pages until one side writes. `copy.copy` is `fork`. Keys and values are constants;
    q has a gradient (none in eight bits). Under autocast, inputs are cast to the cache's dtype.
    Only one thread at a time may use a cache and its forks. On Linux a cache of 4 MiB or more asks
    for huge pages in a CPU's memory, which then fills by these.

    Numbers of eight bits (see storage) have a float32 scale for each token's head vector, which
    kernels read. A vector with a NaN or an infinity is stored as NaN. For normally distributed data
    and D of 64 or 128, outputs are off by 1% of their own size in int8 (4% in e4m3, 8% in e5m2),
    and the worst of a hundred rows by 1.5% (7%, 14%).

    Numbers of four bits have a scale and a minimum in bfloat16 for each 32 of a vector, which makes
    5 bits a number. 32 with a NaN or an infinity, or further apart than float32 has, are stored as
    NaN. Outputs for such data are off by 12%, and the worst of a hundred rows by 18%. Keys are
    quantised by token, not by channel: where a few channels vary 10 to 20 times as much as others,
    outputs are off by 36% to 60%, where quantisation by channel (KIVI) has 15% to 19%.

    In eight and four bits keys are stored less `key_offset`, so that a constant of a channel in all
    keys, as a bias makes it, costs no accuracy: results and LSE are those of whole keys. The keys
    that come while no page is used decide it, if they are of 16 tokens or more, in all items
    together: in fewer tokens it may be chance. It is a channel's mean where this is larger than the
    deviation, else 0. With softcap or a score_mod such a call runs a score_mod, or restores the
    items' keys and values in float32 for its time. In a cache with latent, the columns of values
    have no offset.

    Args:
        batch: B, the number of items.
        heads: Hk, the number of key heads.
        head_dim: D, the size of a key.
        value_dim: Dv, the size of a value; head_dim by default.
        latent: Dv of a cache of keys alone: the value of a token is the first `latent` numbers of
            its key, as in latent attention (`fastattn.mla`). Not with value_dim.
        capacity: The largest number of keys of an item.
        page_size: The number of keys of a page. None gives each item one contiguous page, and
            allocates all memory at once.
        dtype: The dtype of queries, and of appended keys and values.
        storage: The dtype of the pages: dtype by default; torch.int8, float8_e4m3fn or float8_e5m2
            store numbers of eight bits, "int4" of four, for which head_dim, value_dim and latent
            are multiples of 32.
        device: The device of the pages; torch's default device by default.
        grow: If True, add pages and capacity when they run out. If False, raise.

    Raises:
        ValueError: A size is too small, or there are no kernels for the dtype or storage.
        TypeError: A size is not a whole number.

    Example:
        >>> import torch
        >>> import fastattn
        >>> cache = fastattn.KVCache(2, 4, 32, capacity=64, page_size=16)
        >>> k, v = torch.randn(2, 2, 4, 10, 32)  # a prompt of 10 tokens for each of 2 items
        >>> cache.append(k, v)
        >>> q = torch.randn(2, 4, 10, 32)
        >>> out = cache.attention(q)  # causal: row i is the i-th of the last 10
        >>> torch.testing.assert_close(out, fastattn.attention(q, k, v, causal=True))
        >>> cache.pages_free, cache.nbytes  # of 8 pages
        (6, 131072)
    """

    capacity: int
    grow: bool
    _shortest: int | None = None
    # What `attention` of M rows reads: the pages, M, tensors.
    _reads: tuple[dict[str, Tensor], int, tuple[Tensor | None, ...]] | None = None
    _step: tuple | None = None  # of `append_rows`, for the items in these pages:
    _step_in: dict[str, Tensor] | None = None

    @_kept
    def __init__(
        self,
        batch: int,
        heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        latent: int | None = None,
        capacity: int,
        page_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        storage: torch.dtype | Literal["int4"] | None = None,
        device: torch.device | str | None = None,
        grow: bool = False,
    ):
        batch, heads, head_dim = (
            _size(*x) for x in (("batch", batch), ("heads", heads), ("head_dim", head_dim))
        )
        capacity = _size("capacity", capacity, 1)
        page_size = None if page_size is None else _size("page_size", page_size, 1)
        if latent is not None:
            latent = _latent(latent, head_dim, value_dim)
        value_dim = head_dim if value_dim is None else _size("value_dim", value_dim)
        if dtype not in DTYPES:
            raise ValueError(f"dtype: got {dtype}, expected one of {DTYPES}")
        if storage not in (None, dtype, *STORAGE, "int4"):
            listed = " or ".join(map(str, STORAGE))
            expected = f'None for {dtype}, {listed}, or "int4"'
            raise ValueError(f"storage: got {storage!r}, expected {expected}")
        if storage == "int4":
            _need_blocks(head_dim=head_dim, value_dim=value_dim, latent=latent or 0)
            storage = INT4
        page = capacity if page_size is None else page_size
        blocks = -(-capacity // page)
        shape = batch * blocks, page, heads
        pool = Pool(shape, head_dim, value_dim, dtype, storage or dtype, device, latent)
        table = torch.zeros(batch, blocks, dtype=torch.int64, device="cpu")
        lengths = torch.zeros(batch, dtype=torch.int64, device="cpu")
        items = Items(table, lengths, torch.zeros(batch, dtype=torch.bool, device="cpu"))
        self._begin(pool, items, capacity, flag("grow", grow), contiguous=page_size is None)
        self._watch()

    # ----------------------------------------------------------------------------------- contents

    @property
    def batch(self) -> int:
        """The number of items, B."""
        return self._lengths.shape[0]

    @property
    def lengths(self) -> Tensor:
        """The number of keys of each item, (B,) int64 on the cache's device."""
        return self._on_device[1].clone()

    @property
    def page_size(self) -> int:
        """The number of keys of a page."""
        return self._pool.page

    @property
    def block_table(self) -> Tensor:
        """The pages of each item for `attention_packed`: (B,blocks) int64 on the cache's device."""
        return self._on_device[0].clone()

    @property
    def k_pages(self) -> Tensor:
        """The pages of keys, (P,page,Hk,D), shared with all forks.

        With storage="int4" they are of torch.uint8, (P,page,Hk,D / 32 * 20). On CPUs they are not
        contiguous: a page has the rows of a head one after the other.
        """
        return self._pool.k

    @property
    def v_pages(self) -> Tensor:
        """The pages of values, (P,page,Hk,Dv), shared with all forks.

        With latent they are a view of those of keys. With storage="int4" they are as `k_pages`.
        """
        return self._pool.v

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of queries, and of appended keys and values."""
        return self._pool.dtype

    @property
    def storage(self) -> torch.dtype | Literal["int4"]:
        """The dtype of the pages; "int4" where they have numbers of four bits."""
        return "int4" if self._pool.k.dtype == INT4 else self._pool.k.dtype

    @property
    def k_scales(self) -> Tensor | None:
        """The factor of each row of k, (P,page,Hk) float32; None unless pages have eight bits."""
        return self._pool.scale("k")

    @property
    def v_scales(self) -> Tensor | None:
        """The factor of each row of v, (P,page,Hk) float32; None unless pages have eight bits."""
        return self._pool.scale("v")

    @property
    def key_offset(self) -> Tensor | None:
        """What keys are stored less, (Hk,D) float32 (float64 for float64); None if nothing.

        Only in eight and four bits. In a call of `attention_packed` on `k_pages` each score lacks
        the product of q, key_offset and the scale. It is the same number for all keys of a row, so
        outputs do not change, except with softcap, score_mod or sinks.
        """
        return self._pool.offset

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and their scales, used or free, including those of forks."""
        return sum(x.nbytes for x in self._pool.kept.values())

    @property
    def pages_free(self) -> int:
        """The number of pages that no item uses, forks included."""
        return int((self._pool.users == 0).sum())

    def __repr__(self) -> str:
        P, page, heads, _ = self._pool.k.shape
        dim, storage = self._pool.head_dims[0], str(self.storage).removeprefix("torch.")
        return (
            f"KVCache({self.batch} items of up to {self.capacity} keys, {heads} heads of {dim}, "
            f"{storage}, {P - self.pages_free} of {P} pages of {page} keys "
            f"used, {self.nbytes / 2**20:.1f} MiB)"
        )

    # ---------------------------------------------------------------------------------- attention

    @overload
    def attention(
        self,
        q: Tensor,
        causal: bool | Literal["top_left", "bottom_right"] = "bottom_right",
        *,
        cu_q: Tensor | None = None,
        max_q: int | None = None,
        allow_empty_rows: bool = False,
        return_lse: Literal[False] = False,
        **arguments: Unpack[CacheArguments],
    ) -> Tensor: ...
    @overload
    def attention(
        self,
        q: Tensor,
        causal: bool | Literal["top_left", "bottom_right"] = "bottom_right",
        *,
        cu_q: Tensor | None = None,
        max_q: int | None = None,
        allow_empty_rows: bool = False,
        return_lse: Literal[True],
        **arguments: Unpack[CacheArguments],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def attention(
        self,
        q: Tensor,
        causal: bool | Literal["top_left", "bottom_right"] = "bottom_right",
        *,
        cu_q: Tensor | None = None,
        max_q: int | None = None,
        allow_empty_rows: bool = False,
        return_lse: bool,
        **arguments: Unpack[CacheArguments],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def attention(
        self,
        q: Tensor,
        causal: bool | Literal["top_left", "bottom_right"] = "bottom_right",
        *,
        cu_q: Tensor | None = None,
        max_q: int | None = None,
        allow_empty_rows: bool = False,
        return_lse: bool = False,
        **arguments: Any,
    ) -> Any:
        """Compute `fastattn.attention` of q over the cached keys of each item.

        Args:
            q: Queries. Without cu_q, M rows of each item; with cu_q, the rows of all items.
            causal: As in `fastattn.attention`. With causal=False, rows stand at the first keys;
                with place=Place(bottom_right=True) as well, they stand at the last.
            cu_q: Offsets: item b has rows cu_q[b] to cu_q[b+1].
            max_q: The largest number of rows of an item; only with cu_q. See `attention_packed`.
            allow_empty_rows: If True, rows to which causal and window leave no key of their item
                give zeros, and an LSE of -inf: for batches with unused items. If False, they raise,
                except in compiled code; with cu_q on a GPU only if no item has a key, or if
                FASTATTN_CHECK=1.
            return_lse: As in `fastattn.attention`.
            **arguments: Those of `fastattn.attention`, except key_lengths, which the cache
                supplies.

        Shape:
            q: (B, H, M, D), or (T, H, D) with cu_q; the cache's dtype.
            cu_q: (B + 1,), int32 or int64, on the cache's device.
            mask: Broadcasts to (B, H, M, N), where N is at least the longest length.
            out: (B, H, M, Dv), or (T, H, Dv) with cu_q.
            lse: (B, H, M), or (T, H) with cu_q; float32 (float64 for float64).

        Returns:
            out, or (out, lse) with return_lse.

        Raises:
            ValueError: q or cu_q does not fit the cache, a row has no key, or as
                `fastattn.attention`.
            TypeError: An argument is one that the cache supplies, or as `fastattn.attention`.
            NotImplementedError: As `fastattn.attention`.

        Example:
            >>> import torch
            >>> import fastattn
            >>> cache = fastattn.KVCache(2, 4, 32, capacity=64)
            >>> cache.append(*torch.randn(2, 2, 4, 10, 32))
            >>> token = torch.randn(2, 8, 1, 32)  # two query heads for each key head
            >>> cache.attention(token, window=(3, 0)).shape
            torch.Size([2, 8, 1, 32])
        """
        if self._is_ordinary(q, cu_q, max_q, allow_empty_rows):
            found = self._attend_at_once(q, causal, return_lse, arguments)
            if found is not None:
                return found
        for name in _SUPPLIED:
            if name in arguments:
                raise TypeError(f"{name}: got an argument, expected none: the cache passes its own")
        flag("allow_empty_rows", allow_empty_rows)
        flag("return_lse", return_lse)
        mask = arguments.get("mask")
        columns = mask.shape[-1] if isinstance(mask, Tensor) and mask.ndim else 1
        given: dict[str, Any] = arguments | dict(
            self._pool.given(),
            causal=causal,
            return_lse=return_lse,
            block_table=self._on_device[0],
            key_lengths=self._on_device[1],
            max_k=None if columns == 1 else columns,
        )
        checks = not allow_empty_rows and not is_compiling()
        wrong = self._without_keys(q, cu_q, given) if checks else None
        if wrong is not None:  # other arguments that are wrong raise first, on no key
            given["key_lengths"] = torch.zeros_like(given["key_lengths"])
        if not self._is_autocast():
            result = self._attend(q, cu_q, max_q, given)
        else:
            with torch.autocast(self._pool.k.device.type, enabled=False):  # pages must not be cast
                if "mask" in given:
                    given["mask"] = self._cast(given["mask"])
                result = self._attend(self._cast(q), cu_q, max_q, given)
        if wrong is not None:
            raise ValueError(wrong)
        return result

    def _is_ordinary(self, q: Any, cu_q: Any, max_q: Any, allow_empty_rows: Any) -> bool:
        """True for the same number of rows of each item, if all are known to see a key."""
        given = cu_q is not None or max_q is not None
        if is_dynamo_compiling() or given or self._pool.offset is not None:
            return False
        if not isinstance(q, Tensor) or q.ndim != 4 or self._pool.k.device.type != "cpu":
            return False
        if allow_empty_rows is True:
            return True
        if self._shortest is None:
            self._shortest = min(self._lengths.tolist(), default=0)
        # Then each row sees the key where it stands, which no window hides.
        return 0 < q.shape[2] <= self._shortest and allow_empty_rows is False

    def _attend_at_once(
        self, q: Tensor, causal: Any, return_lse: Any, arguments: dict[str, Any]
    ) -> Any:
        if is_dynamo_compiling():  # it may begin here, after a break of its graph
            return None
        M, pool = q.shape[2], self._pool
        if self._reads is None or self._reads[0] is not pool.kept or self._reads[1] != M:
            scales = pool.scale("k"), pool.scale("v")
            tensors = pool.k, pool.v, *self._on_device, self._every(M), *scales
            self._reads = pool.kept, M, tensors
        tensors = self._reads[2]
        return fast_path.attend(_FAST, q, *tensors, causal, return_lse, arguments)

    def _is_autocast(self) -> bool:
        return _any_autocast() and torch.is_autocast_enabled(self._pool.k.device.type)

    def _cast(self, x: Any) -> Any:
        """Cast x as autocast does, but to the cache's dtype."""
        casts = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(self.dtype) if casts else x

    def _attend(self, q: Tensor, cu_q: Tensor | None, max_q: int | None, given: Any) -> Any:
        if cu_q is not None:
            if isinstance(cu_q, Tensor) and cu_q.shape != (self.batch + 1,):
                expected = f"(B + 1,) = ({self.batch + 1},) offsets"
                raise ValueError(f"cu_q: got shape {tuple(cu_q.shape)}, expected {expected}")
            return self._packed(q, given | dict(cu_q=cu_q, max_q=max_q))
        if not isinstance(q, Tensor) or q.ndim != 4 or q.shape[0] != self.batch:
            got = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
            raise ValueError(f"q: got {got}, expected (B, H, M, D) with B = {self.batch}")
        if max_q is not None:
            raise TypeError(f"max_q: got {max_q} without cu_q, expected None")
        B, _, M, _ = q.shape
        rows = q.transpose(1, 2).flatten(0, 1)
        result = self._packed(rows, given | dict(cu_q=self._every(M), max_q=M))
        return _each(lambda x: x.unflatten(0, (B, M)).transpose(1, 2), result)

    def _packed(self, q: Tensor, given: dict[str, Any]) -> Any:
        if self._pool.offset is None:
            return attention_packed(q, **given)
        return key_offset.attend(q, self._pool.offset, given)

    def _without_keys(self, q: Tensor, cu_q: Tensor | None, given: dict[str, Any]) -> str | None:
        """What is wrong if causal and window leave the first or the last row of an item without a
        key. The arguments may be wrong in other ways, which the call names."""
        try:
            rows = self._rows_of_items(q, cu_q)
            causal, place = given["causal"], given.get("place")
            at_end = causal == "bottom_right" or (place is not None and place.bottom_right)
            left, right = given.get("window") or (None, None)
            left = math.inf if left is None else left
            right = min(math.inf if right is None else right, 0 if causal else math.inf)

            def see(M: int, N: int) -> bool:  # fewer rows on more keys do, too
                first = N - M if at_end else 0
                return 0 < N > first + M - 1 - left and first + right >= 0 <= left + right

            if self._shortest is None:
                self._shortest = min(self._lengths.tolist(), default=0)
            if rows is None or see(max(rows, default=0), self._shortest):
                return None
            for b, (M, N) in enumerate(zip(rows, self._lengths.tolist())):
                if M and not see(M, N):
                    return (
                        f"q: got {M} rows of item {b} on {N} keys, expected that causal and window "
                        "let each row see a key; allow_empty_rows=True gives zeros for one without"
                    )
        except (AttributeError, IndexError, TypeError, ValueError):
            pass  # an argument of a wrong type or shape
        return None

    def _rows_of_items(self, q: Tensor, cu_q: Tensor | None) -> list[int] | None:
        """The number of rows of each item. None: only the device knows them."""
        if cu_q is None:
            return [q.shape[2]] * self.batch
        # Only plain memory has numbers to read, not fake tensors, say; and a GPU's wait for it.
        if kind((cu_q,)) is not None and checks_values(cu_q.device):
            return [end - first for first, end in itertools.pairwise(cu_q.tolist())]
        return None if self._lengths.any() else [q.shape[0]]  # without any key all rows are empty

    def _every(self, M: int) -> Tensor:
        """Offsets (B+1,) of items with M rows each."""
        if self._offsets is None or self._offsets[0] != M:
            with torch.inference_mode(False):  # for calls in any mode
                offsets = torch.arange(self.batch + 1, device=self._pool.k.device) * M
            self._offsets = M, offsets
        return self._offsets[1]

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        causal: bool | Literal["top_left", "bottom_right"] = "bottom_right",
        **arguments: Any,
    ) -> Any:
        """Append k and v, then compute `attention` of q, as a step of decoding does.

        On a CPU each of the two is one native call, while the rows fit into the pages that the
        items have. Where attention raises, the keys stay appended; `truncate` drops them.

        Args:
            q: Queries, as in `attention`.
            k: Keys, as in `append` without cu.
            v: Values, as in `append` without cu.
            causal: As in `attention`.
            **arguments: Those of `attention`.

        Shape:
            q: (B, H, M, D), the cache's dtype.
            k: (B, Hk, n, D), the cache's dtype and device.
            v: (B, Hk, n, Dv), the cache's dtype and device.
            out: (B, H, M, Dv).

        Returns:
            As `attention`.

        Raises:
            RuntimeError: As `append`.
            ValueError, TypeError, NotImplementedError: As `append` and `attention`.

        Example:
            >>> import torch
            >>> import fastattn
            >>> cache = fastattn.KVCache(2, 4, 32, capacity=64)
            >>> for n in (10, 1, 1):  # a prompt, then token by token
            ...     q, k, v = torch.randn(3, 2, 4, n, 32)
            ...     out = cache.step(q, k, v)
            >>> cache.lengths
            tensor([12, 12])
        """
        self.append(k, v)
        return self.attention(q, causal, **arguments)

    # ---------------------------------------------------------------------------------- appending

    def append(self, k: Tensor, v: Tensor | None = None, cu: Tensor | None = None) -> None:
        """Append keys and values to the items, in place.

        Args:
            k: Keys. Without cu, n for each item; with cu, the new keys of all items.
            v: Values, laid out as k; None in a cache with latent.
            cu: Offsets: item b gets rows cu[b] to cu[b+1].

        Shape:
            k: (B, Hk, n, D), or (T, Hk, D) with cu; the cache's dtype and device.
            v: (B, Hk, n, Dv), or (T, Hk, Dv) with cu; the cache's dtype and device.
            cu: (B + 1,), int32 or int64.

        Raises:
            RuntimeError: The cache is full. Nothing was written.
            ValueError: A tensor does not fit the cache, or k or v requires grad outside
                torch.no_grad() or has a tangent, of which a cache keeps nothing.
            TypeError: k or v is not a tensor, or cu is not of whole numbers; v is given to a cache
                with latent.

        Example:
            >>> import torch
            >>> import fastattn
            >>> cache = fastattn.KVCache(2, 4, 32, capacity=64)
            >>> k, v = torch.randn(2, 5, 4, 32)  # 3 tokens for the first item, 2 for the second
            >>> cache.append(k, v, torch.tensor([0, 3, 5]))
            >>> cache.lengths
            tensor([3, 2])
        """
        if cu is None and self._append_step(k, v):
            return
        need_constant("a cache keeps keys and values without their gradient", k=k, v=v)
        self._append(k, v, cu)

    def _append_step(self, k: Tensor, v: Tensor | None) -> bool:
        """Append rows of every item to the pages that it has, in one native call, as most decoding
        steps do. False: it has not."""
        if is_compiling() or not self._slack:
            return False
        kept = self._pool.kept
        if self._step_in is not kept:
            if not is_plain():
                return False
            self._step, self._step_in = step(self._pool, *self._items[:2]), kept
        n = None if self._step is None else append_rows(self._step, k, v, self._slack)
        if n is None:
            return False
        self._slack -= n
        if self._shortest is not None:
            self._shortest += n
        return True

    @_kept
    def _append(self, k: Tensor, v: Tensor | None, cu: Tensor | None) -> None:
        given: dict[str, Any] = dict(k=k, v=v)
        if self._pool.latent is not None:
            if v is not None:
                raise TypeError("v: got an argument, expected None: latent gives the values")
            del given["v"]
        if self._is_autocast():
            given = {name: self._cast(x) for name, x in given.items()}
        self._check(given, cu is not None)
        k, n = given["k"], given["k"].shape[2]
        if cu is None and n <= self._slack:
            self._go_on(n, put(self._pool, given))
            return
        self._pool.decide_offset(k)
        if cu is None:
            write = put(self._pool, given)
            change = self._with(torch.full_like(self._lengths, n), self._items)
        else:
            offsets = _offsets(cu, self.batch, k.shape[0])
            write = put(self._pool, given, offsets)
            change = self._with(offsets.diff(), self._items)
        # Items without new rows may share their last page, to which no step goes on.
        self._do(change, write, self._left(change) if cu is None else 0)

    def _check(self, given: dict[str, Any], packed: bool) -> None:
        dtype, device, heads = self.dtype, self._pool.k.device, self._pool.k.shape[2]
        for (name, x), d in zip(given.items(), self._pool.head_dims):
            letters = "(T, Hk, D)" if packed else "(B, Hk, n, D)"
            need_a_tensor(name, x)
            fits = x.ndim == (3 if packed else 4) and x.shape[1] == heads and x.shape[-1] == d
            if not fits or not (packed or x.shape[0] == self.batch):
                sizes = f"Hk = {heads}, D = {d}" + ("" if packed else f", B = {self.batch}")
                raise ValueError(f"{name}: got {tuple(x.shape)}, expected {letters} with {sizes}")
            if (x.dtype, x.device) != (dtype, device):
                expected = f"{dtype} on {device}, as the cache has"
                raise ValueError(f"{name}: got {x.dtype} on {x.device}, expected {expected}")
        rows = 0 if packed else 2
        counts = {name: x.shape[rows] for name, x in given.items()}
        if counts.get("v", counts["k"]) != counts["k"]:
            raise ValueError(f"v: got {counts['v']} rows, expected {counts['k']}, as k has")

    def _go_on(self, n: int, write: Put) -> None:
        """Append n keys to every item in the pages that it has, as most decoding steps do."""
        table, lengths, goes_on = self._items
        longer = lengths + n
        there = self._moved(table, longer)
        write(self._pool.kept, table, longer)
        shortest = None if self._shortest is None else self._shortest + n
        self._set(Items(table, longer, goes_on), there, self._slack - n, shortest)

    def _with(self, counts: Tensor, items: Items, gone: Tensor | None = None) -> Change:
        """Return the change that gives each of `items` room for `counts` more keys, in pages that
        it may write. gone: pages that are released first.

        The cache itself does not change yet: only pages without a user are written. Raises
        RuntimeError if there is no room for all keys.
        """
        lengths, pool = items.lengths + counts, self._pool
        capacity, kept, table = self._capacity_for(lengths), pool.kept, items.table
        if capacity > self.capacity and self._is_contiguous and not pool.forked:
            kept = pool.longer(capacity)
        page = kept["k"].shape[1]
        blocks = max(table.shape[1], -(-capacity // page))
        table = torch.cat([table, table.new_zeros(self.batch, blocks - table.shape[1])], 1)
        has, needs = -(-items.lengths // page), -(-lengths // page)
        more, last = needs - has, (has - 1).clamp(min=0)
        mine = table.gather(1, last[:, None])[:, 0]
        copied = self._copied(items, counts, mine, page)
        n, left = int(more.sum()), mine[copied]
        dropped = left if gone is None else torch.cat([gone, left])
        claim = pool.claim(n + len(left), dropped, self.grow, kept)
        item = torch.repeat_interleave(torch.arange(self.batch, device="cpu"), more)
        first = torch.repeat_interleave(more.cumsum(0) - more - has, more)
        table[item, torch.arange(n, device="cpu") - first] = claim.taken[:n]
        if len(left):
            table[copied, last[copied]] = claim.taken[n:]
            claim.copy(left, claim.taken[n:])
        return Change(Items(table, lengths, items.goes_on | (counts > 0)), capacity, claim)

    def _capacity_for(self, lengths: Tensor) -> int:
        longest = int(lengths.max()) if self.batch else 0
        if longest <= self.capacity:
            return self.capacity
        if not self.grow:
            raise RuntimeError(
                f"KVCache is full: got {longest} keys of item {int(lengths.argmax())}, expected at "
                f"most capacity = {self.capacity}; evict() drops the oldest, grow=True makes room"
            )
        return max(longest, 2 * self.capacity)

    def _copied(self, items: Items, counts: Tensor, last: Tensor, page: int) -> Tensor:
        """(B,) bool: items that must copy their last page before they append, because others use
        it. If all users of a page append, the one with the most keys in it keeps the page: it
        writes behind the rows that the others read."""
        users = self._pool.users
        partial = (counts > 0) & (items.lengths % page > 0)
        shared = partial & ~items.goes_on & (users[last] > 1)
        if shared.any():
            pages, item = last[shared], shared.nonzero()[:, 0]
            order = items.lengths[shared] % page * self.batch + item
            most = torch.zeros_like(users).scatter_reduce(0, pages, order, "amax")
            all_write = torch.bincount(pages, minlength=len(users)) == users
            shared[item[all_write[pages] & (order == most[pages])]] = False
        return shared

    def _left(self, change: Change) -> int:
        """How many keys every item can still append to its last page."""
        if not self.batch:
            return 0
        lengths = change.items.lengths
        return min(int((-lengths % change.page).min()), change.capacity - int(lengths.max()))

    def _do(self, change: Change, write: Put | None = None, slack: int = 0) -> None:
        """Write the rows, then apply the change: an error in writing leaves the cache as it was."""
        there = self._moved(*change.items[:2])
        if write is not None:
            write(change.claim.kept, *change.items[:2])
        self._pool.settle(change.claim)
        self.capacity = change.capacity
        self._set(change.items, there, slack)

    # ----------------------------------------------------------------------- forking and dropping

    @_kept
    def fork(self, items: Sequence[int] | Tensor | None = None) -> KVCache:
        """Make a cache of these items that shares their pages.

        An item copies a shared page before it writes to it, with two exceptions. An item that was
        the only user of its last page when it was forked writes there until it drops keys. If all
        items that share a page write in one call, as in beam search, one keeps the page.

        Args:
            items: The items, by index. An item may be listed several times. None: all.

        Shape:
            items: (n,), int32 or int64, if it is a tensor.

        Returns:
            The new cache. It has one item for each of `items`.

        Raises:
            ValueError: An index is out of range.
            TypeError: An index is not a whole number.

        Example:
            >>> import torch
            >>> import fastattn
            >>> prompt = fastattn.KVCache(1, 4, 32, capacity=64, page_size=16)
            >>> prompt.append(*torch.randn(2, 1, 4, 16, 32))
            >>> beams = prompt.fork([0, 0, 0])
            >>> beams.lengths
            tensor([16, 16, 16])
            >>> beams.block_table[:, 0].unique().numel()  # all share the page of the prompt
            1
        """
        pool, page = self._pool, self.page_size
        if items is None:
            table, lengths = self._table.clone(), self._lengths.clone()
        else:
            chosen = _index(items, self.batch)
            table, lengths = self._table[chosen], self._lengths[chosen]
        alone = torch.ones_like(self._items.goes_on)
        if pool.forked:
            alone = self._items.goes_on | (pool.users[self._last_pages()] == 1)
        made = object.__new__(KVCache)
        kept = self.capacity, self.grow, self._is_contiguous
        made._begin(pool, Items(table, lengths, alone.new_zeros(len(table))), *kept)
        if items is None and not pool.forked:  # all pages in use are this cache's
            pool.users.mul_(2)
        else:
            pool.add(used(table, lengths, page))
        pool.forked, self._items = True, self._items._replace(goes_on=alone)
        made._watch()
        return made

    @_kept
    def evict(self, counts: Counts) -> None:
        """Drop the oldest keys of each item.

        Whole pages are released. If a page is dropped in part, all later keys of the item are
        copied; multiples of page_size need no copy.

        Args:
            counts: The number of keys to drop: one for all items, or one for each.

        Shape:
            counts: One element, or (B,), int32 or int64, if it is a tensor.

        Raises:
            ValueError: The shape is wrong, or an item has fewer keys.
            TypeError: A count is not a whole number.
            RuntimeError: There is no free page for a copy.

        Example:
            >>> import torch
            >>> import fastattn
            >>> cache = fastattn.KVCache(2, 4, 32, capacity=64, page_size=16)
            >>> cache.append(*torch.randn(2, 2, 4, 40, 32))
            >>> cache.evict([16, 0])
            >>> cache.lengths
            tensor([24, 40])
        """
        counts = self._counts("counts", counts)
        page, blocks = self.page_size, torch.arange(self._table.shape[1], device="cpu")
        keep, moves = self._lengths - counts, counts % page > 0
        n = torch.where(moves, -(-self._lengths // page), counts // page)[:, None]
        table = self._table.gather(1, (blocks + n).clamp(max=len(blocks) - 1))
        items = Items(table, torch.where(moves, 0, keep), self._items.goes_on)
        moved = torch.where(moves, keep, 0)
        change = self._with(moved, items, self._table[blocks < n])
        kept = [self._rows(b, int(counts[b])) for b in moves.nonzero()[:, 0]]
        rows = {name: torch.cat([x[name] for x in kept]) for name in self._pool.kept if kept}
        self._do(change, put_stored(rows, moved) if kept else None)

    def truncate(self, lengths: Counts) -> None:
        """Keep only the first keys of each item, to drop rejected speculative tokens.

        Args:
            lengths: The number of keys to keep: one for all items, or one for each.

        Shape:
            lengths: One element, or (B,), int32 or int64, if it is a tensor.

        Raises:
            ValueError: The shape is wrong, or an item has fewer keys.
            TypeError: A length is not a whole number.

        Example:
            >>> import torch
            >>> import fastattn
            >>> cache = fastattn.KVCache(2, 4, 32, capacity=64)
            >>> cache.append(*torch.randn(2, 2, 4, 10, 32))
            >>> cache.truncate([7, 10])
            >>> cache.lengths
            tensor([ 7, 10])
        """
        if not self._shorten(lengths):
            self._truncate(lengths)

    def _shorten(self, lengths: Counts) -> bool:
        """Keep fewer keys in the pages that the items have, if no other cache reads these, as the
        steps of speculative decoding do: the next step goes on there. False: nothing has changed.
        """
        if not is_plain() or self._pool.k.device.type != "cpu":
            return False
        if isinstance(lengths, Tensor):
            whole_numbers = lengths.dtype in (torch.int32, torch.int64) and lengths.ndim < 2
            if not whole_numbers or kind((lengths,)) is None:
                return False
            lengths = lengths.tolist()
        now, page = self._lengths.tolist(), self.page_size
        if isinstance(lengths, (list, tuple)):
            keep = list(lengths)
        elif type(lengths) is int:
            keep = [lengths] * len(now)
        else:
            return False
        if len(keep) != len(now) or not now:
            return False
        if not all(type(n) is int for n in keep):
            return False
        if not all(0 <= n <= m and (m - 1) // page == (n - 1) // page for n, m in zip(keep, now)):
            return False
        if self._pool.forked and (self._pool.users[self._last_pages()] != 1).any():
            return False
        with torch.inference_mode(False):  # for calls in any mode
            kept = torch.tensor(keep, device="cpu")
        slack = min(min(-n % page for n in keep), self.capacity - max(keep))
        self._set(self._items._replace(lengths=kept), (self._table, kept), slack, min(keep))
        return True

    @_kept
    def _truncate(self, lengths: Counts) -> None:
        keep = self._counts("lengths", lengths)
        has, needs = (-(-x[:, None] // self.page_size) for x in (self._lengths, keep))
        block = torch.arange(self._table.shape[1], device="cpu")
        gone = self._table[(needs <= block) & (block < has)]
        items = Items(self._table, keep, self._items.goes_on & (keep == self._lengths))
        self._do(Change(items, self.capacity, self._pool.claim(0, gone)))

    @_kept
    def free(self, items: Sequence[int] | Tensor | None = None) -> None:
        """Release all pages of these items, which are empty then.

        Args:
            items: The items, by index. None: all.

        Shape:
            items: (n,), int32 or int64, if it is a tensor.

        Raises:
            ValueError: An index is out of range.
            TypeError: An index is not a whole number.

        Example:
            >>> import torch
            >>> import fastattn
            >>> cache = fastattn.KVCache(2, 4, 32, capacity=64)
            >>> cache.append(*torch.randn(2, 2, 4, 10, 32))
            >>> cache.free([1])
            >>> cache.lengths
            tensor([10,  0])
        """
        chosen = _index(items, self.batch)
        keep = self._lengths.clone()
        keep[chosen] = 0
        self.truncate(keep)

    # ---------------------------------------------------------------------------------- internals

    def _begin(self, pool: Pool, items: Items, capacity: int, grow: bool, contiguous: bool) -> None:
        """contiguous: each item has one page, as long as the capacity."""
        self.capacity, self.grow, self._pool, self._is_contiguous = capacity, grow, pool, contiguous
        self._offsets: tuple[int, Tensor] | None = None
        self._held: list[Tensor] = []
        self._set(items, self._moved(*items[:2]))

    def _watch(self) -> None:
        """Release the cache's pages when it is garbage collected."""
        weakref.finalize(self, _let_go, self._pool, self._held).atexit = False

    def __copy__(self) -> KVCache:
        return self.fork()

    def __getstate__(self) -> dict[str, Any]:  # without addresses
        return self.__dict__ | dict(_step=None, _step_in=None, _reads=None)

    def __setstate__(self, state: dict[str, Any]) -> None:  # for deepcopy and pickle
        self.__dict__.update(state)
        self._pool.add(used(*self._held, self.page_size))  # a copied pool counts no users
        self._watch()

    def _set(
        self,
        items: Items,
        there: tuple[Tensor, Tensor],
        slack: int = 0,
        shortest: int | None = None,
    ) -> None:
        """there: table and lengths on the pages' device. slack: at most the result of `_left`.
        shortest: the keys of the shortest item, if that is known without reading a tensor."""
        self._items, self._on_device = items, there
        self._reads = self._step = self._step_in = None
        self._slack, self._shortest = slack, shortest
        self._held[:] = items[:2]

    @property
    def _table(self) -> Tensor:
        return self._items.table

    @property
    def _lengths(self) -> Tensor:
        return self._items.lengths

    def _last_pages(self) -> Tensor:
        """(B,): the last page of each item that has one."""
        last = ((self._lengths - 1) // self.page_size).clamp(min=0)
        return self._table.gather(1, last[:, None])[:, 0]

    def _moved(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x and y on the pages' device; bookkeeping is done on the host."""
        device = self._pool.k.device
        return (x, y) if device.type == "cpu" else (x.to(device), y.to(device))

    def _rows(self, b: int, first: int) -> dict[str, Tensor]:
        """The keys and values of item b from key `first` on, (n,Hk,D), as stored."""
        pages = self._table[b, : -(-int(self._lengths[b]) // self.page_size)]
        end = int(self._lengths[b])
        pages = pages.to(self._pool.k.device)
        taken = {name: indexable(x)[pages].view(x.dtype) for name, x in self._pool.kept.items()}
        return {name: x.flatten(0, 1)[first:end] for name, x in taken.items()}

    def _counts(self, name: str, counts: Counts) -> Tensor:
        numbers = _whole(name, counts)
        if numbers.ndim > 1 or numbers.numel() not in (1, self.batch):
            got = tuple(numbers.shape)
            raise ValueError(f"{name}: got shape {got}, expected one number, or ({self.batch},)")
        numbers = numbers.expand(self.batch).clone()
        wrong = (numbers < 0) | (numbers > self._lengths)
        if wrong.any():
            b = int(wrong.nonzero()[0])
            raise ValueError(
                f"{name}: got {int(numbers[b])} keys of item {b}, expected a number in "
                f"[0, {int(self._lengths[b])}], its length"
            )
        return numbers


def _prepare_fast(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> fast_path.Prepared | None:
    table, lengths, cu_q, k_scale, v_scale, causal, return_lse, arguments = rest
    B, _, M, _ = q.shape
    if B != len(table) or draws(arguments) or _SUPPLIED.keys() & arguments.keys():
        return None
    mask = arguments.get("mask")
    columns = mask.shape[-1] if isinstance(mask, Tensor) and mask.ndim else 1

    def by_item(rows: Tensor) -> Tensor:
        return rows_first(rows).unflatten(0, (B, M)).transpose(1, 2)

    t, o = prepare_packed(
        q.transpose(1, 2).flatten(0, 1),
        *(k, v, cu_q, None, table, M, None if columns == 1 else columns, k_scale, v_scale),
        arguments | dict(causal=causal, key_lengths=lengths),
    )
    lse = (lambda normaliser: by_item(normaliser[0])) if flag("return_lse", return_lse) else None
    return fast_path.Prepared(t, o, by_item, lse)


_FAST = fast_path.path(
    _prepare_fast,
    ["block_table", "key_lengths", "cu_q", "k_scale", "v_scale", "causal", "return_lse"],
)


def _let_go(pool: Pool, held: list[Tensor]) -> None:
    # A cache may be collected in any mode, and under torch.func's transforms.
    with _disable_current_modes():
        guard = torch._C._DisableFuncTorch()  # noqa: F841
        pool.drop(used(held[0], held[1], pool.page))


def _latent(latent: Any, head_dim: int, value_dim: Any) -> int:
    if value_dim is not None:
        raise ValueError(
            f"latent: got {latent} beside value_dim = {value_dim}, expected one of them"
        )
    size = _size("latent", latent)
    if size > head_dim:
        raise ValueError(f"latent: got {size}, expected at most head_dim = {head_dim}")
    return size


def _need_blocks(**sizes: int) -> None:
    for name, n in sizes.items():
        if n % BLOCK:
            expected = f'a multiple of {BLOCK} with storage="int4"'
            raise ValueError(f"{name}: got {n}, expected {expected}")


def _size(name: str, x: Any, least: int = 0) -> int:
    size = whole(name, x, f"a whole number, {least} or more")
    if size < least:
        raise ValueError(f"{name}: got {size}, expected {least} or more")
    return size


def _whole(name: str, x: Any) -> Tensor:
    """Numbers as int64 on the CPU. Bools, and floats, which would be truncated, raise."""
    numbers = x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")
    if numbers.numel() and numbers.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: got {numbers.dtype}, expected whole numbers, int32 or int64")
    return numbers.cpu().long()


def _each(f, result):
    return tuple(f(x) for x in result) if isinstance(result, tuple) else f(result)


def _offsets(cu: Tensor, batch: int, total: int) -> Tensor:
    """The offsets `cu` in int64, contiguous on the CPU."""
    if not isinstance(cu, Tensor) or cu.shape != (batch + 1,):
        got = tuple(cu.shape) if isinstance(cu, Tensor) else type(cu).__name__
        raise ValueError(f"cu: got {got}, expected (B + 1,) = ({batch + 1},) offsets")
    offsets = _whole("cu", cu).contiguous()
    if offsets[0] != 0 or offsets[-1] != total or (offsets.diff() < 0).any():
        raise ValueError(
            f"cu: got {offsets.tolist()}, expected offsets that begin at 0, never fall, and "
            f"end at {total}, the rows of k"
        )
    return offsets


def _index(items: Sequence[int] | Tensor | None, batch: int) -> Tensor:
    """The indices of these items; None means all."""
    if items is None:
        return torch.arange(batch, device="cpu")
    chosen = _whole("items", items).reshape(-1)
    if ((chosen < 0) | (chosen >= batch)).any():
        raise ValueError(f"items: got {chosen.tolist()}, expected numbers in [0, {batch})")
    return chosen
