"""Attention for any number of leading dimensions, with the weights that made the output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import api


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Fused attention of q (..., M, D) to k (..., N, D) and v (..., N, Dv).

    The leading dimensions, from none to any number, are the same for all three. mask broadcasts to
    (..., M, N) and says what may be attended to: a bool, or any other dtype in which 0 hides a key
    (a float mask is no bias here: add one with `fastattn.attention`).

    Returns the output (..., M, Dv) and, if wanted, the weights (..., M, N) that v was multiplied
    by, dropout included. A row whose keys are all hidden has weights and output 0.
    """
    lead = q.shape[:-2]
    if not q.ndim == k.ndim == v.ndim >= 2 or not lead == k.shape[:-2] == v.shape[:-2]:
        raise ValueError(
            f"q, k, v: got shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, expected "
            "(..., M, D), (..., N, D), (..., N, Dv) with the same leading dimensions"
        )
    options: dict[str, Any] = {"causal": causal, "scale": scale}
    if mask is not None:
        options["mask"] = _four_dimensional(_may_attend(mask), lead)
    if dropout_p:  # drawn here, so that the weights see the dropout of the output
        options |= {"dropout_p": dropout_p, "seed": api.draw_seed(q.device)}
    q, k, v = (_split_lead(x) for x in (q, k, v))
    out, lse = api.attention(q, k, v, return_lse=True, **options)
    weights = api.weights_from(q, k, lse=lse, **options) if need_weights else None
    return _restore(out, lead), None if weights is None else _restore(weights, lead)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(..., N, H D) as (..., H, N, D)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """(..., H, N, D) as (..., N, H D)."""
    return x.transpose(-3, -2).flatten(-2)


def check_heads(embed_dim: int, num_heads: int) -> None:
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(
            f"embed_dim, num_heads: got {embed_dim} and {num_heads}, expected embed_dim to be a "
            "multiple of num_heads"
        )


def _may_attend(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask != 0


def _four_dimensional(mask: Tensor, lead: tuple[int, ...]) -> Tensor:
    """The mask beside q as `_split_lead` leaves it."""
    if mask.ndim <= 2 or len(lead) == 2:  # aligned to the right, as everything that broadcasts
        return mask
    if mask.ndim > len(lead) + 2:
        expected = ", ".join(["..."] * bool(lead) + ["M", "N"])
        raise ValueError(f"mask: got {mask.ndim} dimensions, expected one for ({expected}) of q")
    return _split_lead(mask.expand(*lead, *mask.shape[-2:]))


def _split_lead(x: Tensor) -> Tensor:
    """(..., N, D) as (B, H, N, D)."""
    if x.ndim < 4:
        return x.unsqueeze(0).unsqueeze(0) if x.ndim == 2 else x.unsqueeze(1)
    return x.flatten(0, -4)


def _restore(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    return x.reshape(*lead, *x.shape[-2:])
