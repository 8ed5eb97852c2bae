"""A score_mod or mask_mod as data: a list of operations on single numbers.

A program does not depend on the tensors that its function captured, only on their kinds and ranks.
It can be hashed, compared and written as text. `evaluate.py` runs it on torch tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

FLOAT, INT, BOOL = "float", "int", "bool"
NUMBER = "number"  # in a signature: int or float, the same for all such operands

INPUTS = {"score": FLOAT, "b": INT, "h": INT, "i": INT, "j": INT}

_TWO, _ONE = (NUMBER, NUMBER), (NUMBER,)
# Operation: (kinds of its operands, kind of its result). Meanings are torch's functions of these
# names; `floor_div` and `remainder` round down, `to_int` rounds to zero, shifts are of ints.
OPS: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(("add", "sub", "mul", "minimum", "maximum", "pow"), (_TWO, NUMBER)),
    **dict.fromkeys(("floor_div", "remainder", "fmod"), (_TWO, NUMBER)),
    **dict.fromkeys(("neg", "abs", "sign"), (_ONE, NUMBER)),
    **dict.fromkeys(("ge", "gt", "le", "lt", "eq", "ne"), (_TWO, BOOL)),
    "where": ((BOOL, NUMBER, NUMBER), NUMBER),
    "where_bool": ((BOOL, BOOL, BOOL), BOOL),
    "div": ((FLOAT, FLOAT), FLOAT),
    **dict.fromkeys(("exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt"), ((FLOAT,), FLOAT)),
    **dict.fromkeys(("rsqrt", "sin", "cos", "tanh", "sigmoid", "erf"), ((FLOAT,), FLOAT)),
    **dict.fromkeys(("floor", "ceil", "trunc", "round"), ((FLOAT,), FLOAT)),
    **dict.fromkeys(("shift_left", "shift_right"), ((INT, INT), INT)),
    **dict.fromkeys(("bit_and", "bit_or", "bit_xor"), ((INT, INT), INT)),
    "bit_not": ((INT,), INT),
    **dict.fromkeys(("and", "or", "xor"), ((BOOL, BOOL), BOOL)),
    "not": ((BOOL,), BOOL),
    "to_float": ((NUMBER,), FLOAT),
    "to_int": ((NUMBER,), INT),
    "to_bool": ((NUMBER,), BOOL),
    "float_of_bool": ((BOOL,), FLOAT),
    "int_of_bool": ((BOOL,), INT),
}


class Value(NamedTuple):
    """One operation and its result.

    op: a name of `INPUTS` or `OPS`; "constant", which is `number`; or "load", the element of the
        captured tensor `tensor` at the indices `args`, one for each of its dimensions. A negative
        index counts from the end.
    args: the numbers of earlier values.
    kind: of the result.
    """

    op: str
    args: tuple[int, ...] = ()
    kind: str = FLOAT
    number: float | int | bool | None = None
    tensor: int | None = None


@dataclass(frozen=True)
class Program:
    """Values in order; the last one is the result. captured: the kind and the number of dimensions
    of each tensor that `load` reads."""

    values: tuple[Value, ...]
    captured: tuple[tuple[str, int], ...] = ()

    @property
    def kind(self) -> str:
        return self.values[-1].kind

    def text(self) -> str:
        """The program as text, from which `parse` makes an equal one."""
        numbers = [
            [*v[:3], v.number.hex() if isinstance(v.number, float) else v.number, v.tensor]
            for v in self.values
        ]
        return json.dumps([numbers, self.captured], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Program:
        values, captured = json.loads(text)
        read = (
            Value(op, tuple(args), kind, _number(number), tensor)
            for op, args, kind, number, tensor in values
        )
        return cls(tuple(read), tuple((kind, rank) for kind, rank in captured))

    def inputs(self) -> frozenset[str]:
        """The names of the inputs that it reads."""
        return frozenset(v.op for v in self.values if v.op in INPUTS)

    def part(self, at: int) -> Program:
        """The program with value `at` as its result. It captures the same tensors."""
        return Program(_reached(self.values, at), self.captured)

    def dependent(self, name: str) -> frozenset[int]:
        """The numbers of the values that depend on an input."""
        found: set[int] = set()
        for at, value in enumerate(self.values):
            if value.op == name or found.intersection(value.args):
                found.add(at)
        return frozenset(found)


def _number(written: str | int | bool | None) -> float | int | bool | None:
    return float.fromhex(written) if isinstance(written, str) else written


def _reached(values: tuple[Value, ...], result: int) -> tuple[Value, ...]:
    """The values that `result` needs, numbered anew."""
    needed, left = {result}, [result]
    while left:
        fresh = set(values[left.pop()].args) - needed
        needed |= fresh
        left += fresh
    numbers = {old: new for new, old in enumerate(sorted(needed))}
    return tuple(
        values[old]._replace(args=tuple(numbers[x] for x in values[old].args)) for old in numbers
    )


class Builder:
    """Collects values. Equal ones are one value."""

    def __init__(self, values: Iterable[Value] = ()):
        self.values: list[Value] = []
        self._numbers: dict[tuple, int] = {}
        for value in values:
            self.add(value)

    def add(self, value: Value) -> int:
        """The number of the value."""
        # 1, 1.0 and True are equal, 0.0 and -0.0 too, and NaN is not equal to itself.
        key = value, type(value.number), str(value.number)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]

    def op(self, name: str, *args: int) -> int:
        """Add an operation of `OPS` on values of the kinds that it takes."""
        kinds, result = OPS[name]
        got = tuple(self.values[at].kind for at in args)
        number = next((x for x, expected in zip(got, kinds) if expected == NUMBER), "")
        expected = tuple(number if x == NUMBER else x for x in kinds)
        assert got == expected and number != BOOL, f"{name}: got {got}, expected {kinds}"
        return self.add(Value(name, args, number if result == NUMBER else result))

    def constant(self, number: float | int | bool) -> int:
        kind = BOOL if isinstance(number, bool) else INT if isinstance(number, int) else FLOAT
        return self.add(Value("constant", (), kind, number))

    def cast(self, at: int, kind: str) -> int:
        """The value as another kind."""
        value = self.values[at]
        if value.kind == kind:
            return at
        if value.op == "constant":
            assert value.number is not None
            return self.constant({FLOAT: float, INT: int, BOOL: bool}[kind](value.number))
        if value.kind == BOOL:
            return self.op(f"{kind}_of_bool", at)
        return self.op(f"to_{kind}", at)

    def program(self, result: int, captured: tuple[tuple[str, int], ...] = ()) -> Program:
        return Program(_reached(tuple(self.values), result), captured)
