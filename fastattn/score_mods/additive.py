"""Take a score_mod apart into softcap(score) + bias, for kernels that have a softcap and a mask."""

from __future__ import annotations

from typing import NamedTuple

from .program import Program, Value, combined, part
from .recognition import cap_at

HIDDEN = -float("inf")
Captured = tuple[tuple[str, int], ...]  # as `Program.captured`


class Sum(NamedTuple):
    """A score_mod as softcap(score) + bias, and -inf where `mask` is false.

    softcap: c of c tanh(score / c), or None.
    bias: a float program that reads no score, or None.
    mask: a bool program that reads no score, or None.
    """

    softcap: float | None = None
    bias: Program | None = None
    mask: Program | None = None

    def program(self, captured: Captured) -> Program:
        """softcap(score) + bias as a program with these captured tensors."""
        score = Program((Value("score"),), captured)
        if self.softcap is not None:
            score = capped(score, self.softcap)
        return score if self.bias is None else combined("add", score, self.bias)


def capped(program: Program, cap: float) -> Program:
    """cap tanh(score / cap) of the result of a score_mod."""
    last = len(program.values) - 1
    after = (
        Value("constant", number=float(cap)),
        Value("div", (last, last + 1)),
        Value("tanh", (last + 2,)),
        Value("mul", (last + 3, last + 1)),
    )
    return Program((*program.values, *after), program.captured)


def as_sum(program: Program) -> Sum | None:
    """Take a score_mod apart. None if it is not of that form."""
    values = list(program.values)
    of_score = _dependent(program)
    terms: list[int] = []
    conditions: list[int] = []
    at = len(values) - 1

    def emit(op: str, *args: int, kind: str = "float") -> int:
        values.append(Value(op, args, kind))
        return len(values) - 1

    while True:
        op, args = values[at].op, values[at].args
        own = [x for x in args if x in of_score]
        inner, cap = cap_at(program, at)
        if op == "score" or (inner is not None and values[inner].op == "score"):
            break
        if op == "add" and len(own) == 1:
            (at,) = own
            terms.append(next(x for x in args if x != at))
        elif op == "sub" and own == [args[0]]:
            at = own[0]
            terms.append(emit("neg", args[1]))
        elif op == "where" and len(own) == 1 and args[0] not in of_score:
            shown = args.index(own[0]) == 1
            other = values[args[2 if shown else 1]]
            if other.op != "constant" or other.number != HIDDEN:
                return None
            at = own[0]
            conditions.append(args[0] if shown else emit("not", args[0], kind="bool"))
        else:
            return None
    joined = []
    for op, kind, operands in (("add", "float", terms), ("and", "bool", conditions)):
        while len(operands) > 1:
            operands.append(emit(op, operands.pop(), operands.pop(), kind=kind))
        joined.append(operands[0] if operands else None)
    whole = Program(tuple(values), program.captured)
    bias, mask = (None if x is None else part(whole, x) for x in joined)
    return Sum(cap if inner is not None else None, bias, mask)


def _dependent(program: Program) -> set[int]:
    """The values that depend on the score."""
    dependent: set[int] = set()
    for at, value in enumerate(program.values):
        if value.op == "score" or dependent.intersection(value.args):
            dependent.add(at)
    return dependent


def conjunction(*programs: Program | None) -> Program | None:
    """The program that is true where all of these are. They capture the same tensors."""
    given = [x for x in programs if x is not None]
    return combined("and", *given) if given else None
