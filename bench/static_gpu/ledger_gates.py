"""What the kernels of csrc/cuda/sm90 need besides few instructions, and no run of PTX shows: the
order that ptxas makes of products, waits, exponentials and barriers, and its registers.

Each is a fault of `python -m bench ledger`, whatever the budget says:

    waits for products other than those of WAITS, or in another order
    an exponential before the first wait of an iteration or after the last: no product runs under it
    more barriers in the shortest iteration than BARRIERS: BAR.SYNC and BAR.ARV
    limits of registers (setmaxnreg) other than those that the source sets
    spilled registers in a plain kernel
    products that ptxas serialises (its messages C7500 to C7599)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .ledger_cases import OF_PLAIN, Compiled
from .sass import Code, Instruction
from .sass_walk import Issued

# By pass: for each wait, how many groups of products may still run after it; the most barriers.
WAITS = {"forward": (1, 0), "dqkv": (1, 1, 1, 0), "dqkv with features": (0, 1, 0)}
BARRIERS = {"forward": 2, "dqkv": 3}


class Order(NamedTuple):
    """Of one iteration, not scaled to 64 x 64 scores."""

    waits: tuple[int, ...]
    exponentials: int
    between: int  # of them: after the first wait and before the last
    barriers: int

    @property
    def text(self) -> tuple[str, str, str]:
        """As columns: waits, overlap and barriers."""
        waits = ",".join(map(str, self.waits)) or "-"
        return waits, f"{self.between}/{self.exponentials}", str(self.barriers)


def order(issued: Iterable[Issued]) -> Order:
    run = [x for x, runs in issued if runs]
    at = [k for k, x in enumerate(run) if x.opcode.startswith("WARPGROUP.DEPBAR")]
    exponentials = [k for k, x in enumerate(run) if x.opcode.startswith("MUFU.EX2")]
    between = sum(at[0] < k < at[-1] for k in exponentials) if at else 0
    waits = tuple(int(run[k].operands[1], 0) for k in at)
    return Order(waits, len(exponentials), between, sum(x.base == "BAR" for x in run))


def limits(instructions: Iterable[Instruction]) -> tuple[int, ...]:
    """The limits of registers that warps set, ascending."""
    found = {int(x.operands[-1], 0) for x in instructions if x.base == "USETMAXREG"}
    return tuple(sorted(found))


def spilled(said: str) -> int:
    """Bytes of the output of ptxas -v: stores and loads."""
    return sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said)))


def serialised(said: str) -> list[str]:
    """The messages by which ptxas says that it serialises products."""
    return re.findall(r"C75\d\d\b", said)


def faults(kernel: Compiled, code: Code, ways: Sequence[Sequence[Issued]]) -> list[str]:
    """What is wrong with a kernel, of which `ways` are the iterations of its main loops."""
    if kernel.case.folder != "sm90":
        return []
    found, name = [], kernel.case.name
    features = name == "dqkv" and kernel.case.feature not in OF_PLAIN
    waits = WAITS["dqkv with features" if features else name]
    for one in dict.fromkeys(map(order, ways)):
        if one.waits != waits:
            found.append(f"waits: got {one.waits}, expected {waits}")
        if one.between < one.exponentials:
            found.append(f"overlap: got {one.text[1]} exponentials between the waits, expected all")
    # On the shortest way through each loop, which comes first: a tile at a sequence's end has one
    # more, for the rows that it clears.
    barriers = max(order(way).barriers for way in ways[: len(code.main_loops())])
    if barriers > BARRIERS.get(name, barriers):
        found.append(f"barriers: got {barriers}, expected at most {BARRIERS[name]}")
    if (set_by := limits(code.instructions)) != tuple(kernel.declared):
        found.append(
            f"setmaxnreg: got {set_by}, expected {tuple(kernel.declared)} as in its source"
        )
    if kernel.case.feature == "plain" and (bytes_spilled := spilled(kernel.said)):
        found.append(f"ptxas: got {bytes_spilled} bytes spilled, expected none in a plain kernel")
    if messages := serialised(kernel.said):
        found.append(f"ptxas: got {', '.join(messages)}, expected no serialised products")
    return found
