"""What the fused kernels of this machine run: the largest head dim, by device and dtype. Each GPU
counts for itself: one may be too old for them."""

from __future__ import annotations

import sys

import torch

from ..backends import base
from ..backends.shared import gpu

Where = tuple[str, int | None]  # type and index of a device, of which traced code makes a key
head_dims: dict[Where, dict[torch.dtype, int]] = {}


def look() -> None:
    """Find what can run here. Patches do so when they begin, because `why_none` may be traced."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in (torch.device("cpu"), *(torch.device("cuda", i) for i in range(gpus))):
        known: dict[torch.dtype, int] = {}
        for name in base.names():
            support = base.get(name).support
            if device.type in (support.devices or ()) and not base.unavailable(name, device):
                dtypes = support.dtypes_on(gpu.found(device))
                limits = dict.fromkeys(dtypes, support.max_head_dim or sys.maxsize)
                known |= {x: max(limit, known.get(x, 0)) for x, limit in limits.items()}
        head_dims[device.type, device.index] = known


def why_none(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
    """The reason why no fused kernel runs such a call; None if one does."""
    known = head_dims.get((device.type, device.index))
    if not known:
        return f"no fused kernel here for {device}"
    limit = known.get(dtype)
    if limit is None:
        return f"no fused kernel here for {dtype} on {device}"
    if any(size > limit for size in sizes):
        return f"a head dim over {limit}"
    return None
