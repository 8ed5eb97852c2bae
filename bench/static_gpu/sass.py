"""Read the machine code that nvdisasm prints for a kernel: its loops, and what an iteration issues.

The main loops of attention are the innermost ones with both tensor-core products and exponentials.
An iteration is one way from a loop's first instruction back to it. Where ways part, the one with
the most products, exponentials and loads is taken, then the one with the fewest instructions: a
whole tile within the bounds, features off that the call decides.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LINE = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@(!?\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
LABEL = re.compile(r"([.$][\w.$]+):\s*$")
SECTION = re.compile(r"\s*\.section\s+\.text\.([\w$.]+)")
PRODUCTS = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA", "DMMA", "UTCHMMA", "UTCQMMA")
LOADS = ("LDGSTS", "UTMALDG", "LDG")
SPILLS = ("STL", "LDL")
ENDS = ("EXIT", "RET", "KILL", "BRX")


class Instruction(NamedTuple):
    guard: str  # a predicate; "" if it always runs
    opcode: str
    operands: tuple[str, ...]

    @property
    def base(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def jumps(self) -> bool:
        """Is it a jump? ptxas also uses CALL to jump to labels of the kernel itself."""
        label = self.target or ""
        return self.base in ("BRA", "JMP") or (self.base == "CALL" and label.startswith(".L"))

    @property
    def target(self) -> str | None:
        """The label that it may jump to."""
        found = re.fullmatch(r"`\((.*)\)", self.operands[-1]) if self.operands else None
        return found[1] if found else None

    @property
    def exponential(self) -> bool:
        return self.opcode.startswith("MUFU.EX2")


class Loop(NamedTuple):
    header: int  # index of its first instruction
    blocks: frozenset[int]  # indices of their first instructions


class Counts(NamedTuple):
    """Of one iteration of a main loop. `waits`: for each wait for products of warpgroups, how many
    groups may still run; `between`: the exponentials after the first of these and before the last.
    """

    instructions: int
    spills: int
    products: int
    exponentials: int
    between: int
    barriers: int
    waits: tuple[int, ...]

    def __str__(self) -> str:
        text = f"{self.instructions:5d} in the loop  {self.products:3d} products"
        text += f"  {self.spills:2d} spills"
        if not self.waits:
            return text
        overlap = f"{self.between}/{self.exponentials} overlapped"
        return (
            f"{text}  waits {','.join(map(str, self.waits))}  {overlap}  {self.barriers} barriers"
        )


@dataclasses.dataclass(frozen=True)
class Code:
    """The instructions of one kernel, and the index of the one after each label."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def after(self, at: int) -> tuple[int, ...]:
        """The instructions that may run next; the target of a branch comes first."""
        x = self.instructions[at]
        following = (at + 1,) if at + 1 < len(self.instructions) else ()
        if x.jumps:
            target = (self.labels[x.target],) if x.target in self.labels else ()
            return target + following if x.guard or len(x.operands) > 1 else target
        return () if x.base in ENDS and not x.guard else following

    @functools.cached_property
    def blocks(self) -> dict[int, tuple[Instruction, ...]]:
        """The instructions of each basic block, by the index of its first."""
        starts = {0, *self.labels.values()}
        starts |= {at + 1 for at, x in enumerate(self.instructions) if x.jumps or x.base in ENDS}
        edges = sorted(x for x in starts if x < len(self.instructions))
        ends = [*edges[1:], len(self.instructions)]
        return {a: self.instructions[a:b] for a, b in zip(edges, ends, strict=True)}

    def successors(self, block: int) -> tuple[int, ...]:
        return self.after(block + len(self.blocks[block]) - 1)

    @functools.cached_property
    def order(self) -> list[int]:
        """The reachable blocks in reverse postorder: each after its dominators."""
        seen, found = {0}, []
        stack = [(0, iter(self.successors(0)))]
        while stack:
            block, rest = stack[-1]
            if (x := next((x for x in rest if x not in seen), None)) is None:
                found.append(block)
                stack.pop()
            else:
                seen.add(x)
                stack.append((x, iter(self.successors(x))))
        return found[::-1]

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """The natural loops: a branch goes back to a block that no way to it avoids."""
        after = {block: self.successors(block) for block in self.order}
        before: dict[int, list[int]] = {block: [] for block in self.order}
        for block in self.order:
            for x in after[block]:
                before[x].append(block)
        place = {block: i for i, block in enumerate(self.order)}
        bodies: dict[int, set[int]] = {}
        for block in self.order:
            for header in after[block]:
                if place[header] <= place[block] and block not in _reached(after, 0, header):
                    body = _reached(before, block, header)
                    bodies.setdefault(header, {header}).update(body)
        return [Loop(header, frozenset(body)) for header, body in sorted(bodies.items())]

    def main_loops(self) -> list[Loop]:
        def fits(loop: Loop) -> bool:
            inside = [x for b in loop.blocks for x in self.blocks[b]]
            products = any(x.base in PRODUCTS for x in inside)
            return products and any(x.exponential for x in inside)

        found = [loop for loop in self.loops if fits(loop)]
        return [x for x in found if not any(y.blocks < x.blocks for y in found)]

    def iteration(self, loop: Loop) -> list[Instruction]:
        """The instructions of the best way from the header to itself."""
        best: dict[int, tuple[tuple[int, ...], int]] = {}
        place = {block: i for i, block in enumerate(self.order)}
        for block in sorted(loop.blocks, key=place.__getitem__, reverse=True):
            ways = [((0,) * 4, loop.header)] * (loop.header in self.successors(block))
            forward = (x for x in self.successors(block) if place[x] > place[block] and x in best)
            ways += [(best[x][0], x) for x in forward]
            if ways:
                rest, step = max(ways)
                best[block] = tuple(map(operator.add, _score(self.blocks[block]), rest)), step
        found, block = [], loop.header
        while True:
            found += self.blocks[block]
            block = best[block][1]
            if block == loop.header:
                return found

    def spills_in_loops(self) -> int:
        """Spills in the loops over tiles, which compute exponentials, on any way through them."""
        inside: set[int] = set()
        for loop in self.loops:
            if any(x.exponential for block in loop.blocks for x in self.blocks[block]):
                inside |= loop.blocks
        return sum(spills(self.blocks[block]) for block in inside)

    def counts(self) -> list[Counts]:
        """Of the main loops, the shortest first."""
        return sorted(count(self.iteration(loop)) for loop in self.main_loops())


def _reached(edges: Mapping[int, Sequence[int]], start: int, without: int) -> set[int]:
    """The blocks that edges lead to from `start`, not through `without`."""
    found, todo = set(), [start]
    while todo:
        block = todo.pop()
        if block not in found and block != without:
            found.add(block)
            todo += edges[block]
    return found


def _score(block: tuple[Instruction, ...]) -> tuple[int, ...]:
    kinds = (
        sum(x.base in PRODUCTS for x in block),
        sum(x.exponential for x in block),
        sum(x.base in LOADS for x in block),
    )
    return (*kinds, -len(block))


def count(issued: list[Instruction]) -> Counts:
    at = [i for i, x in enumerate(issued) if x.opcode.startswith("WARPGROUP.DEPBAR")]
    exponentials = [i for i, x in enumerate(issued) if x.exponential]
    return Counts(
        len(issued),
        spills(issued),
        sum(x.base in PRODUCTS for x in issued),
        len(exponentials),
        sum(at[0] < i < at[-1] for i in exponentials) if at else 0,
        sum(x.base == "BAR" for x in issued),
        tuple(int(issued[i].operands[1], 0) for i in at),
    )


def spills(code: list[Instruction] | tuple[Instruction, ...]) -> int:
    return sum(x.base in SPILLS for x in code)


def read(listing: str) -> dict[str, Code]:
    """The kernels in the output of nvdisasm -c, by name."""
    kernels: dict[str, tuple[list[Instruction], dict[str, int]]] = {}
    code, labels = kernels.setdefault("", ([], {}))
    for line in listing.splitlines():
        if found := SECTION.match(line):
            code, labels = kernels.setdefault(found[1], ([], {}))
        elif found := LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := LINE.match(line):
            operands = tuple(x.strip() for x in found[3].split(", ")) if found[3].strip() else ()
            code.append(Instruction(found[1] or "", found[2], operands))
    return {
        name: Code(tuple(code), {x: at for x, at in labels.items() if at < len(code)})
        for name, (code, labels) in kernels.items()
        if code
    }
