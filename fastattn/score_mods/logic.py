"""Comparisons, logic, shifts and choices of symbols, as torch has them."""

from __future__ import annotations

import math
from typing import Any

from .registry import FUNCTIONS, known_as, pair, with_first
from .symbols import Symbol, Trace, refused


def _compare(op: str, t: Trace, input: Any, other: Any) -> Symbol:
    return t.emit(op, *pair(t, op, input, other, "int"))


for _names in (
    "ge greater_equal",
    "gt greater",
    "le less_equal",
    "lt less",
    "eq",
    "ne not_equal",
):
    known_as(*_names.split())(with_first(_compare, _names.split()[0]))


@known_as("isnan")
def isnan(t: Trace, input: Any) -> Symbol:
    x = t.cast(t.lift(input, "isnan"), "float")
    return t.emit("ne", x, x)


@known_as("isinf")
def isinf(t: Trace, input: Any) -> Symbol:
    x = t.cast(t.lift(input, "isinf"), "float")
    return t.emit("eq", t.emit("abs", x), t.constant(math.inf))


@known_as("isfinite")
def isfinite(t: Trace, input: Any) -> Symbol:
    x = t.cast(t.lift(input, "isfinite"), "float")
    return t.emit("lt", t.emit("abs", x), t.constant(math.inf))


def _bitwise(logical: str, op: str, t: Trace, input: Any, *other: Any) -> Symbol:
    values = t.promoted(*(t.lift(x, logical) for x in (input, *other)))
    if values[0].kind == "float":
        raise refused(
            TypeError, f"{logical} (& | ^ ~) of a float: compare it first, as in (x != 0)"
        )
    return t.emit(logical if values[0].kind == "bool" else op, *values)


def _logical(op: str, t: Trace, input: Any, *other: Any) -> Symbol:
    return t.emit(op, *(t.cast(t.lift(x, op), "bool") for x in (input, *other)))


for _name in ("and", "or", "xor", "not"):
    _handler = with_first(_bitwise, _name, f"bit_{_name}")
    known_as(_name, f"r{_name}", f"i{_name}", f"bitwise_{_name}")(_handler)
    FUNCTIONS[f"logical_{_name}"] = with_first(_logical, _name)
FUNCTIONS["invert"] = FUNCTIONS["not"]


def _shifted(op: str, t: Trace, input: Any, other: Any) -> Symbol:
    x, n = pair(t, op, input, other, "int")
    if x.kind == "float":
        raise refused(TypeError, f"{op} of a float: shift ints, or multiply by torch.exp2(n)")
    return t.emit(op, x, n)


for _side, _letter in (("left", "l"), ("right", "r")):
    _handler = with_first(_shifted, f"shift_{_side}")
    known_as(f"{_letter}shift", f"i{_letter}shift", f"bitwise_{_side}_shift")(_handler)
    FUNCTIONS[f"r{_letter}shift"] = lambda t, x, y, f=_handler: f(t, y, x)


@known_as("where")
def where(t: Trace, condition: Any, input: Any = None, other: Any = None, **names: Any) -> Symbol:
    input, other = names.get("self", input), names.get("y", other)
    if input is None or other is None:
        raise refused(TypeError, "where with a condition alone: give both values")
    c = t.lift(condition, "where")
    if c.kind != "bool":
        raise refused(TypeError, f"where got a condition of kind {c.kind}: compare it, as (x != 0)")
    x, y = pair(t, "where", input, other)
    if x.kind == "bool":
        return t.emit("or", t.emit("and", c, x), t.emit("and", t.emit("not", c), y))
    return t.emit("where", c, x, y)


@known_as("masked_fill")
def masked_fill(t: Trace, input: Any, mask: Any, value: Any) -> Symbol:
    x = t.lift(input, "masked_fill")
    return where(t, mask, t.cast(t.lift(value, "masked_fill"), x.kind), x)
