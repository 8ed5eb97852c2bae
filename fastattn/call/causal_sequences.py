"""A packed batch of which some sequences are causal: `causal` as a bool tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .need import need
from .spec import MaskMod, Options, Tensors


def causal_mask_mod(
    causal: Tensor,
    row_lengths: Tensor | None,
    t: Tensors,
    o: Options,
    mask_mod: MaskMod | None,
) -> MaskMod:
    """The mask_mod that also hides what `causal` (B,) does, of a checked call.

    A row is at i' = i, with Place(bottom_right=True) at i' = i + length - M. Raises ValueError.
    """
    need(causal.dtype == torch.bool, "causal.dtype", causal.dtype, "torch.bool, or a bool")
    cu_q = t.given("cu_q")
    shape, sequences = tuple(causal.shape), cu_q.shape[0] - 1
    need(shape == (sequences,), "causal", f"shape {shape}", f"(B,) = ({sequences},)")
    need(causal.device == cu_q.device, "causal.device", causal.device, f"{cu_q.device}")
    moved = torch.zeros_like(causal, dtype=torch.int64)
    if o.bottom_right:
        rows = cu_q.diff() if row_lengths is None else row_lengths
        keys = t.given("cu_k").diff() if t.key_lengths is None else t.key_lengths
        moved = keys.long() - rows.long()
    free, first = ~causal, o.at_item

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = free[b - first] | (j <= i + moved[b - first])
        return seen if mask_mod is None else seen & mask_mod(b, h, i, j)

    return visible
