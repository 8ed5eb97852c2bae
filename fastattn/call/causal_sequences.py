"""A packed batch of which some sequences are causal: `causal` as a bool tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .need import need
from .spec import Place


def with_causal_sequences(
    causal: Tensor, cu_q: Any, cu_k: Tensor | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """The arguments with a mask_mod in place of `causal` (B,).

    A row is at i' = i, with Place(bottom_right=True) at i' = i + length - M. Raises ValueError.
    """
    need(causal.dtype == torch.bool, "causal.dtype", causal.dtype, "torch.bool, or a bool")
    shape = tuple(causal.shape)
    if isinstance(cu_q, Tensor) and cu_q.ndim == 1:  # the checks refuse other offsets
        sequences = cu_q.shape[0] - 1
        need(shape == (sequences,), "causal", f"shape {shape}", f"(B,) = ({sequences},)")
        need(causal.device == cu_q.device, "causal.device", causal.device, "q's device")
    place, mask_mod = arguments.get("place"), arguments.get("mask_mod")
    first = place.item if isinstance(place, Place) else 0
    moved = torch.zeros_like(causal, dtype=torch.int64)
    if isinstance(place, Place) and place.bottom_right:
        lengths = arguments.get("key_lengths")
        if lengths is None and isinstance(cu_k, Tensor):
            lengths = cu_k.diff()
        if isinstance(lengths, Tensor):  # the checks refuse a call without
            moved = lengths.long() - cu_q.diff().long()
    free = ~causal

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = free[b - first] | (j <= i + moved[b - first])
        return seen if mask_mod is None else seen & mask_mod(b, h, i, j)

    return arguments | dict(causal=False, mask_mod=visible)
