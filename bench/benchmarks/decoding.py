"""Cases with a few rows of queries: decoding on long keys, where most time goes to reading keys and
values; and training, where writing their gradients costs as much again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..cases import BOTH, Case

ROWS = (1, 4, 16)
LENGTHS = (4096, 8192, 16384)
D = 128
HEADS = {"MHA": (8, 8), "GQA": (32, 8)}  # (H, Hk): both read the same bytes


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


# (B, H, M, N) of a few rows with gradients, as in class tokens, pooling and latents.
TRAINED = (
    *((64, 8, 1, 197), (1, 12, 1, 196), (1, 12, 2, 196), (1, 12, 3, 196)),
    *((16, 8, 1, 1024), (1, 1, 3, 70_000), (1, 8, 3, 70_000)),
)
TRAINED_D = 64


def trained(device: str, dtypes: Sequence[str] = ("float32",)) -> Iterator[Case]:
    for dtype in dtypes:
        for b, h, m, n in TRAINED:
            yield Case(device, dtype, "full", b, h, n, TRAINED_D, M=m)
