"""Rules on flash-attn's arguments that `fastattn.attention` does not know, and in their names."""

from __future__ import annotations

import functools
import re
from contextlib import contextmanager

import torch
from torch import Tensor

_THEIRS = {
    "scale": "softmax_scale",
    "window": "window_size",
    "sinks": "s_aux",
    "cu_q": "cu_seqlens_q",
    "cu_k": "cu_seqlens_k",
    "max_q": "max_seqlen_q",
    "max_k": "max_seqlen_k",
}


@contextmanager
def in_their_names(**names: str):
    """What is said of our argument is said of flash-attn's."""
    names = _THEIRS | names
    try:
        yield
    except (TypeError, ValueError) as error:
        first = re.match(r"\w+", str(error))
        if first is None or first[0] not in names:
            raise
        raise type(error)(names[first[0]] + str(error)[first.end() :]) from None


def need_shape(name: str, x: Tensor, axes: str) -> None:
    """Raise unless x has these axes: "total, 3, heads" also says that the second has 3."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor ({axes})")
    count, fixed = _parsed(axes)
    if x.ndim != count or any(x.shape[at] != n for at, n in fixed):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected ({axes})")


@functools.lru_cache
def _parsed(axes: str) -> tuple[int, list[tuple[int, int]]]:
    """How many they are, and which have a size."""
    names = axes.split(", ")
    return len(names), [(at, int(x)) for at, x in enumerate(names) if x.isdigit()]


def need_integers(name: str, x: Tensor, shape: tuple[int | str, ...]) -> None:
    """Raise unless x is int32 or int64 of this shape; a word stands for any size."""
    fits = isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64)
    fits = fits and x.ndim == len(shape)
    if not fits or any(s != n for s, n in zip(shape, x.shape) if isinstance(s, int)):
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
        raise ValueError(f"{name}: got {got}, expected int32 or int64 {shape}")


def within(name: str, x: Tensor, last: int | Tensor, why: str = "") -> Tensor:
    """x as int64 in [0, last]: on a CPU what is not raises. Elsewhere nobody waits for the values,
    which are clamped."""
    x = x.long()
    if x.device.type != "cpu":
        return clamped(x, torch.as_tensor(last, device=x.device))
    room = last - x
    if x.numel() and (int(x.min()) < 0 or int(room.min()) < 0):
        at = ((x < 0) | (room < 0)).nonzero()[0].unbind()
        got, most = x[at].item(), (x + room)[at].item()
        raise ValueError(f"{name}: got {got}, expected 0 to {most}" + (f": {why}" if why else ""))
    return x


def clamped(x: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(x, high).clamp(min=0)
