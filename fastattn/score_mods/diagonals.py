"""Programs of i - j: relative biases, buckets of distances, dilated windows. They have one value
for each diagonal: M + N - 1 values are computed, not M N."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .program import Program, Value

ROWS = 64  # that are added at a time
COMPARISONS = frozenset(("ge", "gt", "le", "lt", "eq", "ne"))


def is_of_difference(program: Program) -> bool:
    """Whether f(b, h, i + 1, j + 1) is f(b, h, i, j), and the program reads i and j, but no score.

    False does not exclude it: only operators on whole numbers are followed.
    """
    ops = {x.op for x in program.values}
    if not {"i", "j"} <= ops or "score" in ops:
        return False
    steps: list[int | None] = []
    for value in program.values:
        steps.append(_step(program, value, [steps[x] for x in value.args]))
    return steps[-1] == 0


def _step(program: Program, value: Value, args: list[int | None]) -> int | None:
    """What a value grows by if i and j grow by 1. None: not known."""
    if value.op in ("i", "j"):
        return 1
    if not any(x != 0 for x in args):
        return 0
    known = [x for x in args if x is not None]
    if len(known) < len(args) or value.kind == "float":
        return None
    same = len(set(known)) == 1
    if value.op in COMPARISONS:
        return 0 if same else None
    if value.op in ("minimum", "maximum"):
        return known[0] if same else None
    if value.op == "where":
        return known[1] if known[0] == 0 and known[1] == known[2] else None
    if value.op == "add":
        return known[0] + known[1]
    if value.op == "sub":
        return known[0] - known[1]
    if value.op == "neg":
        return -known[0]
    if value.op == "mul":
        return _multiplied(program, value, known)
    return None


def _multiplied(program: Program, value: Value, steps: list[int]) -> int | None:
    for at, step in zip(value.args, reversed(steps)):
        number = program.values[at].number
        if program.values[at].op == "constant" and type(number) is int:
            return step * number
    return None


def diagonal_indices(rows: int, keys: int, device: torch.device) -> dict[str, Tensor]:
    """The indices i and j with which `evaluate` gives one value for each diagonal, from that of the
    last row and the first key to that of the first row and the last key."""
    i = torch.arange(rows - 1, -keys, -1, device=device)
    return dict(i=i.view(1, 1, 1, -1), j=i.new_zeros(1, 1, 1, 1))


def spread(values: Tensor, keys: int) -> Tensor:
    """The matrices (B,H,rows,keys) of diagonals: (B,H,1,rows + keys - 1), a value for each of
    `diagonal_indices`. keys: at least 1. The gradient of a diagonal is the sum along it, in a fixed
    order."""
    return _Spread.apply(values.squeeze(2), keys)


class _Spread(torch.autograd.Function):
    """[..., rows + keys - 1] -> [..., rows, keys]. torch's own gradient of unfold adds a diagonal's
    numbers one after another, which is less exact, and slower."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, keys: int) -> Tensor:
        return values.unfold(-1, keys, 1).flip(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.keys = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sums_of_diagonals(gradients[0]), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _Spread.apply(tangents[0], ctx.keys)


def sums_of_diagonals(x: Tensor) -> Tensor:
    """The sum along each diagonal of [..., rows, keys]: of ROWS rows at a time, then of these sums.
    [..., rows + keys - 1], in the order of `diagonal_indices`."""
    *others, rows, keys = x.shape
    sums = x.new_zeros(rows + keys - 1)
    for end in range(rows, 0, -ROWS):
        begin = max(0, end - ROWS)
        count = end - begin
        width = keys + count - 1
        # Row r begins at column r: rows of width + 1 numbers are read as rows of width numbers.
        wide = pad(x.narrow(-2, begin, count).flip(-2), (0, count))
        numbers = wide.reshape(*others, count * (width + 1)).narrow(-1, 0, count * width)
        skewed = numbers.view(*others, count, width)
        sums = sums + pad(skewed.sum(-2), (rows - end, begin))
    return sums
