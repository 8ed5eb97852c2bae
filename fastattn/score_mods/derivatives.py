"""The derivative of a program by one of its values, as more values of the same program.

Forward mode: each value gets its derivative by the rule of its operator. The rules are torch's:
0 for roundings and comparisons, half to each operand of a minimum or maximum of two equal numbers.

A branch of `where` that is not taken has no effect, whatever follows: a derivative is selected
after all its products, because 0 times an infinite factor would be NaN. Torch's autograd selects
before it multiplies by what a branch computes. So where the branch that is not taken has no
derivative, as in where(s > 0, sqrt(s), 0) at -1, torch has NaN, and 0 is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .program import Builder, Value, needed

Derivative = int | None  # the number of a value; None: 0


class Unselected(NamedTuple):
    """A derivative that is not selected yet.

    at: the number of a value.
    taken: that of the bool where it counts. Elsewhere the derivative is 0, whatever the value is.
    """

    at: int
    taken: int


Move = Unselected | None  # None: 0


class Differentiation:
    """Adds derivatives to the values of a program."""

    def __init__(self, values: Sequence[Value]) -> None:
        self.builder = Builder()
        self.values = self.builder.values
        for value in values:  # a load of a float is a value of its own: it is known by its index
            self._again(value)

    def _again(self, value: Value) -> None:
        at = len(self.values)
        self.values.append(value)
        if value.op == "constant":
            number = value.number
            key = number.hex() if isinstance(number, float) else number
            self.builder.known.setdefault(("constant", value.kind, key), at)
        elif value.op != "load":
            self.builder.known.setdefault((value.op, value.args), at)

    def by(self, at: int, result: int) -> Derivative:
        """The derivative of value `result` by value `at`."""
        return self.along({at: self.number(1.0)}, result)

    def along(self, tangents: dict[int, int], result: int) -> Derivative:
        """The derivative of value `result` along the tangents of values: the number of each value,
        and that of its tangent."""
        derivatives: dict[int, Move] = {}
        for x in needed(self.values, result):
            value = self.values[x]
            if x in tangents:
                derivatives[x] = Unselected(tangents[x], self.builder.constant(True))
            elif value.kind == "float" and value.op in RULES:
                moves = [derivatives.get(y) for y in value.args]
                if any(y is not None for y in moves):
                    derivatives[x] = RULES[value.op](self, x, value.args, moves)
        return self.selected(derivatives.get(result))

    def by_score(self, result: int) -> tuple[Derivative, Derivative]:
        """The first and the second derivative of value `result` by the score."""
        score = next((at for at, value in enumerate(self.values) if value.op == "score"), None)
        slope = None if score is None else self.by(score, result)
        return slope, None if score is None or slope is None else self.by(score, slope)

    def by_loads(self, result: int) -> list[tuple[int, int]]:
        """For each load of a captured float: the value of its index, and the derivative of value
        `result` by it, where that is not 0."""
        loads = [
            (x, value.args[0])
            for x, value in enumerate(self.values[: result + 1])
            if value.op == "load" and value.kind == "float"
        ]
        slopes = [(index, self.by(x, result)) for x, index in loads]
        return [(index, slope) for index, slope in slopes if slope is not None]

    def is_one(self, x: Derivative) -> bool:
        return x is not None and self.values[x].number == 1.0

    def number(self, x: float) -> int:
        return self.builder.constant(float(x))

    def emit(self, op: str, *args: int) -> int:
        return self.builder.emit(op, *args)

    def selected(self, x: Move) -> Derivative:
        return None if x is None else self.emit("where", x.taken, x.at, self.number(0.0))

    def mul(self, factor: int, x: Move) -> Move:
        if x is None or self.is_one(factor):
            return x
        at = factor if self.is_one(x.at) else self.emit("mul", factor, x.at)
        return Unselected(at, x.taken)

    def div(self, x: Move, by: int) -> Move:
        return None if x is None else Unselected(self.emit("div", x.at, by), x.taken)

    def neg(self, x: Move) -> Move:
        return None if x is None else Unselected(self.emit("neg", x.at), x.taken)

    def add(self, x: Move, y: Move) -> Move:
        if x is None or y is None:
            return y if x is None else x
        if x.taken == y.taken:
            return Unselected(self.emit("add", x.at, y.at), x.taken)
        own, other = (self.emit("where", z.taken, z.at, self.number(0.0)) for z in (x, y))
        return Unselected(self.emit("add", own, other), self.emit("or", x.taken, y.taken))

    def where(self, test: int, x: Move, y: Move) -> Move:
        other = self.emit("not", test)
        if x is None or y is None:
            moves, side = (x, test) if y is None else (y, other)
            return moves and Unselected(moves.at, self.emit("and", side, moves.taken))
        if x == y:
            return x
        of_x, of_y = self.emit("or", x.taken, other), self.emit("or", y.taken, test)
        return Unselected(self.emit("where", test, x.at, y.at), self.emit("and", of_x, of_y))


Rule = Callable[[Differentiation, int, tuple[int, ...], list[Move]], Move]


def _either(compare: str) -> Rule:
    def rule(d: Differentiation, at: int, args: tuple[int, ...], moves: list[Move]) -> Move:
        (x, y), (dx, dy) = args, moves
        half = d.mul(d.number(0.5), d.add(dx, dy))
        other = d.where(d.emit("eq", x, y), half, dy)
        return d.where(d.emit(compare, x, y), dx, other)

    return rule


def _of_one(factor: Callable[[Differentiation, int, int], int]) -> Rule:
    """factor(d, value, operand): the derivative of a function of one number."""
    return lambda d, at, args, moves: d.mul(factor(d, at, args[0]), moves[0])


def _div(d: Differentiation, at: int, args: tuple[int, ...], moves: list[Move]) -> Move:
    (_, y), (dx, dy) = args, moves
    return d.add(d.div(dx, y), d.neg(d.div(d.mul(at, dy), y)))


def _pow(d: Differentiation, at: int, args: tuple[int, ...], moves: list[Move]) -> Move:
    (x, y), (dx, dy) = args, moves
    zero, one = d.number(0.0), d.number(1.0)
    less = d.emit("pow", x, d.emit("sub", y, one))
    of_x = d.where(d.emit("eq", y, zero), None, d.mul(d.emit("mul", y, less), dx))
    none = d.emit("and", d.emit("eq", x, zero), d.emit("ge", y, zero))
    of_y = d.where(none, None, d.mul(d.emit("mul", at, d.emit("log", x)), dy))
    return d.add(of_x, of_y)


def _rsqrt(d: Differentiation, at: int, x: int) -> int:
    return d.emit("mul", d.number(-0.5), d.emit("mul", at, d.emit("mul", at, at)))


def _one_minus_square(d: Differentiation, at: int, x: int) -> int:
    return d.emit("sub", d.number(1.0), d.emit("mul", at, at))


def _log1p(d: Differentiation, at: int, x: int) -> int:
    return d.emit("div", d.number(1.0), d.emit("add", x, d.number(1.0)))


def _erf(d: Differentiation, at: int, x: int) -> int:
    bell = d.emit("exp", d.emit("neg", d.emit("mul", x, x)))
    return d.emit("mul", d.number(2 / math.sqrt(math.pi)), bell)


RULES: dict[str, Rule] = {
    "add": lambda d, at, args, moves: d.add(*moves),
    "sub": lambda d, at, args, moves: d.add(moves[0], d.neg(moves[1])),
    "mul": lambda d, at, args, moves: d.add(d.mul(args[1], moves[0]), d.mul(args[0], moves[1])),
    "neg": lambda d, at, args, moves: d.neg(moves[0]),
    "abs": _of_one(lambda d, at, x: d.emit("sign", x)),
    "minimum": _either("lt"),
    "maximum": _either("gt"),
    "where": lambda d, at, args, moves: d.where(args[0], *moves[1:]),
    "remainder": lambda d, at, args, moves: d.add(
        moves[0], d.neg(d.mul(d.emit("floor_div", *args), moves[1]))
    ),
    "div": _div,
    "pow": _pow,
    "exp": _of_one(lambda d, at, x: at),
    "exp2": _of_one(lambda d, at, x: d.emit("mul", at, d.number(math.log(2)))),
    "log": _of_one(lambda d, at, x: d.emit("div", d.number(1.0), x)),
    "log2": _of_one(lambda d, at, x: d.emit("div", d.number(1 / math.log(2)), x)),
    "log1p": _of_one(_log1p),
    "sqrt": _of_one(lambda d, at, x: d.emit("div", d.number(0.5), at)),
    "rsqrt": _of_one(_rsqrt),
    "sin": _of_one(lambda d, at, x: d.emit("cos", x)),
    "cos": _of_one(lambda d, at, x: d.emit("neg", d.emit("sin", x))),
    "tanh": _of_one(_one_minus_square),
    "sigmoid": _of_one(lambda d, at, x: d.emit("mul", at, d.emit("sub", d.number(1.0), at))),
    "erf": _of_one(_erf),
}
