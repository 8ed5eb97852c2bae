"""Attention with any number of leading dimensions, and optionally the weights of the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .. import api
from ..call.need import flag
from ..call.sizes import agree, broadcasts
from ..dispatch import torch_function
from ..module_types import AsForward

Causal = bool | Literal["top_left", "bottom_right"]


class Module(nn.Module):
    """A module for which type checkers give a call the types of `forward`."""

    __call__: AsForward  # ty: ignore  (torch says that it is any callable)


class Leaf(Module):
    """A module that torch.fx.symbolic_trace records as one node."""

    if not TYPE_CHECKING:
        __call__ = torch_function.call


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: Causal = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Fused attention of q (..., M, D) to k (..., N, D) and v (..., N, Dv).

    All three have the same leading dimensions, any number of them. mask broadcasts to (..., M, N);
    it is bool or any other dtype, and 0 hides a key. A float mask is not added to the scores here:
    one of 0 and -inf would have the opposite meaning, so -inf raises on the CPU. Pass such masks to
    `fastattn.attention`.

    Returns the output (..., M, Dv) and, with need_weights, the weights (..., M, N) after dropout
    that v was multiplied by. A row with every key hidden has weights and output 0.
    """
    flag("need_weights", need_weights)
    lead = q.shape[:-2]
    alike = agree(lead, k.shape[:-2]) and agree(lead, v.shape[:-2])
    if not (q.ndim == k.ndim == v.ndim >= 2 and alike):
        raise ValueError(
            f"q, k, v: got shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, expected "
            "(..., M, D), (..., N, D), (..., N, Dv) with the same leading dimensions"
        )
    options: dict[str, Any] = {"causal": causal, "scale": scale}
    if mask is not None:
        shape = (*lead, q.shape[-2], k.shape[-2])
        options["mask"] = _four_dimensional(_may_attend(mask), shape)
    if dropout_p:  # one seed, so that weights and output have the same dropout
        options |= {"dropout_p": dropout_p, "seed": api.draw_seed(q.device)}
    q, k, v = (_split_lead(x) for x in (q, k, v))
    out, normaliser = api.attend(q, k, v, **options)
    weights = api.weights_from(q, k, normaliser=normaliser, **options) if need_weights else None
    return _restore(out, lead), None if weights is None else _restore(weights, lead)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(..., N, H D) as (..., H, N, D)."""
    # A view, because unflatten makes the other sizes constants in an export to ONNX.
    return x.view(*x.shape[:-1], num_heads, x.shape[-1] // num_heads).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """(..., H, N, D) as (..., N, H D)."""
    return x.transpose(-3, -2).flatten(-2)


def of_heads(mask: Tensor | None) -> Tensor | None:
    """Add a head dimension to a mask (B, M, N), which is the same for all heads."""
    return mask.unsqueeze(1) if mask is not None and mask.ndim == 3 else mask


def merge_masks(
    mask: Tensor | None, padding_mask: Tensor | None, shape: tuple[int, int], name: str
) -> Tensor | None:
    """Combine both masks: padding_mask, of `shape` (B, N), hides keys from all rows and heads."""
    if padding_mask is None:
        return mask
    if not agree(padding_mask.shape, shape):
        raise ValueError(
            f"{name}: got shape {tuple(padding_mask.shape)}, expected {shape}: the batch and the "
            "number of keys, with those of a cache"
        )
    shown = _may_attend(padding_mask)[:, None, None]
    mask = of_heads(mask)
    return shown if mask is None else _may_attend(mask) & shown


def check_heads(embed_dim: int, num_heads: int) -> None:
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(
            f"embed_dim, num_heads: got {embed_dim} and {num_heads}, expected embed_dim to be a "
            "multiple of num_heads"
        )


def _may_attend(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point() and _may_look(mask) and (mask == -torch.inf).any():
        raise ValueError(
            "mask: got a float mask with -inf, expected one in which 0 hides a key: pass "
            "mask > -torch.inf, or add it to the scores with fastattn.attention"
        )
    return mask != 0


def _may_look(x: Tensor) -> bool:
    """Return True if the values can be read without synchronizing with a device."""
    plain = type(x) is Tensor and x.device.type == "cpu"
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return plain and not traced


def _four_dimensional(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A mask for scores of `shape` (..., M, N) in the layout that `_split_lead` gives q."""
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.ndim > len(shape) or not all(broadcasts(n, size) for n, size in sizes):
        raise ValueError(
            f"mask: got shape {tuple(mask.shape)}, expected one that broadcasts to {tuple(shape)}"
        )
    if mask.ndim <= 2 or len(shape) == 4:  # broadcasting aligns to the right
        return mask
    return _split_lead(mask.expand(*shape[:-2], *mask.shape[-2:]))


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Masked softmax in plain torch operations; 0 in a row with every key hidden."""
    if mask is None:
        return torch.softmax(scores, dim=-1)
    keep = _may_attend(mask)
    seen = keep.any(-1, keepdim=True)  # a row with every key hidden keeps its scores: no NaN
    scores = scores.masked_fill(~keep & seen, -torch.inf)
    return torch.softmax(scores, dim=-1) * seen


def _split_lead(x: Tensor) -> Tensor:
    """(..., N, D) as (B, H, N, D)."""
    if x.ndim < 4:
        return x.unsqueeze(0).unsqueeze(0) if x.ndim == 2 else x.unsqueeze(1)
    return x.flatten(0, -4)


def _restore(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    return x.reshape(*lead, *x.shape[-2:])
