"""The norm of queries and keys and their rotation, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.overrides import handle_torch_function

from ..backends.native.marshalling import Kind, kind
from ..call.need import (
    flag,
    need,
    need_a_tensor,
    need_constant,
    need_dense,
    real,
    shape_of,
    whole,
)
from ..call.packed_layout import heads_first, rows_first
from ..call.sizes import agree, holds
from ..dispatch.torch_function import SUBSYSTEMS, is_compiling, is_overridden
from . import passes
from .form import Form, Rows

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NORMS = (None, "rms", "layer")
_TABLES = "(M, R / 2) or (B, M, R / 2)"
# Calls that were checked: the tensors' kind with the form and the layout.
_checked: set[tuple[Kind, Form, bool]] = set()
_MOST = 1024


@overload
def norm_rope(
    q: Tensor,
    k: None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: None = None,
    eps: float = 1e-6,
    norm: Literal["rms", "layer"] | None = None,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    deinterleave: bool = False,
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    rope_first: bool = False,
    cu_q: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor: ...
@overload
def norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    norm: Literal["rms", "layer"] | None = None,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    deinterleave: bool = False,
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    rope_first: bool = False,
    cu_q: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]: ...
def norm_rope(
    q: Tensor,
    k: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    norm: Literal["rms", "layer"] | None = None,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    deinterleave: bool = False,
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    rope_first: bool = False,
    cu_q: Tensor | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Norm each row of queries and keys, and rotate its columns by the row's position.

    A row x becomes x / sqrt(mean(x^2) + eps) times its weight (RMSNorm, Zhang and Sennrich 2019).
    Then each pair of columns (a, b) becomes (a cos - b sin, b cos + a sin) (RoPE, equation 34 of Su
    et al. 2021). On a CPU one kernel does both in one pass over q and k. It computes in float32
    (float64 for float64) and rounds once. Elsewhere, and in forward mode, torch's operations do.

    There are gradients for q, k and the weights, of any order, with the same bits for any number of
    threads. cos and sin have none. torch.compile does not compile torch.func.grad of a call: it
    raises. Scaled and multidimensional positions (YaRN, Llama 3, M-RoPE, axial) are other tables.

    Args:
        q: Queries.
        k: Keys.
        cos, sin: The cosines and sines of the angles of each row and pair. Without them nothing is
            rotated.
        q_weight, k_weight: The factors of the norm's columns. What has one is normed.
        eps: Added to the mean of squares, inside the root.
        norm: "rms", or "layer", which first subtracts the row's mean. It norms both q and k, also
            without weights. None: what has a weight gets "rms", the rest no norm.
        weight_offset: Added to the weights. Gemma's factors are 1 + weight.
        interleaved: If True, a pair is columns 2i and 2i + 1 of those that are rotated, otherwise i
            and i + R/2.
        deinterleave: If True, pairs are i and i + R/2 in the result though they are interleaved in
            q and k, as in DeepSeek-V3. It requires interleaved.
        rotary_dim: R, the number of columns that are rotated. By default cos has R/2 columns; if it
            has more, the first R/2 are used.
        rotary_start: The first column that is rotated.
        rope_first: If True, the norm follows the rotation.
        cu_q: Offsets of the sequences of a packed batch, as in `attention_packed`. Row i of each
            sequence has the position i.
        out: Where to write the result: a tensor like q or, with k, a pair. It may be q itself, or
            (q, k). Without gradients only.

    Shape:
        q: (B, H, M, D), float32, float64, bfloat16 or float16; with cu_q (T, H, D).
        k: (B, Hk, M, D), q's dtype and device; with cu_q (T, Hk, D).
        cos, sin: (M, R/2) or (B, M, R/2); with cu_q (N, R/2), N at least the longest sequence. Any
            of these dtypes and any strides.
        q_weight, k_weight: (D,), any of these dtypes.
        cu_q: (sequences + 1,), int32 or int64.
        out: As q, or as q and k.

    Returns:
        The result for q, or (that for q, that for k). On a CPU, outside forward mode, they lie in
        memory as q and k do.

    Raises:
        ValueError: An argument has a value, shape, dtype or device that breaks these rules.
        TypeError: An argument has a wrong type.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64)
        >>> angle = torch.arange(16)[:, None] * 1e4 ** (-torch.arange(32) / 32)
        >>> weights = dict(q_weight=torch.ones(64), k_weight=torch.ones(64))
        >>> q, k = fastattn.norm_rope(q, k, angle.cos(), angle.sin(), **weights)
        >>> q.square().mean(-1).allclose(torch.ones(()))
        True
    """
    rows = Rows(q, k, cos, sin, q_weight, k_weight, cu_q)
    if is_overridden(*rows) and not is_compiling():
        named: dict[str, Any] = dict(
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            norm=norm,
            weight_offset=weight_offset,
            interleaved=interleaved,
            deinterleave=deinterleave,
            rotary_dim=rotary_dim,
            rotary_start=rotary_start,
            rope_first=rope_first,
            cu_q=cu_q,
            out=out,
        )
        return handle_torch_function(norm_rope, rows, q, k, cos, sin, **named)
    if norm not in _NORMS:
        raise ValueError(f'norm: got {norm!r}, expected "rms", "layer" or None')
    form = Form(
        norm or ("" if q_weight is None else "rms"),
        "" if k is None else norm or ("" if k_weight is None else "rms"),
        real("eps", eps),
        real("weight_offset", weight_offset),
        _rotary_dim(cos, rotary_dim),
        whole("rotary_start", rotary_start, "the first column that is rotated"),
        flag("interleaved", interleaved),
        flag("deinterleave", deinterleave),
        flag("rope_first", rope_first),
    )
    known = None if is_compiling() else kind(rows)
    if known is None or (known, form, cu_q is None) not in _checked:
        _check(form, rows)
        if known is not None:
            if len(_checked) >= _MOST:
                _checked.clear()
            _checked.add((known, form, cu_q is None))
    if cu_q is not None:
        rows = rows._replace(q=heads_first("q", q), k=None if k is None else heads_first("k", k))
    if cos is not None:
        need_constant("tables of angles have no gradient", cos=cos, sin=sin)
    found = passes.call(form, rows) if out is None else _written(form, rows, out)
    if cu_q is not None:
        found = [rows_first(x) for x in found]
    if out is not None:
        return out
    return found[0] if k is None else (found[0], found[1])


# --------------------------------------------------------------------------- checks


def _rotary_dim(cos: Any, rotary_dim: Any) -> int:
    """R: as given, or twice the columns of cos; 0 without cos."""
    if not isinstance(cos, Tensor) or cos.ndim == 0:
        if rotary_dim is not None and cos is None:
            raise ValueError(f"rotary_dim: got {rotary_dim!r} without cos, expected cos and sin")
        return 0
    if rotary_dim is None:
        return 2 * cos.shape[-1]
    return whole("rotary_dim", rotary_dim, "the number of columns that are rotated")


def _check(form: Form, rows: Any) -> None:
    q, k, _, _, q_weight, k_weight, cu = rows
    letters = "(B, H, M, D)" if cu is None else "(T, H, D)"
    for name, x in (("q", q), ("k", k)):
        if name == "k" and x is None:
            continue
        need_a_tensor(name, x)
        need_dense(name, x)
        need(x.ndim == len(letters.split()), name, shape_of(x), f"{letters}{_hint(x, cu)}")
        need(x.dtype in DTYPES, f"{name}.dtype", x.dtype, _told(DTYPES))
    assert q is not None
    D = q.shape[-1]
    if k is not None:
        free = 1  # the dimension of heads
        expected = [*q.shape]
        expected[free] = k.shape[free]
        need(agree(tuple(k.shape), tuple(expected)), "k", shape_of(k), f"{tuple(expected)}, as q")
        need(k.dtype == q.dtype, "k.dtype", k.dtype, f"{q.dtype}, as q has")
        need(k.device == q.device, "k.device", k.device, f"{q.device}, as q has")
    for name, x, of in (("q_weight", q_weight, q), ("k_weight", k_weight, k)):
        if x is None:
            continue
        if of is None:
            raise ValueError("k_weight: got it without k, expected k too")
        need_a_tensor(name, x, "a torch.Tensor or None")
        need(agree(tuple(x.shape), (D,)), name, shape_of(x), f"(D,) = ({D},)")
        _need_numbers(name, x, q)
    if form.weight_offset and q_weight is None and k_weight is None:
        got = f"{form.weight_offset} without weights"
        raise ValueError(f"weight_offset: got {got}, expected q_weight or k_weight")
    need(form.eps >= 0, "eps", form.eps, "0 or more")
    if cu is not None:
        need_a_tensor("cu_q", cu, "a torch.Tensor or None")
        need(cu.ndim == 1 and holds(cu.shape[0] >= 1), "cu_q", shape_of(cu), "(sequences + 1,)")
        kinds = torch.int32, torch.int64
        need(cu.dtype in kinds, "cu_q.dtype", cu.dtype, "torch.int32 or torch.int64")
        need(cu.device == q.device, "cu_q.device", cu.device, f"{q.device}, as q has")
    _check_tables(form, rows)
    if not (form.q_norm or form.k_norm or form.rotary_dim):
        expected = "one or more: cos and sin rotate, a weight or norm norms"
        raise ValueError(f"norm_rope: got no tables, no weight and no norm, expected {expected}")


def _hint(x: Tensor, cu: Tensor | None) -> str:
    if cu is None and x.ndim == 3:
        return "; of a packed batch it is (T, H, D), with cu_q"
    return ", as in attention_packed" if cu is not None and x.ndim == 4 else ""


def _told(choices: Sequence[Any]) -> str:
    return ", ".join(str(x) for x in choices[:-1]) + f" or {choices[-1]}"


def _need_numbers(name: str, x: Tensor, q: Tensor) -> None:
    need_dense(name, x)
    need(x.dtype in DTYPES, f"{name}.dtype", x.dtype, _told(DTYPES))
    need(x.device == q.device, f"{name}.device", x.device, f"{q.device}, as q has")


def _check_tables(form: Form, rows: Rows) -> None:
    q, _, cos, sin, *_, cu = rows
    assert q is not None
    if cos is None and sin is None:
        for name, x in (("interleaved", form.interleaved), ("rope_first", form.rope_first)):
            if x:
                raise ValueError(f"{name}: got True without cos, expected cos and sin")
        need(form.rotary_start == 0, "rotary_start", form.rotary_start, "cos and sin beside it")
    for name, x, other in (("cos", cos, "sin"), ("sin", sin, "cos")):
        if x is None and (cos is not None or sin is not None):
            raise ValueError(f"{name}: got None beside {other}, expected both or neither")
    if form.deinterleave and not form.interleaved:
        expected = "interleaved=True beside it: the pairs of q and k are interleaved"
        raise ValueError(f"deinterleave: got True without interleaved, expected {expected}")
    if cos is None or sin is None:
        return
    expected = _TABLES if cu is None else "(N, R / 2) with cu_q"
    for name, x in (("cos", cos), ("sin", sin)):
        need_a_tensor(name, x, "a torch.Tensor or None")
        need(x.ndim == 2 or (x.ndim == 3 and cu is None), name, shape_of(x), expected)
        _need_numbers(name, x, q)
    need(agree(tuple(sin.shape), tuple(cos.shape)), "sin", shape_of(sin), f"{tuple(cos.shape)}")
    if cu is None:
        axes = q.shape[2:3] if cos.ndim == 2 else (q.shape[0], q.shape[2])
        fits = agree(tuple(cos.shape[:-1]), tuple(axes))
        need(fits, "cos", shape_of(cos), f"{_TABLES}, a row for each of q: {(*axes, 'R / 2')}")
    need(cos.shape[-1] > 0, "cos", shape_of(cos), "a column or more, one for each pair")
    R, start, D, columns = form.rotary_dim, form.rotary_start, q.shape[-1], cos.shape[-1]
    if not holds((R > 0) & (R % 2 == 0) & (R <= 2 * columns)):
        expected = f"an even number from 2 to {2 * columns}, twice the columns of cos"
        raise ValueError(f"rotary_dim: got {R}, expected {expected}")
    need(start >= 0, "rotary_start", start, "0 or more")
    if not holds(start + R <= D):
        got = f"columns {start} to {start + R - 1}"
        raise ValueError(f"rotary_dim: got {got}, expected columns below {D}, those of q")


# --------------------------------------------------------------------------- out


def _written(form: Form, rows: Rows, out: Any) -> Sequence[Tensor]:
    given = [x for x in rows[:2] if x is not None]
    outs = [out] if len(given) == 1 else out
    if not isinstance(outs, (tuple, list)) or len(outs) != len(given):
        got, expected = type(out).__name__, "a pair of tensors, for q and k"
        raise TypeError(f"out: got {got}, expected {expected}")
    packed = rows.cu is not None
    for at, (x, y) in enumerate(zip(given, outs)):
        name = "out" if len(given) == 1 else f"out[{at}]"
        need_a_tensor(name, y, "a torch.Tensor")
        shape = tuple(rows_first(x).shape if packed else x.shape)
        need(agree(tuple(y.shape), shape), name, shape_of(y), f"{shape}")
        alike = y.dtype == x.dtype and y.device == x.device
        got, expected = f"{y.dtype} on {y.device}", f"{x.dtype} on {x.device}"
        need(alike, name, got, expected)
        for source in (y, *rows):
            if torch.is_grad_enabled() and source is not None and source.requires_grad:
                raise ValueError(
                    f"{name}: got it for a call with a gradient, expected None, or the call "
                    "under torch.no_grad()"
                )
    outs = tuple(heads_first("out", y) if packed else y for y in outs)
    direct = _nothing_sees() and kind(outs) is not None and _are_apart(outs, rows)
    if not torch.is_inference_mode_enabled() and any(y.is_inference() for y in outs):
        direct = False  # copy_ says what torch does not allow
    found = passes.call(form, rows, outs if direct else ())
    if found is outs:
        increment_version(outs)
        return outs
    for y, x in zip(outs, found):
        y.copy_(x)
    return outs


def _nothing_sees() -> bool:
    """True if no mode or transform of torch sees operations: an autocast changes none of these."""
    return not is_compiling() and all(
        function() == inactive
        for function, inactive in SUBSYSTEMS
        if function is not torch._C._is_any_autocast_enabled
    )


def _are_apart(outs: Sequence[Tensor], rows: Rows) -> bool:
    """True if rows may be written as they are read: a result lies apart from the other result and
    from all inputs, or in place of its own."""
    own = [x for x in rows[:2] if x is not None]
    written = [y.untyped_storage().data_ptr() for y in outs]
    if any(x is not None and x.untyped_storage().data_ptr() in written for x in rows[2:]):
        return False
    if any(torch._debug_has_internal_overlap(y) == 1 for y in outs):
        return False
    moved = [y.data_ptr() != x.data_ptr() or y.stride() != x.stride() for y, x in zip(outs, own)]
    pairs = [(y, x) for y, x, moves in zip(outs, own, moved) if moves]
    if len(outs) == 2:
        pairs.append((outs[0], outs[1]))
        pairs += [(y, x) for y, x, moves in zip(outs, own[::-1], moved[::-1]) if moves]
    return all(_are_disjoint(*pair) for pair in pairs)


def _are_disjoint(a: Tensor, b: Tensor) -> bool:
    """True if two tensors of one dtype provably share no element: there is a period, such as a row
    of fused q, k and v, that both repeat with, and in it they lie apart."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return True
    between = b.storage_offset() - a.storage_offset()
    for period in (_NO_PERIOD, *a.stride(), *b.stride()):
        if period:
            gap = between % period
            if _extent(a, period) <= gap and gap + _extent(b, period) <= period:
                return True
    return False


_NO_PERIOD = 1 << 62  # more than any storage


def _extent(x: Tensor, period: int) -> int:
    """From the first element to behind the last, without the steps of whole periods."""
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()) if s % period)
