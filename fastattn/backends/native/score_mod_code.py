"""A score_mod and a mask_mod as code for the interpreter of the CPU's kernels.

csrc/cpu/score/score_mod_ops.h states the layout: a header, then instructions, all of int64.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from ...score_mods.derivatives import Differentiation
from ...score_mods.mod_text import ModText
from ...score_mods.program import Value, needed

UNIFORM, ROW, KEY, TILE = range(4)  # enum ModClass
SCORE, DERIVATIVE, SECOND = range(3)  # the slots of tiles
FIRST = 3  # the first slot of values that are the same for all keys


@functools.lru_cache(maxsize=512)
def encode(text: str, floats: int, ints: int, operators: str) -> array[int]:
    """The code of a text of `ModText`.

    floats, ints: how many captured numbers there are.
    operators: the names of the operators in the order of their numbers, with spaces between.

    Raises ValueError if the text is of no programs, or these load from a tensor without numbers.
    """
    programs = ModText.parse(text)
    for value in (x for program in programs if program for x in program.values):
        if value.op == "load" and not (floats, ints)[value.tensor or 0]:
            raise ValueError(
                f"captured_{('floats', 'ints')[value.tensor or 0]}: got no number, expected those "
                "that the programs of score_mod load"
            )
    code = _Code({name: at for at, name in enumerate(operators.split())})
    lists, has_derivative, reads = [], False, False
    if programs.score is None:
        lists += [code.empty()] * 3
    else:
        d = Differentiation(programs.score.values)
        result = len(programs.score.values) - 1
        slope, bend = d.by_score(result)
        zero = d.number(0.0)
        has_derivative = not d.is_one(slope)
        first, second = (zero if x is None else x for x in (slope, bend))
        outputs = [("copy", SECOND, second), ("copy", DERIVATIVE, first), ("copy", SCORE, result)]
        lists += [code.compiled(d.values, outputs[x:], result + 1) for x in (2, 1, 0)]
    for op, program in (("hide", programs.mask), ("check", programs.outside)):
        if program is None:
            lists.append(code.empty())
        else:
            last = len(program.values) - 1
            lists.append(code.compiled(program.values, [(op, SCORE, last)], last + 1))
    scatters = []
    if programs.score is not None:
        scatters += [("scatter", DERIVATIVE, *x) for x in d.by_loads(result)]
        of_outputs = [y for x in scatters for y in x[2:]]
        reads = any(d.values[x].op == "score" for x in needed(d.values, *of_outputs))
    lists.append(code.compiled(d.values, scatters, result + 1) if scatters else code.empty())
    return code.words((floats, ints, int(has_derivative), int(reads)), lists)


class Slot(NamedTuple):
    """Where a value is."""

    kind: int  # TILES, CONSTANT (the same for all keys) or VARYING
    at: int  # which one of the slots of this kind
    of: int  # the class of the value


TILES, CONSTANT, VARYING = range(3)
NOTHING = Slot(TILES, 0, UNIFORM)


class _Code:
    """Collects instructions. Slots of varying values are free again after each list; those of
    constant values are not, because an interpreter keeps these values."""

    def __init__(self, numbers: dict[str, int]) -> None:
        self.numbers = numbers
        self.instructions: list[tuple[int, list[Slot], int]] = []
        self.slots = [FIRST, 0, 0]  # of each kind

    def empty(self) -> tuple[int, int, int]:
        at = len(self.instructions)
        return at, at, at

    def compiled(
        self, values: Sequence[Value], outputs: Sequence[tuple], own: int
    ) -> tuple[int, int, int]:
        """Append the instructions of these values and outputs: (op, tile, *values). Returns where
        the list begins, where its values begin to vary by keys, and where it ends.

        own: how many of the values come first. The others, which are their derivatives, each follow
        those that they need at once, so that few are kept at a time.
        """
        kept = needed(values, *(x for output in outputs for x in output[2:]))
        after: dict[int, int] = {}
        for x in kept:
            of_args = max((after[y] for y in values[x].args), default=0)
            after[x] = x if x < own else of_args
        kept.sort(key=lambda x: (after[x], x))
        classes = _classes(values, kept)
        slot_of: dict[int, Slot] = {}
        begin = len(self.instructions)
        for x in kept:
            if classes[x] in (UNIFORM, ROW):
                slot_of[x] = Slot(CONSTANT, self.slots[CONSTANT], classes[x])
                self.slots[CONSTANT] += 1
                self._value(values, x, slot_of)
        varying = len(self.instructions)
        self._varying(values, [x for x in kept if x not in slot_of], outputs, classes, slot_of)
        return begin, varying, len(self.instructions)

    def _varying(self, values, kept, outputs, classes, slot_of: dict[int, Slot]) -> None:
        kept = _result_last(values, kept, outputs)
        last = {x: at for at, x in enumerate(kept)}  # where each value is read last
        for at, x in enumerate(kept):
            last |= {y: at for y in values[x].args if y in last}
        last |= {x: len(kept) for output in outputs for x in output[2:] if x in last}
        direct = _direct(values, kept, outputs, classes)
        free: list[int] = []
        for at, x in enumerate(kept):
            if values[x].op == "score":
                slot_of[x] = Slot(TILES, SCORE, TILE)
                continue
            done = [y for y in dict.fromkeys(values[x].args) if last.get(y) == at]
            done = [y for y in done if slot_of[y].kind == VARYING]
            # The result may take the slot of an operand of its class: each number is read first.
            free += [slot_of[y].at for y in done if classes[y] == classes[x]]
            if x in direct:
                slot_of[x] = Slot(TILES, direct[x], TILE)
            else:
                slot = free.pop() if free else self._new_slot(slot_of)
                slot_of[x] = Slot(VARYING, slot, classes[x])
            free += [slot_of[y].at for y in done if classes[y] != classes[x]]
            self._value(values, x, slot_of)
        for op, tile, *of in outputs:
            if op != "copy" or slot_of[of[0]] != Slot(TILES, tile, TILE):
                self._append(op, Slot(TILES, tile, TILE), [slot_of[x] for x in of])

    def _new_slot(self, slot_of: dict[int, Slot]) -> int:
        used = [x.at for x in slot_of.values() if x.kind == VARYING]
        slot = max(used, default=-1) + 1
        self.slots[VARYING] = max(self.slots[VARYING], slot + 1)
        return slot

    def _value(self, values: Sequence[Value], x: int, slot_of: dict[int, Slot]) -> None:
        op, args, kind, number, _ = values[x]
        bits = _bits(number) if isinstance(number, float) else int(number or 0)
        letter = kind if op in ("constant", "load") else values[args[-1]].kind if args else ""
        name = f"{op}:{letter[0]}" if letter else op
        self._append(name, slot_of[x], [slot_of[y] for y in args], bits)

    def _append(self, name: str, out: Slot, args: list[Slot], number: int = 0) -> None:
        operands = [out, *args, *[NOTHING] * (3 - len(args))]
        self.instructions.append((self.numbers[name], operands, number))

    def words(self, header: Sequence[int], lists: Sequence[tuple[int, int, int]]) -> array[int]:
        first = (0, FIRST, FIRST + self.slots[CONSTANT])  # the number of the first slot of a kind
        slots = sum(self.slots)
        words = array("q", [first[VARYING], slots, *header])
        for positions in lists:
            words.extend(positions)
        for op, operands, number in self.instructions:
            words.append(op)
            for kind, at, of in operands:
                words.extend((first[kind] + at, of))
            words.append(number)
        return words


def _result_last(values: Sequence[Value], kept: list[int], outputs: Sequence[tuple]) -> list[int]:
    """`kept` with the resulting score at its end, if no other value needs it."""
    result = next((x for op, tile, x, *_ in outputs if (op, tile) == ("copy", SCORE)), None)
    if result not in kept or any(result in values[x].args for x in kept):
        return kept
    return [*(x for x in kept if x != result), result]


def _direct(values, kept, outputs, classes) -> dict[int, int]:
    """The values that are computed right in the tile that they are for, with the tile."""
    tiles: dict[int, int] = {}
    for op, tile, *of in outputs:
        x = of[0]
        fits = op == "copy" and x in kept and x not in tiles
        fits = fits and classes[x] == TILE and values[x].op != "score"
        # The scores are read until the last value is computed.
        if fits and (tile != SCORE or x == kept[-1]):
            tiles[x] = tile
    return tiles


def _bits(number) -> int:
    return struct.unpack("=q", struct.pack("=d", number))[0]


def _classes(values: Sequence[Value], kept: Sequence[int]) -> dict[int, int]:
    own = {"score": TILE, "i": ROW, "j": KEY}
    classes: dict[int, int] = {}
    for x in kept:
        of = own.get(values[x].op, UNIFORM)
        for y in values[x].args:
            of |= classes[y]  # ROW | KEY is TILE
        classes[x] = of
    return classes
