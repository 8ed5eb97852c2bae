"""torch.nn.functional.scaled_dot_product_attention, call for call.

Leading dimensions of any number are broadcast against each other and brought to (B,H,M,D), by views
if the memory layout allows it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Size, SymFloat, SymInt, Tensor

from ..api import autocast, may_autocast, prepare
from ..call.need import need_dense
from ..call.sizes import agree, broadcasts, divides, holds, is_decided, known
from ..call.spec import TOKENS
from ..dispatch import fast_path
from ..dispatch.dispatcher import call
from ..dispatch.operation import ATTENTION
from ..dispatch.torch_function import (
    handle,
    is_compiling,
    is_dynamo_compiling,
    is_overridden,
)
from ..require_torch import TORCH_VERSION
from . import nested


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute softmax(query key^T scale + attn_mask) value, as torch's function of the same name.

    It differs from torch's on purpose in four things: a mask together with is_causal always raises,
    as do keys and values of different lengths and a scale that is not finite; masks may have fewer
    than two dimensions; dropout runs inside the kernel and draws its own mask. A row that may
    attend to no key gives 0.

    Jagged tensors are computed sequence by sequence, without padding and without a mask.
    `fastattn.attention` is the same computation with more features and fewer shapes.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        attn_mask: Either bool (True = may attend), or float, which is added to the scores, or a
            CausalBias.
        dropout_p: The probability of dropout.
        is_causal: A bool. If True, mask as causal, aligned to the top left.
        scale: The factor of query key^T; 1 / sqrt(E) by default. Like dropout_p, it is a number
            (bools count as numbers), a numpy scalar, or a tensor of no dimension that does not
            require grad.
        enable_gqa: A bool. If True, the heads (dimension -3) of key and value divide query's.

    Shape:
        query: (..., L, E), float32, float64, bfloat16 or float16; leading dimensions broadcast. Or
            jagged: (B, H, L*, E).
        key: (..., S, E), query's dtype.
        value: (..., S, Ev), query's dtype.
        attn_mask: Broadcasts to (..., L, S); bool, query's dtype or float32.
        out: (..., L, Ev), query's dtype.

    Returns:
        out. It and the gradients have the memory layout of torch's on a CPU, so that the same
        `view` calls work. Where torch takes its flash kernel, the result has the layout of query,
        and the gradients are laid out as (B, L, H, E). Otherwise all are contiguous, even a
        gradient that torch's math kernel leaves transposed. In compiled code all are contiguous if
        a size depends on data.

    Raises:
        RuntimeError: Where torch does, with the same first words.
        TypeError: Where torch does, with the same first words.
        ValueError: is_causal is True beside a CausalBias.
        NotImplementedError: As `fastattn.attention`.

    Example:
        >>> import torch
        >>> import fastattn
        >>> query, key, value = torch.randn(3, 2, 4, 10, 32)
        >>> out = fastattn.scaled_dot_product_attention(query, key, value, is_causal=True)
        >>> torchs = torch.nn.functional.scaled_dot_product_attention
        >>> torch.testing.assert_close(out, torchs(query, key, value, is_causal=True))
    """
    if not is_dynamo_compiling():
        rest = attn_mask, dropout_p, is_causal, scale, enable_gqa
        out = fast_path.attend(_FAST, query, key, value, *rest, {})
        if out is not None:
            return out
    if is_overridden(query, key, value) and not is_compiling():
        given, rest = (query, key, value), (attn_mask, dropout_p, is_causal)
        own = {"scale": scale, "enable_gqa": enable_gqa}
        return handle(scaled_dot_product_attention, given, *rest, **own)
    numbers = _numbers(dropout_p, is_causal, scale, enable_gqa)
    if all(map(nested.is_jagged, (query, key, value))):
        return _attend_jagged(query, key, value, attn_mask, *numbers)
    made = _as_call(query, key, value, attn_mask, *numbers)
    given = made.q, made.k, made.v, made.arguments, "scaled_dot_product_attention"
    out, _ = call(ATTENTION, *prepare(*given, orders=made.orders))
    return out if made.view is None else made.view(out)


class _Call(NamedTuple):
    """A call in the form of `attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    orders: tuple[str, str]
    arguments: dict[str, Any]
    view: Callable[[Tensor], Tensor] | None = None  # of the result; None: as it is


def _numbers(dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> tuple:
    """These arguments in the types that torch converts them to."""
    if type(dropout_p) is not float:
        dropout_p = _number("dropout_p", dropout_p)
    if scale is not None:
        scale = _number("scale", scale)
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        _need_type(isinstance(is_causal, bool), "is_causal", "bool", is_causal)
        _need_type(isinstance(enable_gqa, bool), "enable_gqa", "bool", enable_gqa)
    return dropout_p, is_causal, scale, enable_gqa


def _as_call(q, k, v, mask, dropout_p, is_causal: bool, scale, enable_gqa: bool) -> _Call:
    casts = may_autocast()
    if mask is None and scale is None and dropout_p == 0 and _is_ordinary(q, k, v, casts):
        return _Call(q, k, v, _orders_of_rows(q, k, v), {"causal": is_causal})
    causal = "top_left" if is_causal else False
    if is_causal_bias(mask):
        causal, mask = _causal_bias(mask, q, k, is_causal), None
    _check(q, k, v, mask, dropout_p, is_causal, scale)
    rank = max(q.ndim, k.ndim, v.ndim)
    if mask is not None and mask.ndim > rank:
        raise RuntimeError(
            f"attn_mask: got {mask.ndim} dimensions, expected at most {rank}, as the scores have"
        )
    if casts:  # before the memory orders are found, because a cast may change them
        q, k, v, mask = autocast(q, k, v, mask)
    given = dict(mask=mask, causal=causal, dropout_p=dropout_p, scale=scale)
    of_items = q.shape[0], k.shape[0], v.shape[0]
    if not (q.ndim == k.ndim == v.ndim == 4 and agree(of_items[:2], of_items[1:])):
        return _any_rank(q, k, v, given, enable_gqa)
    orders = _memory_orders(q, k, v, mask, dropout_p, enable_gqa)
    heads = k.shape[1], v.shape[1], q.shape[1]
    if not agree(heads[:2], heads[1:]):
        q, k, v = _match_heads(q, k, v, enable_gqa)
    return _Call(q, k, v, orders, given)


def _prepare_fast(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, *rest: Any
) -> fast_path.Prepared | None:
    *scalars, _ = rest
    if scalars[0] != 0:  # dropout draws a seed
        return None
    made = _as_call(q, k, v, mask, *_numbers(*scalars))
    t, o = prepare(made.q, made.k, made.v, made.arguments, orders=made.orders)
    return fast_path.Prepared(t, o, made.view)


_FAST = fast_path.path(_prepare_fast, ["mask", "dropout_p", "is_causal", "scale", "enable_gqa"])


def is_causal_bias(mask: Any) -> bool:
    """True for a CausalBias. This compares names, because to import the class takes a second. A
    caller that has one has imported it."""
    return type(mask).__name__ == "CausalBias"


# --------------------------------------------------------------------------------- memory layout

CONTIGUOUS = "BHM", "BHM"
# torch's flash kernel for CPUs takes grouped heads from 2.9 on, and from 2.14 on tensors of three
# dimensions, and one head of keys and values for all heads.
FLASH_TAKES_GROUPS, FLASH_TAKES_MORE = TORCH_VERSION >= (2, 9), TORCH_VERSION >= (2, 14)


def _memory_orders(q, k, v, mask, dropout_p, enable_gqa) -> tuple[str, str]:
    """The memory orders of the result and of the gradients that torch's function gives 4-D query,
    key and value: those of its flash kernel for CPUs if it takes that, else of its math kernel."""
    if not _are_decided(q, k, v):
        return CONTIGUOUS
    (B, H, _, D), (Bk, Hk, _, Dk), (Bv, Hv, _, Dv) = q.shape, k.shape, v.shape
    grouped = enable_gqa and FLASH_TAKES_GROUPS and Hk and H % Hk == 0
    takes_flash = (
        not dropout_p
        and B == Bk == Bv
        and Hk == Hv
        and (Hk == H or grouped or (Hk == 1 and FLASH_TAKES_MORE))
        and D == Dk == Dv
        and (mask is None or (mask.ndim in (2, 4) and not mask.requires_grad))
    )
    return _orders_of_rows(q, k, v) if takes_flash else CONTIGUOUS


def _orders_of_rows(q, k, v) -> tuple[str, str]:
    """`_memory_orders` for shapes that torch's flash kernel takes. It takes them if there are rows
    and keys, each of them contiguous."""
    if not _are_decided(q, k, v):
        return CONTIGUOUS
    try:
        whole = q.stride(3) == k.stride(3) == v.stride(3) == 1
    except RuntimeError:  # a sparse tensor has no strides; `check` refuses it
        return CONTIGUOUS
    if not (whole and q.shape[2] and k.shape[2]):
        return CONTIGUOUS
    return (_order_of(q), TOKENS) if _may_flash() else CONTIGUOUS


def _are_decided(*tensors: Tensor) -> bool:
    """False if data decides a size or a stride."""
    return not is_compiling() or all(
        is_decided(n) for x in tensors for n in (*x.shape, *x.stride())
    )


def _may_flash() -> bool:
    """True if sdpa_kernel(...) leaves flash enabled; there is one setting for every device."""
    return torch._C._get_flash_sdp_enabled()


_may_flash._dynamo_marked_constant = True  # ty: ignore  (evaluated when a compiler traces)


def _order_of(x: Tensor) -> str:
    """The memory order of dimensions that torch.empty_like(x) has. It sorts as TensorIterator does:
    a dimension of stride 0 is compared with no other."""
    if not _are_decided(x) or x.is_contiguous():
        return "BHM"
    sizes, strides = x.shape, x.stride()
    b, h, m, _ = strides
    if b > m > h > 0:
        return TOKENS
    inward = [2, 1, 0]
    for at in (1, 2):
        for before in reversed(range(at)):
            a, b = inward[before], inward[at]
            if strides[a] == 0 or strides[b] == 0:
                continue
            if strides[a] > strides[b] or (strides[a] == strides[b] and sizes[a] > sizes[b]):
                inward[before], inward[at], at = b, a, before
            elif strides[a] < strides[b]:
                break
    return "".join("BHM"[dim] for dim in reversed(inward))


# ---------------------------------------------------------------------------- shapes of every rank


def _attend_jagged(
    q: Tensor, k: Tensor, v: Tensor, mask, dropout_p, is_causal, scale, enable_gqa
) -> Tensor:
    if mask is not None:
        raise RuntimeError("attn_mask: got a mask beside jagged tensors, expected None")
    _check_scalars(dropout_p, scale)
    if not enable_gqa and not q.shape[1] == k.shape[1] == v.shape[1]:
        heads = [x.shape[1] for x in (q, k, v)]
        raise RuntimeError(
            f"query, key, value: got {heads} heads, expected equal numbers, or enable_gqa=True"
        )
    causal = "top_left" if is_causal else False
    return nested.attend(q, k, v, dropout_p=dropout_p, causal=causal, scale=scale)


def _is_ordinary(q, k, v, casts: bool) -> bool:
    """True for 4-D tensors that differ only in the number of rows and keys, and that autocast
    leaves as they are: these need no checks and no rearranging. casts: whether it may be active."""
    if not type(q) is type(k) is type(v) is Tensor:
        return False
    try:
        rows, keys = q.shape, k.shape
        return (
            len(rows) == 4
            and len(keys) == 4
            and agree((*rows[:2], rows[3]), (*keys[:2], keys[3]))
            and agree(keys, v.shape)
            and q.dtype == k.dtype == v.dtype
            and q.device == k.device == v.device
            and not (casts and torch.is_autocast_enabled(q.device.type))
        )
    except (RuntimeError, IndexError):
        return False  # a nested tensor has no shape


def _any_rank(q, k, v, given: dict[str, Any], enable_gqa: bool) -> _Call:
    """A call in the form (B,H,M,D), and the view of its result. Two dimensions have B = H = 1;
    three have B = 1."""
    mask = given["mask"]
    rank = max(q.ndim, k.ndim, v.ndim)
    if enable_gqa and rank < 3:
        raise RuntimeError(
            "enable_gqa: got tensors of 2 dimensions, expected 3 or more: dimension -3 is heads"
        )
    may_flash = FLASH_TAKES_MORE and q.ndim == k.ndim == v.ndim == 3
    q, k, v = (x[(None,) * (max(rank, 4) - x.ndim)] for x in (q, k, v))
    orders = CONTIGUOUS
    if may_flash:
        of_items = mask if mask is None or mask.ndim < 3 else mask[None]
        orders = _memory_orders(q, k, v, of_items, given["dropout_p"], enable_gqa)
    q, k, v = _match_heads(q, k, v, enable_gqa)
    lead = _broadcast(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (_merge(x, lead) for x in (q, k, v))

    def as_given(out: Tensor) -> Tensor:
        return out.unflatten(0, lead)[(0,) * (max(rank, 4) - rank)]

    return _Call(q, k, v, orders, given | {"mask": _merge_mask(mask, lead)}, as_given)


def _merge(x: Tensor, lead: Size) -> Tensor:
    """(..., H, M, D) with its leading dimensions broadcast to `lead` and merged into one."""
    if len(lead) == 1:
        return x.expand(*lead, *x.shape[1:])
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])


def _merge_mask(mask: Tensor | None, lead: Size) -> Tensor | None:
    """`_merge` for a mask. A mask that is the same for every batch item is not expanded."""
    if mask is None or mask.ndim < 4:
        return mask
    if all(known(n == 1) for n in mask.shape[:-3]):
        return mask[(0,) * (mask.ndim - 3)]
    if not all(map(broadcasts, reversed(mask.shape[:-3]), reversed(lead))):
        raise RuntimeError(
            f"attn_mask: got leading dimensions {tuple(mask.shape[:-3])}, expected dimensions "
            f"that broadcast to {tuple(lead)}, as the scores have"
        )
    return _merge(mask, lead)


def _match_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool):
    """Heads (dimension -3) as `attention` takes them: k and v have the same number, and it divides
    q's."""
    H, Hk, Hv = (x.shape[-3] for x in (q, k, v))
    if enable_gqa:
        if not (divides(Hk, H) and divides(Hv, H)):
            raise RuntimeError(
                "Number of heads in key and value must divide the number of heads in query: got "
                f"{Hk} and {Hv}, expected divisors of {H}"
            )
        if not holds(Hk == Hv):
            k, v = (x.repeat_interleave(H // max(x.shape[-3], 1), dim=-3) for x in (k, v))
        return q, k, v
    (heads,) = _broadcast((H,), (Hk,), (Hv,))
    if not known(heads == H):
        q = _expand_heads(q, heads)
    if not (known(Hk == 1) and known(Hv == 1)):  # one key head for all needs no expansion
        k, v = _expand_heads(k, heads), _expand_heads(v, heads)
    return q, k, v


def _expand_heads(x: Tensor, heads: int) -> Tensor:
    return x.expand(*x.shape[:-3], heads, *x.shape[-2:])


def _broadcast(*shapes) -> Size:
    """As torch.broadcast_shapes, which raises for sizes that data decides."""
    lead = [1] * max(map(len, shapes))
    for shape in shapes:
        for at, n in enumerate(shape, len(lead) - len(shape)):
            if known(lead[at] == 1):
                lead[at] = n
            elif not broadcasts(n, lead[at]):
                raise RuntimeError(
                    "The size of tensor must match at non-singleton dimensions: got query, key and "
                    f"value with leading dimensions {', '.join(str(tuple(s)) for s in shapes)}, "
                    "expected shapes that broadcast (enable_gqa=True lets fewer key heads serve "
                    "more query heads)"
                )
    return Size(lead)


def _causal_bias(bias, query: Tensor, key: Tensor, is_causal: bool) -> str:
    """The alignment of a CausalBias, by its variant and sizes alone: its data is uninitialised."""
    if is_causal:
        raise ValueError(
            "CausalBias should not be used with is_causal=True: got both, expected one"
        )
    sizes = bias.seq_len_q, bias.seq_len_kv
    if bias.variant.name == "UPPER_LEFT" or sizes[0] == sizes[1]:
        return "top_left"
    if not agree(sizes, (query.shape[-2], key.shape[-2])):
        raise RuntimeError(
            f"The size of tensor must match: got a CausalBias for (L, S) = {sizes}, expected "
            f"{(query.shape[-2], key.shape[-2])}"
        )
    return "bottom_right"


def _check(q, k, v, mask, dropout_p, is_causal: bool, scale) -> None:
    """Apply torch's rules, with torch's messages. Where its kernels disagree, the stricter rule."""
    tensors = (("query", q), ("key", k), ("value", v), ("attn_mask", mask))
    for name, x in tensors[: 3 if mask is None else 4]:
        _need_type(isinstance(x, Tensor), name, "Tensor", x)
        need_dense(name, x)
    _check_scalars(dropout_p, scale)
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be at least 2 dimensional, but got query.dim: "
            f"{q.ndim} key.dim: {k.ndim} and value.dim: {v.ndim} instead."
        )
    for what, kinds in (
        ("dtype", (q.dtype, k.dtype, v.dtype)),
        ("device type", (q.device, k.device, v.device)),
    ):
        mixed = not kinds[0] == kinds[1] == kinds[2]
        if mixed and (what != "dtype" or not torch.is_autocast_enabled(q.device.type)):
            name = what.split()[0]
            raise RuntimeError(
                f"Expected query, key, and value to have the same {what}, but got query.{name}: "
                f"{kinds[0]} key.{name}: {kinds[1]} and value.{name}: {kinds[2]} instead."
            )
    if not agree((q.shape[-1], k.shape[-2]), (k.shape[-1], v.shape[-2])):
        raise RuntimeError(
            f"Expected size for query, key and value: got {tuple(q.shape)}, {tuple(k.shape)} and "
            f"{tuple(v.shape)}, expected (..., L, E), (..., S, E) and (..., S, Ev)"
        )
    if mask is not None:
        _check_mask(q, k, mask, is_causal)


def _number(name: str, x: Any) -> Any:
    """x as a float, if torch takes it for one. A compiler's symbol is returned as it is."""
    if type(x) is float or isinstance(x, (SymFloat, SymInt)):
        return x
    if isinstance(x, Tensor):
        _need_type(x.ndim == 0 and not x.requires_grad, name, "float", x)
    elif not isinstance(x, (float, int)):
        numpy = sys.modules.get("numpy")  # a numpy scalar exists only if numpy was imported
        fits = numpy is not None and isinstance(x, (numpy.number, numpy.bool_))
        _need_type(fits, name, "float", x)
    return float(x)


def _check_scalars(dropout_p, scale) -> None:
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    # Compilers can trace neither math.isfinite nor infinity for a number that is a symbol.
    if scale is not None and not -sys.float_info.max <= scale <= sys.float_info.max:
        raise RuntimeError(f"scale: got {scale}, expected a finite number or None")


def _check_mask(q: Tensor, k: Tensor, mask: Tensor, is_causal: bool) -> None:
    if is_causal:
        raise RuntimeError(
            "Explicit attn_mask should not be set when is_causal=True: got both, expected one; "
            "put the causal part into the mask"
        )
    if mask.dtype not in (torch.bool, torch.float32, q.dtype) and not (
        mask.is_floating_point() and torch.is_autocast_enabled(q.device.type)
    ):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {mask.dtype} and query.dtype: {q.dtype} instead."
        )
    tail = reversed(mask.shape[-2:])
    if not all(broadcasts(m, n) for m, n in zip(tail, (k.shape[-2], q.shape[-2]))):
        raise RuntimeError(
            f"The size of attn_mask must match at non-singleton dimensions: got {tuple(mask.shape)}"
            f", expected a shape that broadcasts to (..., {q.shape[-2]}, {k.shape[-2]})"
        )


def _need_type(ok: bool, name: str, kind: str, x: object) -> None:
    if not ok:
        raise TypeError(
            f"scaled_dot_product_attention(): argument '{name}' must be {kind}, not "
            f"{type(x).__name__}"
        )
