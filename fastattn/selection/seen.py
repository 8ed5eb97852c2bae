"""How many keys each row may attend to, and the checks that the choices of keys share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.shared import value_checks
from ..backends.shared.value_checks import checks_values
from ..call.need import need, need_a_tensor, shape_of
from ..call.sizes import agree


def need_tensor(name: str, x: Any, axes: str) -> None:
    """Raise TypeError or ValueError unless x is a tensor with one dimension for each of `axes`."""
    need_a_tensor(name, x)
    count, letters = len(axes.split()), ", ".join(axes.split())
    need(x.ndim == count, name, shape_of(x), f"{count} dimensions ({letters})")


def need_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    need(agree(x.shape, shape), name, shape_of(x), f"{tuple(shape)}")


def need_like(name: str, x: Tensor, q: Tensor) -> None:
    """Raise ValueError unless x has q's dtype and device."""
    alike = x.dtype == q.dtype and x.device == q.device
    need(alike, name, f"{x.dtype} on {x.device}", f"{q.dtype} on {q.device}, as q has")


def need_device(name: str, x: Tensor, q: Tensor) -> None:
    need(x.device == q.device, f"{name}.device", x.device, f"{q.device}, as q has")


def need_integers(name: str, x: Tensor, q: Tensor) -> None:
    kinds = torch.int32, torch.int64
    need(x.dtype in kinds, f"{name}.dtype", x.dtype, "torch.int32 or torch.int64")
    need_device(name, x, q)


def need_lengths(key_lengths: Any, batch: int, q: Tensor) -> None:
    if key_lengths is None:
        return
    need_a_tensor("key_lengths", key_lengths, "a torch.Tensor or None")
    fits = agree(key_lengths.shape, (batch,))
    need(fits, "key_lengths", shape_of(key_lengths), f"(B,) = ({batch},)")
    need_integers("key_lengths", key_lengths, q)


def check_lengths(key_lengths: Tensor | None, keys: int, device: torch.device) -> None:
    """Raise ValueError for lengths out of range; on a GPU only if FASTATTN_CHECK=1."""
    if key_lengths is not None and checks_values(device):
        value_checks.check_lengths(key_lengths, keys)


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
