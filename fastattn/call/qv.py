"""Scores q.k + qv.v of latent attention, as one product of wider queries and keys.

FlashAttention-3 has the argument qv for the decoding of DeepSeek's models: the rotated columns of a
key are apart from the latent vector, which is the value, too. (q, qv) . (k, v) is one product. If
k and v are adjacent columns in memory, as in a cache of latent vectors, wider keys are a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .need import need_a_tensor
from .sizes import agree
from .validation import need_tangent


def joined(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> tuple[Tensor, Tensor]:
    """q and k with the columns of qv and v: (..., D + Dv). Their order is that of memory.

    v comes first where k and v are apart in memory. Raises TypeError and ValueError.
    """
    _check(q, k, v, qv)
    for first, second, queries in ((v, k, (qv, q)), (k, v, (q, qv))):
        if _are_adjacent(first, second):
            size = *first.shape[:-1], first.shape[-1] + second.shape[-1]
            view = first.as_strided(size, first.stride(), first.storage_offset())
            return torch.cat(queries, -1), view
    return torch.cat((qv, q), -1), torch.cat((v, k), -1)


def joined_with_tangents(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor, tangents: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """q and k as of `joined`, and their tangents, from those of q, k, v and qv; None is zero.

    Copies: a view has the tangent of one tensor alone. Raises TypeError and ValueError.
    """
    _check(q, k, v, qv)
    given = dict(q=q, k=k, v=v, qv=qv)
    for (name, x), x_t in zip(given.items(), tangents, strict=True):
        if x_t is not None:
            need_tangent(name, x_t, x)
    q_t, k_t, v_t, qv_t = tangents
    moved = _side_by_side(qv, q, qv_t, q_t), _side_by_side(v, k, v_t, k_t)
    return torch.cat((qv, q), -1), torch.cat((v, k), -1), *moved


def _side_by_side(x: Tensor, y: Tensor, x_t: Tensor | None, y_t: Tensor | None) -> Tensor | None:
    if x_t is None and y_t is None:
        return None
    both = (torch.zeros_like(of) if x is None else x for of, x in ((x, x_t), (y, y_t)))
    return torch.cat(tuple(both), -1)


def _check(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("qv", qv)):
        need_a_tensor(name, x)
    if 0 in (q.ndim, v.ndim) or not agree(qv.shape, (*q.shape[:-1], v.shape[-1])):
        raise ValueError(
            f"qv: got shape {tuple(qv.shape)}, expected that of q with the columns of v, "
            f"{(*q.shape[:-1], *v.shape[-1:])}"
        )
    if not agree(k.shape[:-1], v.shape[:-1]):
        raise ValueError(
            f"v: got shape {tuple(v.shape)}, expected that of k but for the columns: "
            f"{(*k.shape[:-1], *v.shape[-1:])}"
        )
    for name, x, other, like in (("qv", qv, "q", q), ("v", v, "k", k)):
        if (x.dtype, x.device) != (like.dtype, like.device):
            raise ValueError(
                f"{name}: got {x.dtype} on {x.device}, expected {other}'s {like.dtype} on "
                f"{like.device}: with qv they are parts of one tensor"
            )


def _are_adjacent(first: Tensor, second: Tensor) -> bool:
    """True if each row of `second` follows that row of `first` in memory, and a view of both is
    safe: compiled code, transforms and derivatives know tensors by their names, not their places.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if forward_ad._current_level >= 0 or type(first) is not Tensor or type(second) is not Tensor:
        return False
    if torch.is_grad_enabled() and (first.requires_grad or second.requires_grad):
        return False
    return (
        first.numel() > 0
        and second.numel() > 0
        and first.stride() == second.stride()
        and first.stride(-1) == 1
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and second.storage_offset() == first.storage_offset() + first.shape[-1]
    )
