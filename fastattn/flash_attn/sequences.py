"""The calls that FlashAttention-3 and -4 share: rows and keys padded, packed or in pages, of which
sequences use the first ones; latent queries; scales of eight bits; and chunks, windows and
functions that are a mask_mod and a score_mod here."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import attention_packed
from ..backends.shared.value_checks import check_order
from ..call.need import need_constant
from ..call.quantisation import STORAGE
from ..call.spec import MaskMod, ScoreMod
from ..dropin.flex_blocks import both
from .checks import in_their_names, need_integers, need_shape, whole_or_none
from .translation import Arguments, dense

Count = int | Tensor  # one for all sequences, or (B,)
Scales = tuple[Tensor | None, Tensor | None, Tensor | None]  # of q, k and v, (B,Hk)
NO_SCALES: Scales = (None, None, None)
_said: set[str] = set()


class Functions(NamedTuple):
    """What a call shows and how it changes scores, beside `Arguments`.

    chunk: its size; a row sees the keys of its own chunk. 0 is none.
    band: (left, right), of which one is below 0.
    score_mod, mask_mod: from the numbers of rows and of keys to functions as of `attention`.
    """

    chunk: int = 0
    band: tuple[int | None, int | None] | None = None
    score_mod: Callable[[Count, Count], ScoreMod] | None = None
    mask_mod: Callable[[Count, Count], MaskMod] | None = None

    def of(self, rows: Count, keys: Count) -> Arguments:
        """The arguments of a call of this many rows and keys."""
        if self == NO_FUNCTIONS:
            return {}
        masks: list[MaskMod] = []
        ahead = keys - rows  # row i is at i' = i + ahead
        if self.chunk:
            size = self.chunk
            masks.append(lambda b, h, i, j: (i + each(ahead, b)) // size == j // size)
        if self.band is not None:
            left, right = self.band
            if left is not None:
                masks.append(lambda b, h, i, j: j - i >= each(ahead, b) - left)
            if right is not None:
                masks.append(lambda b, h, i, j: j - i <= each(ahead, b) + right)
        if self.mask_mod is not None:
            masks.append(self.mask_mod(rows, keys))
        found: Arguments = {}
        if masks:
            found["mask_mod"] = functools.reduce(both, masks)
        if self.score_mod is not None:
            found["score_mod"] = self.score_mod(rows, keys)
        return found


NO_FUNCTIONS = Functions()


def each(x: Count, b: Any) -> Any:
    """That of sequence b."""
    return x[b] if isinstance(x, Tensor) else x


class Rows(NamedTuple):
    """Queries (T,H,D) and qv (T,H,Dv) of sequences that begin at cu (B+1,). `used` (B,) of each
    count, if not all; `longest` is the most rows of one. If they were given as (B,M,...), padded is
    (B, M)."""

    q: Tensor
    qv: Tensor | None
    cu: Tensor
    used: Tensor | None
    longest: int | None
    padded: tuple[int, int] | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        qv: Tensor | None,
        cu_seqlens_q: Tensor | None,
        seqused_q: Tensor | None,
        max_seqlen_q: int | None,
    ) -> Rows:
        need_queries(q, qv, cu_seqlens_q)
        if cu_seqlens_q is None:
            B, M = q.shape[:2]
            cu = M * torch.arange(B + 1, device=q.device)
            flat = [None if x is None else x.flatten(0, 1) for x in (q, qv)]
            rows = cls(flat[0], flat[1], cu, seqused_q, M, (B, M))  # ty: ignore
        else:
            most = whole_or_none(max_seqlen_q)
            if seqused_q is not None:  # theirs may be that of the rows that are used
                most = None if q.device.type == "cpu" else len(q)
            rows = cls(q, qv, cu_seqlens_q, seqused_q, most, None)
        if seqused_q is not None:
            need_integers("seqused_q", seqused_q, (len(rows.cu) - 1,))
        return rows

    @property
    def counts(self) -> Tensor:
        return (self.cu.diff() if self.used is None else self.used).long()

    def as_given(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """out (T,H,Dv) and LSE (T,H) as (B,M,H,Dv) and (B,H,M), or (T,H,Dv) and (H,T)."""
        lse = lse.transpose(0, 1)
        if self.padded is None:
            return out, lse
        return out.unflatten(0, self.padded), lse.unflatten(1, self.padded).transpose(0, 1)


class Keys(NamedTuple):
    """Keys and values of sequences: packed, (S,Hk,·), that begin at cu (B+1,), or in pages
    (P,page,Hk,·) of `table` (B,pages). `lengths` (B,) of each count, or all."""

    k: Tensor
    v: Tensor
    cu: Tensor | None
    table: Tensor | None
    lengths: Tensor | None
    longest: int | None

    @classmethod
    def of(
        cls,
        k: Tensor,
        v: Tensor,
        cu_seqlens_k: Tensor | None,
        seqused_k: Tensor | None,
        max_seqlen_k: int | None,
        page_table: Tensor | None,
        batch: int,
    ) -> Keys:
        """Raise TypeError and ValueError if the arguments do not fit each other."""
        if seqused_k is not None:
            need_integers("seqused_k", seqused_k, (batch,))
        if page_table is not None:
            if cu_seqlens_k is not None:
                raise ValueError(
                    "page_table: got it with cu_seqlens_k, expected the number of keys of each "
                    "sequence in seqused_k"
                )
            need_integers("page_table", page_table, (batch, "pages"))
            need_shape("k", k, ("blocks", "page", "heads", "head_dim"))
            N = page_table.shape[1] * k.shape[1]
            if seqused_k is None:
                seqused_k = torch.full((batch,), N, device=k.device)
            return cls(k, v, None, page_table, seqused_k, N)
        if cu_seqlens_k is not None:
            need_offsets("cu_seqlens_k", cu_seqlens_k, batch)
            return cls(k, v, cu_seqlens_k, None, seqused_k, whole_or_none(max_seqlen_k))
        need_shape("k", k, (batch, "seqlen", "heads", "head_dim"))
        need_shape("v", v, (*k.shape[:3], "head_dim"))
        N = k.shape[1]
        if k.dtype in STORAGE:  # items are pages, as they lie
            table = torch.arange(batch, device=k.device)[:, None]
            if seqused_k is None:
                seqused_k = torch.full((batch,), N, device=k.device)
            return cls(k, v, None, table, seqused_k, N)
        cu = N * torch.arange(batch + 1, device=k.device)
        return cls(k.flatten(0, 1), v.flatten(0, 1), cu, None, seqused_k, N)

    @property
    def counts(self) -> Tensor:
        if self.lengths is not None:
            return self.lengths.long()
        assert self.cu is not None
        return self.cu.diff().long()


class Tokens(NamedTuple):
    """For each token of x, (B,n,...) or packed, its sequence, its place among those of the
    sequence, and how many these are (B,); `item` and `step` broadcast to x's tokens."""

    item: Tensor
    step: Tensor
    counts: Tensor | int

    def of_each(self, x: Tensor) -> Tensor:
        """Of each token, that of its sequence in x (B,)."""
        return x[:, None] if self.item.ndim == 2 else x[self.item]

    @classmethod
    def of(cls, name: str, cu: Tensor | None, x: Tensor, batch: int | None = None) -> Tokens:
        """cu: the offsets `name`, if x is packed. Raise on a CPU unless they are those of x."""
        if cu is None:
            B, n = x.shape[:2]
            item = torch.arange(B, device=x.device)[:, None]
            return cls(item, torch.arange(n, device=x.device), n)
        need_offsets(name, cu, batch)
        if cu.device.type == "cpu":
            check_order(name, cu, len(x), "the packed tensor")
        at = torch.arange(len(x), device=x.device)
        item = torch.searchsorted(cu[1:].contiguous(), at, right=True).clamp(max=len(cu) - 2)
        return cls(item, at - cu[item], cu.diff().long())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: Arguments,
    functions: Functions = NO_FUNCTIONS,
    scales: Scales = NO_SCALES,
    *,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and LSE: (B,M,H,Dv), (B,H,M) of q (B,M,H,D); (T,H,Dv), (H,T) of q (T,H,D)."""
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table
    in_eight_bits = any(isinstance(x, Tensor) and x.dtype in STORAGE for x in (q, k, v))
    if all(x is None for x in (*lengths, *scales)) and not in_eight_bits:
        need_shape("q", q, ("batch", "seqlen", "heads", "head_dim"))
        need_shape("k", k, ("batch", "seqlen", "heads", "head_dim"))
        with in_their_names():
            given = arguments | functions.of(q.shape[1], k.shape[1])
            return dense(q, k, v, given, qv=qv)[:2]
    rows = Rows.of(q, qv, cu_seqlens_q, seqused_q, max_seqlen_q)
    where = cu_seqlens_k, seqused_k, max_seqlen_k, page_table
    keys = Keys.of(k, v, *where, len(rows.cu) - 1)
    return attend_sequences(rows, keys, arguments, functions, scales)


def attend_sequences(
    rows: Rows,
    keys: Keys,
    arguments: Arguments,
    functions: Functions = NO_FUNCTIONS,
    scales: Scales = NO_SCALES,
) -> tuple[Tensor, Tensor]:
    """As `attend`."""
    q, qv, after = _scaled(rows, keys, scales)
    given: Arguments = dict(arguments)
    if functions != NO_FUNCTIONS:
        given |= functions.of(rows.counts, keys.counts)
    given |= dict(max_q=rows.longest, max_k=keys.longest, qv=qv, row_lengths=rows.used)
    if keys.k.dtype in STORAGE:
        one = torch.ones((), device=q.device)
        given |= dict(k_scale=one, v_scale=one)
    where = keys.cu
    if keys.table is not None:
        where, given["block_table"] = None, keys.table
    with in_their_names(key_lengths="seqused_k", row_lengths="seqused_q", block_table="page_table"):
        out, lse = attention_packed(
            q, keys.k, keys.v, rows.cu, where, key_lengths=keys.lengths, return_lse=True, **given
        )
    if after is not None:
        out = (out.to(torch.promote_types(out.dtype, after.dtype)) * after).to(out.dtype)
    return rows.as_given(out, lse)


def _scaled(rows: Rows, keys: Keys, scales: Scales) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q and qv times the scales of q and k, in bfloat16 for eight bits, and the factor of outputs.

    A score is linear in q and in k, and an output in v, so that scales need no pass over keys.
    """
    q, qv = rows.q, rows.qv
    of_k = keys.k.dtype
    if (of_k in STORAGE or q.dtype in STORAGE) and qv is not None:
        raise NotImplementedError("qv: got it beside eight bits, expected float16 or bfloat16")
    if q.dtype in STORAGE:
        if {q.dtype, of_k, keys.v.dtype} != {torch.float8_e4m3fn}:
            expected = "torch.float8_e4m3fn of q, k and v, or one of float16, bfloat16 and wider"
            raise ValueError(f"q.dtype: got {q.dtype} beside {of_k}, expected {expected}")
        dtype = torch.bfloat16
    else:
        dtype = q.dtype
    check_scales(len(rows.cu) - 1, q.shape[1], keys.k.shape[-2], scales)
    found: list[Tensor | None] = [None] * 3
    if scales != NO_SCALES:
        item = Tokens.of("cu_seqlens_q", rows.cu, q).item
        group = q.shape[1] // keys.k.shape[-2]
        found = [
            None if x is None else x.float().repeat_interleave(group, 1)[item][..., None]
            for x in scales
        ]
    of_q, of_keys, of_values = found
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def times(x: Tensor, *factors: Tensor | None) -> Tensor:
        present = [f for f in factors if f is not None]
        if not present:
            return x.to(dtype)
        x = x.to(wide)
        for f in present:
            x = x * f
        return x.to(dtype)

    scaled = times(q, of_q, of_keys)
    return scaled, None if qv is None else times(qv, of_q, of_values), of_values


def need_queries(q: Tensor, qv: Tensor | None, cu_seqlens_q: Any) -> None:
    """Raise unless q and qv are padded, or packed if there are offsets."""
    axes = ("batch", "seqlen") if cu_seqlens_q is None else ("total",)
    need_shape("q", q, (*axes, "heads", "head_dim"))
    if qv is not None:
        need_shape("qv", qv, (*q.shape[:-1], "head_dim"))
    if cu_seqlens_q is not None:
        need_offsets("cu_seqlens_q", cu_seqlens_q)


def check_scales(B: int, H: int, Hk: int, scales: Scales) -> None:
    """Raise unless heads divide, and scales are (B,Hk) without a gradient."""
    if Hk < 1 or H % Hk:
        raise ValueError(f"k: got {Hk} heads, expected a number that divides the {H} heads of q")
    for name, x in zip(("q_descale", "k_descale", "v_descale"), scales):
        if x is not None:
            need_shape(name, x, (B, Hk))
            need_constant("there is no gradient of scales", **{name: x})


def need_offsets(name: str, cu: Any, batch: int | None = None) -> None:
    """Raise unless cu is int32 or int64 (batch + 1,), of any batch if it is None."""
    need_integers(name, cu, ("batch + 1",) if batch is None else (batch + 1,))
    if not len(cu):
        raise ValueError(f"{name}: got no offset, expected the first one, 0, and one per sequence")


def say_once(**given: Any) -> None:
    """Warn once of each argument that is not None: it has no meaning here, and changes nothing."""
    for name, x in given.items():
        if x is not None and name not in _said:
            _said.add(name)
            text = f"{name}: it tunes FlashAttention's own kernels and has no effect on fastattn's"
            warnings.warn(text, stacklevel=3)
