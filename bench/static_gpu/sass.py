"""Parse the machine code that nvdisasm prints for a kernel, and find its loops.

Loops are natural loops: a branch back to a block that dominates the branch. The main loops of
attention are the innermost ones with both tensor-core products and exponentials.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import NamedTuple

LINE = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@(!?\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
LABEL = re.compile(r"([.$][\w.$]+):\s*$")
SECTION = re.compile(r"\s*\.section\s+\.text\.([\w$.]+)")
# On tensor cores.
PRODUCTS = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA", "DMMA", "UTCHMMA", "UTCQMMA")
NEVER = ("!PT", "!UPT")  # a guard that no thread passes


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


class Loop(NamedTuple):
    header: int  # index of its first instruction
    blocks: frozenset[int]  # indices of their first instructions


@dataclasses.dataclass(frozen=True)
class Code:
    """The instructions of one kernel, and the index of the one after each label."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def after(self, at: int) -> tuple[int, ...]:
        """The instructions that may run next; the target of a branch comes first."""
        x = self.instructions[at]
        following = (at + 1,) if at + 1 < len(self.instructions) else ()
        conditional = bool(x.guard) or len(x.operands) > 1
        if x.jumps:
            target = (self.labels[x.target],) if x.target else ()
            return target + following if conditional else target
        ends = x.base in ("EXIT", "RET", "KILL", "BRX")
        return () if ends and not x.guard else following

    def called(self, at: int) -> tuple[Instruction, ...]:
        """The function that an instruction calls; its code follows that of the kernel."""
        x = self.instructions[at]
        if x.base != "CALL" or x.jumps or x.target not in self.labels:
            return ()
        start = end = self.labels[x.target]
        while self.instructions[end].base != "RET" or self.instructions[end].guard:
            end += 1
        return self.instructions[start:end]

    @functools.cached_property
    def blocks(self) -> dict[int, tuple[int, ...]]:
        """The instructions of each basic block, by its first instruction."""
        starts = {0, *self.labels.values()}
        for at, x in enumerate(self.instructions):
            if x.jumps or x.base in ("EXIT", "RET", "KILL", "BRX"):
                starts.add(at + 1)
        edges = sorted(x for x in starts if x < len(self.instructions))
        ends = [*edges[1:], len(self.instructions)]
        return {a: tuple(range(a, b)) for a, b in zip(edges, ends, strict=True)}

    def successors(self, block: int) -> tuple[int, ...]:
        return self.after(self.blocks[block][-1])

    @functools.cached_property
    def order(self) -> list[int]:
        """The reachable blocks in reverse postorder: each after its dominators."""
        seen, found = {0}, []
        stack = [(0, iter(self.successors(0)))]
        while stack:
            block, rest = stack[-1]
            for x in rest:
                if x not in seen:
                    seen.add(x)
                    stack.append((x, iter(self.successors(x))))
                    break
            else:
                found.append(block)
                stack.pop()
        return found[::-1]

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """The natural loops, sorted by header."""
        place = {block: i for i, block in enumerate(self.order)}
        before: dict[int, list[int]] = {block: [] for block in place}
        for block in place:
            for x in self.successors(block):
                before[x].append(block)
        dominator = _dominators(self.order, place, before)
        bodies: dict[int, set[int]] = {}
        for block in place:
            for header in self.successors(block):
                if _dominates(dominator, header, block):
                    bodies.setdefault(header, {header}).update(_body(before, header, block))
        return [Loop(header, frozenset(body)) for header, body in sorted(bodies.items())]

    def main_loops(self) -> list[Loop]:
        """The innermost loops with products and exponentials."""

        def fits(loop: Loop) -> bool:
            inside = [self.instructions[i] for b in loop.blocks for i in self.blocks[b]]
            exponentials = any(x.opcode.startswith("MUFU.EX2") for x in inside)
            return exponentials and any(x.base in PRODUCTS for x in inside)

        found = [loop for loop in self.loops if fits(loop)]
        return [x for x in found if not any(y.blocks < x.blocks for y in found)]


def _dominators(
    order: list[int], place: dict[int, int], before: dict[int, list[int]]
) -> dict[int, int]:
    """The immediate dominator of each block (Cooper, Harvey and Kennedy 2001)."""
    found = {order[0]: order[0]}

    def common(a: int, b: int) -> int:
        while a != b:
            if place[a] > place[b]:
                a = found[a]
            else:
                b = found[b]
        return a

    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            new = functools.reduce(common, [x for x in before[block] if x in found])
            changed |= found.get(block) != new
            found[block] = new
    return found


def _dominates(dominator: dict[int, int], a: int, b: int) -> bool:
    while b != a and dominator[b] != b:
        b = dominator[b]
    return a == b


def _body(before: dict[int, list[int]], header: int, latch: int) -> set[int]:
    found, todo = {header}, [latch]
    while todo:
        block = todo.pop()
        if block not in found:
            found.add(block)
            todo += before[block]
    return found


def read(listing: str) -> dict[str, Code]:
    """The kernels in the output of nvdisasm -c, by name."""
    kernels: dict[str, tuple[list[Instruction], dict[str, int]]] = {}
    code, labels = [], {}
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
    }
