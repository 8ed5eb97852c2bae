"""What is measured. A Case fixes the tensors; a pass says what is computed on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

FORWARD = "forward"
TRAINING = "forward+backward"
PASSES = (FORWARD, TRAINING)
MASKS = ("full", "causal")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """Self-attention with q, k, v of (B, H, N, D); mask is one of MASKS."""

    device: str
    dtype: str
    mask: str
    B: int
    H: int
    N: int
    D: int

    def __str__(self) -> str:
        return f"{self.dtype} D{self.D} N{self.N} {self.mask}"

    def flops(self, phase: str) -> float:
        """Useful floating-point operations: two products forward and five backward, 2·D each, for
        every (query, key) pair that the mask keeps."""
        pairs = self.N * (self.N + 1) // 2 if self.mask == "causal" else self.N * self.N
        products = {"forward": 2, "backward": 5, "forward+backward": 7}[phase]
        return 2.0 * products * self.B * self.H * pairs * self.D

    def tensors(self, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """q, k, v and the gradient of the output, all standard normal."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (self.B, self.H, self.N, self.D)
        return tuple(
            torch.randn(shape, generator=generator, device=self.device).to(DTYPES[self.dtype])
            for _ in range(4)
        )


@dataclass(frozen=True)
class Sweep:
    """A grid of cases. seconds is the timing budget of one cell at one thread count."""

    name: str
    lengths: tuple[int, ...]
    dims: tuple[int, ...]
    dtypes: tuple[str, ...] = tuple(DTYPES)
    masks: tuple[str, ...] = MASKS
    passes: tuple[str, ...] = PASSES
    seconds: float = 0.4

    def cases(self, device: str) -> Iterator[Case]:
        for dtype, d, mask, n in itertools.product(
            self.dtypes, self.dims, self.masks, self.lengths
        ):
            b, h = batch_and_heads(device, n, d)
            yield Case(device, dtype, mask, b, h, n, d)


def batch_and_heads(device: str, n: int, d: int) -> tuple[int, int]:
    """Enough work to fill the device, little enough to repeat: on a GPU 16k tokens of width 2048
    (as flash-attention's own benchmark), on a CPU four heads, fewer when they are long."""
    if device == "cuda":
        return max(1, 16384 // n), max(1, 2048 // d)
    return 1, 4 if n <= 1024 else 2 if n <= 4096 else 1


SWEEPS = {
    "quick": Sweep("quick", (128, 512, 1024, 2048), (64, 128), seconds=0.4),
    "full": Sweep("full", (128, 256, 512, 1024, 2048, 4096, 8192), (32, 64, 128, 256), seconds=2.0),
}
