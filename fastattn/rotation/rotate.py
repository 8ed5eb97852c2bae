"""Rotation by tables that broadcast, in `norm_rope`'s pass where its layouts allow."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import reference
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
    by_operations = _have_derivatives(cos, sin) or _is_onnx_export()
    axes = None if by_operations else _axes(x, cos)
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
    return y if axes.rows == x.ndim - 2 else y.movedim(-2, axes.rows)


def _is_onnx_export() -> bool:
    """True in torch.onnx.export, which knows only torch's operators."""
    if is_dynamo_compiling():  # it would look at each of sys.modules
        return False
    return "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


def _have_derivatives(*tables: Tensor) -> bool:
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tables)


def _axes(x: Tensor, cos: Tensor) -> _Axes | None:
    """None if `norm_rope` has no such layout."""
    if (
        x.is_nested
        or cos.is_nested
        or x.ndim not in (3, 4)
        or cos.ndim > x.ndim
        or x.dtype not in DTYPES
    ):
        return None
    if cos.dtype not in DTYPES or known(cos.shape[-1] == 0) or cos.device != x.device:
        return None
    if x.ndim == 4 and cos.ndim == 2 and known(cos.shape[0] == x.shape[2]):
        return _Axes(2, -1)  # the most frequent
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
    if axes.rows != x.ndim - 2:
        x = x.movedim(axes.rows, -2)
    return x if axes.missing < 0 else x.unsqueeze(axes.missing)


def _table(t: Tensor, ndim: int, axes: _Axes) -> Tensor:
    """(M,R/2), or (B,M,R/2)."""
    if t.ndim == 2 and axes.rows == ndim - 2:
        return t
    t = t.reshape((1,) * (ndim - t.ndim) + tuple(t.shape)).movedim(axes.rows, -2)
    while t.ndim > 3:
        t = t.squeeze(1)
    if axes.missing == 0 or known(t.shape[0] == 1):
        t = t.squeeze(0)
    return t


def _by_operations(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    columns, wide = 2 * cos.shape[-1], acc_dtype(x.dtype)
    turned = x[..., :columns].to(wide)
    y = reference.turn_pairs(turned, cos.to(wide), sin.to(wide), interleaved, interleaved)
    return torch.cat([y.to(x.dtype), x[..., columns:]], dim=-1)
