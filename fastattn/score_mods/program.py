"""A score_mod or mask_mod as data: a small program of values in order, each from earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from .operators import KINDS, OPS, RESULTS

INT64 = range(-(2**63), 2**63)


class Value(NamedTuple):
    """One instruction. Values are numbered in order; no value changes."""

    op: str  # the name of an operator of OPS
    args: tuple[int, ...] = ()  # the numbers of earlier values
    kind: str = "float"  # of the result; or "int", or "bool"
    number: int | float | bool | None = None  # of a "constant"
    tensor: int | None = None  # the number of the captured tensor of a "load"


@dataclass(frozen=True, eq=False)
class Program:
    """A function of score, b, h, i and j as data.

    Two programs are equal if their texts are: 0.0 and -0.0 differ, NaN equals NaN.
    """

    values: tuple[Value, ...]  # the last one is the result
    captured: tuple[tuple[str, int], ...] = ()  # each tensor's kind and number of dimensions

    @property
    def kind(self) -> str:
        """The kind of the result."""
        return self.values[-1].kind

    @cached_property
    def _text(self) -> str:
        return _text(self)

    def text(self) -> str:
        """The program as text, one line a value. `parse` reads it back exactly.

        The first line has the captured tensors as kind:dimensions. Each further line has an
        operator, the kind of its result, and the numbers of its operands. A constant has its
        number (floats in hexadecimal), a load the number of its tensor after @.
        """
        return self._text if not torch.compiler.is_dynamo_compiling() else _text(self)

    @classmethod
    def parse(cls, text: str) -> Program:
        """The program that `text` states. Raises ValueError if it is of none."""
        first, *lines = text.split("\n")
        head, *captured = first.split(" ")
        if head != "captured":
            raise ValueError(f"a program's text begins with 'captured', got {first!r}")
        pairs = tuple((kind, int(dims)) for kind, _, dims in (x.partition(":") for x in captured))
        program = cls(tuple(_parsed(line) for line in lines), pairs)
        program.check()
        return program

    def check(self) -> None:
        """Raise ValueError for a value, by its number, that contradicts the table of operators."""
        if not self.values:
            raise ValueError("a program has at least one value")
        for at, value in enumerate(self.values):
            if any(not 0 <= x < at for x in value.args):
                raise ValueError(f"value {at}: operands are earlier values, got {value.args}")
            kinds = tuple(self.values[x].kind for x in value.args)
            if value.op == "load":
                if value.tensor is None or not 0 <= value.tensor < len(self.captured):
                    raise ValueError(f"value {at}: no captured tensor {value.tensor}")
                right = (value.kind, len(kinds)) == self.captured[value.tensor]
                right = right and all(kind == "int" for kind in kinds)
            elif value.op == "constant":
                right = value.kind in KINDS and type(value.number) is KINDS[value.kind]
                right = right and not kinds
            else:
                right = value.op in OPS and (kinds, value.kind) in OPS[value.op].signatures
            if not right:
                raise ValueError(f"value {at}: no operator {value.op} of {kinds} to {value.kind}")

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Program) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)


def _text(program: Program) -> str:
    lines = [" ".join(["captured", *(f"{kind}:{dims}" for kind, dims in program.captured)])]
    for value in program.values:
        words = [value.op, value.kind]
        if value.op == "constant":
            words.append(_number_text(value))
        if value.op == "load":
            words.append(f"@{value.tensor}")
        lines.append(" ".join([*words, *map(str, value.args)]))
    return "\n".join(lines)


def _number_text(value: Value) -> str:
    return value.number.hex() if isinstance(value.number, float) else str(value.number)


def _parsed(line: str) -> Value:
    try:
        op, kind, *words = line.split(" ")
        number = tensor = None
        if op == "constant":
            (word,), words = words, []
            bools = {"True": True, "False": False}
            number = {"float": float.fromhex, "int": int, "bool": bools.__getitem__}[kind](word)
        if op == "load":
            tensor = int(words.pop(0).removeprefix("@"))
        return Value(op, tuple(map(int, words)), kind, number, tensor)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"no value of a program: {line!r}") from error


class Builder:
    """Collect values. Equal values become one, constants are folded where that is exact."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.known: dict[object, int] = {}

    def constant(self, number: int | float | bool) -> int:
        kind = "bool" if isinstance(number, bool) else type(number).__name__
        if kind == "int" and number not in INT64:
            raise ValueError(f"a constant fits into 64 bits, got {number}")
        # 0.0 == -0.0 and nan != nan: the text of a float is its key.
        key = "constant", kind, number.hex() if isinstance(number, float) else number
        return self._put(key, Value("constant", (), kind, number))

    def load(self, tensor: int, kind: str, args: tuple[int, ...]) -> int:
        value = Value("load", args, kind, None, tensor)
        return self._put(value, value)

    def emit(self, op: str, *args: int) -> int:
        """The number of the value of `op`. Its operands have the right kinds."""
        key = op, args
        at = self.known.get(key)
        if at is not None:
            return at
        operands = [self.values[x] for x in args]
        if op == "not" or any(x.number is not None for x in operands):
            at = self._simplified(op, args, operands)
        if at is None:
            kind = RESULTS[op, tuple([x.kind for x in operands])]
            at = len(self.values)
            self.values.append(Value(op, args, kind))
        self.known[key] = at
        return at

    def _put(self, key: object, value: Value) -> int:
        at = self.known.get(key)
        if at is None:
            at = self.known[key] = len(self.values)
            self.values.append(value)
        return at

    def _simplified(self, op: str, args: tuple[int, ...], operands: list[Value]) -> int | None:
        numbers = [x.number for x in operands]
        if op == "not" and operands[0].op == "not":
            return operands[0].args[0]
        fold = OPS[op].fold
        # Of floats, only what rounds nothing: a number has the score's precision later.
        exact = op in ("neg", "abs") or all(x.kind != "float" for x in operands)
        if fold is not None and exact and None not in numbers:
            result = fold(*numbers)
            if result is not None and (type(result) is not int or result in INT64):
                return self.constant(result)
        if op == "where" and numbers[0] is not None:
            return args[1] if numbers[0] else args[2]
        for this, other in ((0, 1), (1, 0)):
            if len(args) != 2 or numbers[this] is None or operands[this].kind == "float":
                continue
            number = numbers[this]
            if (op, number) in _NEUTRAL and (this == 1 or op != "sub"):
                return args[other]
            if (op, number) in (("and", False), ("or", True)):
                return args[this]
        return None

    def program(self, result: int, captured: tuple[tuple[str, int], ...]) -> Program:
        """The program of `result`, without values that it does not need. Captured tensors
        keep their numbers."""
        return Program(renumbered(self.values, needed(self.values, result)), captured)


_NEUTRAL = {("and", True), ("or", False), ("xor", False), ("add", 0), ("sub", 0), ("mul", 1)}


def needed(values: Sequence[Value], *results: int) -> list[int]:
    """The numbers of the values that these results need, themselves too, in order."""
    reached, todo = set(), [*results]
    while todo:
        at = todo.pop()
        if at not in reached:
            reached.add(at)
            todo.extend(values[at].args)
    return sorted(reached)


def conjuncts(program: Program) -> list[int]:
    """The values of which the result is the conjunction, in order."""
    found, todo = [], [len(program.values) - 1]
    while todo:
        at = todo.pop()
        value = program.values[at]
        if value.op == "and":
            todo.extend(reversed(value.args))
        elif at not in found:
            found.append(at)
    return found


def part(program: Program, at: int) -> Program:
    """The program of one value of a program, with the same captured tensors."""
    return Program(renumbered(program.values, needed(program.values, at)), program.captured)


def renumbered(values: Sequence[Value], kept: list[int]) -> tuple[Value, ...]:
    """The values at `kept`, in order, with their operands' new numbers."""
    number = {old: new for new, old in enumerate(kept)}
    return tuple(values[at]._replace(args=tuple(number[x] for x in values[at].args)) for at in kept)


def combined(op: str, *programs: Program) -> Program:
    """The program of `op` of the results of these, from the left. All capture the same tensors."""
    first, *others = programs
    values = list(first.values)
    for program in others:
        begin = len(values)
        values += [x._replace(args=tuple([begin + at for at in x.args])) for x in program.values]
        kind = RESULTS[op, (values[begin - 1].kind, program.kind)]
        values.append(Value(op, (begin - 1, len(values) - 1), kind))
    return Program(tuple(values), first.captured)


def without_unused(program: Program, tensors: tuple) -> tuple[Program, tuple]:
    """The program and its captured tensors, without those that no value loads."""
    used = sorted({x.tensor for x in program.values if x.tensor is not None})
    number: dict[int | None, int | None] = {old: new for new, old in enumerate(used)}
    number[None] = None
    values = tuple(x._replace(tensor=number[x.tensor]) for x in program.values)
    captured = tuple(program.captured[x] for x in used)
    return Program(values, captured), tuple(tensors[x] for x in used)
