"""Tensors from files and to them, in an environment with torch."""

import math

import torch
from protocol import Tensors
from torch import Tensor


def read(tensors: Tensors) -> list[Tensor]:
    """q, k and v, in memory of this process."""
    return [_read(*tensors[name]) for name in "qkv"]


def _read(path: str, dtype: str, shape: list[int]) -> Tensor:
    size = math.prod(shape)
    file = torch.from_file(path, shared=False, size=size, dtype=getattr(torch, dtype))
    return file.view(shape).clone()


def write(x: Tensor, path: str) -> None:
    file = torch.from_file(path, shared=True, size=x.numel(), dtype=torch.float32)
    file.copy_(x.float().flatten())


def tokens(x: Tensor) -> Tensor:
    """(B, H, N, D) as tokens (B N, H, D), which engines of serving take."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]).contiguous()


def heads(x: Tensor, batch: int) -> Tensor:
    """The reverse of `tokens`."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2).contiguous()
