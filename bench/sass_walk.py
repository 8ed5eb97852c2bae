"""The instructions that one iteration of a loop issues.

Constants are followed from the kernel's entry, as a compiler would: immediates, the parameters that
are given, and what is computed of them. So switches of a kernel that a call sets once (is there a
mask?) go one way, and inner loops of a constant length take their turns. Where a branch hangs on
what is not known, the way is taken that has, in this order, the most products, exponentials,
asynchronous copies and loads, then the fewest instructions: a whole tile within the bounds; or,
`dear`, the most. Two things that are not known are not equal: no tile is the first, nor the last.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

from . import sass_arithmetic, sass_values
from .sass import PRODUCTS, Code, Instruction, Loop
from .sass_values import State

LIMIT = 1_000_000  # instructions on the way to a loop: more is a fault of this reader
Score = tuple[int, ...]
NOTHING: Score = (0, 0, 0, 0, 0)
Issued = tuple[Instruction, bool]


def iteration(
    code: Code, loop: Loop, constants: Mapping[int, int] | None = None, dear: bool = False
) -> list[Issued]:
    """What one iteration issues, in order, and whether its guard lets it run. `constants` are words
    of bank 0 by their address."""
    state = State(dict(constants or {}))
    for _ in _walk(code, 0, loop.header, set(code.blocks), state, dear=False):
        pass
    for block in loop.blocks:  # what one iteration leaves is not what the next one finds
        for at in code.blocks[block]:
            for x in (code.instructions[at], *code.called(at)):
                sass_values.forget(state, x)
    return list(_walk(code, loop.header, loop.header, set(loop.blocks), state, dear))


def _walk(
    code: Code, start: int, end: int, allowed: set[int], state: State, dear: bool
) -> Iterator[Issued]:
    """The instructions from `start` until `end` is reached (again), within the allowed blocks."""
    best = _best_ways(code, end, allowed, dear)
    at, block, steps = start, start, 0
    while True:
        if at in code.blocks:
            block = at
        x, ways = code.instructions[at], code.after(at)
        yield x, x.jumps or sass_values.runs(state, x)
        sass_arithmetic.execute(state, x)
        for y in code.called(at):
            yield y, True
            sass_values.forget(state, y)
        if len(ways) > 1:  # what leads elsewhere is not the way that is asked for
            ways = [w for w in ways if w == end or w in best]
        if len(ways) > 1 and (taken := sass_values.condition(state, x)) is not None:
            ways = [ways[not taken]]
        if len(ways) > 1:
            ways = [best[block][1]]
        if not ways:
            raise ValueError(f"no way from instruction {at} ({x.opcode}) to {end}")
        at, steps = ways[0], steps + 1
        if at == end:
            return
        if steps > LIMIT:
            raise ValueError(f"no end of the way from instruction {start} to {end}")


def _best_ways(code: Code, end: int, allowed: set[int], dear: bool) -> dict[int, tuple[Score, int]]:
    """For each block with a way on to `end` the score of the best, and its first step. No block is
    passed twice: a loop on the way has one iteration, or none."""
    found: dict[int, tuple[Score, int]] = {}
    place = {block: i for i, block in enumerate(code.order)}
    for block in reversed(code.order):
        onward: list[tuple[Score, int]] = []
        for x in code.successors(block) if block in allowed else ():
            if x == end:
                onward.append((NOTHING, x))
            elif place[x] > place[block] and (way := found.get(x)):
                onward.append((way[0], x))
        if onward:
            rest, step = max(onward)
            own = _score(code, block, dear)
            found[block] = tuple(map(operator.add, own, rest)), step
    return found


def _score(code: Code, block: int, dear: bool) -> Score:
    inside = [code.instructions[i] for i in code.blocks[block]]
    return (
        sum(x.base in PRODUCTS for x in inside),
        sum(x.opcode.startswith("MUFU.EX2") for x in inside),
        sum(x.base in ("LDGSTS", "UTMALDG") for x in inside),
        sum(x.base == "LDG" for x in inside),
        len(inside) if dear else -len(inside),
    )
