"""The choice of blocks of keys by the means of their keys."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ..call.need import alignment, flag, whole
from ..call.sizes import divides, known
from .highest import highest
from .seen import (
    check_lengths,
    need_lengths,
    need_like,
    need_shape,
    need_tensor,
    seen_keys,
)

ROOM = 1 << 22  # scores at a time


def top_blocks(
    q: Tensor,
    k: Tensor,
    block: int,
    count: int,
    *,
    causal: bool | Literal["top_left", "bottom_right"] = False,
    key_lengths: Tensor | None = None,
    shared: bool = False,
) -> Tensor:
    """Choose for each row the blocks of keys with the highest scores of their mean keys.

    With shared=False each query head chooses for itself, by the product q m of a row and the mean m
    of a block's keys (MoBA, arXiv 2502.13189, section 2.2). With shared=True the query heads of a
    key head choose together, by the sum of their probabilities softmax(q m / sqrt(D)) over blocks
    (NSA, arXiv 2502.11089, equations 8 to 10, with means in place of learned compression).

    With causal, the block of the row's own position is always chosen, and of the others those that
    end before it can be. Keys past key_lengths are in no mean.

    The choice has no gradient. No M x N tensor is stored. Of equal scores the first are chosen,
    so the result is the same in every run.

    Args:
        q: Queries.
        k: Keys.
        block: The number of keys of a block. The last one may have fewer.
        count: The number of blocks to choose for each row.
        causal, key_lengths: As in `attention`.
        shared: Whether the query heads that share a key head choose together.

    Shape:
        q: (B, H, M, D), any floating dtype.
        k: (B, Hk, N, D), q's dtype and device.
        block: 1 or more.
        count: 0 or more.
        key_lengths: (B,), int32 or int64.
        indices: (B, G, M, count), int32. G is H, or Hk if shared.

    Returns:
        indices, for `attention_selected`: ascending, then -1 for each block that is missing.

    Raises:
        ValueError: An argument has a value, shape, dtype or device that breaks these rules.
        TypeError: An argument has a wrong type.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k = torch.randn(2, 1, 4, 256, 32)
        >>> fastattn.top_blocks(q, k, block=64, count=2, causal=True)[0, 0, 100]
        tensor([0, 1], dtype=torch.int32)
    """
    flag("shared", shared)
    align = _check(q, k, block, count, causal, key_lengths)
    (B, H, M, _), (Hk, N) = q.shape, k.shape[1:3]
    with torch.no_grad():
        wide = torch.promote_types(q.dtype, torch.float32)
        means = _means(k.to(wide), block, key_lengths)
        seen = seen_keys(B, M, N, key_lengths, align, q.device)
        chosen = []
        step = max(1, ROOM // max(1, B * H * means.shape[2]))
        for i in range(0, M, step):
            rows = q[:, :, i : i + step].to(wide).unflatten(1, (Hk, H // max(Hk, 1)))
            scores = rows @ means[:, :, None].mT
            here = seen[:, None, None, i : i + step, None]
            scores = _hide(scores, here, block, bool(align))
            if shared:
                scores = _of_group(scores, q.shape[3]).unsqueeze(2)
            chosen.append(highest(scores.flatten(1, 2), count))
        if chosen:
            return torch.cat(chosen, 2)
        return q.new_empty((B, Hk if shared else H, 0, count), dtype=torch.int32)


def _means(k: Tensor, block: int, key_lengths: Tensor | None) -> Tensor:
    """The mean key of each block (B,Hk,blocks,D), 0 of a block without keys."""
    B, _, N, _ = k.shape
    counted = torch.ones(B, N, dtype=k.dtype, device=k.device)
    if key_lengths is not None:
        counted = (torch.arange(N, device=k.device) < key_lengths[:, None]).to(k.dtype)
    rest, blocks = -N % block, 0 if known(N == 0) else -1
    k = k.masked_fill(counted[:, None, :, None] == 0, 0)
    sums = F.pad(k, (0, 0, 0, rest)).unflatten(2, (blocks, block)).sum(3)
    sizes = F.pad(counted, (0, rest)).unflatten(1, (blocks, block)).sum(2)
    return sums / sizes.clamp(min=1)[:, None, :, None]


def _hide(scores: Tensor, seen: Tensor, block: int, causal: bool) -> Tensor:
    """-inf for blocks that a row may not choose, +inf for its own."""
    first = torch.arange(scores.shape[-1], device=scores.device) * block
    scores = scores.masked_fill(first >= seen, -torch.inf)
    if causal:
        own = (first < seen) & (first + block >= seen)
        scores = scores.masked_fill(own, torch.inf)
    return scores


def _of_group(scores: Tensor, D: int) -> Tensor:
    """The sum of the heads' probabilities, with the infinities of `scores`."""
    finite = scores.masked_fill(scores == torch.inf, -torch.inf) * (D**-0.5 if D else 1.0)
    top = finite.amax(-1, keepdim=True) if scores.shape[-1] else finite
    p = torch.exp(finite - top.masked_fill(top == -torch.inf, 0))
    p = (p / p.sum(-1, keepdim=True).clamp(min=1)).sum(2)
    fixed = scores.select(2, 0) if scores.shape[2] else p
    return torch.where(fixed.isinf(), fixed, p)


def _check(q: Any, k: Any, block: Any, count: Any, causal: Any, key_lengths: Any) -> str:
    need_tensor("q", q, "B H M D")
    need_tensor("k", k, "B Hk N D")
    B, H, _, D = q.shape
    need_shape("k", k, (B, k.shape[1], k.shape[2], D))
    need_like("k", k, q)
    if not q.is_floating_point():
        raise ValueError(f"q.dtype: got {q.dtype}, expected a floating dtype")
    Hk = k.shape[1]
    if not divides(Hk, H):
        raise ValueError(f"k: got {Hk} heads, expected a divisor of q's {H} heads")
    for name, x, least in (("block", block, 1), ("count", count, 0)):
        if whole(name, x, "a whole number") < least:
            raise ValueError(f"{name}: got {x}, expected {least} or more")
    need_lengths(key_lengths, B, q)
    check_lengths(key_lengths, k.shape[2], q.device)
    return alignment(causal)
