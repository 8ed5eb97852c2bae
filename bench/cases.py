"""The measured cases. A Case defines the tensors; a pass is what is computed on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .masks import HIDDEN, MASKS, SWEPT, Mask

FORWARD, BACKWARD, TRAINING = "forward", "backward", "forward+backward"
PASSES = (FORWARD, BACKWARD, TRAINING)
PRODUCTS = {FORWARD: 2, BACKWARD: 5, TRAINING: 7}  # each 2 D operations per visible (row, key)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Inputs(NamedTuple):
    """The tensors of a case; bias is None where the mask has none."""

    q: Tensor  # (B, H, M, D)
    k: Tensor  # (B, Hk, N, D)
    v: Tensor  # (B, Hk, N, D)
    dout: Tensor  # (B, H, M, D)
    bias: Tensor | None = None  # (1, H, M, N)


@dataclass(frozen=True)
class Case:
    """q is (B, H, M, D), k and v are (B, Hk, N, D); mask is a key of MASKS. M = 0 means N, and
    Hk = 0 means H."""

    device: str
    dtype: str
    mask: str
    B: int
    H: int
    N: int
    D: int
    Hk: int = 0
    M: int = 0

    def __post_init__(self):
        if self.B != 1 and self.rule.learned:
            raise ValueError(f"B: got {self.B}, expected 1 where the bias has a gradient")
        object.__setattr__(self, "Hk", self.Hk or self.H)
        object.__setattr__(self, "M", self.M or self.N)

    def __str__(self) -> str:
        heads = "" if self.Hk == self.H else f" Hk{self.Hk}"
        rows = "" if self.M == self.N else f" M{self.M}"
        return f"{self.dtype} H{self.H}{heads}{rows} D{self.D} N{self.N} {self.mask}"

    @property
    def rule(self) -> Mask:
        return MASKS[self.mask]

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values: what one pass over them reads."""
        return 2 * self.B * self.Hk * self.N * self.D * DTYPES[self.dtype].itemsize

    def lengths(self) -> Tensor:
        """(B,) keys of each item: N, or with padding spread evenly around (1 - HIDDEN) N."""
        if not self.rule.padded:
            return torch.full((self.B,), self.N, device=self.device)
        spread = (2 * torch.arange(self.B, device=self.device) + 1) / self.B - 1
        return ((1 - HIDDEN + HIDDEN * spread) * self.N).long()

    def visible(self, start: int = 0, stop: int | None = None) -> Tensor:
        """(B, 1, stop - start, N) bool: the keys that these rows attend to."""
        i = torch.arange(start, self.M if stop is None else stop, device=self.device)[:, None]
        j = torch.arange(self.N, device=self.device)
        left, right = self.rule.left, self.rule.right
        hidden = self.N - self.lengths()[:, None, None, None]
        keep = j < self.N - hidden
        if left is not None:
            keep = keep & (j >= i - left)
        if right is not None:
            keep = keep & (j <= i + right)
        return keep.expand(self.B, 1, len(i), self.N)

    def compact_mask(self) -> Tensor:
        """`visible` as a caller would store it: (B, 1, M, N) for a dense mask, (1, 1, M, N) for
        a band, (B, 1, 1, N) for padding."""
        if self.rule.dense:
            return self.visible().contiguous()
        if self.rule.padded:
            return self.visible(0, 1).contiguous()
        return self.visible()[:1].contiguous()

    def stored(self) -> Tensor:
        """`compact_mask` as it is passed to a peer: bool, or float with -inf for hidden keys."""
        keep = self.compact_mask()
        if self.rule.dense != "float":
            return keep
        return torch.zeros(keep.shape, device=self.device).masked_fill(~keep, -torch.inf)

    def slopes(self) -> Tensor:
        """ALiBi's slopes (H,) as in its paper: 2^(-8 / H), its square, its cube, ..."""
        return 2 ** (-8.0 / self.H * torch.arange(1, self.H + 1, device=self.device))

    def pairs(self) -> int:
        """How many (row, key) pairs of one head the mask keeps, over all items."""
        i = torch.arange(self.M)[:, None]
        hidden = self.N - self.lengths().cpu()
        first, last = 0 * hidden, self.N - hidden
        if self.rule.left is not None:
            first = torch.maximum(first, i - self.rule.left)
        if self.rule.right is not None:
            last = (i + self.rule.right + 1).clamp_max(last)
        return int((last - first).clamp_min(0).expand(self.M, self.B).sum())

    def flops(self, what: str) -> float:
        """Useful floating-point operations of a pass: those of the pairs that the mask keeps."""
        return 2.0 * PRODUCTS[what] * self.H * self.pairs() * self.D

    def inputs(self, seed: int = 0) -> Inputs:
        """Standard normal tensors; the mask's rule may set the bias to ALiBi's."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator, device=self.device)
            return x.to(DTYPES[self.dtype])

        def heads(count: int, rows: int) -> Tensor:
            return normal(self.B, count, rows, self.D)

        q, k, v = heads(self.H, self.M), heads(self.Hk, self.N), heads(self.Hk, self.N)
        bias = None
        if self.rule.alibi:
            i = torch.arange(self.M, device=self.device)[:, None]
            j = torch.arange(self.N, device=self.device)
            bias = -self.slopes()[:, None, None] * (i - j).abs()[None, None]
        elif self.rule.biased:
            bias = normal(1, self.H, self.M, self.N)
        return Inputs(q, k, v, heads(self.H, self.M), bias)

    @property
    def leaves(self) -> tuple[str, ...]:
        """The inputs that get gradients."""
        return ("q", "k", "v", "bias") if self.rule.learned else ("q", "k", "v")


@dataclass(frozen=True)
class Grid:
    """Every combination of these axes."""

    lengths: tuple[int, ...]
    dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    masks: tuple[str, ...]

    def cases(self, device: str) -> Iterator[Case]:
        axes = itertools.product(self.dtypes, self.dims, self.masks, self.lengths)
        for dtype, d, mask, n in axes:
            b, h = batch_and_heads(device, n, d)
            yield Case(device, dtype, mask, b, h, n, d)


def batch_and_heads(device: str, n: int, d: int) -> tuple[int, int]:
    """Enough work to fill the device, little enough to repeat. On a GPU: 16k tokens of width 2048,
    as in flash-attention's benchmark. On a CPU: four heads, fewer for long sequences."""
    if device == "cuda":
        return max(1, 16384 // n), max(1, 2048 // d)
    return 1, 4 if n <= 1024 else 2 if n <= 4096 else 1


PLAIN, OTHERS = SWEPT[:2], SWEPT[2:]
BOTH = ("float32", "bfloat16")

# Several grids, not one product: full and causal masks at every size, other masks at a few. On
# two cores quick takes under two minutes and full under twenty. On a GPU quick has few kinds of
# calls, because Triton compiles four kernels or more for each.
GRIDS = {
    "quick": (
        Grid((128, 512, 2048), (64, 128), BOTH, PLAIN),
        Grid((1024,), (64,), BOTH, OTHERS),
        Grid((1024,), (64,), ("float16",), PLAIN),
    ),
    "quick on a GPU": (
        Grid((512, 2048, 8192), (64, 128), ("bfloat16",), PLAIN),
        Grid((2048,), (64,), ("bfloat16",), OTHERS),
        Grid((2048,), (64,), ("float16", "float32"), PLAIN[1:]),
    ),
    "full": (
        Grid((128, 256, 512, 1024, 2048, 4096), (32, 64, 128, 256), BOTH, PLAIN),
        Grid((8192,), (64,), BOTH, PLAIN),
        Grid((512, 2048), (64, 128), ("float16",), PLAIN),
        Grid((512, 1024, 2048, 4096), (64,), BOTH, OTHERS),
    ),
}
SECONDS = {
    "quick": 0.2,
    "quick on a GPU": 0.3,
    "full": 0.5,
}  # timing budget of a cell at one thread count
