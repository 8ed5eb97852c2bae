"""Sums, extremes, norms and products of small tensors, as torch has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .elements import by_element, checked, elements_of, groups, is_part, made
from .registry import FUNCTIONS, known_as, with_first
from .symbols import Elements, Symbol, Trace, kind_of, refused

Fold = Callable[[Trace, list[Symbol]], Symbol]


def _folded(t: Trace, op: str, symbols: list[Symbol]) -> Symbol:
    """Neighbours by twos, then these results likewise: a sum of n terms errs by log2(n) roundings.
    Of equal largest elements, the gradient is halved at each step that meets two of them."""
    while len(symbols) > 1:
        last = symbols[-1:] if len(symbols) % 2 else []
        pairs = zip(symbols[::2], symbols[1::2])
        symbols = [t.emit(op, x, y) for x, y in pairs] + last
    return symbols[0]


def reduced(
    t: Trace, name: str, fold: Fold, input: Any, dim: Any = None, keepdim: bool = False
) -> Symbol | Elements:
    """What `fold` makes of the elements along some dimensions. dim: a number, several, or None for
    all."""
    if not is_part(input):
        return fold(t, [t.lift(input, name)])
    x = elements_of(t, input, name)
    given = range(x.ndim) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    dims = []
    for d in given or range(x.ndim):
        if type(d) is not int or not -x.ndim <= d < x.ndim:
            raise refused(IndexError, f"{name} of {x.described()}: got the dimension {d}")
        dims.append(d % x.ndim)
    found = [fold(t, group) for group in groups(x, dims)]
    sizes = [1 if at in dims else n for at, n in enumerate(x.shape)]
    shape = sizes if keepdim else [n for at, n in enumerate(sizes) if at not in dims]
    return made(t, shape, found)


def _cast(t: Trace, symbols: list[Symbol], dtype: Any, least: str) -> list[Symbol]:
    if dtype is not None:
        symbols = [t.cast(x, kind_of(dtype)) for x in symbols]
    return list(t.promoted(*symbols, least=least))


def _sum(op: str, t: Trace, symbols: list[Symbol], dtype: Any = None) -> Symbol:
    return _folded(t, op, _cast(t, symbols, dtype, "int"))


def _mean(t: Trace, symbols: list[Symbol], dtype: Any = None) -> Symbol:
    if dtype is None and symbols[0].kind != "float":
        raise refused(TypeError, f"mean of kind {symbols[0].kind}: write .to(torch.float32) first")
    total = _sum("add", t, symbols, dtype)
    return t.emit("div", total, t.constant(float(len(symbols))))


def _extreme(op: str, logical: str, t: Trace, symbols: list[Symbol]) -> Symbol:
    return _folded(t, logical if symbols[0].kind == "bool" else op, symbols)


def _logical(op: str, t: Trace, symbols: list[Symbol]) -> Symbol:
    return _folded(t, op, [t.cast(x, "bool") for x in symbols])


def _reduction(
    name: str, fold: Callable, t: Trace, input: Any, dim: Any = None, keepdim: bool = False,
    *, axis: Any = None, dtype: Any = None,
) -> Symbol | Elements:  # fmt: skip
    if dtype is not None:
        fold = with_first(_with_dtype, fold, dtype)
    return reduced(t, name, fold, input, dim if axis is None else axis, keepdim)


def _with_dtype(fold: Callable, dtype: Any, t: Trace, symbols: list[Symbol]) -> Symbol:
    return fold(t, symbols, dtype)


LARGEST = with_first(_extreme, "maximum", "or")
SMALLEST = with_first(_extreme, "minimum", "and")
for _name, _fold in {
    "sum": with_first(_sum, "add"),
    "prod": with_first(_sum, "mul"),
    "mean": _mean,
    "amax": LARGEST,
    "amin": SMALLEST,
    "any": with_first(_logical, "or"),
    "all": with_first(_logical, "and"),
}.items():
    FUNCTIONS[_name] = with_first(_reduction, _name, _fold)


def _one_or_two(
    name: str, op: str, fold: Fold, t: Trace, input: Any, other: Any = None, **names: Any
) -> Symbol | Elements:
    """max(x) is an extreme of all elements, max(x, y) that of two operands."""
    if other is None and not names:
        return reduced(t, name, fold, input)
    if names or (is_part(input) and isinstance(other, int)):
        raise refused(
            NotImplementedError, f"{name} along a dimension, which has indices: use a{name}"
        )
    if is_part(input) or is_part(other):
        return by_element(t, name, FUNCTIONS[op], (input, other), {})
    return FUNCTIONS[op](t, input, other)


FUNCTIONS["max"] = with_first(_one_or_two, "max", "maximum", LARGEST)
FUNCTIONS["min"] = with_first(_one_or_two, "min", "minimum", SMALLEST)


def _root_of_squares(t: Trace, symbols: list[Symbol]) -> Symbol:
    """At 0, where the distance of a row from itself is, the gradient is 0, as torch has it."""
    total = _folded(t, "add", [t.emit("mul", x, x) for x in symbols])
    none = t.emit("eq", total, t.constant(0.0))
    # The root of 1 there: torch's autograd, too, multiplies by the derivative of this branch.
    root = t.emit("sqrt", t.emit("where", none, t.constant(1.0), total))
    return t.emit("where", none, t.constant(0.0), root)


def _norm_of(p: Any, t: Trace, symbols: list[Symbol]) -> Symbol:
    if p == 2 and len(symbols) > 1:
        return _root_of_squares(t, symbols)
    sizes = [t.emit("abs", x) for x in symbols]
    return _folded(t, "maximum", sizes) if p == math.inf else _folded(t, "add", sizes)


@known_as("norm", "linalg_vector_norm")
def norm(
    t: Trace, input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False,
    *, ord: Any = None, dtype: Any = None, out: Any = None,
) -> Symbol | Elements:  # fmt: skip
    p = p if ord is None else ord
    p = 2 if p is None or p == "fro" else t.number(p) if isinstance(p, Tensor) else p
    if p not in (1, 2, math.inf):
        raise refused(
            NotImplementedError,
            f"norm of order {p}, expected 1, 2 or inf: write it by abs, pow and sum",
        )
    x = elements_of(t, input, "norm") if is_part(input) else input
    if is_part(x) and x.symbols[0].kind != "float" and dtype is None:
        raise refused(TypeError, "norm of ints or bools: write .to(torch.float32) first")
    fold = with_first(_norm_of, p)
    return reduced(t, "norm", lambda t, s: fold(t, _cast(t, s, dtype, "float")), x, dim, keepdim)


@known_as("linalg_norm")
def matrix_norm(
    t: Trace, input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, **names: Any
) -> Symbol | Elements:
    several = isinstance(dim, (tuple, list)) and len(dim) > 1
    of_matrix = several or (dim is None and len(input.shape) != 1)
    if ord is not None and of_matrix:
        raise refused(NotImplementedError, "norm of a matrix: use torch.linalg.vector_norm")
    return norm(t, input, ord, dim, keepdim, **names)


@known_as("dot", "vdot", "inner", "linalg_vecdot")
def dot(t: Trace, input: Any, other: Any) -> Symbol | Elements:
    return _products(t, "dot", input, other, 1)


@known_as("matmul", "mv", "mm")
def matmul(t: Trace, input: Any, other: Any) -> Symbol | Elements:
    return _products(t, "matmul", input, other, 2)


@known_as("rmatmul")
def rmatmul(t: Trace, input: Any, other: Any) -> Symbol | Elements:
    return matmul(t, other, input)


def _products(t: Trace, name: str, input: Any, other: Any, most: int) -> Symbol | Elements:
    """Of two tensors of one dimension, or of up to `most`, as torch.matmul has it."""
    shapes = []
    for x in (input, other):
        if not is_part(x):
            raise refused(TypeError, f"{name} got a number: use * for a product of numbers")
        shapes.append(tuple(x.shape))
    if max(map(len, shapes)) > most or shapes[0][-1] != shapes[1][0]:
        raise refused(TypeError, f"{name} got tensors of shapes {shapes[0]} and {shapes[1]}")
    shape = shapes[0][:-1] + shapes[1][1:]
    checked(shape, name, "operands with a larger product")
    x, y = (elements_of(t, z, name) for z in (input, other))
    found = []
    for row in groups(x, [x.ndim - 1]):
        for column in groups(y, [0]):
            terms = [FUNCTIONS["mul"](t, a, b) for a, b in zip(row, column)]
            found.append(_sum("add", t, terms))
    return made(t, shape, found)
