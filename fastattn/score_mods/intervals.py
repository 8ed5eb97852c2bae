"""Classes of blocks of a mask_mod by interval arithmetic: no pair of a row and a key is computed.

Each value of the program becomes the least and the largest number that it may have in a block. A
block called NONE or ALL is so; one called SOME may be any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .bounds import bounds, is_inside
from .bounds import extremes as bounds_of_elements
from .program import Program, Value, conjuncts, needed
from .range_tables import extremes

NONE, SOME, ALL = 0, 1, 2  # classes of a block
BIG = 2**61  # of an int that may be anything: two of them add up without overflow


class Interval(NamedTuple):
    """A range of values for each block."""

    lo: Tensor  # the least value; of bools, whether the value is surely true. NaN: any float
    hi: Tensor  # the largest; of bools, whether it may be true. The same object as lo: one value
    size: int = 0  # at least the largest magnitude of an int. BIG: anything


def block_classes(
    program: Program,
    tensors: Sequence[Tensor],
    rows: int,
    keys: int,
    *,
    block_rows: int = 128,
    block_keys: int = 128,
    b: int = 0,
    h: int = 0,
    row: int = 0,
    key: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """uint8 [ceil(rows / block_rows), ceil(keys / block_keys)]: the class of each block of a
    mask_mod's program. NONE: no pair is seen. ALL: every pair is. SOME: any of its pairs may be;
    also where a captured tensor may be indexed out of range at a pair that the conditions before
    do not hide: kernels find it when they compute the block.

    Values of captured tensors are read: they are on a CPU. b, h: the item and the head. row, key:
    the indices of the first row and key. dtype: that of floats in the program.

    Raises ValueError for a program that has another result than a bool, or reads the score.
    """
    if program.kind != "bool" or any(x.op == "score" for x in program.values):
        raise ValueError("block_classes takes the program of a mask_mod, with a bool as result")
    i = _blocks(rows, block_rows, row)
    j = _blocks(keys, block_keys, key)
    shape = i.lo.numel(), j.lo.numel()
    inputs = {
        "b": _point(torch.tensor(b), abs(b)),
        "h": _point(torch.tensor(h), abs(h)),
        "i": Interval(i.lo[:, None], i.hi[:, None], i.size),
        "j": Interval(j.lo[None], j.hi[None], j.size),
    }
    results: list[Interval] = []
    outside: dict[int, Tensor] = {}  # of a load: the blocks in which its index may be out of range
    for at, value in enumerate(program.values):
        args = [results[x] for x in value.args]
        results.append(inputs.get(value.op) or _value(value, args, tensors, dtype))
        if value.kind == "int" and results[-1].size >= BIG:
            results[-1] = _any_int()
        if value.op == "load":
            wrong = _outside(args, tensors[value.tensor or 0].shape)
            outside |= {} if wrong is None else {at: wrong}
    sure, possible = results[-1].lo, results[-1].hi
    classes = sure.to(torch.uint8) + possible.to(torch.uint8)
    if outside:
        ranges = dict(b=(b, b), h=(h, h), i=(row, row + rows - 1), j=(key, key + keys - 1))
        outside = _unproven(program, tensors, ranges, outside)
        classes = torch.where(_wrong(program, results, outside), SOME, classes)
    return classes.expand(shape).contiguous()


def _outside(index: list[Interval], shape: torch.Size) -> Tensor | None:
    """Whether an index may be outside of [-size, size), for each block. None: in no block."""
    wrong = [(x.lo < -size) | (x.hi >= size) for x, size in zip(index, shape) if x.size >= size]
    return functools.reduce(torch.bitwise_or, wrong) if any(x.any() for x in wrong) else None


def _unproven(
    program: Program,
    tensors: Sequence[Tensor],
    ranges: dict[str, tuple[int, int]],
    outside: dict[int, Tensor],
) -> dict[int, Tensor]:
    """`outside`, without the loads that are in range by the bounds of their indices over the call:
    these know some operators that may have any value here."""
    known = bounds(program, ranges, bounds_of_elements(dict(enumerate(tensors))))
    loads = {at: program.values[at] for at in outside}
    shapes = {at: tensors[x.tensor or 0].shape for at, x in loads.items()}
    inside = {at: map(is_inside, (known[y] for y in x.args), shapes[at]) for at, x in loads.items()}
    return {at: x for at, x in outside.items() if not all(inside[at])}


def _wrong(program: Program, results: list[Interval], outside: dict[int, Tensor]) -> Tensor:
    """Whether some pair of a block may have an index out of range in a condition of the mask_mod,
    and be shown by the conditions before it."""
    shown, wrong = torch.tensor(True), torch.tensor(False)
    for at in conjuncts(program):
        for x in needed(program.values, at):
            if x in outside:
                wrong = wrong | (shown & outside[x])
        shown = shown & results[at].hi
    return wrong


def _blocks(count: int, block: int, first: int) -> Interval:
    lo = torch.arange(0, count, block)
    hi = (lo + (block - 1)).clamp(max=max(count - 1, 0))
    return Interval(lo + first, hi + first, abs(first) + max(count - 1, 0))


def _point(x: Tensor, size: int = 0) -> Interval:
    return Interval(x, x, size)


def _any_int() -> Interval:
    return Interval(torch.tensor(-BIG), torch.tensor(BIG), BIG)


def _any_float(dtype: torch.dtype) -> Interval:
    nan = torch.full((), float("nan"), dtype=dtype)
    return Interval(nan, nan.clone())


def _value(value: Value, args: list[Interval], tensors, dtype: torch.dtype) -> Interval:
    if value.op == "constant":
        number = value.number
        if value.kind == "float":
            return _point(torch.tensor(number, dtype=dtype))
        return _point(torch.tensor(number), abs(number) if type(number) is int else 0)
    if value.op == "load":
        return _load(value, args, tensors[value.tensor], dtype)
    if value.op in COMPARED or value.op in LOGIC:
        return (COMPARED.get(value.op) or LOGIC[value.op])(*args)
    if value.op.startswith("to_"):
        return _cast(value.kind, args[0], dtype)
    if value.op in EITHER:
        return EITHER[value.op](*args)
    if value.kind == "int":
        return INT[value.op](*args)
    if value.op in FLOAT:
        # Infinite bounds: between them may be a NaN, as of inf - inf and 0 * inf.
        lo, hi = FLOAT[value.op](*args)
        finite = torch.isfinite(args[0].lo) & torch.isfinite(args[0].hi)
        for x in args[1:]:
            finite = finite & torch.isfinite(x.lo) & torch.isfinite(x.hi)
        nan = torch.full_like(lo, float("nan"))
        return Interval(torch.where(finite, lo, nan), torch.where(finite, hi, nan))
    if value.op in RISING:
        f, slack = RISING[value.op]
        lo, hi = f(args[0].lo), f(args[0].hi)
        if slack:
            lo, hi = lo - lo.abs() * slack, hi + hi.abs() * slack
        # A NaN of one end, as of sqrt below 0, may be of any value between.
        return Interval(torch.where(hi.isnan(), hi, lo), torch.where(lo.isnan(), lo, hi))
    return _any_float(dtype)


def _load(value: Value, args: list[Interval], tensor: Tensor, dtype: torch.dtype) -> Interval:
    tensor = tensor.detach()
    if value.kind == "bool":
        tensor = tensor.to(torch.uint8)  # torch has no minimum over bools
    else:
        tensor = tensor.to(dtype if value.kind == "float" else torch.int64)
    if not args or all(x.lo is x.hi and x.lo.numel() == 1 for x in args):
        lo = hi = tensor
        if args and not tensor.numel():
            return _unknown(value.kind, dtype)
        for x, size in zip(args, tensor.shape):
            at = int(x.lo)
            at = min(max(at + size if at < 0 else at, 0), size - 1)
            lo = hi = lo[at]
    elif not tensor.numel():
        return _unknown(value.kind, dtype)
    else:
        lo, hi = extremes(tensor, [(x.lo, x.hi) for x in args])
    if value.kind == "bool":
        lo, hi = lo.bool(), hi.bool()
    size = 0
    if value.kind == "int":
        size = max(abs(int(lo.min())), abs(int(hi.max())))
    return Interval(lo, hi, size)


def _unknown(kind: str, dtype: torch.dtype) -> Interval:
    if kind == "bool":
        return Interval(torch.tensor(False), torch.tensor(True))
    return _any_int() if kind == "int" else _any_float(dtype)


def _cast(kind: str, x: Interval, dtype: torch.dtype) -> Interval:
    if kind == "bool":
        return _ne(x, _point(torch.zeros((), dtype=x.lo.dtype)))
    if kind == "float":
        if x.size >= BIG:
            return _any_float(dtype)
        lo, hi = x.lo.to(dtype), x.hi.to(dtype)
        return Interval(lo, lo if x.hi is x.lo else hi)
    if x.lo.dtype == torch.bool:
        return Interval(x.lo.to(torch.int64), x.hi.to(torch.int64), 1)
    most = torch.maximum(x.lo.abs(), x.hi.abs()).max()
    if not float(most) < BIG:  # NaN, too
        return _any_int()
    return Interval(x.lo.to(torch.int64), x.hi.to(torch.int64), int(most) + 1)


# Comparisons: with a NaN none is sure, and each may be.
def _le(x: Interval, y: Interval) -> Interval:
    return Interval(x.hi <= y.lo, ~(x.lo > y.hi))


def _lt(x: Interval, y: Interval) -> Interval:
    return Interval(x.hi < y.lo, ~(x.lo >= y.hi))


def _eq(x: Interval, y: Interval) -> Interval:
    sure = (x.lo == x.hi) & (y.lo == y.hi) & (x.lo == y.lo)
    return Interval(sure, ~((x.lo > y.hi) | (x.hi < y.lo)))


def _not(x: Interval) -> Interval:
    return Interval(~x.hi, ~x.lo)


def _ne(x: Interval, y: Interval) -> Interval:
    return _not(_eq(x, y))


COMPARED: dict[str, Callable] = {
    "ge": lambda x, y: _le(y, x),
    "gt": lambda x, y: _lt(y, x),
    "le": _le,
    "lt": _lt,
    "eq": _eq,
    "ne": _ne,
}
LOGIC: dict[str, Callable] = {
    "and": lambda x, y: Interval(x.lo & y.lo, x.hi & y.hi),
    "or": lambda x, y: Interval(x.lo | y.lo, x.hi | y.hi),
    "xor": lambda x, y: Interval(
        (x.lo & ~y.hi) | (~x.hi & y.lo), ~((x.lo & y.lo) | (~x.hi & ~y.hi))
    ),
    "not": _not,
}


def _where(c: Interval, x: Interval, y: Interval) -> Interval:
    lo = torch.where(c.lo, x.lo, torch.where(c.hi, torch.minimum(x.lo, y.lo), y.lo))
    hi = torch.where(c.lo, x.hi, torch.where(c.hi, torch.maximum(x.hi, y.hi), y.hi))
    return Interval(lo, hi, max(x.size, y.size))


def _abs(x: Interval) -> Interval:
    low, high = x.lo.abs(), x.hi.abs()
    lo = torch.where((x.lo <= 0) & (x.hi >= 0), torch.zeros_like(low), torch.minimum(low, high))
    return Interval(lo, torch.maximum(low, high), x.size)


def _sign(x: Interval) -> Interval:
    anything = torch.isnan(x.lo) | torch.isnan(x.hi)
    nan = x.lo if x.lo.dtype.is_floating_point else torch.zeros_like(x.lo)
    lo, hi = (torch.where(anything, nan, torch.sign(y)) for y in (x.lo, x.hi))
    return Interval(lo, hi, 1)


EITHER: dict[str, Callable] = {  # of ints and floats
    "neg": lambda x: Interval(-x.hi, -x.lo, x.size),
    "abs": _abs,
    "sign": _sign,
    "where": _where,
    "minimum": lambda x, y: Interval(
        torch.minimum(x.lo, y.lo), torch.minimum(x.hi, y.hi), max(x.size, y.size)
    ),
    "maximum": lambda x, y: Interval(
        torch.maximum(x.lo, y.lo), torch.maximum(x.hi, y.hi), max(x.size, y.size)
    ),
}


def _corners(f: Callable, x: Interval, y: Interval) -> tuple[Tensor, Tensor]:
    """The least and the largest at the ends of both, of f that is monotone in each operand."""
    values = [f(x.lo, y.lo)]
    values += [] if y.hi is y.lo else [f(x.lo, y.hi)]
    values += [] if x.hi is x.lo else [f(x.hi, y.lo), f(x.hi, y.hi)]
    lo = hi = values[0]
    for z in values[1:]:
        lo, hi = torch.minimum(lo, z), torch.maximum(hi, z)
    return lo, hi


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)


_floor = partial(torch.div, rounding_mode="floor")


def _floor_div(x: Interval, y: Interval) -> Interval:
    lo, hi = _corners(lambda a, d: _floor(a, _nonzero(d)), x, y)
    most = torch.maximum(x.lo.abs(), x.hi.abs())
    spans = (y.lo <= 0) & (y.hi >= 0)
    return Interval(torch.where(spans, -most, lo), torch.where(spans, most, hi), x.size + 1)


def _remainder(x: Interval, y: Interval) -> Interval:
    d = _nonzero(y.lo)
    once = (y.lo == y.hi) & (y.lo != 0) & (_floor(x.lo, d) == _floor(x.hi, d))
    lo = torch.where(once, torch.remainder(x.lo, d), (y.lo + 1).clamp(max=0))
    hi = torch.where(once, torch.remainder(x.hi, d), (y.hi - 1).clamp(min=0))
    return Interval(lo, hi, y.size)


def _shift(x: Interval, n: Interval, f: Callable, left: bool) -> Interval:
    n = Interval(n.lo.clamp(0, 63), n.hi.clamp(0, 63))
    most = int(n.hi.max()) if n.hi.numel() else 0
    size = x.size << most if left else x.size
    return _any_int() if size >= BIG else Interval(*_corners(f, x, n), size)


BITWISE = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}


def _bits(op: str, x: Interval, y: Interval) -> Interval:
    for a, m in ((x, y), (y, x)):
        if op == "and" and m.lo is m.hi and m.lo.numel() == 1:
            mask = int(m.lo)
            if mask >= 0 and mask & (mask + 1) == 0:  # a remainder by a power of two
                return _remainder(a, _point(m.lo + 1, mask + 1))
    full = (1 << max(x.size, y.size).bit_length()) - 1
    if full >= BIG:
        return _any_int()
    point = BITWISE[op](x.lo, y.lo)  # of blocks where both are one number
    known = (x.lo == x.hi) & (y.lo == y.hi)
    zero, most = torch.zeros_like(point), torch.full_like(point, full)
    lo, hi = -most - 1, most
    if op == "and":
        lo = torch.where((x.lo >= 0) | (y.lo >= 0), zero, lo)
        for z in (x, y):
            hi = torch.where(z.lo >= 0, torch.minimum(hi, z.hi), hi)
    else:
        low = torch.maximum(x.lo, y.lo) if op == "or" else zero
        lo = torch.where((x.lo >= 0) & (y.lo >= 0), low, lo)
    return Interval(torch.where(known, point, lo), torch.where(known, point, hi), full + 1)


INT: dict[str, Callable] = {
    "add": lambda x, y: Interval(x.lo + y.lo, x.hi + y.hi, x.size + y.size),
    "sub": lambda x, y: Interval(x.lo - y.hi, x.hi - y.lo, x.size + y.size),
    "mul": lambda x, y: (
        _any_int()
        if x.size * y.size >= BIG
        else Interval(*_corners(torch.mul, x, y), x.size * y.size)
    ),
    "floor_div": _floor_div,
    "remainder": _remainder,
    "shift_left": partial(_shift, f=torch.bitwise_left_shift, left=True),
    "shift_right": partial(_shift, f=torch.bitwise_right_shift, left=False),
    "bit_and": partial(_bits, "and"),
    "bit_or": partial(_bits, "or"),
    "bit_xor": partial(_bits, "xor"),
    "bit_not": lambda x: Interval(~x.hi, ~x.lo, x.size + 1),
}


def _divided(x: Interval, y: Interval) -> tuple[Tensor, Tensor]:
    lo, hi = _corners(torch.div, x, y)
    spans = (y.lo <= 0) & (y.hi >= 0)
    nan = torch.full_like(lo, float("nan"))
    return torch.where(spans, nan, lo), torch.where(spans, nan, hi)


# Correctly rounded operators are monotone in float arithmetic, too.
FLOAT: dict[str, Callable] = {
    "add": lambda x, y: (x.lo + y.lo, x.hi + y.hi),
    "sub": lambda x, y: (x.lo - y.hi, x.hi - y.lo),
    "mul": lambda x, y: _corners(torch.mul, x, y),
    "div": _divided,
}
# Rising functions, with slack: the last digits of readers differ.
RISING: dict[str, tuple[Callable, float]] = {
    "floor": (torch.floor, 0.0),
    "ceil": (torch.ceil, 0.0),
    "trunc": (torch.trunc, 0.0),
    "round": (torch.round, 0.0),
    "sqrt": (torch.sqrt, 1e-5),
    "exp": (torch.exp, 1e-5),
    "exp2": (torch.exp2, 1e-5),
    "log1p": (torch.log1p, 1e-5),
    "tanh": (torch.tanh, 1e-5),
    "sigmoid": (torch.sigmoid, 1e-5),
    "erf": (torch.erf, 1e-5),
}
