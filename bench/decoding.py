"""Decoding: a few rows of queries on long keys, where reading the keys and values is the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .cases import BOTH, Case

ROWS = (1, 4, 16)
LENGTHS = (4096, 8192, 16384)
D = 128
HEADS = {"MHA": (8, 8), "GQA": (32, 8)}  # (H, Hk): both read as much


def cases(
    device: str,
    dtypes: Sequence[str] = BOTH,
    rows: Sequence[int] = ROWS,
    lengths: Sequence[int] = LENGTHS,
    dim: int = D,
) -> Iterator[Case]:
    for dtype in dtypes:
        for h, hk in HEADS.values():
            for n in lengths:
                for m in rows:
                    yield Case(device, dtype, "full", 1, h, n, dim, Hk=hk, M=m)
