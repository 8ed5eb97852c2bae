"""Find structure in programs: what `attention` has an argument for.

A recognised part means the same, with the same gradients. The rest stays a program. No value of a
captured tensor is read.
"""

from __future__ import annotations

from typing import NamedTuple

from .program import BOOL, Builder, Program, Value


class ScoreParts(NamedTuple):
    """A score_mod as softcap(score) + bias, at keys where `mask` is true.

    softcap: c of c tanh(score / c), or None.
    bias: a program of the indices alone, or None.
    mask: the same, of kind bool: where it is false, the score is -inf.
    """

    softcap: float | None = None
    bias: Program | None = None
    mask: Program | None = None


def score_parts(program: Program) -> ScoreParts | None:
    """Take a score_mod apart, or return None if it is not of that form."""
    values, of_score = program.values, program.dependent("score")
    builder = Builder(values)  # values are distinct, so that their numbers stay
    bias: int | None = None
    conditions: list[int] = []
    at = len(values) - 1
    while values[at].op != "score" and (softcap_of(program, at) is None):
        if at not in of_score:
            return None
        op, args = values[at].op, values[at].args
        if op == "add" and sum(x in of_score for x in args) == 1:
            at, term = args if args[0] in of_score else args[::-1]
        elif op == "sub" and args[0] in of_score and args[1] not in of_score:
            at, term = args[0], builder.op("neg", args[1])
        elif op == "where" and args[0] not in of_score:
            at, condition = _visible(builder, args, of_score)
            if condition is None:
                return None
            conditions.append(condition)
            continue
        else:
            return None
        bias = term if bias is None else builder.op("add", term, bias)
    mask = conditions[0] if conditions else None
    for condition in conditions[1:]:
        mask = builder.op("and", condition, mask)  # ty: ignore
    parts = (None if x is None else builder.program(x, program.captured) for x in (bias, mask))
    return ScoreParts(softcap_of(program, at), *parts)


def softcap_of(program: Program, at: int) -> float | None:
    """c if value `at` is c tanh(score / c), in the order of a constant and its operand that users
    write; c must be above 0."""
    values = program.values

    def constant(x: int) -> float | None:
        return values[x].number if values[x].op == "constant" else None

    def of(op: str, x: int) -> tuple[int, ...]:
        return values[x].args if values[x].op == op else ()

    for cap, rest in _orders(of("mul", at)):
        c, inner = constant(cap), of("tanh", rest)
        if not c or c <= 0 or not inner:
            continue
        divided = of("div", inner[0])
        if divided and values[divided[0]].op == "score" and constant(divided[1]) == c:
            return float(c)
    return None


def _orders(args: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [args, args[::-1]] if len(args) == 2 else []


def _visible(
    builder: Builder, args: tuple[int, ...], of_score: frozenset[int]
) -> tuple[int, int | None]:
    """For where(condition, x, y) with -inf for x or y: the other one, and where it is taken."""
    condition, x, y = args
    least = [builder.values[z] == Value("constant", (), "float", -float("inf")) for z in (x, y)]
    if least[1] and x in of_score:
        return x, condition
    if least[0] and y in of_score:
        return y, builder.op("not", condition)
    return condition, None


class MaskParts(NamedTuple):
    """A mask_mod as a band, i - left <= j <= i + right, and a program for the rest. None is no
    limit, and no rest."""

    left: int | None = None
    right: int | None = None
    rest: Program | None = None


def mask_parts(*programs: Program) -> MaskParts:
    """Take mask_mods apart that must all be true. They capture the same tensors."""
    left = right = None
    captured = programs[0].captured if programs else ()
    builder, rest = Builder(), None
    for program in programs:
        for at in _conjuncts(program):
            edge = _edge(program, at)
            if edge is None:
                term = _copied(builder, program.part(at))
                rest = term if rest is None else builder.op("and", rest, term)
            elif edge[0] == "left":
                left = edge[1] if left is None else min(left, edge[1])
            elif edge[0] == "right":
                right = edge[1] if right is None else min(right, edge[1])
    return MaskParts(left, right, None if rest is None else builder.program(rest, captured))


def _copied(builder: Builder, program: Program) -> int:
    numbers: list[int] = []
    for value in program.values:
        numbers.append(builder.add(value._replace(args=tuple(numbers[at] for at in value.args))))
    return numbers[-1]


def _conjuncts(program: Program) -> list[int]:
    found, left = [], [len(program.values) - 1]
    while left:
        at = left.pop()
        if program.values[at].op == "and":
            left += reversed(program.values[at].args)
        else:
            found.append(at)
    return found


_SWAPPED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}


def _edge(program: Program, at: int) -> tuple[str, int] | None:
    """("left" or "right", edge) if value `at` compares i - j with a constant, ("", 0) if it is
    true, else None. Edges below 0 are no edges of a window."""
    op, args, kind, number, _ = program.values[at]
    if op == "constant" and kind == BOOL and number:
        return "", 0
    if op not in _SWAPPED:
        return None
    x, y = (_affine(program, at) for at in args)
    if x is None or y is None:
        return None
    of_i, of_j, offset = (p - q for p, q in zip(x, y))  # of_i i + of_j j + offset `op` 0
    if (of_i, of_j) == (-1, 1):
        of_i, of_j, offset, op = 1, -1, -offset, _SWAPPED[op]
    if (of_i, of_j) != (1, -1):
        return None
    if op in ("ge", "gt"):  # j <= i + offset
        name, edge = "right", offset - (op == "gt")
    else:  # j >= i + offset
        name, edge = "left", -offset - (op == "lt")
    return (name, edge) if edge >= 0 else None


def _affine(program: Program, at: int) -> tuple[int, int, int] | None:
    """(a, c, d) if value `at` is a i + c j + d with whole numbers."""
    op, args, kind, number, _ = program.values[at]
    if op == "i":
        return 1, 0, 0
    if op == "j":
        return 0, 1, 0
    if op == "constant" and kind == "int":
        assert isinstance(number, int)
        return 0, 0, number
    if op not in ("add", "sub", "neg"):
        return None
    parts = [_affine(program, x) for x in args]
    if any(x is None for x in parts):
        return None
    first, *rest = parts
    signs = {"add": 1, "sub": -1}
    if op == "neg":
        return tuple(-x for x in first)  # ty: ignore
    return tuple(x + signs[op] * y for x, y in zip(first, rest[0]))  # ty: ignore
