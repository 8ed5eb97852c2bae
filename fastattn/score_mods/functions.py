"""What torch's functions and methods mean on symbols: each in terms of the operators of programs.

FUNCTIONS has them by name: torch.add, Tensor.add, Tensor.__add__ and add_ have one name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .symbols import ORDER, Symbol, Table, Trace, kind_of, refused

Handler = Callable[..., object]
FUNCTIONS: dict[str, Handler] = {}
# dtypes whose values all kinds of a program hold. Others would wrap or round.
INTS = (torch.int64, torch.int32)


def known_as(*names: str) -> Callable[[Handler], Handler]:
    """Enter a handler under `names`. It takes the trace, then the function's arguments."""

    def enter(f: Handler) -> Handler:
        FUNCTIONS.update(dict.fromkeys(names, f))
        return f

    return enter


def _unary(op: str, least: str, t: Trace, input) -> Symbol:
    x = t.lift(input, op)
    if least == "int" and x.kind == "bool":
        raise refused(TypeError, f"{op} of a bool: write .to(torch.int64) first")
    return t.emit(op, *t.promoted(x, least=least))


for _op in "exp exp2 log log2 sqrt rsqrt sin cos tanh sigmoid erf".split():
    FUNCTIONS[_op] = partial(_unary, _op, "float")
for _op in "neg abs sign".split():
    FUNCTIONS[_op] = partial(_unary, _op, "int")
for _alias, _op in dict(
    negative="neg", absolute="abs", sgn="sign", expit="sigmoid", special_exp2="exp2"
).items():
    FUNCTIONS[_alias] = FUNCTIONS[_op]


def _rounded(op: str, t: Trace, input, *, decimals: int = 0) -> Symbol:
    if decimals:
        raise refused(NotImplementedError, f"{op} with decimals: multiply, {op}, then divide")
    x = t.lift(input, op)
    return t.emit(op, x) if x.kind == "float" else x


for _op in "floor ceil trunc round".split():
    FUNCTIONS[_op] = partial(_rounded, _op)
FUNCTIONS["fix"] = FUNCTIONS["trunc"]


def _pair(t: Trace, name: str, x, y, least: str = "bool") -> tuple[Symbol, ...]:
    return t.promoted(t.lift(x, name), t.lift(y, name), least=least)


@known_as("add", "radd", "iadd")
def add(t: Trace, input, other, *, alpha=1) -> Symbol:
    x, y = _pair(t, "add", input, other)
    if not (isinstance(alpha, int) and alpha == 1):
        y = mul(t, y, alpha)
        x, y = t.promoted(x, y)
    return t.emit("or" if x.kind == "bool" else "add", x, y)


@known_as("sub", "isub", "subtract")
def sub(t: Trace, input, other, *, alpha=1) -> Symbol:
    x, y = _pair(t, "sub", input, other)
    if x.kind == "bool":
        raise refused(TypeError, "a bool minus a bool: use ^ (logical_xor), or .to(torch.int64)")
    if not (isinstance(alpha, int) and alpha == 1):
        x, y = t.promoted(x, mul(t, y, alpha))
    return t.emit("sub", x, y)


@known_as("rsub")
def rsub(t: Trace, input, other, *, alpha=1) -> Symbol:
    return sub(t, other, input, alpha=alpha)


@known_as("mul", "rmul", "imul", "multiply")
def mul(t: Trace, input, other) -> Symbol:
    x, y = _pair(t, "mul", input, other)
    return t.emit("and" if x.kind == "bool" else "mul", x, y)


@known_as("div", "divide", "true_divide", "truediv", "itruediv", "idiv")
def div(t: Trace, input, other, *, rounding_mode=None) -> Symbol:
    if rounding_mode == "floor":
        return floor_divide(t, input, other)
    if rounding_mode == "trunc":
        return _truncated(t, input, other)
    return t.emit("div", *_pair(t, "div", input, other, "float"))


@known_as("rtruediv", "rdiv")
def rdiv(t: Trace, input, other) -> Symbol:
    return div(t, other, input)


@known_as("floordiv", "ifloordiv", "floor_divide")
def floor_divide(t: Trace, input, other) -> Symbol:
    return t.emit("floor_div", *_pair(t, "floor_divide", input, other, "int"))


@known_as("rfloordiv")
def rfloordiv(t: Trace, input, other) -> Symbol:
    return floor_divide(t, other, input)


@known_as("mod", "imod", "remainder")
def remainder(t: Trace, input, other) -> Symbol:
    return t.emit("remainder", *_pair(t, "remainder", input, other, "int"))


@known_as("rmod")
def rmod(t: Trace, input, other) -> Symbol:
    return remainder(t, other, input)


def _truncated(t: Trace, input, other) -> Symbol:
    x, y = _pair(t, "div", input, other, "int")
    if x.kind == "float":
        return t.emit("trunc", t.emit("div", x, y))
    size = t.emit("floor_div", t.emit("abs", x), t.emit("abs", y))
    return t.emit("mul", size, t.emit("mul", t.emit("sign", x), t.emit("sign", y)))


@known_as("fmod")
def fmod(t: Trace, input, other) -> Symbol:
    x, y = _pair(t, "fmod", input, other, "int")
    size = t.emit("remainder", t.emit("abs", x), t.emit("abs", y))
    return t.emit("mul", size, t.emit("sign", x))


@known_as("pow", "ipow", "float_power")
def pow(t: Trace, input, exponent) -> Symbol:
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


@known_as("rpow")
def rpow(t: Trace, input, other) -> Symbol:
    return pow(t, other, input)


@known_as("square")
def square(t: Trace, input) -> Symbol:
    return mul(t, input, input)


@known_as("reciprocal")
def reciprocal(t: Trace, input) -> Symbol:
    return div(t, 1.0, input)


@known_as("positive", "pos", "clone", "contiguous", "squeeze", "conj", "resolve_conj", "view_as")
def same(t: Trace, input, *args, **kwargs) -> Symbol:
    return t.lift(input)


@known_as("detach")
def detach(t: Trace, input) -> Symbol:
    x = t.lift(input)
    if x.kind == "float":
        raise refused(
            NotImplementedError,
            "detach of a score or a float: detach the captured tensor outside of the function",
        )
    return x


@known_as("view", "reshape", "expand", "flatten")
def reshaped(t: Trace, input, *shape) -> Symbol:
    if shape and any(tuple(x) if isinstance(x, (tuple, list)) else (x,) for x in shape):
        raise refused(TypeError, f"a score or an index has the shape (), not {shape}")
    return t.lift(input)


def _extreme(op: str, logical: str, t: Trace, input, other=None) -> Symbol:
    if other is None:
        return t.lift(input, op)
    x, y = _pair(t, op, input, other)
    return t.emit(logical if x.kind == "bool" else op, x, y)


for _op, _names, _logical in (
    ("minimum", ("minimum", "min", "amin"), "and"),
    ("maximum", ("maximum", "max", "amax"), "or"),
):
    known_as(*_names)(partial(_extreme, _op, _logical))


@known_as("clamp", "clip", "hardtanh")
def clamp(t: Trace, input, min=None, max=None, **names) -> Symbol:
    x = t.lift(input, "clamp")
    min, max = names.get("min_val", min), names.get("max_val", max)
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
def clamp_min(t: Trace, input, min) -> Symbol:
    return clamp(t, input, min)


@known_as("clamp_max")
def clamp_max(t: Trace, input, max) -> Symbol:
    return clamp(t, input, None, max)


@known_as("relu")
def relu(t: Trace, input, inplace: bool = False) -> Symbol:
    x = t.lift(input, "relu")
    (zero,) = t.promoted(t.cast(t.constant(0), x.kind))
    if x.kind != "float":
        return _extreme("maximum", "or", t, x, zero)
    return t.emit("where", t.emit("le", x, zero), zero, x)


@known_as("leaky_relu")
def leaky_relu(t: Trace, input, negative_slope=0.01, inplace: bool = False) -> Symbol:
    (x,) = t.promoted(t.lift(input, "leaky_relu"), least="float")
    return where(t, t.emit("gt", x, t.constant(0.0)), x, mul(t, x, float(negative_slope)))


@known_as("silu")
def silu(t: Trace, input, inplace: bool = False) -> Symbol:
    return mul(t, input, FUNCTIONS["sigmoid"](t, input))


@known_as("gelu")
def gelu(t: Trace, input, approximate: str = "none") -> Symbol:
    x = t.cast(t.lift(input, "gelu"), "float")
    if approximate == "tanh":
        inner = mul(t, add(t, x, mul(t, mul(t, x, mul(t, x, x)), 0.044715)), math.sqrt(2 / math.pi))
        gate = t.emit("tanh", t.lift(inner))
    else:
        gate = t.emit("erf", mul(t, x, math.sqrt(0.5)))
    return mul(t, mul(t, x, 0.5), add(t, gate, 1.0))


def _compare(op: str, t: Trace, input, other) -> Symbol:
    return t.emit(op, *_pair(t, op, input, other, "int"))


for _names in (
    "ge greater_equal",
    "gt greater",
    "le less_equal",
    "lt less",
    "eq",
    "ne not_equal",
):
    known_as(*_names.split())(partial(_compare, _names.split()[0]))


@known_as("isnan")
def isnan(t: Trace, input) -> Symbol:
    x = t.cast(t.lift(input, "isnan"), "float")
    return t.emit("ne", x, x)


@known_as("isinf")
def isinf(t: Trace, input) -> Symbol:
    x = t.cast(t.lift(input, "isinf"), "float")
    return t.emit("eq", t.emit("abs", x), t.constant(math.inf))


@known_as("isfinite")
def isfinite(t: Trace, input) -> Symbol:
    x = t.cast(t.lift(input, "isfinite"), "float")
    return t.emit("lt", t.emit("abs", x), t.constant(math.inf))


def _bitwise(logical: str, op: str, t: Trace, input, *other) -> Symbol:
    values = t.promoted(*(t.lift(x, logical) for x in (input, *other)))
    if values[0].kind == "float":
        raise refused(
            TypeError, f"{logical} (& | ^ ~) of a float: compare it first, as in (x != 0)"
        )
    return t.emit(logical if values[0].kind == "bool" else op, *values)


def _logical(op: str, t: Trace, input, *other) -> Symbol:
    return t.emit(op, *(t.cast(t.lift(x, op), "bool") for x in (input, *other)))


for _name in ("and", "or", "xor", "not"):
    _handler = partial(_bitwise, _name, f"bit_{_name}")
    known_as(_name, f"r{_name}", f"i{_name}", f"bitwise_{_name}")(_handler)
    FUNCTIONS[f"logical_{_name}"] = partial(_logical, _name)
FUNCTIONS["invert"] = FUNCTIONS["not"]


def _shifted(op: str, t: Trace, input, other) -> Symbol:
    x, n = _pair(t, op, input, other, "int")
    if x.kind == "float":
        raise refused(TypeError, f"{op} of a float: shift ints, or multiply by torch.exp2(n)")
    return t.emit(op, x, n)


for _side, _letter in (("left", "l"), ("right", "r")):
    _handler = partial(_shifted, f"shift_{_side}")
    known_as(f"{_letter}shift", f"i{_letter}shift", f"bitwise_{_side}_shift")(_handler)
    FUNCTIONS[f"r{_letter}shift"] = lambda t, x, y, f=_handler: f(t, y, x)


@known_as("where")
def where(t: Trace, condition, input=None, other=None, **names) -> Symbol:
    input, other = names.get("self", input), names.get("y", other)
    if input is None or other is None:
        raise refused(TypeError, "where with a condition alone: give both values")
    c = t.lift(condition, "where")
    if c.kind != "bool":
        raise refused(TypeError, f"where got a condition of kind {c.kind}: compare it, as (x != 0)")
    x, y = _pair(t, "where", input, other)
    if x.kind == "bool":
        return t.emit("or", t.emit("and", c, x), t.emit("and", t.emit("not", c), y))
    return t.emit("where", c, x, y)


@known_as("masked_fill")
def masked_fill(t: Trace, input, mask, value) -> Symbol:
    x = t.lift(input, "masked_fill")
    return where(t, mask, t.cast(t.lift(value, "masked_fill"), x.kind), x)


def _cast(t: Trace, x: Symbol, dtype: torch.dtype) -> Symbol:
    kind = kind_of(dtype)
    if kind == "int" and dtype not in INTS:
        raise refused(NotImplementedError, f"a cast to {dtype}, which wraps: use torch.int64")
    return t.cast(x, kind)


@known_as("to", "type", "as_tensor", "tensor", "asarray", "scalar_tensor", "_to_copy")
def to(t: Trace, input, *args, **kwargs) -> Symbol:
    x = t.lift(input, "to")
    for target in (*args, kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(target, torch.dtype):
            x = _cast(t, x, target)
        elif isinstance(target, (Symbol, Tensor)):
            x = _cast(t, x, target.dtype)
    return x


@known_as("type_as")
def type_as(t: Trace, input, other) -> Symbol:
    return _cast(t, t.lift(input, "type_as"), other.dtype)


for _name, _dtype in {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int32,
    "long": torch.int64,
    "bool": torch.bool,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
}.items():
    FUNCTIONS[_name] = lambda t, x, dtype=_dtype: _cast(t, t.lift(x), dtype)


def _made(t: Trace, like, size, number, dtype) -> Symbol:
    """A constant of the shape (). Without a dtype, it has the kind of `like`."""
    if tuple(size):
        raise refused(
            TypeError, f"a new tensor of shape {tuple(size)}: a score or an index has the shape ()"
        )
    value = t.lift(number, "a new tensor")
    kind = kind_of(dtype) if dtype is not None else t.lift(like).kind
    return t.cast(value, kind)


def _size(size: tuple) -> tuple:
    return tuple(size[0]) if size and isinstance(size[0], (tuple, list)) else size


for _name, _number in (("ones", 1), ("zeros", 0), ("empty", 0)):
    FUNCTIONS[f"new_{_name}"] = lambda t, x, *size, dtype=None, number=_number, **_: _made(
        t, x, _size(_.get("size", size) or ()), number, dtype
    )
    FUNCTIONS[f"{_name}_like"] = lambda t, input, *, dtype=None, number=_number, **_: _made(
        t, input, (), number, dtype
    )


@known_as("new_full")
def new_full(t: Trace, input, size, fill_value, *, dtype=None, **_) -> Symbol:
    return _made(t, input, size, fill_value, dtype)


@known_as("full_like")
def full_like(t: Trace, input, fill_value, *, dtype=None, **_) -> Symbol:
    return _made(t, input, (), fill_value, dtype)


@known_as("new_tensor")
def new_tensor(t: Trace, input, data, *, dtype=None, **_) -> object:
    if isinstance(data, (bool, int, float)):  # torch infers the dtype of data, not of input
        value = t.constant(data)
        return value if dtype is None else _cast(t, value, dtype)
    default = {"dtype": dtype, "device": t.device}
    return torch.tensor(data, **default)


@known_as("lerp")
def lerp(t: Trace, input, end, weight) -> Symbol:
    return add(t, input, mul(t, weight, sub(t, end, input)))


@known_as("result_type")
def result_type(t: Trace, x, y) -> torch.dtype:
    kind = max((t.lift(z).kind for z in (x, y)), key=ORDER.__getitem__)
    return {"float": t.dtype, "int": torch.int64, "bool": torch.bool}[kind]


@known_as("is_floating_point")
def is_floating_point(t: Trace, input) -> bool:
    return t.lift(input).kind == "float"


@known_as("dot", "sum", "mean", "prod", "matmul", "einsum", "norm")
def of_tables(t: Trace, *args, **kwargs) -> object:
    raise refused(
        NotImplementedError,
        "a sum over elements of captured tensors: compute it outside of the function and index "
        "the result, or add its terms to the head dimension of query and key",
    )


def call(t: Trace, name: str, args: tuple, kwargs: dict) -> object:
    """What the function `name` of torch means on symbols.

    Raises:
        NotImplementedError: No program has it.
    """
    handler = FUNCTIONS.get(name)
    in_place = False
    if handler is None and name.startswith("__") and name.endswith("__"):
        handler = FUNCTIONS.get(name[2:-2])
        in_place = name[2:-2] in IN_PLACE
    elif handler is None and name.endswith("_"):
        handler, in_place = FUNCTIONS.get(name[:-1]), True
    if handler is None:
        raise refused(
            NotImplementedError,
            f"{name} of a score or an index is no operator of a program: write it by arithmetic, "
            "comparisons, torch.where, exp, log, tanh and indexing, or compute it outside of the "
            "function and index the result",
        )
    if kwargs.get("out") is not None:
        raise refused(NotImplementedError, f"{name} with out=: use its result")
    try:
        result = handler(t, *args, **kwargs)
    except TypeError as error:
        if f"{getattr(handler, '__name__', '')}()" in str(error) or "lambda" in str(error):
            raise refused(TypeError, f"{name}: wrong arguments: {error}") from error
        raise
    if in_place:
        target = args[0]
        if not isinstance(target, Symbol) or not isinstance(result, Symbol):
            raise refused(
                TypeError, f"{name} changes a captured tensor: a score_mod or mask_mod may not"
            )
        if ORDER[result.kind] > ORDER[target.kind]:
            raise refused(TypeError, f"{name}: a {result.kind} does not fit into a {target.kind}")
        target.at = t.cast(result, target.kind).at
        return target
    return result


IN_PLACE = frozenset(
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
)
OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and rand or "
    "ror xor rxor lshift rlshift rshift rrshift ge gt le lt eq ne neg pos abs invert"
).split()


def _operator(name: str) -> Callable:
    handler = FUNCTIONS[name]
    return lambda self, *other: handler(self.trace, self, *other)


def _method(self: Symbol, name: str) -> Callable:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: call(self.trace, name, (self, *args), kwargs)


def _no_index(self: Symbol, key) -> Symbol:
    if key == () or key is Ellipsis:
        return self
    raise refused(IndexError, "a score or an index has no dimension to index")


for _name in OPERATORS:
    setattr(Symbol, f"__{_name}__", _operator(_name))
Symbol.__getattr__ = _method  # ty: ignore
Symbol.__getitem__ = _no_index  # ty: ignore
assert Table
