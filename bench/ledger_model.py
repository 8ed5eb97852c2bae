"""What a loop costs, by counting: per 64 x 64 scores, on one multiprocessor.

One iteration of a main loop is what a warp issues from header to header; times the warps of a
block, over the scores of the tile that an iteration covers, that is 64 x 64 scores' worth. Each
unit takes its count over its documented rate, and the busiest unit is the bound: no schedule is
faster, and a good one with several warps comes near. `peak` is the tensor cores' share of it.

The model knows nothing of latency: waits, barriers that keep warps in step, loads that are late and
too few warps to hide them make a kernel slower than its bound. So their counts, the blocks that fit
and what is in flight under the exponentials stand beside it. Nor does it know bank conflicts,
caches, memory, clocks under load, prologues, or tiles that a causal edge cuts. FlashAttention-2 and
-3 reach 60 to 75% of the peak where their bounds say 75 to 100. Products of tcgen05 do not tell
their shapes: they are the algorithm's, and the shared memory that they read is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from . import sass_kinds
from .sass import Instruction
from .sass_walk import Issued

UNIT = 64 * 64  # scores
LANES, REGISTERS, RESERVED = 32, 65536, 1024  # a warp; a multiprocessor; shared bytes of each block
MUFU, ISSUE, SHARED = 16, 4, 128  # results, instructions and bytes a cycle
PRODUCTS = {"forward": 2, "dqkv": 5, "dq": 3, "dkv": 4, "dk": 3, "dv": 2, "decode": 2}
NEEDED = {"forward": 2, "backward": 5, "decode": 2}  # when nothing is computed twice
HMMA = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}


class Chip(NamedTuple):
    """Of one multiprocessor."""

    name: str
    tensor: int  # dense 16-bit FMAs a cycle, accumulated in float32
    fp32: int  # lanes
    shared: int  # KB
    warps: int


# Whitepapers of the architectures: dense peaks over multiprocessors and boost clock, and the tables
# of the CUDA programming guide. GeForce chips of sm_120 have half of its tensor rate.
CHIPS = {
    80: Chip("A100", 1024, 64, 164, 64),
    90: Chip("H100", 2048, 128, 228, 64),
    100: Chip("B200", 4096, 128, 228, 64),
    120: Chip("RTX PRO 6000", 512, 128, 100, 48),
}


class Tile(NamedTuple):
    """What one iteration covers: a block's rows and keys, the sides that pass by, and its warps."""

    rows: int
    keys: int
    passing: int
    head_dim: int
    warps: int
    stages: int


class Loop(NamedTuple):
    """Per 64 x 64 scores."""

    counts: dict[str, int]  # instructions, each kind of sass_kinds.KINDS, and some by name
    opcodes: dict[str, int]  # products by shape, MUFU by kind
    cycles: dict[str, float]  # of each unit
    products: float  # of 64 x 64 x D; more than PRODUCTS where warps compute the same
    exponentials: int
    under_products: int  # of those, while a product is in flight
    under_copies: int  # while a copy is on its way

    @property
    def bound(self) -> tuple[str, float]:
        return max(self.cycles.items(), key=lambda x: x[1])


NAMED = ("LDSM", "LDS", "STS", "SHFL", "LDG", "LDGSTS", "UTMALDG", "STG")


def loop(issued: Sequence[Issued], tile: Tile, arch: int, name: str) -> Loop:
    """Raises ValueError for opcodes of no kind, and for fewer products than those of the pass."""
    run = [x for x, runs in issued if runs]
    kinds = Counter({"instructions": len(issued)}) | sass_kinds.count(run)
    kinds += Counter({name: n for name in NAMED if (n := sum(x.base == name for x in run))})
    scale = tile.warps * UNIT / (tile.rows * tile.keys)
    chip = CHIPS[arch]
    needed = UNIT * tile.head_dim * PRODUCTS[name]
    fmas = scale * sum(map(product, run)) or needed
    if fmas < needed:
        raise ValueError(
            f"got {fmas / UNIT / tile.head_dim:.2f} products of 64 x 64 x {tile.head_dim} in a "
            f"main loop, expected {PRODUCTS[name]} or more: sass_walk.py missed some of its way"
        )
    copied = 2 * tile.passing * tile.head_dim * 2 / (tile.rows * tile.keys) * UNIT
    moved = scale * sum(map(shared_bytes, run)) + copied * bool(kinds["UTMALDG"])
    floats = sum(1 + x.base.endswith("2") for x in run if sass_kinds.kind(x) == "fp32")
    cycles = {
        "tensor": fmas / chip.tensor,
        "mufu": scale * kinds["mufu"] * LANES / MUFU,
        "fp32": scale * floats * LANES / chip.fp32,
        "shared": moved / SHARED,
        "issue": scale * len(issued) / ISSUE,
    }
    opcodes = Counter(_shape(x) for x in run if sass_kinds.kind(x) in ("tensor", "mufu"))
    total, products, copies = in_flight(run, tile.stages)
    return Loop(
        {x: round(n * scale) for x, n in sorted(kinds.items())},
        {x: round(n * scale) for x, n in sorted(opcodes.items())},
        {x: round(n, 1) for x, n in cycles.items()},
        round(fmas / UNIT / tile.head_dim, 2),
        *(round(n * scale) for n in (total, products, copies)),
    )


def _shape(x: Instruction) -> str:
    parts = x.opcode.split(".")
    return ".".join(parts[:2] if x.base != "UTCHMMA" else parts[:1])


def product(x: Instruction) -> float:
    """FMAs of one warp's instruction; 0 where it does not tell."""
    parts = x.opcode.split(".")
    if x.base == "HMMA":
        return HMMA[parts[1]]
    if x.base == "HGMMA":  # of four warps together
        m, n, k = map(int, parts[1].split("x"))
        return m * n * k / 4
    return 0


def shared_bytes(x: Instruction) -> float:
    """That one warp's instruction moves to or from shared memory, without conflicts."""
    parts = x.opcode.split(".")
    if x.base == "HGMMA":  # of 16 bits; a descriptor first: the left side is there too
        m, n, k = map(int, parts[1].split("x"))
        left = m * k if x.operands[1].startswith("gdesc") else 0
        return 2 * (left + n * k) / 4
    if x.base in ("LDSM", "STSM"):
        return 128 * int(parts[-1] if parts[-1] in ("2", "4") else 1)
    if x.base in ("LDS", "STS", "LDGSTS"):
        return LANES * (16 if "128" in parts else 8 if "64" in parts else 4)
    return 128 if x.base == "SHFL" else 0


def in_flight(run: Sequence[Instruction], stages: int) -> tuple[int, int, int]:
    """Exponentials of an iteration that follows another: all, those with a product in flight, and
    those with a copy on its way. Groups that the code waits for tell it; barriers in memory do not
    say which copy or product they are of: they are taken to be waited for in order."""
    in_memory = any(x.base == "UTCBAR" for x in run)  # products of tcgen05
    products, copies = 0, (stages - 1) * sum(x.base == "UTMALDG" for x in run)
    found = [0, 0, 0]
    for turn in range(2):
        for x in run:
            if (x.base == "HGMMA" and "gsb0" in x.operands) or x.base == "UTCBAR":
                products += 1
            elif x.base in ("LDGDEPBAR", "UTMALDG"):
                copies += 1
            elif x.opcode.startswith("WARPGROUP.DEPBAR"):
                products = min(products, _number(x))
            elif x.opcode == "DEPBAR.LE" and x.operands[0] == "SB0":
                copies = min(copies, _number(x))
            elif x.opcode.startswith("SYNCS.PHASECHK") and in_memory and products:
                products -= 1
            elif x.opcode.startswith("SYNCS.PHASECHK"):
                copies = max(0, copies - 1)
            elif x.opcode.startswith("MUFU.EX2") and turn:
                found[0] += 1
                found[1] += products > 0
                found[2] += copies > 0
    return found[0], found[1], found[2]


def _number(x: Instruction) -> int:
    return int(x.operands[1], 0)


def blocks(registers: int, shared: int, warps: int, columns: int, arch: int) -> int:
    """How many blocks a multiprocessor holds."""
    chip = CHIPS[arch]
    each = -(-registers // 8) * 8 * LANES  # of a warp
    room = [
        REGISTERS // (each * warps),
        (chip.shared << 10) // (shared + RESERVED),
        chip.warps // warps,
        512 // columns if columns else 32,
    ]
    return min(room)
