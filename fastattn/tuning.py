"""Tiles for the Triton kernels: tables, chosen by what compiled with few spilled registers.

`make aot` compiles every row, and bench/results/aot-triton-*.txt has what each became. Where two
tiles fit in registers, the larger one is here: it reads keys and values less often.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
from typing import NamedTuple


class Config(NamedTuple):
    """A tile of BM query rows by BN keys, and how it is worked on."""

    BM: int
    BN: int
    warps: int
    stages: int  # tiles in flight at a time


@functools.cache
def triton_version() -> str | None:
    """Of the Triton that is installed, under whatever name; None if there is none."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a vendor's build, or none
        with contextlib.suppress(ImportError):
            return getattr(importlib.import_module("triton"), "__version__", None)
        return None


C = Config
INTERPRETED = C(32, 32, 4, 1)
PASSES = ("forward", "delta", "dq", "dkv", "dmask", "decode", "combine", "weights")
BUCKETS = (64, 128, 256)  # head dims: the larger of q's and v's
TUNED = ("forward", "dq", "dkv", "decode", "weights")  # what FASTATTN_AUTOTUNE searches

Row = tuple[Config, Config]  # of plain calls, and of those whose features need registers
Table = dict[tuple[str, int], Row]  # by pass and head dim

# A row's comment is what it was chosen by: registers of a thread / spill instructions of the plain
# tile in a causal call with grouped heads, then of the other with every feature at once (-: no such
# call; inner: within one loop over tiles), by Triton 3.9.0, the 99 KB table for sm_120. The reports
# have what they are now.

# fmt: off
AMPERE: Table = {  # 16 bits on sm_80: mma.sync, cp.async, 163 KB of shared memory
    ("forward", 64): (C(128, 64, 4, 3), C(128, 64, 8, 2)),  # 255/2, 255/0
    ("forward", 128): (C(128, 64, 8, 3), C(128, 32, 8, 2)),  # 212/0, 255/0
    ("forward", 256): (C(64, 64, 8, 2), C(64, 32, 8, 2)),  # 255/4, 255/0
    ("dq", 64): (C(128, 64, 8, 2), C(128, 32, 8, 2)),  # 190/0, 255/0
    ("dq", 128): (C(64, 64, 8, 2), C(64, 32, 8, 2)),  # 188/0, 255/0
    ("dq", 256): (C(64, 32, 8, 2), C(32, 32, 8, 2)),  # 193/0, 174/0
    ("dkv", 64): (C(64, 128, 8, 2), C(32, 64, 8, 2)),  # 255/57, 255/363 (21 inner)
    ("dkv", 128): (C(64, 64, 8, 2), C(16, 64, 8, 2)),  # 255/25, 255/130
    ("dkv", 256): (C(32, 32, 8, 2), C(32, 32, 8, 2)),  # 255/15, 255/212
    ("dmask", 256): (C(64, 64, 8, 1), C(64, 64, 8, 1)),  # -, 255/124
    ("weights", 256): (C(64, 64, 8, 1), C(64, 64, 8, 1)),  # 164/0, 186/0
    ("decode", 128): (C(16, 64, 4, 3), C(16, 64, 4, 3)),  # 142/0, 255/32
    ("decode", 256): (C(16, 64, 4, 2), C(16, 64, 4, 2)),  # 202/0, 255/81
}
SMALL: Table = AMPERE | {  # 16 bits on sm_86, sm_89, sm_120: mma.sync, 99 KB
    ("forward", 64): (C(128, 64, 8, 3), C(128, 32, 8, 3)),  # 178/0, 248/0
    ("forward", 128): (C(128, 64, 8, 3), C(128, 32, 8, 2)),  # 255/103 (26 inner), 255/32 (6 inner)
    ("forward", 256): (C(64, 32, 8, 2), C(64, 32, 8, 2)),  # 180/0, 254/0
    ("dq", 256): (C(32, 32, 8, 2), C(32, 32, 8, 2)),  # 142/0, 170/0
}
HOPPER: Table = {  # 16 bits on sm_90: wgmma wants 64 rows and warps in fours; TMA; 227 KB
    ("forward", 64): (C(128, 128, 8, 3), C(128, 64, 8, 2)),  # 188/0, 218/0
    ("forward", 128): (C(128, 128, 8, 2), C(128, 64, 8, 2)),  # 219/0, 255/128 (27 inner)
    ("forward", 256): (C(128, 64, 8, 2), C(128, 32, 8, 2)),  # 219/0, 255/29 (9 inner)
    ("dq", 64): (C(128, 128, 8, 2), C(128, 64, 8, 2)),  # 213/0, 230/0
    ("dq", 128): (C(128, 64, 8, 2), C(128, 32, 8, 2)),  # 165/0, 246/0
    ("dq", 256): (C(128, 32, 8, 2), C(64, 32, 8, 2)),  # 207/0, 255/158 (15 inner)
    ("dkv", 64): (C(64, 128, 8, 3), C(32, 128, 8, 2)),  # 248/0, 255/197
    ("dkv", 128): (C(32, 128, 8, 2), C(16, 64, 8, 2)),  # 255/49, 255/63
    ("dkv", 256): (C(16, 64, 8, 2), C(16, 64, 8, 2)),  # 255/123 (7 inner), 255/355 (56 inner)
    ("dmask", 256): (C(128, 64, 8, 1), C(128, 64, 8, 1)),  # -, 192/0
    ("weights", 256): (C(128, 64, 8, 1), C(128, 64, 8, 1)),  # 224/0, 255/6
    ("decode", 128): (C(16, 64, 4, 3), C(16, 64, 4, 3)),  # 96/2, 168/0
    ("decode", 256): (C(16, 64, 4, 2), C(16, 64, 4, 2)),  # 110/0, 189/0
}
BLACKWELL: Table = HOPPER | {  # 16 bits on sm_100: sums lie in tensor memory, 512 columns of it
    ("dkv", 64): (C(64, 64, 8, 2), C(32, 128, 8, 2)),  # 254/0, 255/139
    ("dkv", 128): (C(64, 128, 8, 2), C(32, 64, 8, 2)),  # 255/208, 255/124
    ("dkv", 256): (C(32, 64, 8, 2), C(16, 64, 8, 2)),  # 255/465, 255/544; 64 keys fill its products
}
FLOAT32: Table = {  # IEEE products are FMAs of every thread: small tiles, on every chip
    ("forward", 64): (C(64, 32, 8, 2), C(64, 32, 8, 2)),  # 80/2, 128/6
    ("forward", 128): (C(32, 16, 8, 2), C(32, 32, 8, 2)),  # 80/0, 128/8
    ("forward", 256): (C(32, 16, 8, 1), C(32, 32, 8, 1)),  # 128/0, 255/0
    ("dq", 128): (C(32, 16, 8, 2), C(32, 32, 8, 2)),  # 80/0, 128/6
    ("dq", 256): (C(16, 16, 8, 2), C(16, 16, 8, 2)),  # 74/0, 108/0
    ("dkv", 64): (C(32, 32, 8, 2), C(32, 32, 8, 2)),  # 128/4, 255/18
    ("dkv", 128): (C(16, 32, 8, 2), C(16, 32, 8, 2)),  # 128/21, 255/20
    ("dkv", 256): (C(16, 16, 8, 2), C(16, 16, 8, 2)),  # 186/0, 255/5
    ("dmask", 128): (C(32, 32, 8, 1), C(32, 32, 8, 1)),  # -, 243/0
    ("dmask", 256): (C(16, 32, 8, 1), C(16, 32, 8, 1)),  # -, 113/0
    ("weights", 256): (C(32, 32, 8, 1), C(32, 32, 8, 1)),  # 120/0, 144/0
    ("decode", 128): (C(16, 32, 8, 2), C(16, 32, 8, 2)),  # 64/0, -
    ("decode", 256): (C(16, 16, 4, 1), C(16, 16, 4, 1)),  # 168/12, 168/0
}
# fmt: on

BY_ROWS = C(32, 32, 4, 1)  # delta and combine: no products, bound by memory
TABLES = {80: AMPERE, 86: SMALL, 90: HOPPER, 100: BLACKWELL, 120: SMALL}  # 16-bit, by arch


def config(which: str, arch: int, itemsize: int, head_dim: int, busy: bool) -> Config:
    """The tile of one pass.

    arch is 90 for compute capability 9.0, or 0 for the interpreter; itemsize is the inputs', in
    bytes; busy says that features need registers in every score (dropout, softcap, ALiBi, a mask).
    A chip without a table has that of the nearest older one. Raises ValueError for chips older
    than every table.
    """
    if not arch:
        return INTERPRETED
    if which in ("delta", "combine"):
        return BY_ROWS
    nearest = max((x for x in TABLES if x <= arch), default=None)
    if nearest is None:
        raise ValueError(f"arch: got {arch}, expected {min(TABLES)} or newer")
    table = FLOAT32 if itemsize == 4 else TABLES[nearest]
    return next(table[which, d] for d in BUCKETS if d >= head_dim and (which, d) in table)[busy]


def candidates(which: str, tile: Config) -> list[Config]:
    """A few other tiles that FASTATTN_AUTOTUNE tries: one step away from `tile`."""
    if which not in TUNED:  # the mask's buffers are cut for one tile; the others hardly differ
        return []
    least = 16 if which == "decode" else 32
    found = [
        tile._replace(stages=tile.stages + 1),
        tile._replace(stages=max(1, tile.stages - 1)),
        tile._replace(warps=12 - tile.warps),  # 4 for 8, 8 for 4
        tile._replace(BN=max(least, tile.BN // 2)),
        tile._replace(BN=min(128, tile.BN * 2)),
        tile._replace(BM=max(least, tile.BM // 2)),
        tile._replace(BM=min(128, tile.BM * 2)),
    ]
    return [c for c in dict.fromkeys(found) if c != tile]


# ------------------------------------------------------------- decoding: keys split among programs

DECODE_ROWS = 16  # up to here, M is few enough to split the keys
FEW_TILES = 4  # of keys: not worth a second pass to combine


@functools.lru_cache(maxsize=4096)
def splits(programs: int, tiles: int, processors: int) -> int:
    """Into how many parts `programs` split their `tiles` of keys: no part is empty.

    The fewest with which the processors are nearly as busy as with any number: at the end of a
    call some wait for others. One where they are busy as it is. The CUDA kernels have the same
    rule in C++ (csrc/cuda/splits.h).
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
