"""The rows that engines are held against: prompts, packed prompts, one row on a cache, and one row
on a cache of eight or four bits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cases import DTYPES

PREFILL, PACKED, DECODE, STORAGE = "prefill", "packed", "decode", "storage"


@dataclass(frozen=True)
class Row:
    """q is (B, H, M, D), k and v are (B, Hk, N, D); packed, (T, H, D) with `lengths`. `storage` is
    the width of the cache that the row asks for; "" is that of the dtype."""

    kind: str
    dtype: str
    H: int
    N: int
    D: int = 64
    causal: bool = False
    B: int = 1
    Hk: int = 0
    M: int = 0
    lengths: tuple[int, ...] = ()
    storage: str = ""
    quick: bool = False  # a row of --quick

    def __post_init__(self):
        object.__setattr__(self, "Hk", self.Hk or self.H)
        object.__setattr__(self, "M", self.M or self.N)

    @property
    def name(self) -> str:
        heads = f"{self.H}:{self.Hk}" if self.kind in (DECODE, STORAGE) else f"{self.H}"
        mask = "" if self.kind in (DECODE, STORAGE) else " causal" if self.causal else " full"
        storage = f" {self.storage}" if self.storage else ""
        keys = f"{self.lengths[0]}-{self.lengths[-1]}" if self.lengths else f"{self.N}"
        kind = DECODE if self.kind == STORAGE else self.kind
        return f"{kind} {self.dtype}{storage}{mask} B{self.B} H{heads} N{keys} D{self.D}"

    @property
    def width(self) -> str:
        """The precision that the row asks for: of the cache, or of all tensors."""
        return self.storage or self.dtype

    def tensors(self, seed: int = 0) -> dict[str, Tensor]:
        """Standard normal q, k and v."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DTYPES[self.dtype])

        if self.lengths:
            total = sum(self.lengths)
            shapes = [(total, heads, self.D) for heads in (self.H, self.Hk, self.Hk)]
        else:
            sizes = (self.H, self.M), (self.Hk, self.N), (self.Hk, self.N)
            shapes = [(self.B, heads, rows, self.D) for heads, rows in sizes]
        return {name: normal(*shape) for name, shape in zip("qkv", shapes, strict=True)}

    def expected(self, x: dict[str, Tensor]) -> Tensor:
        """The output in float64, (B, H, M, D) or (T, H, D)."""
        if not self.lengths:
            return _attention(x["q"], x["k"], x["v"], self.causal)
        parts = zip(*(y.split(list(self.lengths)) for y in x.values()), strict=True)
        dense = (
            _attention(*(y.transpose(0, 1)[None] for y in part), self.causal) for part in parts
        )
        return torch.cat([y[0].transpose(0, 1) for y in dense])

    def sizes(self) -> dict[str, Any]:
        """The fields that a worker gets."""
        return dataclasses.asdict(self)


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """A head at a time, so that scores of one head alone are held."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        s = q[b, h].double() @ k[b, h // group].double().mT / q.shape[-1] ** 0.5
        if causal:
            hidden = torch.ones(s.shape, dtype=torch.bool).triu(1 + s.shape[1] - s.shape[0])
            s.masked_fill_(hidden, -torch.inf)
        out[b, h] = torch.softmax(s, -1) @ v[b, h // group].double()
    return out


def store(x: Tensor, path: Path) -> tuple[str, str, list[int]]:
    """Write the numbers of a tensor, as they are in memory: (path, dtype, shape)."""
    file = torch.from_file(str(path), shared=True, size=x.numel(), dtype=x.dtype)
    file.copy_(x.flatten())
    return str(path), str(x.dtype).removeprefix("torch."), list(x.shape)


def _rows() -> Iterator[Row]:
    f32, bf16, f16 = DTYPES
    for n, heads, d in ((512, 8, 64), (2048, 4, 64), (4096, 2, 64), (2048, 4, 128)):
        yield Row(PREFILL, f32, heads, n, d, quick=n == 512)
    for d, (n, heads, batch) in itertools.product(
        (64, 128), ((64, 8, 8), (128, 8, 8), (512, 8, 1), (2048, 4, 1))
    ):
        yield Row(PREFILL, f32, heads, n, d, causal=True, B=batch, quick=(n, d) == (512, 64))
    for dtype in (bf16, f16):
        for causal, (n, heads) in itertools.product((False, True), ((512, 8), (2048, 4))):
            quick = not causal and n == 512
            yield Row(PREFILL, dtype, heads, n, causal=causal, quick=quick)
    # Encoders: the heads of BERT, base.
    for dtype, causal in ((f32, False), (f32, True), (bf16, False)):
        yield Row(PREFILL, dtype, 12, 128, causal=causal, B=8)
    yield Row(PREFILL, f32, 12, 16, B=8, quick=True)
    lengths = tuple(range(128, 1025, 128))
    for dtype, causal in itertools.product((f32, bf16), (False, True)):
        quick = dtype == f32 and not causal
        yield Row(PACKED, dtype, 8, 1024, causal=causal, B=8, lengths=lengths, quick=quick)
    decoded = (
        *((f32, 8, 8, 4096, 1), (f32, 8, 8, 8192, 1), (f32, 32, 32, 2048, 1)),
        *((f32, 32, 8, 4096, 1), (f32, 32, 8, 4096, 8)),
        *((bf16, 32, 8, 4096, 1), (bf16, 32, 8, 4096, 8), (bf16, 8, 8, 16384, 1)),
        *((f16, 8, 8, 1024, 1), (f16, 32, 32, 2048, 1), (f16, 32, 8, 4096, 8)),
    )
    for dtype, heads, key_heads, n, batch in decoded:
        quick = (dtype, n) in ((f32, 4096), (bf16, 4096), (f16, 1024)) and batch == 1
        yield Row(DECODE, dtype, heads, n, 128, B=batch, Hk=key_heads, M=1, quick=quick)
    for storage, heads in itertools.product(("int8", "fp8", "int4"), (8, 32)):
        quick = heads == 32 and storage == "int8"
        yield Row(STORAGE, bf16, heads, 8192, 128, Hk=8, M=1, storage=storage, quick=quick)


ROWS = tuple(_rows())


def selected(texts: Sequence[str], quick: bool) -> list[Row]:
    """The rows with any of these texts in their names; with `quick`, one row of each class.

    Raises ValueError if there is none."""
    chosen = [row for row in ROWS if not texts or any(text in row.name for text in texts)]
    chosen = [row for row in chosen if row.quick or not quick]
    if not chosen:
        names = "\n  ".join(row.name for row in ROWS)
        raise ValueError(f"--rows: got {list(texts)}, expected parts of these names:\n  {names}")
    return chosen
