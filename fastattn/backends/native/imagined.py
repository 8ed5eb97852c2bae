"""FaCalls of which only the spec is known: for questions about a kind of call, never for a launch.

Every tensor that the call may have is there, gapless and aligned, at an address that nothing reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...call.spec import ARGUMENTS, BY_HEAD, DIFFERENTIABLE, TOKENS, AttentionSpec
from ..base import dense_layout
from . import libraries
from .libraries import DTYPE, POINTER, TENSOR

ADDRESS = 1 << 20  # a multiple of every alignment that a kernel may ask for


def imagined(spec: AttentionSpec, which: int) -> bytes:
    """The FaCall of a pass. Its mask and sinks need their gradients, if they may have any."""
    params = bytearray(libraries.form(spec))
    for field, strides, dtype in _tensors(spec, which):
        at = libraries.offset(field)
        TENSOR.pack_into(params, at, ADDRESS, *strides, DTYPE[dtype])
    for name in spec.given:
        if ARGUMENTS[name].passed_as == "pointer":
            POINTER.pack_into(params, libraries.offset(ARGUMENTS[name].field), ADDRESS)
    return bytes(params)


def _tensors(spec: AttentionSpec, which: int) -> Iterator[tuple[str, Sequence[int], torch.dtype]]:
    """Field, strides and dtype of each tensor in the fields of an FaTensor."""
    (B, M, N), H, Hk, D, Dv = spec.memory_sizes, spec.H, spec.Hk, spec.D, spec.Dv
    items, keys = (spec.P, spec.page) if spec.paged else (B, N)
    shapes = {"q": (B, H, M, D), "k": (items, Hk, keys, D), "v": (items, Hk, keys, Dv)}
    if spec.weights:
        del shapes["v"]
    for name, shape in shapes.items():
        yield name, dense_layout(*shape, TOKENS)[1], spec.dtype
    heads, pair = (0, 1, 0, 0), (H * M, M, 1, B * H * M)
    by_head = [a for a in BY_HEAD if a.name in spec.given]
    for a in by_head:
        yield a.field, heads, spec.acc_dtype
    if spec.mask_shape is not None and spec.mask_dtype is not None:
        yield "mask", _broadcast(spec.mask_shape), spec.mask_dtype
    attends = not spec.weights
    if attends or which == libraries.WEIGHTS_BACKWARD:
        yield "lse", pair, spec.acc_dtype
    if attends:
        out = dense_layout(B, H, M, Dv, spec.out_order)[1]
        yield "out", out, spec.stored(spec.dtype)
    else:
        weights = _broadcast((spec.B, 1 if spec.average_heads else H, spec.M, spec.N))
        yield "weights" if which == libraries.WEIGHTS else "dweights", weights, spec.dtype
    if which not in (libraries.BACKWARD, libraries.WEIGHTS_BACKWARD):
        return
    if attends:
        yield "dout", dense_layout(B, H, M, Dv, TOKENS)[1], spec.dtype
    for name in DIFFERENTIABLE:
        if name in shapes:
            layout = dense_layout(*shapes[name], spec.grad_order)[1]
            yield f"d{name}", layout, spec.stored(spec.dtype)
    if spec.mask_shape is not None and spec.mask_dtype not in (None, torch.bool):
        shape = (*(1,) * (4 - len(spec.mask_shape)), *spec.mask_shape)
        if spec.packed:  # a part for each sequence
            yield "dmask", _broadcast((spec.B, *shape[1:])), spec.acc_dtype
        else:
            yield "dmask", _broadcast(shape), spec.stored(spec.mask_dtype)
    for a in by_head:
        if a.gradient:
            yield f"d{a.field}", (H, 1, 0, 0) if spec.packed else heads, spec.acc_dtype


def _broadcast(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, aligned to the right; 0 where it repeats."""
    strides, step = [0, 0, 0, 0], 1
    for at, size in enumerate(reversed(shape)):
        strides[3 - at] = 0 if size == 1 else step
        step *= size
    return tuple(strides)
