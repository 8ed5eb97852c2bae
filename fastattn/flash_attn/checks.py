"""Checks of flash-attn's arguments, and errors that name flash-attn's arguments, not ours."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..call.flash_conventions import in_names
from ..call.int4 import INT4
from ..call.need import need_a_tensor

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
    """Replace our argument names by flash-attn's in the message of a TypeError or ValueError."""
    names = _THEIRS | names
    try:
        yield
    except (TypeError, ValueError) as error:
        told = in_names(error, names)
        if told is error:
            raise
        raise told from None


Axes = tuple[int | str, ...]  # a string allows any size


def need_shape(name: str, x: Tensor, axes: Axes) -> None:
    if isinstance(x, Tensor) and _fits(x, axes):  # a text of sizes breaks a compiler's graph
        return
    need_a_tensor(name, x, f"a torch.Tensor {_told(axes)}")
    raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {_told(axes)}")


def need_floats(name: str, x: Tensor) -> None:
    """Raise unless x, a tensor, is of a floating dtype."""
    if not x.is_floating_point():
        raise ValueError(f"{name}.dtype: got {x.dtype}, expected a floating dtype")


def refuse_int4(name: str, x: Tensor) -> None:
    """Raise for keys and values in four bits, which flash-attn does not have."""
    if x.dtype == INT4:
        raise ValueError(
            f"{name}.dtype: got {INT4}, expected q's dtype: rows in four bits are those of "
            "fastattn.attention_packed and fastattn.KVCache"
        )


def need_integers(name: str, x: Tensor, axes: Axes) -> None:
    """Raise unless x is int32 or int64 of this shape."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {x!r}, expected an int32 or int64 tensor {_told(axes)}")
    if x.dtype not in (torch.int32, torch.int64) or not _fits(x, axes):
        got = f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(f"{name}: got {got}, expected int32 or int64 {_told(axes)}")


def _fits(x: Tensor, axes: Axes) -> bool:
    sizes = zip(axes, x.shape)
    return x.ndim == len(axes) and not any(isinstance(a, int) and a != n for a, n in sizes)


def _told(axes: Axes) -> str:
    return f"({', '.join(map(str, axes))}{',' * (len(axes) == 1)})"


def within(name: str, x: Tensor, last: int | Tensor, why: str = "") -> Tensor:
    """x as int64 in [0, last]. Values out of range raise on a CPU; on other devices they are
    clamped, which needs no synchronization."""
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


def whole_or_none(x: Any) -> Any:
    """A number that may be a tensor of one element."""
    return int(x.item()) if isinstance(x, Tensor) else x
