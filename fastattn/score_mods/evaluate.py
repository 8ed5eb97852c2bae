"""The value of a program on broadcast torch tensors: the plain meaning of a score_mod."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.sizes import known
from .operators import OPS
from .program import Program, Value

NOWHERE = torch.tensor(False, device="cpu")  # `seen` of a call that checks its indices otherwise


def evaluate(program: Program, tensors: Sequence[Tensor], **where: Any) -> Tensor:
    """The result of a program. where: as in `evaluate_all`."""
    return evaluate_all(program, tensors, **where)[-1]


def evaluate_all(
    program: Program,
    tensors: Sequence[Tensor],
    *,
    score: Tensor | None = None,
    b: Tensor,
    h: Tensor,
    i: Tensor,
    j: Tensor,
    seen: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Each value of a program, of the scores' dtype, int64 or bool; the last is its result.

    A value keeps the smallest shape to which its operands broadcast. Values are differentiable by
    torch in `score` and in floating captured tensors. On CPUs the gradient of a load adds in a
    fixed order.

    tensors: the captured tensors, as many as `program.captured` has.
    score: float32 or float64. Needed if the program has it.
    b, h, i, j: the indices of item, query head, row and key, int64. Their shapes broadcast.
    seen: bool, to which the indices broadcast. An index out of range raises IndexError only where
        it is true (None: everywhere), and is clamped elsewhere; also without this check: compiled,
        under vmap, on GPUs.
    dtype: that of floats, where there is no score. Default: float32.
    """
    if len(tensors) != len(program.captured):
        got, needed = len(tensors), len(program.captured)
        raise ValueError(f"the program has {needed} captured tensors, got {got}: give each")
    floats = score.dtype if score is not None else dtype or torch.float32
    inputs = dict(score=score, b=b, h=h, i=i, j=j)
    results: list[Tensor] = []
    for value in program.values:
        args = [results[x] for x in value.args]
        if value.op in inputs:
            result = inputs[value.op]
            if result is None:
                raise ValueError("the program reads the score: give score=")
        elif value.op == "constant":
            result = _constant(value, floats, i.device)
        elif value.op == "load":
            assert value.tensor is not None
            x = tensors[value.tensor]
            if x.requires_grad and value.kind == "float":
                x = x.to(floats)  # its gradient is summed in this dtype, and rounded once
            result = _load(x, value.tensor, args, seen)
            result = result.to(_dtype(value.kind, floats))
        elif value.op == "to_float":
            result = args[0].to(floats)
        else:
            meaning = OPS[value.op].meaning
            assert meaning is not None
            result = meaning(*args)
        results.append(result)
    return results


def _dtype(kind: str, floats: torch.dtype) -> torch.dtype:
    return {"float": floats, "int": torch.int64, "bool": torch.bool}[kind]


def _constant(value: Value, floats: torch.dtype, device: torch.device) -> Tensor:
    assert value.number is not None
    # TorchScript fills nothing with a bool.
    number = int(value.number) if value.kind == "bool" else value.number
    return torch.full((), number, dtype=_dtype(value.kind, floats), device=device)


def _load(tensor: Tensor, number: int, index: list[Tensor], seen: Tensor | None) -> Tensor:
    inside = []
    for at, (x, size) in enumerate(zip(index, tensor.shape)):
        _check(x, size, seen, f"captured tensor {number} of shape {tuple(tensor.shape)}", at)
        x = torch.where(x < 0, x + size, x)
        inside.append(x.clamp(min=0).clamp(max=size - 1))  # of a trace, a size is a tensor
    if any(known(n == 0) for n in tensor.shape):  # nothing to read
        shape = torch.broadcast_shapes(*(x.shape for x in inside))
        return tensor.new_zeros(shape)
    return tensor[tuple(inside)] if inside else tensor


def _check(x: Tensor, size: int, seen: Tensor | None, name: str, dim: int) -> None:
    """Raise if an index is outside of [-size, size) at a pair that is seen."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return
    outside = (x < -size) | (x >= size)
    try:
        any_outside = bool(outside.any())
        if any_outside and seen is not None:
            outside = outside & seen
            any_outside = bool(outside.any())
    except RuntimeError:  # under vmap, or of tensors without data: values are not known
        return
    if any_outside:
        wrong = int(torch.broadcast_to(x, outside.shape)[outside][0])
        raise IndexError(
            f"index {wrong} is out of range for dimension {dim} of size {size} of {name}: "
            "clamp the index, or hide such pairs before it, by conditions of the mask_mod, joined "
            "by &"
        )
