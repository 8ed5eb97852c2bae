"""Arithmetic of symbols, as torch has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .registry import FUNCTIONS, known_as, pair, with_first
from .symbols import Symbol, Trace, refused


def _unary(op: str, least: str, t: Trace, input: Any) -> Symbol:
    x = t.lift(input, op)
    if least == "int" and x.kind == "bool":
        raise refused(TypeError, f"{op} of a bool: write .to(torch.int64) first")
    return t.emit(op, *t.promoted(x, least=least))


EXPONENTIALS = ("exp", "exp2", "log", "log2", "log1p")
for _op in (*EXPONENTIALS, "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf"):
    FUNCTIONS[_op] = with_first(_unary, _op, "float")
for _op in ("neg", "abs", "sign"):
    FUNCTIONS[_op] = with_first(_unary, _op, "int")
for _alias, _op in dict(
    negative="neg", absolute="abs", sgn="sign", expit="sigmoid", special_expit="sigmoid",
    special_exp2="exp2", special_log1p="log1p", special_erf="erf",
).items():  # fmt: skip
    FUNCTIONS[_alias] = FUNCTIONS[_op]


def _rounded(op: str, t: Trace, input: Any, *, decimals: int = 0) -> Symbol:
    if decimals:
        raise refused(NotImplementedError, f"{op} with decimals: multiply, {op}, then divide")
    x = t.lift(input, op)
    return t.emit(op, x) if x.kind == "float" else x


for _op in ("floor", "ceil", "trunc", "round"):
    FUNCTIONS[_op] = with_first(_rounded, _op)
FUNCTIONS["fix"] = FUNCTIONS["trunc"]


@known_as("add", "radd", "iadd")
def add(t: Trace, input: Any, other: Any, *, alpha: Any = 1) -> Symbol:
    x, y = pair(t, "add", input, other)
    if not (isinstance(alpha, int) and alpha == 1):
        y = mul(t, y, alpha)
        x, y = t.promoted(x, y)
    return t.emit("or" if x.kind == "bool" else "add", x, y)


@known_as("sub", "isub", "subtract")
def sub(t: Trace, input: Any, other: Any, *, alpha: Any = 1) -> Symbol:
    x, y = pair(t, "sub", input, other)
    if x.kind == "bool":
        raise refused(TypeError, "a bool minus a bool: use ^ (logical_xor), or .to(torch.int64)")
    if not (isinstance(alpha, int) and alpha == 1):
        x, y = t.promoted(x, mul(t, y, alpha))
    return t.emit("sub", x, y)


@known_as("rsub")
def rsub(t: Trace, input: Any, other: Any, *, alpha: Any = 1) -> Symbol:
    return sub(t, other, input, alpha=alpha)


@known_as("mul", "rmul", "imul", "multiply")
def mul(t: Trace, input: Any, other: Any) -> Symbol:
    x, y = pair(t, "mul", input, other)
    return t.emit("and" if x.kind == "bool" else "mul", x, y)


@known_as("div", "divide", "true_divide", "truediv", "itruediv", "idiv")
def div(t: Trace, input: Any, other: Any, *, rounding_mode: Any = None) -> Symbol:
    if rounding_mode == "floor":
        return floor_divide(t, input, other)
    if rounding_mode == "trunc":
        return _truncated(t, input, other)
    return t.emit("div", *pair(t, "div", input, other, "float"))


@known_as("floordiv", "ifloordiv", "floor_divide")
def floor_divide(t: Trace, input: Any, other: Any) -> Symbol:
    return t.emit("floor_div", *pair(t, "floor_divide", input, other, "int"))


@known_as("mod", "imod", "remainder")
def remainder(t: Trace, input: Any, other: Any) -> Symbol:
    return t.emit("remainder", *pair(t, "remainder", input, other, "int"))


def _truncated(t: Trace, input: Any, other: Any) -> Symbol:
    x, y = pair(t, "div", input, other, "int")
    if x.kind == "float":
        return t.emit("trunc", t.emit("div", x, y))
    size = t.emit("floor_div", t.emit("abs", x), t.emit("abs", y))
    return t.emit("mul", size, t.emit("mul", t.emit("sign", x), t.emit("sign", y)))


@known_as("fmod")
def fmod(t: Trace, input: Any, other: Any) -> Symbol:
    x, y = pair(t, "fmod", input, other, "int")
    if x.kind == "int":
        size = t.emit("remainder", t.emit("abs", x), t.emit("abs", y))
        return t.emit("mul", size, t.emit("sign", x))
    below = t.emit("lt", x, t.constant(0.0))  # at 0, the gradient is that of the input
    size = t.emit("remainder", t.emit("where", below, t.emit("neg", x), x), t.emit("abs", y))
    return t.emit("where", below, t.emit("neg", size), size)


@known_as("pow", "ipow", "float_power")
def pow(t: Trace, input: Any, exponent: Any) -> Symbol:
    x, n = t.lift(input, "pow"), t.lift(exponent, "pow")
    if "float" in (x.kind, n.kind):
        return t.emit("pow", t.cast(x, "float"), t.cast(n, "float"))
    base, number = (t.builder.values[v.at].number for v in (x, n))
    if number is not None and 0 <= number <= 16:
        x, result = t.cast(x, "int"), t.constant(1)
        for _ in range(int(number)):
            result = t.emit("mul", result, x)
        return result
    if base is not None and type(base) is int and base == 2:
        return t.emit("shift_left", t.constant(1), t.cast(n, "int"))
    raise refused(
        NotImplementedError, "pow of two ints: write .to(torch.float32), or 2**n, or a small power"
    )


def _reversed(f: Callable, t: Trace, input: Any, other: Any) -> Symbol:
    return f(t, other, input)


for _f, _names in (
    (div, ("rtruediv", "rdiv")),
    (floor_divide, ("rfloordiv",)),
    (remainder, ("rmod",)),
    (pow, ("rpow",)),
):
    known_as(*_names)(with_first(_reversed, _f))


@known_as("square")
def square(t: Trace, input: Any) -> Symbol:
    return mul(t, input, input)


@known_as("reciprocal")
def reciprocal(t: Trace, input: Any) -> Symbol:
    return div(t, 1.0, input)


@known_as("positive", "pos", "clone", "contiguous", "squeeze", "conj", "resolve_conj", "view_as")
def same(t: Trace, input: Any, *args: Any, **kwargs: Any) -> Symbol:
    return t.lift(input)


@known_as("detach")
def detach(t: Trace, input: Any) -> Symbol:
    x = t.lift(input)
    if x.kind == "float":
        raise refused(
            NotImplementedError,
            "detach of a score or a float: detach the captured tensor outside of the function",
        )
    return x


@known_as("view", "reshape", "expand", "flatten")
def reshaped(t: Trace, input: Any, *shape: Any) -> Symbol:
    if shape and any(tuple(x) if isinstance(x, (tuple, list)) else (x,) for x in shape):
        raise refused(TypeError, f"a score or an index has the shape (), not {shape}")
    return t.lift(input)


def _extreme(op: str, logical: str, t: Trace, input: Any, other: Any) -> Symbol:
    x, y = pair(t, op, input, other)
    return t.emit(logical if x.kind == "bool" else op, x, y)


for _op, _names, _logical in (
    ("minimum", ("minimum",), "and"),
    ("maximum", ("maximum",), "or"),
):
    known_as(*_names)(with_first(_extreme, _op, _logical))


@known_as("clamp", "clip")
def clamp(t: Trace, input: Any, min: Any = None, max: Any = None) -> Symbol:
    x = t.lift(input, "clamp")
    for bound, op, beyond in ((min, "maximum", "lt"), (max, "minimum", "gt")):
        if bound is None:
            continue
        x, limit = t.promoted(x, t.lift(bound, "clamp"), least="int")
        if x.kind == "int":
            x = t.emit(op, x, limit)
        else:  # at a bound, the gradient is that of the input, as torch has it
            x = t.emit("where", t.emit(beyond, x, limit), limit, x)
    return x


@known_as("clamp_min")
def clamp_min(t: Trace, input: Any, min: Any) -> Symbol:
    return clamp(t, input, min)


@known_as("clamp_max")
def clamp_max(t: Trace, input: Any, max: Any) -> Symbol:
    return clamp(t, input, None, max)


@known_as("hardtanh")
def hardtanh(
    t: Trace, input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False
) -> Symbol:
    x = t.lift(input, "hardtanh")
    for bound, beyond in ((min_val, "le"), (max_val, "ge")):  # at a bound, the gradient is 0
        x, limit = t.promoted(x, t.lift(bound, "hardtanh"), least="int")
        x = t.emit("where", t.emit(beyond, x, limit), limit, x)
    return x


@known_as("relu")
def relu(t: Trace, input: Any, inplace: bool = False) -> Symbol:
    x = t.lift(input, "relu")
    (zero,) = t.promoted(t.cast(t.constant(0), x.kind))
    if x.kind != "float":
        return _extreme("maximum", "or", t, x, zero)
    return t.emit("where", t.emit("le", x, zero), zero, x)


@known_as("leaky_relu")
def leaky_relu(t: Trace, input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Symbol:
    (x,) = t.promoted(t.lift(input, "leaky_relu"), least="float")
    scaled = mul(t, x, t.number(negative_slope))
    return t.emit("where", t.emit("gt", x, t.constant(0.0)), x, scaled)


@known_as("tan")
def tan(t: Trace, input: Any) -> Symbol:
    return div(t, FUNCTIONS["sin"](t, input), FUNCTIONS["cos"](t, input))


def _log_of_one_plus_exp(t: Trace, x: Symbol) -> Symbol:
    """log(1 + e^x), as max(x, 0) + log1p(e^-|x|): e^x would overflow. Where it selects branches, at
    0, both have the same derivatives."""
    zero = t.constant(0.0)
    above = t.emit("gt", x, zero)
    size = t.emit("where", above, t.emit("neg", x), x)
    rest = t.emit("log1p", t.emit("exp", size))
    return t.emit("add", t.emit("where", above, x, zero), rest)


@known_as("softplus")
def softplus(t: Trace, input: Any, beta: Any = 1, threshold: Any = 20) -> Symbol:
    x = t.cast(t.lift(input, "softplus"), "float")
    beta, threshold = t.number(beta), t.number(threshold)
    scaled = x if beta == 1 else mul(t, x, beta)
    value = _log_of_one_plus_exp(t, scaled)
    value = value if beta == 1 else div(t, value, beta)
    return t.emit("where", t.emit("gt", scaled, t.constant(threshold)), x, value)


@known_as("logsigmoid", "log_sigmoid")
def logsigmoid(t: Trace, input: Any) -> Symbol:
    x = t.cast(t.lift(input, "logsigmoid"), "float")
    return t.emit("sub", t.constant(0.0), _log_of_one_plus_exp(t, t.emit("neg", x)))


@known_as("silu")
def silu(t: Trace, input: Any, inplace: bool = False) -> Symbol:
    return mul(t, input, FUNCTIONS["sigmoid"](t, input))


@known_as("gelu")
def gelu(t: Trace, input: Any, approximate: str = "none") -> Symbol:
    x = t.cast(t.lift(input, "gelu"), "float")
    if approximate == "tanh":
        inner = mul(t, add(t, x, mul(t, mul(t, x, mul(t, x, x)), 0.044715)), math.sqrt(2 / math.pi))
        gate = t.emit("tanh", t.lift(inner))
    else:
        gate = t.emit("erf", mul(t, x, math.sqrt(0.5)))
    return mul(t, mul(t, x, 0.5), add(t, gate, 1.0))
