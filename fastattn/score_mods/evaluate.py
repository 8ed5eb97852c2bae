"""Run a program on torch tensors.

Each value keeps the smallest shape that its operands broadcast to. torch differentiates the result
in the score and in captured tensors of floating dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .program import FLOAT, INT, Program, Value


def _floor_div(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, y, rounding_mode="floor")


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "floor_div": _floor_div,
    "div": torch.true_divide,
    "where_bool": torch.where,
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    "bit_and": torch.bitwise_and,
    "bit_or": torch.bitwise_or,
    "bit_xor": torch.bitwise_xor,
    "bit_not": torch.bitwise_not,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
    "not": torch.logical_not,
}
_CASTS = ("to_float", "to_int", "to_bool", "float_of_bool", "int_of_bool")


def evaluate(
    program: Program,
    tensors: Sequence[Tensor],
    *,
    b: Tensor,
    h: Tensor,
    i: Tensor,
    j: Tensor,
    score: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the result of a program.

    Args:
        program: A score_mod or mask_mod.
        tensors: The tensors that it captured.
        b: The items.
        h: The heads of queries.
        i: The rows.
        j: The keys.
        score: The scores, for a score_mod.
        dtype: The dtype of floating numbers where there is no score: float32 or float64.

    Shape:
        b, h, i, j: int64; they broadcast against each other and score.
        result: Broadcasts to the same; score's dtype, or `dtype`, int64 or bool.

    Returns:
        The result, in the smallest shape.

    Raises:
        IndexError: An index of a captured tensor is out of its range.
    """
    inputs = dict(score=score, b=b, h=h, i=i, j=j)
    dtypes = {FLOAT: dtype if score is None else score.dtype, INT: torch.int64}
    found: list[Tensor] = []
    for value in program.values:
        args = [found[at] for at in value.args]
        found.append(_result(value, args, inputs, tensors, dtypes, i.device))
    return found[-1]


def _result(
    value: Value,
    args: list[Tensor],
    inputs: dict[str, Tensor | None],
    tensors: Sequence[Tensor],
    dtypes: dict[str, torch.dtype],
    device: torch.device,
) -> Tensor:
    dtype = dtypes.get(value.kind, torch.bool)
    if value.op == "constant":
        number: Any = value.number
        return torch.full((), number, dtype=dtype, device=device)
    if value.op == "load":
        assert value.tensor is not None
        x = tensors[value.tensor]
        if x.device != device and x.ndim == 0:
            x = x.to(device)
        if x.requires_grad:  # its gradient is summed in this dtype, and rounded once
            x = x.to(dtype)
        return (_element(x, args, value.tensor) if args else x).to(dtype)
    if value.op in _CASTS:
        return args[0].to(dtype)
    if value.op in inputs:
        x = inputs[value.op]
        assert x is not None, f"the program needs {value.op}"
        return x
    return _FUNCTIONS.get(value.op, getattr(torch, value.op, None))(*args)


def _element(x: Tensor, indices: list[Tensor], number: int) -> Tensor:
    try:
        return x[tuple(indices)]
    except IndexError as error:
        raise IndexError(
            f"captured tensor {number} of shape {tuple(x.shape)}: got an index out of range "
            f"({error}), expected indices in [-size, size)"
        ) from None
