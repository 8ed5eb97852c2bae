"""Rotation by tables that broadcast, in `norm_rope`'s pass where its layouts allow."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..call.sizes import known
from ..call.spec import acc_dtype
from .norm_rope import DTYPES, norm_rope


class _Axes(NamedTuple):
    """How x is (B,H,M,D)."""

    rows: int  # the axis of x that is M
    missing: int  # the axis that x lacks where it has three; else -1


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor | None = None
) -> Tensor:
    """Rotate the first R columns of x (..., D) in pairs, by cos and sin (..., R/2).

    A pair is columns i and i + R/2 or, if interleaved, 2i and 2i + 1. Computed in float32 or
    float64. out: where to write the result, which may be x; without gradients only.
    """
    axes = None if _have_derivatives(cos, sin) else _axes(x, cos)
    if axes is None:
        y = _by_operations(x, cos, sin, interleaved)
        return y if out is None else out.copy_(y)
    given = _rows(x, axes), None, _table(cos, x.ndim, axes), _table(sin, x.ndim, axes)
    if out is not None:
        norm_rope(*given, interleaved=interleaved, out=_rows(out, axes))
        return out
    y = norm_rope(*given, interleaved=interleaved)
    if axes.missing >= 0:
        y = y.squeeze(axes.missing)
    return y.movedim(-2, axes.rows)


def _have_derivatives(*tables: Tensor) -> bool:
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tables)


def _axes(x: Tensor, cos: Tensor) -> _Axes | None:
    """None if `norm_rope` has no such layout."""
    if x.ndim not in (3, 4) or cos.ndim > x.ndim or x.dtype not in DTYPES:
        return None
    if cos.dtype not in DTYPES or known(cos.shape[-1] == 0) or cos.device != x.device:
        return None
    sizes = (*(1,) * (x.ndim - cos.ndim), *cos.shape[:-1])
    for rows in range(x.ndim - 2, -1, -1):
        others = [at for at in range(1, x.ndim - 1) if at != rows]
        if not known(sizes[rows] == x.shape[rows]):
            continue
        if not all(known(sizes[at] == 1) for at in others):
            continue
        if rows == 0:
            return _Axes(0, 0) if x.ndim == 3 else None
        if known(sizes[0] == 1):
            return _Axes(rows, 0 if x.ndim == 3 else -1)
        if known(sizes[0] == x.shape[0]):
            return _Axes(rows, 1 if x.ndim == 3 else -1)
    return None


def _rows(x: Tensor, axes: _Axes) -> Tensor:
    x = x.movedim(axes.rows, -2)
    return x if axes.missing < 0 else x.unsqueeze(axes.missing)


def _table(t: Tensor, ndim: int, axes: _Axes) -> Tensor:
    """(M,R/2), or (B,M,R/2)."""
    t = t.reshape((1,) * (ndim - t.ndim) + tuple(t.shape)).movedim(axes.rows, -2)
    while t.ndim > 3:
        t = t.squeeze(1)
    if axes.missing == 0 or known(t.shape[0] == 1):
        t = t.squeeze(0)
    return t


def _by_operations(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    columns, wide = 2 * cos.shape[-1], acc_dtype(x.dtype)
    cos, sin = cos.to(wide), sin.to(wide)
    turned, rest = x[..., :columns].to(wide), x[..., columns:]
    if interleaved:
        a, b = turned.unflatten(-1, (columns // 2, 2)).unbind(-1)
    else:
        a, b = turned.chunk(2, dim=-1)
    rotated = (a * cos - b * sin, a * sin + b * cos)
    y = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([y.to(x.dtype), rest], dim=-1)
