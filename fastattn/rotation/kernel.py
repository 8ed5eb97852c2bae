"""norm_rope on the CPU's kernels: arguments packed as FaNormRope of csrc/abi.h."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ..backends.native import libraries
from ..backends.native.libraries import DTYPE, get_num_threads
from ..call.spec import acc_dtype
from .form import Form, Rows, check_offsets

NORMS = {"": 0, "rms": 1, "layer": 2}  # FaNorm
_PART = "Q4qq" * 4 + "Qqq"  # FaNormRopePart
_CALL = struct.Struct("=" + _PART * 2 + "Q4qq" * 2 + "Q12q2d")  # FaNormRope
_ABSENT = 0, 0, 0, 0, 0, 0
_NO_PART = (0,) * (4 * len(_ABSENT) + 3)


def forward(form: Form, rows: Rows, outs: Sequence[Tensor]) -> None:
    """Write the results into `outs`, which may be the inputs."""
    q, k, _, _, q_weight, k_weight, _ = rows
    assert q is not None
    parts = [*_tensor(q), *_tensor(outs[0]), *_ABSENT, *_weight(q_weight)]
    parts += 0, q.shape[1], NORMS[form.q_norm]
    if k is None:
        parts += _NO_PART
    else:
        parts += *_tensor(k), *_tensor(outs[1]), *_ABSENT, *_weight(k_weight)
        parts += 0, k.shape[1], NORMS[form.k_norm]
    _run(form, rows, parts, q, 0)


def backward(
    form: Form, rows: Rows, grads: Sequence[Tensor | None], wants: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of q, k and of the weights that are wanted. rows: q and k may be None where
    there is no norm; grads: those of the results, None if zero."""
    found: list[Tensor | None] = [None] * 4
    parts: list[int] = []
    given = next(g for g in grads if g is not None)
    of_absent = 0, 0, 0, 0, 0, DTYPE[given.dtype]
    of = (rows.q, rows.q_weight, form.q_norm), (rows.k, rows.k_weight, form.k_norm)
    for at, (g, (x, weight, norm)) in enumerate(zip(grads, of)):
        if g is None:
            parts += *_ABSENT, *of_absent, *_ABSENT, *_ABSENT, 0, 0, 0
            continue
        found[at] = dx = torch.empty_like(g if x is None else x)
        address = 0
        if wants[at]:
            found[2 + at] = dw = g.new_empty(g.shape[3], dtype=acc_dtype(g.dtype))
            address = dw.data_ptr()
        parts += *_tensor(x), *_tensor(g), *_tensor(dx), *_weight(weight), address
        parts += g.shape[1], NORMS[norm]
    _run(form, rows, parts, given, 1)
    for at, weight in enumerate((rows.q_weight, rows.k_weight)):
        dw = found[2 + at]
        if dw is not None and weight is not None:
            found[2 + at] = dw.to(weight.dtype)
    return found


def _tensor(x: Tensor | None) -> tuple[int, ...]:
    return _ABSENT if x is None else (x.data_ptr(), *x.stride(), DTYPE[x.dtype])


def _weight(x: Tensor | None) -> tuple[int, ...]:
    return _ABSENT if x is None else (x.data_ptr(), 0, 0, 0, x.stride(0), DTYPE[x.dtype])


def _table(x: Tensor | None) -> tuple[int, ...]:
    if x is None:
        return _ABSENT
    item = x.stride(0) if x.ndim == 3 else 0
    return x.data_ptr(), item, 0, x.stride(-2), x.stride(-1), DTYPE[x.dtype]


def _run(form: Form, rows: Rows, parts: list[int], x: Tensor, backward: int) -> None:
    B, _, M, D = x.shape
    if D == 0:
        return
    _, _, cos, sin, _, _, cu = rows
    _, _, eps, offset, R, start, interleaved, deinterleave, rope_first = form
    positions, at, sequences = M, 0, 0
    if cos is not None:
        positions = cos.shape[-2]
    if cu is not None:
        cu = cu.to(torch.int64).contiguous()
        at, sequences = cu.data_ptr(), len(cu) - 1
    numbers = at, B, M, D, positions, sequences, R, start, interleaved, deinterleave, rope_first
    threads = get_num_threads()
    packed = _CALL.pack(
        *parts, *_table(cos), *_table(sin), *numbers, backward, threads, eps, offset
    )
    status = libraries.cpu().norm_rope(packed)
    if status == libraries.BAD_OFFSET:
        check_offsets(rows)
    if status != libraries.OK:
        raise MemoryError("the CPU kernels could not allocate their scratch memory")
