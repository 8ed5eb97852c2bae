"""What torch's functions and methods mean in a program: one function for each name.

An operator gets the trace and the operands as the user wrote them, and returns the number of the
result's value. Kinds follow torch's promotion: bool, int, float.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .program import BOOL, FLOAT, INT

OPERATORS: dict[str, Callable[..., Any]] = {}
ORDER = (BOOL, INT, FLOAT)
ALIASES = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "subtract": "sub",
    "multiply": "mul",
    "negative": "neg",
    "positive": "pos",
    "absolute": "abs",
    "greater_equal": "ge",
    "greater": "gt",
    "less_equal": "le",
    "less": "lt",
    "not_equal": "ne",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "clip": "clamp",
    "sgn": "sign",
}


def canonical(name: str) -> tuple[str, bool]:
    """The name of an operator for a method or function of torch, and whether its two operands are
    swapped, as in `__rsub__`."""
    bare = name.strip("_")
    if name.endswith("_") and not name.startswith("_"):
        return name, False  # in place
    swapped = name in ("rsub", "__rsub__") or (
        name.startswith("__r") and ALIASES.get(bare[1:], bare[1:]) in OPERATORS
    )
    bare = bare[1:] if swapped else bare
    return ALIASES.get(bare, bare), swapped


def kind_of(x: Tensor) -> str:
    """The kind of a captured tensor's elements."""
    if x.dtype == torch.bool:
        return BOOL
    return FLOAT if x.is_floating_point() else INT


def kind_of_dtype(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return BOOL
    return FLOAT if dtype.is_floating_point else INT


def operator(*names: str) -> Callable[..., Any]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            OPERATORS[name] = function
        return function

    return add


def promoted(trace, *operands: Any, at_least: str = BOOL) -> list[int]:
    """The operands as values of the highest of their kinds."""
    values = [trace.value(x) for x in operands]
    kind = max((*map(trace.kind, values), at_least), key=ORDER.index)
    return [trace.builder.cast(at, kind) for at in values]


# ------------------------------------------------------------------------------------- arithmetic


def _arithmetic(name: str, of_bools: str = "") -> None:
    @operator(name)
    def run(trace, x, y, *, alpha=1):
        if alpha != 1:
            y = trace.call("mul", (y, alpha), {})
        if of_bools and trace.kind(trace.value(x)) == trace.kind(trace.value(y)) == BOOL:
            return trace.builder.op(of_bools, trace.value(x), trace.value(y))
        return trace.builder.op(name, *promoted(trace, x, y, at_least=INT))


_arithmetic("add", of_bools="or")
_arithmetic("mul", of_bools="and")
for _name in ("sub", "pow", "minimum", "maximum", "remainder", "fmod"):
    _arithmetic(_name)


OPERATORS["min"], OPERATORS["max"] = OPERATORS["minimum"], OPERATORS["maximum"]


@operator("div")
def _div(trace, x, y, *, rounding_mode=None):
    if rounding_mode == "floor":
        return _floor_divide(trace, x, y)
    at = trace.builder.op("div", *promoted(trace, x, y, at_least=FLOAT))
    if rounding_mode is None:
        return at
    if rounding_mode != "trunc":
        trace.fail(
            ValueError, f"got rounding_mode={rounding_mode!r}, expected floor, trunc or None"
        )
    values = promoted(trace, x, y, at_least=INT)
    if trace.kind(values[0]) == FLOAT:
        return trace.builder.op("trunc", at)
    # Whole numbers: x minus the remainder that has its sign divides exactly.
    whole = trace.builder.op("sub", values[0], trace.builder.op("fmod", *values))
    return trace.builder.op("floor_div", whole, values[1])


@operator("floor_divide")
def _floor_divide(trace, x, y):
    return trace.builder.op("floor_div", *promoted(trace, x, y, at_least=INT))


def _of_one_number(name: str) -> None:
    @operator(name)
    def run(trace, x):
        return trace.builder.op(name, *promoted(trace, x, at_least=INT))


for _name in ("neg", "abs", "sign"):
    _of_one_number(_name)


def _of_one_float(name: str) -> None:
    @operator(name)
    def run(trace, x):
        return trace.builder.op(name, *promoted(trace, x, at_least=FLOAT))


for _name in [
    "exp",
    "exp2",
    "log",
    "log2",
    "log1p",
    "expm1",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "erf",
]:
    _of_one_float(_name)


def _rounding(name: str) -> None:
    @operator(name)
    def run(trace, x):
        (at,) = promoted(trace, x, at_least=INT)
        return at if trace.kind(at) == INT else trace.builder.op(name, at)


for _name in ("floor", "ceil", "trunc", "round"):
    _rounding(_name)


@operator("pos", "clone", "detach", "contiguous", "squeeze")
def _same(trace, x):
    return trace.value(x)


@operator("square")
def _square(trace, x):
    return trace.call("mul", (x, x), {})


@operator("reciprocal")
def _reciprocal(trace, x):
    return trace.call("div", (1.0, x), {})


@operator("relu")
def _relu(trace, x):
    return trace.call("maximum", (x, 0), {})


@operator("isnan")
def _isnan(trace, x):
    return trace.call("ne", (x, x), {})


@operator("clamp")
def _clamp(trace, x, min=None, max=None):
    for name, limit in (("maximum", min), ("minimum", max)):
        if limit is not None:
            x = trace.call(name, (x, limit), {})
    return trace.value(x)


@operator("clamp_min")
def _clamp_min(trace, x, min):
    return _clamp(trace, x, min=min)


@operator("clamp_max")
def _clamp_max(trace, x, max):
    return _clamp(trace, x, max=max)


# ------------------------------------------------------------------------------ comparisons, logic


def _comparison(name: str) -> None:
    @operator(name)
    def run(trace, x, y):
        return trace.builder.op(name, *promoted(trace, x, y, at_least=INT))


for _name in ("ge", "gt", "le", "lt", "eq", "ne"):
    _comparison(_name)


def _logic(name: str) -> None:
    @operator(f"bitwise_{name}")
    def of_bits(trace, x, y):
        values = promoted(trace, x, y)
        if trace.kind(values[0]) == FLOAT:
            trace.fail(TypeError, "got bits of a float, expected whole numbers or bools")
        return trace.builder.op(name if trace.kind(values[0]) == BOOL else f"bit_{name}", *values)

    @operator(f"logical_{name}")
    def of_truth(trace, x, y):
        values = (trace.builder.cast(trace.value(z), BOOL) for z in (x, y))
        return trace.builder.op(name, *values)


for _name in ("and", "or", "xor"):
    _logic(_name)


@operator("bitwise_not")
def _bitwise_not(trace, x):
    (at,) = promoted(trace, x)
    if trace.kind(at) == FLOAT:
        trace.fail(TypeError, "got bits of a float, expected whole numbers or bools")
    return trace.builder.op("not" if trace.kind(at) == BOOL else "bit_not", at)


@operator("logical_not")
def _logical_not(trace, x):
    return trace.builder.op("not", trace.builder.cast(trace.value(x), BOOL))


def _shift(name: str, direction: str) -> None:
    @operator(name)
    def run(trace, x, y):
        values = promoted(trace, x, y, at_least=INT)
        if trace.kind(values[0]) == FLOAT:
            trace.fail(TypeError, "got a shift of a float, expected whole numbers")
        return trace.builder.op(f"shift_{direction}", *values)


_shift("bitwise_left_shift", "left")
_shift("bitwise_right_shift", "right")


@operator("where")
def _where(trace, condition, x, y):
    at = trace.value(condition)
    if trace.kind(at) != BOOL:
        trace.fail(TypeError, f"got a condition of kind {trace.kind(at)}, expected bool")
    values = promoted(trace, x, y)
    name = "where_bool" if trace.kind(values[0]) == BOOL else "where"
    return trace.builder.op(name, at, *values)


@operator("masked_fill")
def _masked_fill(trace, x, mask, value):
    return _where(trace, mask, value, x)


# --------------------------------------------------------------------------- casts, new constants


def _cast_method(name: str, kind: str) -> None:
    @operator(name)
    def run(trace, x):
        return trace.builder.cast(trace.value(x), kind)


for _name in ("float", "double", "half", "bfloat16"):
    _cast_method(_name, FLOAT)
for _name in ("int", "long", "short"):
    _cast_method(_name, INT)
_cast_method("bool", BOOL)


@operator("to", "type", "type_as")
def _to(trace, x, *others, dtype=None, device=None, copy=False, non_blocking=False):
    """Floating dtypes are one kind: a cast between them does not round."""
    for other in others:
        if isinstance(other, torch.dtype):
            dtype = other
        elif hasattr(other, "dtype"):
            dtype = other.dtype
    at = trace.value(x)
    return at if dtype is None else trace.builder.cast(at, kind_of_dtype(dtype))


def _constant(trace, like: int, number: Any, dtype: torch.dtype | None) -> int:
    kind = trace.kind(like) if dtype is None else kind_of_dtype(dtype)
    return trace.builder.cast(trace.value(number), kind)


def _new(name: str, of_number: Callable[..., Any]) -> None:
    @operator(f"new_{name}")
    def run(trace, x, size, *rest, dtype=None, device=None, requires_grad=False):
        if tuple(size):
            trace.fail(TypeError, f"got a new tensor of shape {tuple(size)}, expected ()")
        return _constant(trace, trace.value(x), of_number(*rest), dtype)

    @operator(f"{name}_like")
    def like(trace, x, *rest, dtype=None, device=None, requires_grad=False):
        return _constant(trace, trace.value(x), of_number(*rest), dtype)


_new("ones", lambda: 1)
_new("zeros", lambda: 0)
_new("full", lambda fill_value: fill_value)


@operator("new_tensor")
def _new_tensor(trace, x, data, *, dtype=None, device=None, requires_grad=False):
    return trace.value(data) if dtype is None else _constant(trace, 0, data, dtype)
