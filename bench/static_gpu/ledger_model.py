"""Estimate the cost of a loop from instruction counts, per 64 x 64 scores on one multiprocessor.

One iteration of a main loop is the instructions that a warp issues from the loop's header until it
reaches the header again. Their counts are multiplied by the warps of a block, and scaled from the
scores of the iteration's tile to 64 x 64 scores. The time of each unit (tensor cores, exponentials,
float32 lanes, shared memory, issue) is its count divided by its documented rate. The longest of
these times is the bound: no schedule is faster, and a good schedule with several warps comes near.
`peak` (ledger_page.py) is the time of the needed products on the tensor cores, in percent of the
bound.

The model has no latency. Waits, barriers between warps, late loads, and too few warps to hide them
make a kernel slower than its bound. Therefore the report also has the counts of these, the blocks
that fit on a multiprocessor, and the exponentials while a product or a copy is in flight. The model
also omits bank conflicts, caches, memory, clocks under load, the code outside of the loop, and
tiles cut by a causal edge. FlashAttention-2 and -3 reach 60 to 75% of the peak where their bounds
are 75 to 100%. tcgen05 instructions do not encode their shapes: the model assumes the products that
the algorithm needs, and omits the shared memory that these instructions read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from . import sass_kinds
from .sass import Instruction
from .sass_walk import Issued

UNIT = 64 * 64  # scores
LANES, REGISTERS, RESERVED = 32, 65536, 1024  # per warp; per multiprocessor; shared bytes per block
MUFU, ISSUE, SHARED = 16, 4, 128  # results, instructions and bytes per cycle
INPUTS_LOADED, ELEMENT_BYTES = 2, 2  # K and V, or Q and dO; bfloat16
# How many products of 64 x 64 x head_dim 64 x 64 scores take. PRODUCTS: in each kernel (S and O in
# forward; S, dP, dQ, dK and dV in backward, where each kernel computes the S and dP that it needs).
# NEEDED: in each pass, if no product is computed twice.
PRODUCTS = {"forward": 2, "dqkv": 5, "dq": 3, "dkv": 4, "dk": 3, "dv": 2, "decode": 2}
NEEDED = {"forward": 2, "backward": 5, "decode": 2}
HMMA = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8}


class Chip(NamedTuple):
    """Rates and sizes of one multiprocessor."""

    name: str
    tensor: int  # dense 16-bit FMAs per cycle, accumulated in float32
    fp32: int  # lanes
    shared: int  # KB
    warps: int


# Sources: whitepapers of the architectures (dense peak / multiprocessors / boost clock), and tables
# of the CUDA programming guide. GeForce chips of sm_120 have half this tensor rate.
CHIPS = {
    80: Chip("A100", 1024, 64, 164, 64),
    90: Chip("H100", 2048, 128, 228, 64),
    100: Chip("B200", 4096, 128, 228, 64),
    120: Chip("RTX PRO 6000", 512, 128, 100, 48),
}


class Tile(NamedTuple):
    """One iteration of a block."""

    rows: int
    keys: int
    loaded_side: int  # rows or keys, whichever the iteration loads; the others stay
    head_dim: int
    warps: int
    stages: int  # of the pipeline of copies: stages - 1 are in flight at first


class Loop(NamedTuple):
    """Per 64 x 64 scores."""

    counts: dict[str, int]  # instructions, each kind of sass_kinds.KINDS, and some by name
    opcodes: dict[str, int]  # products by shape, MUFU by kind
    cycles: dict[str, float]  # of each unit
    products: float  # of 64 x 64 x D; more than PRODUCTS if warps repeat work
    exponentials: int
    under_products: int  # exponentials while a product is in flight
    under_copies: int  # exponentials while a copy is in flight

    @property
    def bound(self) -> tuple[str, float]:
        return max(self.cycles.items(), key=lambda x: x[1])


NAMED = ("LDSM", "LDS", "STS", "SHFL", "LDG", "LDGSTS", "UTMALDG", "STG")


def loop(issued: Sequence[Issued], tile: Tile, arch: int, name: str) -> Loop:
    """The counts and cycles of an iteration of the kernel `name`, from the instructions that a warp
    issues, each with whether its guard lets it run. Raises ValueError for an unknown opcode, and
    for fewer products than PRODUCTS."""
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
    # The opcode of a TMA copy (UTMALDG) has no size: its bytes come from the tile, once for the
    # block. Other copies are in shared_bytes.
    elements = INPUTS_LOADED * tile.loaded_side * tile.head_dim
    copied = elements * ELEMENT_BYTES / (tile.rows * tile.keys) * UNIT
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
    """FMAs of one warp's instruction; 0 if the opcode does not encode them."""
    parts = x.opcode.split(".")
    if x.base == "HMMA":
        return HMMA[parts[1]]
    if x.base == "HGMMA":  # issued by four warps together
        m, n, k = map(int, parts[1].split("x"))
        return m * n * k / 4
    return 0


def shared_bytes(x: Instruction) -> float:
    """Bytes that one warp's instruction moves to or from shared memory, without conflicts."""
    parts = x.opcode.split(".")
    if x.base == "HGMMA":  # 16-bit; if a descriptor is first, the left side is in shared memory
        m, n, k = map(int, parts[1].split("x"))
        left = m * k if x.operands[1].startswith("gdesc") else 0
        return 2 * (left + n * k) / 4
    if x.base in ("LDSM", "STSM"):
        return 128 * int(parts[-1] if parts[-1] in ("2", "4") else 1)
    if x.base in ("LDS", "STS", "LDGSTS"):
        return LANES * (16 if "128" in parts else 8 if "64" in parts else 4)
    return 128 if x.base == "SHFL" else 0


def in_flight(run: Sequence[Instruction], stages: int) -> tuple[int, int, int]:
    """Three counts of the exponentials of an iteration after the first: all; those while a product
    is in flight; those while a copy is in flight. The loop runs twice, and the second turn counts.
    A wait for groups (DEPBAR) gives the number that may still be in flight. A wait at a barrier in
    memory (SYNCS.PHASECHK) does not name its copy or product: it finishes one. If products signal
    such barriers, a wait finishes a product while one is in flight, else a copy."""
    in_memory = any(x.base == "UTCBAR" for x in run)  # tcgen05 products signal barriers in memory
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
    """How many blocks fit on a multiprocessor at the same time. `registers` are per thread,
    `shared` is the bytes of a block, and `columns` those of tensor memory, of 512 (0: none used).
    The smallest limit counts."""
    chip = CHIPS[arch]
    each = -(-registers // 8) * 8 * LANES  # registers of a warp: allocated 8 per thread at a time
    room = [
        REGISTERS // (each * warps),
        (chip.shared << 10) // (shared + RESERVED),
        chip.warps // warps,
        512 // columns if columns else 32,
    ]
    return min(room)
