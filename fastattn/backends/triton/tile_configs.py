"""Tables of tiles for the Triton kernels. Each tile compiled with few spilled registers.

`make aot` compiles every row; bench/results/local/aot-triton-*.txt has the results. If two tiles
fit in registers, the table has the larger one: it reads keys and values less often.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
from collections.abc import Sequence
from typing import NamedTuple


class Config(NamedTuple):
    """A tile of BM query rows by BN keys, and the launch options that go with it."""

    BM: int
    BN: int
    warps: int
    stages: int  # tiles in flight at a time


@functools.cache
def triton_version() -> str | None:
    """The version of the installed Triton, whatever its package is called; None without Triton."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a vendor's build, or none
        with contextlib.suppress(ImportError):
            return getattr(importlib.import_module("triton"), "__version__", None)
        return None


C = Config
INTERPRETED = C(32, 32, 4, 1)
PASSES = ("forward", "delta", "dq", "dkv", "dk", "dv", "dmask", "decode", "combine", "weights")
PASSES += ("dq_captured", "index_check")  # of programs with captured tensors
PASSES += ("jvp", "rates", "dq_t", "dkv_t", "dk_t", "dv_t", "dmask_t")  # that take tangents
BUCKETS = (64, 128, 256, 576)  # head dims: the larger of q's and v's
MOST = 256  # for every pass
MOST_FORWARD = (576, 512)  # of q and of v, for forward and decoding
TUNED = ("forward", "dq", "dkv", "dk", "dv", "decode", "weights")  # what `tune` races
FEATURES = ("mask", "alibi", "softcap", "dropout")  # they need registers for every score


class Row(NamedTuple):
    """Tiles of calls without FEATURES, with one of them, and with several. Narrow rows, of a size
    that is no multiple of 16 bytes, count as one. None, in the tables of OF_PRECISION, is no tile.
    """

    plain: Config | None
    one: Config | None
    several: Config | None
    mask: Config | None = None  # for this feature alone, if it differs from `one`
    alibi: Config | None = None
    softcap: Config | None = None
    dropout: Config | None = None
    narrow: Config | None = None


def same(tile: Config) -> Row:
    return Row(tile, tile, tile)


R = Row
Table = dict[tuple[str, int], Row]  # by pass and head dim

# Chosen so that loops over tiles issue the fewest instructions (bench/instructions/gpu.json) with
# few spills, in a causal call with grouped heads and with every feature at once
# (bench/static_gpu/aot_budget.json).

# fmt: off
AMPERE: Table = {  # 16 bits on sm_80: mma.sync, cp.async, 163 KB of shared memory
    ("forward", 64): R(C(128, 64, 4, 3), C(128, 64, 4, 2), C(128, 64, 8, 2),
        dropout=C(128, 64, 8, 3)),
    ("forward", 128): R(C(128, 64, 8, 3), C(128, 64, 8, 3), C(128, 32, 8, 2)),
    ("forward", 256): R(C(64, 64, 8, 2), C(64, 32, 8, 2), C(64, 32, 8, 2)),
    ("dq", 64): R(C(128, 64, 8, 3), C(128, 64, 8, 3), C(128, 32, 8, 2), dropout=C(128, 32, 8, 2)),
    ("dq", 128): R(C(128, 32, 8, 2), C(128, 32, 8, 2), C(64, 64, 8, 2),
        dropout=C(64, 64, 8, 2), narrow=C(64, 64, 8, 2)),
    ("dq", 256): R(C(64, 32, 8, 2), C(32, 32, 8, 2), C(32, 32, 8, 2)),
    ("dkv", 64): R(C(64, 128, 8, 2), C(64, 128, 8, 2), C(32, 64, 8, 2),
        mask=C(32, 128, 8, 2), dropout=C(32, 128, 8, 2)),
    ("dkv", 128): R(C(64, 128, 8, 2), C(64, 128, 8, 2), C(32, 64, 8, 2),
        mask=C(64, 64, 8, 2), dropout=C(64, 64, 8, 2), narrow=C(64, 64, 8, 2)),
    ("dkv", 256): same(C(32, 32, 8, 2)),
    ("dmask", 256): same(C(64, 64, 8, 1)),
    ("weights", 256): same(C(64, 64, 8, 1)),
    ("decode", 128): R(C(16, 64, 2, 3), C(16, 64, 2, 3), C(16, 64, 4, 3),
        narrow=C(16, 64, 4, 3)),
    ("decode", 256): same(C(16, 64, 4, 2)),
    ("forward", 576): same(C(32, 32, 8, 2)),
    ("decode", 576): same(C(16, 32, 4, 2)),
    ("jvp", 64): R(C(128, 64, 8, 2), C(128, 64, 8, 2), C(64, 32, 4, 2)),
    ("jvp", 128): R(C(64, 64, 8, 2), C(64, 64, 8, 2), C(64, 32, 8, 2)),
    ("jvp", 256): same(C(32, 32, 8, 2)),
    ("dq_t", 64): R(C(128, 32, 8, 2), C(64, 32, 8, 2), C(64, 32, 8, 2)),
    ("dq_t", 128): R(C(64, 32, 8, 2), C(32, 32, 8, 2), C(32, 32, 8, 2)),
    ("dq_t", 256): same(C(32, 32, 8, 1)),
    ("dkv_t", 64): R(C(32, 64, 8, 2), C(32, 64, 8, 2), C(32, 32, 8, 2)),
    ("dkv_t", 128): R(C(32, 64, 8, 2), C(32, 32, 8, 2), C(32, 32, 8, 2)),
    ("dkv_t", 256): same(C(16, 32, 8, 1)),
    ("dmask_t", 256): same(C(32, 32, 8, 1)),
}
SMALL: Table = AMPERE | {  # 16 bits on sm_86, sm_89, sm_120: mma.sync, 99 KB
    ("forward", 64): R(C(128, 64, 8, 3), C(128, 64, 8, 3), C(128, 32, 8, 3)),
    ("forward", 128): R(C(128, 64, 8, 3), C(128, 64, 8, 2), C(128, 32, 8, 2)),
    ("forward", 256): R(C(64, 32, 4, 2), C(64, 32, 8, 2), C(64, 32, 8, 2)),
    ("dq", 256): R(C(32, 32, 4, 2), C(32, 32, 8, 2), C(32, 32, 8, 2)),
    ("dkv", 256): R(C(32, 32, 4, 2), C(32, 32, 8, 2), C(32, 32, 8, 2)),
    ("forward", 576): same(C(32, 16, 8, 1)),
    ("decode", 576): same(C(16, 16, 4, 1)),
    ("jvp", 128): same(C(64, 32, 8, 2)),
    ("jvp", 256): same(C(32, 32, 8, 1)),
    ("dq_t", 128): same(C(32, 32, 8, 2)),
    ("dq_t", 256): same(C(16, 16, 4, 1)),
    ("dkv_t", 128): same(C(32, 32, 8, 2)),
    ("dkv_t", 256): same(C(16, 16, 4, 1)),
    ("dmask_t", 256): same(C(16, 16, 4, 1)),
}
HOPPER: Table = {  # 16 bits on sm_90: wgmma needs 64 rows and warps in fours; TMA; 227 KB
    ("forward", 64): R(C(128, 128, 8, 3), C(128, 128, 8, 3), C(128, 64, 8, 2),
        mask=C(128, 128, 8, 2)),
    ("forward", 128): R(C(128, 128, 8, 3), C(128, 128, 8, 3), C(128, 64, 8, 2),
        mask=C(128, 128, 8, 2), dropout=C(128, 64, 8, 3)),
    ("forward", 256): R(C(128, 64, 8, 2), C(128, 64, 8, 2), C(128, 32, 8, 2),
        dropout=C(128, 32, 8, 2)),
    ("dq", 64): R(C(128, 128, 8, 3), C(128, 128, 8, 3), C(128, 64, 8, 2),
        mask=C(128, 128, 8, 2), dropout=C(128, 64, 8, 3)),
    ("dq", 128): R(C(128, 64, 8, 3), C(128, 64, 8, 3), C(128, 32, 8, 2)),
    ("dq", 256): R(C(128, 32, 8, 2), C(128, 32, 8, 2), C(64, 32, 8, 2)),
    ("dkv", 64): R(C(64, 128, 8, 3), C(64, 128, 8, 3), C(32, 128, 8, 2), narrow=C(64, 128, 8, 2)),
    ("dkv", 128): R(C(64, 128, 8, 3), C(32, 128, 8, 3), C(16, 64, 8, 2),
        softcap=C(64, 128, 8, 2), narrow=C(32, 128, 8, 2)),
    ("dk", 256): R(C(32, 128, 8, 2), C(32, 128, 8, 2), C(16, 64, 8, 2), dropout=C(16, 128, 8, 2)),
    ("dv", 256): R(C(64, 128, 8, 2), C(64, 128, 8, 2), C(16, 64, 8, 2),
        mask=C(32, 128, 8, 2), dropout=C(32, 128, 8, 2), narrow=C(32, 128, 8, 2)),
    ("dmask", 256): same(C(128, 64, 8, 1)),
    ("weights", 256): same(C(128, 64, 8, 1)),
    ("decode", 128): R(C(16, 64, 2, 3), C(16, 64, 2, 3), C(16, 64, 4, 3),
        narrow=C(16, 64, 4, 3)),
    ("decode", 256): same(C(16, 64, 4, 2)),
    ("forward", 576): same(C(64, 32, 8, 2)),
    ("decode", 576): same(C(64, 32, 8, 2)),
    ("jvp", 64): R(C(128, 64, 8, 2), C(128, 64, 8, 2), C(64, 32, 4, 2)),
    ("jvp", 128): R(C(128, 64, 8, 2), C(64, 32, 4, 2), C(64, 32, 4, 2)),
    ("jvp", 256): same(C(64, 32, 4, 1)),
    ("dq_t", 64): R(C(128, 64, 8, 2), C(64, 32, 4, 2), C(64, 32, 4, 2)),
    ("dq_t", 128): R(C(128, 32, 8, 2), C(64, 32, 4, 2), C(64, 16, 4, 2)),
    ("dq_t", 256): same(C(64, 16, 4, 1)),
    ("dkv_t", 64): R(C(32, 128, 8, 2), C(16, 128, 8, 2), C(16, 128, 8, 2)),
    ("dkv_t", 256): same(C(16, 64, 8, 1)),
    ("dk_t", 128): R(C(32, 128, 8, 2), C(16, 128, 8, 2), C(16, 128, 8, 2)),
    ("dv_t", 128): R(C(32, 128, 8, 2), C(16, 128, 8, 2), C(16, 128, 8, 2)),
    ("dmask_t", 256): same(C(64, 32, 4, 1)),
}
BLACKWELL: Table = HOPPER | {  # 16 bits on sm_100: sums are in tensor memory, which has 512 columns
    ("dkv", 64): R(C(64, 128, 8, 2), C(64, 128, 8, 2), C(32, 128, 8, 2)),
    ("dkv", 128): R(C(64, 128, 8, 2), C(64, 128, 8, 2), C(32, 64, 8, 2)),
    ("dq_t", 64): R(C(128, 32, 8, 2), C(64, 32, 4, 2), C(64, 32, 4, 2)),
    ("dkv_t", 64): same(C(16, 128, 8, 2)),
    ("dk_t", 128): same(C(16, 128, 8, 2)),
    ("dv_t", 128): same(C(16, 128, 8, 2)),
}
FLOAT32: Table = {  # IEEE products are FMAs of every thread: small tiles, on every chip
    ("forward", 64): same(C(64, 32, 8, 2)),
    ("forward", 128): R(C(32, 16, 8, 2), C(32, 32, 8, 2), C(32, 32, 8, 2)),
    ("forward", 256): R(C(32, 16, 8, 1), C(32, 32, 8, 1), C(32, 32, 8, 1)),
    ("dq", 128): R(C(32, 16, 8, 2), C(32, 32, 8, 2), C(32, 32, 8, 2)),
    ("dq", 256): same(C(16, 16, 8, 2)),
    ("dkv", 64): same(C(32, 32, 8, 2)),
    ("dkv", 128): same(C(16, 32, 8, 2)),
    ("dkv", 256): same(C(16, 16, 8, 2)),
    ("dmask", 128): same(C(32, 32, 8, 1)),
    ("dmask", 256): same(C(16, 32, 8, 1)),
    ("weights", 256): same(C(32, 32, 8, 1)),
    ("decode", 128): same(C(16, 32, 8, 2)),
    ("decode", 256): same(C(16, 16, 4, 1)),
    ("forward", 576): same(C(16, 16, 8, 1)),
    ("decode", 576): same(C(16, 16, 8, 1)),
    ("jvp", 128): same(C(32, 32, 8, 1)),
    ("jvp", 256): same(C(16, 16, 8, 1)),
    ("dq_t", 128): same(C(32, 16, 8, 1)),
    ("dq_t", 256): same(C(16, 16, 8, 1)),
    ("dkv_t", 128): same(C(16, 32, 8, 1)),
    ("dkv_t", 256): same(C(16, 16, 8, 1)),
    ("dmask_t", 256): same(C(16, 16, 8, 1)),
}
TURING: Table = {  # sm_75, every dtype: FMAs too, 64 KB, and no loads in flight during products
    ("forward", 64): same(C(64, 32, 8, 1)),
    ("forward", 128): same(C(32, 32, 8, 1)),
    ("forward", 256): same(C(32, 16, 8, 1)),
    ("dq", 64): same(C(64, 16, 8, 1)),
    ("dq", 256): same(C(16, 16, 8, 1)),
    ("dkv", 64): same(C(32, 32, 8, 1)),
    ("dkv", 128): same(C(16, 16, 8, 1)),
    ("dkv", 256): same(C(16, 8, 4, 1)),
    ("dmask", 128): same(C(16, 32, 8, 1)),
    ("dmask", 256): same(C(16, 16, 8, 1)),
    ("weights", 64): same(C(32, 32, 8, 1)),
    ("weights", 256): same(C(16, 16, 8, 1)),
    ("decode", 128): same(C(16, 32, 8, 1)),
    ("decode", 256): same(C(16, 16, 4, 1)),
    ("forward", 576): same(C(8, 16, 4, 1)),
    ("decode", 576): same(C(8, 16, 4, 1)),
    ("jvp", 64): same(C(32, 32, 8, 1)),
    ("jvp", 256): same(C(16, 16, 8, 1)),
    ("dq_t", 64): same(C(32, 16, 8, 1)),
    ("dq_t", 128): same(C(16, 16, 8, 1)),
    ("dq_t", 256): same(C(8, 16, 4, 1)),
    ("dkv_t", 64): same(C(16, 32, 8, 1)),
    ("dkv_t", 256): same(C(16, 8, 4, 1)),
    ("dmask_t", 256): same(C(16, 16, 8, 1)),
}
# fmt: on

# float32 on tensor cores: in parts (kernels/tile.py), and in tf32
# fmt: off
AMPERE_PARTS: Table = {  # of tf32 on sm_80: right sides are in registers, so tiles are narrow
    ("forward", 64): R(C(64, 32, 4, 2), C(64, 32, 4, 2), None),
    ("forward", 128): R(C(128, 16, 8, 2), C(128, 16, 8, 2), None),
    ("dq", 64): R(C(64, 16, 4, 2), C(64, 16, 4, 2), None),
    ("dq", 128): R(C(32, 32, 8, 1), None, None),
    ("dkv", 64): R(C(16, 64, 4, 2), C(16, 64, 4, 2), None),
    ("dk", 128): R(C(32, 32, 8, 1), None, None),
    ("dv", 128): R(C(16, 128, 8, 2), None, None),
    ("decode", 64): R(C(16, 32, 2, 2), C(16, 32, 2, 2), None),
    ("decode", 128): R(C(16, 32, 4, 2), C(16, 32, 4, 2), None),
}
HOPPER_PARTS: Table = {  # of bfloat16 on sm_90. Tiles of plain calls, but decoding, were timed
    ("forward", 64): R(C(128, 128, 8, 2), C(128, 64, 8, 2), C(128, 64, 8, 2)),
    ("forward", 128): R(C(128, 64, 8, 1), C(128, 64, 8, 1), C(128, 32, 8, 2)),
    ("dq", 64): R(C(128, 64, 8, 2), C(128, 64, 8, 2), C(128, 32, 8, 2)),
    ("dq", 128): same(C(128, 32, 8, 1)),
    ("dkv", 64): R(C(32, 64, 4, 2), C(32, 128, 8, 2), C(32, 128, 8, 2)),
    ("dk", 128): same(C(32, 128, 8, 1)),
    ("dv", 128): R(C(64, 128, 8, 1), C(64, 128, 8, 1), C(32, 128, 8, 1)),
    ("decode", 64): same(C(16, 32, 2, 2)),
    ("decode", 128): same(C(16, 32, 4, 2)),
}
AMPERE_TF32: Table = {  # one product of tf32 on sm_80
    ("forward", 64): R(C(128, 64, 4, 2), C(128, 64, 8, 2), None),
    ("forward", 128): R(C(128, 64, 8, 2), C(128, 32, 8, 2), None),
    ("dq", 64): R(C(128, 32, 8, 2), C(128, 32, 8, 2), None),
    ("dq", 128): R(C(128, 16, 8, 2), None, None),
    ("dkv", 64): R(C(32, 128, 8, 2), C(32, 128, 8, 2), None),
    ("dkv", 128): R(C(32, 64, 8, 2), None, None),
}
HOPPER_TF32: Table = {  # one product of tf32 on sm_90. Tiles of plain calls were timed
    ("forward", 64): R(C(128, 128, 8, 2), C(128, 128, 8, 2), C(128, 64, 8, 2),
        mask=C(128, 64, 8, 2)),
    ("forward", 128): R(C(128, 64, 8, 2), C(128, 64, 8, 2), C(128, 32, 8, 2),
        mask=C(128, 32, 8, 2)),
    ("dq", 64): same(C(128, 64, 8, 2)),
    ("dq", 128): same(C(128, 32, 8, 2)),
    ("dkv", 64): R(C(64, 128, 8, 2), C(64, 128, 8, 2), C(32, 128, 8, 2), dropout=C(32, 128, 8, 2)),
    ("dk", 128): R(C(32, 128, 8, 2), C(32, 128, 8, 2), C(32, 128, 8, 1), mask=C(32, 128, 8, 1)),
    ("dv", 128): R(C(64, 128, 8, 2), C(64, 128, 8, 2), C(32, 128, 8, 2), mask=C(32, 128, 8, 2)),
}
# fmt: on

# How a chip multiplies float32 in parts (kernels/tile.py). Others take IEEE products: on sm_86, 89
# and 120 three products of tf32 take longer; on sm_100 most such tiles spill registers in loops.
PARTS = {80: "tf32x3", 90: "bf16x6"}
OF_PRECISION = {  # where a precision has no tile, FLOAT32's serves: for IEEE products or tf32
    (80, "tf32x3"): AMPERE_PARTS,
    (90, "bf16x6"): HOPPER_PARTS,
    (80, "tf32"): AMPERE_TF32,
    (90, "tf32"): HOPPER_TF32,
}

BY_ROWS = C(32, 32, 4, 1)  # for passes without products
WITHOUT_PRODUCTS = ("delta", "rates", "combine", "index_check")
READING = dict(warps=8, stages=2)  # to read a mask for its structure: no products either
# By arch, of 16 bits; TURING is of all dtypes.
TABLES = {75: TURING, 80: AMPERE, 86: SMALL, 90: HOPPER, 100: BLACKWELL, 120: SMALL}
# Most KB of shared memory that a block may opt in to on these chips (CUDA programming guide, table
# of technical specifications per compute capability). Every tile of their tables fits.
SHARED = {75: 64, 80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
TENSOR_CORES = 80  # the oldest chip that Triton multiplies on by tensor cores


def precision(arch: int, asked: str) -> str:
    """`Flags.precision` of float32 on a chip if the user asks for "parts", "tf32" or "ieee"."""
    if 0 < arch < TENSOR_CORES:
        return "ieee"
    return PARTS.get(arch, "ieee") if asked == "parts" else asked


def of_precision(
    which: str, arch: int, itemsize: int, head_dim: int, busy: Sequence[str], precision: str
) -> Config | None:
    """The tile of one pass in a table of its precision; None if it has none there."""
    table = OF_PRECISION.get((arch, precision)) if itemsize == 4 else None
    row = _of_pass(table, which, head_dim) if table else None
    return _of_features(row, busy) if row else None


def products(
    which: str, arch: int, itemsize: int, head_dim: int, busy: Sequence[str], precision: str
) -> str:
    """How one pass of a call with this precision multiplies: by IEEE where parts have no tile.
    Errors of both are small beside the budget of float32, so passes of a call may differ."""
    mine = of_precision(which, arch, itemsize, head_dim, busy, precision)
    return precision if mine or precision not in PARTS.values() else "ieee"


def config(
    which: str,
    arch: int,
    itemsize: int,
    head_dim: int,
    busy: Sequence[str],
    precision: str = "ieee",
) -> Config:
    """The tile of one pass.

    arch is 90 for compute capability 9.0, or 0 for the interpreter; itemsize is the inputs', in
    bytes; busy names what needs registers: FEATURES, "narrow", or anything else, which counts as
    several features. A chip without a table uses that of the nearest older one. Raises ValueError
    for chips older than every table.
    """
    if not arch:
        return INTERPRETED
    if which in WITHOUT_PRODUCTS:
        return BY_ROWS
    if which == "dq_captured":  # dq, and words of 64 bits for every score
        tile = config("dq", arch, itemsize, head_dim, (*busy, "captured"))
        return tile._replace(BN=max(16, tile.BN // 2))
    if tile := of_precision(which, arch, itemsize, head_dim, busy, precision):
        return tile
    row = _of_pass(_table(arch, itemsize), which, head_dim)
    tile = _of_features(row, busy) if row else None
    assert tile is not None, "these tables have every pass and feature"
    return tile


def _of_features(row: Row, busy: Sequence[str]) -> Config | None:
    if not busy:
        return row.plain
    if len(busy) > 1 or busy[0] not in (*FEATURES, "narrow"):
        return row.several
    return getattr(row, busy[0]) or row.one


# A chip without a table may have less shared memory than the one that lends it a table, and a call
# may need more than those that `make aot` compiles. So a kernel that is compiled says what it
# needs, and where the chip has less the launcher takes the next smaller tile. Registers always
# suffice: ptxas compiles for the threads of a tile, and spills what is left over.


def lacks_room(arch: int, room: int) -> bool:
    """True if a chip with `room` bytes of shared memory for a block has less than that of its
    table."""
    return room < SHARED[nearest(arch)] << 10


def smaller(which: str, tile: Config) -> Config | None:
    """The next smaller tile of a pass, None after the smallest. Of its two sides the longer one is
    halved. Two stages go late: loads in flight during products are worth more than a large tile."""
    summed = "BM" if which.startswith(("dk", "dv")) else "BN"  # over which products add up
    sides = sorted(("BN", "BM"), key=lambda side: -getattr(tile, side))
    halves = [x for x in sides if getattr(tile, x) > (16 if x == summed else 8)]
    if tile.stages > 2 or (tile.stages == 2 and max(tile[:2]) <= 32):
        return tile._replace(stages=tile.stages - 1)
    return tile._replace(**{halves[0]: getattr(tile, halves[0]) // 2}) if halves else None


def smallest(which: str, tile: Config) -> Config:
    return smallest(which, below) if (below := smaller(which, tile)) else tile


def reading(tile: Config) -> Config:
    """The tile with the launch options for the kernel that reads a mask for its structure."""
    return tile._replace(**READING)


# Instructions were counted, not time. To look at 64 x 64 numbers of a mask takes 1292, once. Their
# scores (D64) take 954 in forward, and half as many again if the mask is read, in each head. So the
# look pays off from 3 heads on if the mask hides nothing, and from 2 if it is causal. If the mask
# must be read anyway, the look adds 23% with 4 heads, 11% with 8. It also takes a launch, as long
# as half of 2^24 scores take (2 GFLOP of D64: 5 microseconds).
STRUCTURED = 1 << 24  # the fewest scores, of all heads, for which a mask is looked at
SHARING = 4  # the fewest heads, of all items, for each plane of the mask


def structured(heads: int, planes: int, M: int, N: int) -> bool:
    """True if a mask is looked at for its structure before it is used. heads: of all items."""
    shared = heads >= SHARING * planes
    return M > DECODE_ROWS and shared and heads * M * N >= STRUCTURED


def apart(
    arch: int,
    itemsize: int,
    head_dim: int,
    busy: Sequence[str] = (),
    precision: str = "ieee",
    which: str = "dk",
) -> bool:
    """True if dK and dV take two launches, because their sums together need too many registers.
    which: dk, or dk_t for their tangents."""
    if not arch:
        return False
    mine = of_precision(which, arch, itemsize, head_dim, busy, precision)
    table = OF_PRECISION[arch, precision] if mine else _table(arch, itemsize)
    return _row(table, which, head_dim) is not None


def nearest(arch: int) -> int:
    """The chip with the table for this one: itself, else the nearest older one."""
    found = max((x for x in TABLES if x <= arch), default=None)
    if found is None:
        raise ValueError(f"arch: got {arch}, expected {min(TABLES)} or newer")
    return found


def _table(arch: int, itemsize: int) -> Table:
    chip = nearest(arch)
    return FLOAT32 if itemsize == 4 and chip >= TENSOR_CORES else TABLES[chip]


def _row(table: Table, which: str, head_dim: int) -> Row | None:
    """The row of a head dim, else of the next larger one. Rows of dk and dv serve no smaller head
    dims of `BUCKETS`: where dk and dv have no row, they use dkv's."""
    for d in BUCKETS:
        near = which not in ("dk", "dv", "dk_t", "dv_t") or d // 2 < head_dim
        if d >= head_dim and near and (row := table.get((which, d))):
            return row
    return None


def _of_pass(table: Table, which: str, head_dim: int) -> Row | None:
    """The row of a pass: that of dkv where dk or dv have none, and of dk where dkv has none."""
    stem, end = which.removesuffix("_t"), "_t" if which.endswith("_t") else ""
    names = (which, f"dkv{end}", f"dk{end}") if stem in ("dkv", "dk", "dv") else (which,)
    return next((row for x in names if (row := _row(table, x, head_dim))), None)


def candidates(which: str, tile: Config) -> list[Config]:
    """A few other tiles that `tune` races: one step away from `tile`, and halves of it
    with half its warps, so that a multiprocessor holds two."""
    if which not in TUNED:  # the mask's buffers are sized for one tile; the others hardly differ
        return []
    least = 16 if which == "decode" else 32
    tiles = [
        tile._replace(stages=tile.stages + 1),
        tile._replace(stages=max(1, tile.stages - 1)),
        tile._replace(warps={2: 4, 4: 8, 8: 4}[tile.warps]),
        tile._replace(BN=max(least, tile.BN // 2)),
        tile._replace(BN=min(128, tile.BN * 2)),
        tile._replace(BM=max(least, tile.BM // 2)),
        tile._replace(BM=min(128, tile.BM * 2)),
    ]
    if tile.warps == 8:
        half = tile._replace(warps=4, stages=2)
        tiles += [
            half._replace(BN=max(least, tile.BN // 2)),
            half._replace(BM=max(least, tile.BM // 2)),
        ]
    return [c for c in dict.fromkeys(tiles) if c != tile]


# ------------------------------------------------------------- decoding: keys split among programs

DECODE_ROWS = 16  # the largest M for which keys are split
FEW_TILES = 4  # so few tiles of keys are not worth a second pass that combines parts
DECODING = {80: 2, 86: 1, 90: 3, 100: 3, 120: 1}  # programs that a multiprocessor holds, by arch


def decoding(arch: int) -> int:
    """How many programs of a decoding call a multiprocessor works on at a time."""
    return next((n for x, n in sorted(DECODING.items(), reverse=True) if x <= arch), 1)


@functools.lru_cache(maxsize=4096)
def splits(programs: int, tiles: int, processors: int) -> int:
    """The number of parts into which `programs` split their `tiles` of keys: no part is empty.

    It is the smallest number that keeps the processors nearly as busy as any: at the end of a call
    some processors wait for others. It is 1 if they are busy without a split. The CUDA kernels have
    the same rule in C++ (csrc/cuda/splits.h).
    """
    BUSY, NEARLY = 0.8, 0.85
    if programs >= BUSY * processors:
        return 1

    def busy(parts: int) -> float:
        waves = -(-programs * parts // processors)
        return programs * tiles / (waves * -(-tiles // parts) * processors)

    candidates = range(1, min(tiles, processors) + 1)
    best = max(map(busy, candidates))
    return next(parts for parts in candidates if busy(parts) >= NEARLY * best)


def other_splits(parts: int, tiles: int) -> list[int]:
    """Other numbers of parts that `tune` races: no part is empty."""
    asked = (max(1, parts // 2), min(tiles, 2 * parts), 1)
    return [-(-tiles // -(-tiles // x)) for x in asked]
