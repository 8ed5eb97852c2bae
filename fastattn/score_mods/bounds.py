"""The least and the largest number that each value of a program may be, over a whole call.

One pair of Python numbers a value: `intervals` has the same for each block of rows and keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .program import Program, Value

Bounds = tuple[float, float] | None  # of finite values; None: not known
Ints = dict[int, tuple[int, int]]  # of each captured tensor of whole numbers, by its number


def extremes(tensors: Mapping[int, Tensor]) -> Ints:
    """The least and the largest element of each tensor of whole numbers. Values are read."""
    intervals = {}
    for at, x in tensors.items():
        if x.is_floating_point() or not x.numel():
            continue
        lo, hi = (False, True) if x.dtype == torch.bool else x.detach().aminmax()
        intervals[at] = int(lo), int(hi)
    return intervals


def is_inside(index: Bounds, size: int) -> bool:
    """True if an index is surely in [-size, size)."""
    return index is not None and index[0] >= -size and index[1] < size


def bounds(program: Program, inputs: dict[str, tuple[int, int]], ints: Ints) -> list[Bounds]:
    """The bounds of each value. Those of floats leave NaN and infinity out. Bools are 0 and 1.

    inputs: the first and the last b, h, i and j.
    """
    intervals: list[Bounds] = []
    for value in program.values:
        intervals.append(_bounds(value, [intervals[x] for x in value.args], inputs, ints))
    return intervals


def _bounds(value: Value, args: list[Bounds], inputs: dict, ints: Ints) -> Bounds:
    if value.kind == "bool":
        return 0, 1
    if value.op in inputs:
        return inputs[value.op]
    if value.op == "constant":
        number = value.number
        return None if number is None or not math.isfinite(number) else (number, number)
    if value.op == "load":
        return ints.get(value.tensor or 0) if value.kind == "int" else None
    if value.op == "where":
        args = args[1:]
    known = [x for x in args if x is not None]
    rule = (RULES_OF_INTS.get(value.op) if value.kind == "int" else None) or RULES.get(value.op)
    if rule is None or len(known) < len(args):
        return LIMITED.get(value.op)
    try:
        interval = rule(*known)
    except (OverflowError, ValueError, ZeroDivisionError):
        interval = None
    if value.op == "to_int" and interval is not None:
        return max(interval[0], -MOST_OF_FLOAT), min(interval[1], MOST_OF_FLOAT)
    return LIMITED.get(value.op) if interval is None else interval


def _corners(f: Callable) -> Callable:
    def rule(*args: tuple[float, float]) -> Bounds:
        values = [f(*x) for x in itertools.product(*args)]
        return min(values), max(values)

    return rule


def _without_zero(f: Callable) -> Callable:
    """Of a quotient: not known if the divisor may be 0."""
    return lambda x, y: _corners(f)(x, y) if y[0] > 0 or y[1] < 0 else None


def _floor_div(x: tuple, y: tuple) -> Bounds:
    if y[0] > 0 or y[1] < 0:
        return _corners(lambda a, b: a // b)(x, y)
    most = max(abs(x[0]), abs(x[1]))
    return -most, most


def _abs(x: tuple) -> Bounds:
    low, high = abs(x[0]), abs(x[1])
    return 0 if x[0] <= 0 <= x[1] else min(low, high), max(low, high)


def _log(f: Callable) -> Callable:
    # Of 0 it is -inf; the least positive number is 2^-1074.
    return lambda x: (f(max(x[0], 2.0**-1074)), f(x[1])) if x[1] > 0 else None


def _log1p(x: tuple) -> Bounds:
    # Of -1 it is -inf; the next number is -1 + 2^-53.
    return (math.log1p(max(x[0], 2.0**-53 - 1)), math.log1p(x[1])) if x[1] > -1 else None


def _sqrt(x: tuple) -> Bounds:
    return math.sqrt(max(x[0], 0)), math.sqrt(max(x[1], 0))


def _shift(f: Callable) -> Callable:
    return _corners(lambda a, n: f(a, min(max(n, 0), 63)))


def _bits(x: tuple, y: tuple) -> Bounds:
    full = (1 << max(int(abs(z)).bit_length() for z in (*x, *y))) - 1
    return (0 if x[0] >= 0 and y[0] >= 0 else -full - 1), full


def _and(x: tuple, y: tuple) -> Bounds:
    tops = [z[1] for z in (x, y) if z[0] >= 0]
    return (0, min(tops)) if tops else _bits(x, y)


RULES_OF_INTS: dict[str, Callable] = {
    "remainder": lambda x, y: (min(y[0] + 1, 0), max(y[1] - 1, 0)),
}
RULES: dict[str, Callable] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": _corners(lambda a, b: a * b),
    "div": _without_zero(lambda a, b: a / b),
    "neg": lambda x: (-x[1], -x[0]),
    "abs": _abs,
    "sign": lambda x: (-1, 1),
    "minimum": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "maximum": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "where": lambda x, y: (min(x[0], y[0]), max(x[1], y[1])),
    "floor_div": _floor_div,
    "remainder": lambda x, y: (min(y[0], 0), max(y[1], 0)),
    "shift_left": _shift(lambda a, n: a << n),
    "shift_right": _shift(lambda a, n: a >> n),
    "bit_and": _and,
    "bit_or": _bits,
    "bit_xor": _bits,
    "bit_not": lambda x: (-x[1] - 1, -x[0] - 1),
    "to_float": lambda x: x,
    "to_int": lambda x: (int(x[0]) - 1, int(x[1]) + 1),
    "floor": lambda x: (math.floor(x[0]), math.floor(x[1])),
    "ceil": lambda x: (math.ceil(x[0]), math.ceil(x[1])),
    "trunc": lambda x: (math.trunc(x[0]), math.trunc(x[1])),
    "round": lambda x: (x[0] - 1, x[1] + 1),
    "exp": _corners(math.exp),
    "exp2": _corners(lambda a: 2.0**a),
    "log": _log(math.log),
    "log2": _log(math.log2),
    "log1p": _log1p,
    "sqrt": _sqrt,
}
MOST_OF_FLOAT = 2**30  # that a float becomes as a whole number in kernels, if scores are float32
LIMITED: dict[str, Bounds] = {  # whatever the operand is
    "to_int": (-MOST_OF_FLOAT, MOST_OF_FLOAT),
    **dict.fromkeys(("sign", "tanh", "erf", "sin", "cos"), (-1, 1)),
    "sigmoid": (0, 1),
}
