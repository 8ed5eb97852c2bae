"""What the fused kernels of this machine run: the largest head dim, by device and dtype."""

from __future__ import annotations

import sys

import torch

from ..backends import base

head_dims: dict[str, dict[torch.dtype, int]] = {}


def look() -> None:
    """Find what can run here. Patches do so when they begin, because `why_none` may be traced."""
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        known: dict[torch.dtype, int] = {}
        for each in map(base.get, base.names()):
            support = each.support
            if device in (support.devices or ()) and not each.unavailable():
                limits = dict.fromkeys(support.dtypes, support.max_head_dim or sys.maxsize)
                known |= {x: max(limit, known.get(x, 0)) for x, limit in limits.items()}
        head_dims[device] = known


def why_none(device: str, dtype: torch.dtype, *sizes: int) -> str | None:
    """The reason why no fused kernel runs such a call; None if one does."""
    if not head_dims.get(device):
        return f"no fused kernel here for {device}"
    limit = head_dims[device].get(dtype)
    if limit is None:
        return f"no fused kernel here for {dtype} on {device}"
    if any(size > limit for size in sizes):
        return f"a head dim over {limit}"
    return None
