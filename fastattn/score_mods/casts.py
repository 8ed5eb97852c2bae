"""Casts of symbols, and constants made like them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registry import FUNCTIONS, known_as
from .symbols import ORDER, Symbol, Trace, kind_of, refused

# dtypes of ints that a program holds. Narrower ones would wrap.
INTS = (torch.int64, torch.int32)


def _cast(t: Trace, x: Symbol, dtype: torch.dtype) -> Symbol:
    kind = kind_of(dtype)
    if kind == "int" and dtype not in INTS:
        raise refused(NotImplementedError, f"a cast to {dtype}, which wraps: use torch.int64")
    return t.cast(x, kind)


@known_as("to", "type", "as_tensor", "tensor", "asarray", "scalar_tensor", "_to_copy")
def to(t: Trace, input: Any, *args: Any, **kwargs: Any) -> Symbol:
    x = t.lift(input, "to")
    for target in (*args, kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(target, torch.dtype):
            x = _cast(t, x, target)
        elif isinstance(target, (Symbol, Tensor)):
            x = _cast(t, x, target.dtype)
    return x


@known_as("type_as")
def type_as(t: Trace, input: Any, other: Any) -> Symbol:
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


def _made(t: Trace, like: Any, size: Any, number: Any, dtype: Any) -> Symbol:
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
def new_full(
    t: Trace, input: Any, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any
) -> Symbol:
    return _made(t, input, size, fill_value, dtype)


@known_as("full_like")
def full_like(t: Trace, input: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Symbol:
    return _made(t, input, (), fill_value, dtype)


@known_as("new_tensor")
def new_tensor(t: Trace, input: Any, data: Any, *, dtype: Any = None, **_: Any) -> object:
    if isinstance(data, (bool, int, float)):  # torch infers the dtype of data, not of input
        value = t.constant(data)
        return value if dtype is None else _cast(t, value, dtype)
    return torch.tensor(data, dtype=dtype, device=t.device)


@known_as("lerp")
def lerp(t: Trace, input: Any, end: Any, weight: Any) -> Symbol:
    return FUNCTIONS["add"](t, input, FUNCTIONS["mul"](t, weight, FUNCTIONS["sub"](t, end, input)))


@known_as("result_type")
def result_type(t: Trace, x: Any, y: Any) -> torch.dtype:
    kind = max((t.lift(z).kind for z in (x, y)), key=ORDER.__getitem__)
    return {"float": t.dtype, "int": torch.int64, "bool": torch.bool}[kind]


@known_as("is_floating_point")
def is_floating_point(t: Trace, input: Any) -> bool:
    return t.lift(input).kind == "float"
