"""The instructions that one iteration of a loop issues.

Constants are propagated from the kernel's entry, as in a compiler: immediates, the given
parameters, and values computed from them. So branches on parameters of the call (is there a mask?)
are decided, and inner loops of a constant length run all their iterations. At a branch on an
unknown value, the path is taken that has, in this order, the most products, exponentials,
asynchronous copies and loads, then the fewest instructions: a whole tile within the bounds. With
`dear` it has the most instructions. Two unknown values are assumed to differ: no tile is the first,
nor the last.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

from . import sass_arithmetic, sass_values
from .sass import PRODUCTS, Code, Instruction, Loop
from .sass_values import State

LIMIT = 1_000_000  # instructions of a path: more is a bug of this module
Score = tuple[int, ...]
NOTHING: Score = (0, 0, 0, 0, 0)
Issued = tuple[Instruction, bool]


def iteration(
    code: Code, loop: Loop, constants: Mapping[int, int] | None = None, dear: bool = False
) -> list[Issued]:
    """The instructions that one iteration issues, in order, each with whether its guard lets it
    run. `constants` are words of bank 0 by their address."""
    state = State(dict(constants or {}))
    for _ in _walk(code, 0, loop.header, set(code.blocks), state, dear=False):
        pass
    for block in loop.blocks:  # values written in the loop differ between iterations
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
        if len(ways) > 1:  # drop ways that do not lead to `end`
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
    """For each block with a path to `end`: the score of the best path, and its first step. No path
    visits a block twice, so a loop on it has one iteration, or none."""
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
