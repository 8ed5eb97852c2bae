"""The places of the highest scores of each row, by torch's operations."""

from __future__ import annotations

import torch
from torch import Tensor


def highest(scores: Tensor, count: int) -> Tensor:
    """The places of the `count` highest scores (..., n), ascending, then -1 for each that is
    missing: (..., count), int32. -inf and NaN are never chosen. Of equal scores the first ones are.
    """
    n = scores.shape[-1]
    top = min(count, n)
    places = torch.full((*scores.shape[:-1], count), -1, dtype=torch.int32, device=scores.device)
    if top == 0:
        return places
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    least = scores.topk(top, dim=-1).values[..., -1:]
    above, equal = scores > least, scores == least
    left = top - above.sum(-1, keepdim=True)
    chosen = (above | (equal & (equal.cumsum(-1) <= left))) & (scores > -torch.inf)
    # Each chosen one goes to the slot after those before it; the others to one that is cut off.
    slot = torch.where(chosen, chosen.cumsum(-1) - 1, count)
    j = torch.arange(n, dtype=torch.int32, device=scores.device).expand(scores.shape)
    room = torch.cat([places, places[..., :1]], -1)
    return room.scatter(-1, slot, j)[..., :count].contiguous()
