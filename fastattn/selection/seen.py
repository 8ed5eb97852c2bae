"""How many keys each row may attend to, and the checks that the choices of keys share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import CAUSAL
from ..backends.base import checks_values


def need_tensor(name: str, x: Any, axes: str) -> None:
    """Raise TypeError or ValueError unless x is a tensor with one dimension for each of `axes`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor")
    if x.ndim != len(axes.split()):
        shape = ", ".join(axes.split())
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, expected {len(axes.split())} dimensions ({shape})"
        )


def need_like(name: str, x: Tensor, shape: tuple, q: Tensor) -> None:
    """Raise ValueError unless x has this shape, and q's dtype and device."""
    if x.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {tuple(shape)}")
    if x.dtype != q.dtype or x.device != q.device:
        raise ValueError(
            f"{name}: got {x.dtype} on {x.device}, expected {q.dtype} on {q.device}, as q has"
        )


def need_integers(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}.dtype: got {x.dtype}, expected torch.int32 or torch.int64")
    if x.device != q.device:
        raise ValueError(f"{name}.device: got {x.device}, expected {q.device}, as q has")


def need_lengths(key_lengths: Any, batch: int, q: Tensor) -> None:
    if key_lengths is None:
        return
    if not isinstance(key_lengths, Tensor):
        got = type(key_lengths).__name__
        raise TypeError(f"key_lengths: got {got}, expected a torch.Tensor or None")
    if key_lengths.shape != (batch,):
        got = tuple(key_lengths.shape)
        raise ValueError(f"key_lengths: got shape {got}, expected (B,) = ({batch},)")
    need_integers("key_lengths", key_lengths, q)


def alignment(causal: Any) -> str:
    """ "", "top_left" or "bottom_right". Raises ValueError for any other argument."""
    if isinstance(causal, (bool, str)) and causal in CAUSAL:
        return CAUSAL[causal]
    raise ValueError(f'causal: got {causal!r}, expected False, True, "top_left" or "bottom_right"')


def check_lengths(key_lengths: Tensor | None, keys: int, device: torch.device) -> None:
    """Raise ValueError for lengths out of range; on a GPU only if FASTATTN_CHECK=1."""
    if key_lengths is None or not key_lengths.numel() or not checks_values(device):
        return
    low, high = (int(x) for x in key_lengths.aminmax())
    if low < 0 or high > keys:
        got = low if low < 0 else high
        raise ValueError(f"key_lengths: got {got}, expected values in [0, N] = [0, {keys}]")


def seen_keys(
    batch: int, rows: int, keys: int, lengths: Tensor | None, causal: str, device: torch.device
) -> Tensor:
    """(B,M), int64: row i of item b may attend to the first so many keys."""
    limit = torch.full((batch,), keys, dtype=torch.int64, device=device)
    if lengths is not None:
        limit = lengths.to(torch.int64).clamp(0, keys)
    if not causal:
        return limit[:, None].expand(batch, rows)
    row = torch.arange(rows, device=device)
    shift = limit[:, None] - rows if causal == "bottom_right" else 0
    return torch.minimum(limit[:, None], (row + shift + 1).clamp(min=0))
