"""Cutting what every rank has whole, and putting it together again."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ..operators import unseen
from . import layout as layouts
from .agreement import need_group, sizes
from .collectives import Gather
from .layout import CONTIGUOUS
from .whole import resized


def shard(
    x: Tensor,
    *,
    dim: int = 2,
    layout: str = CONTIGUOUS,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """This rank's part of x along dim: of inputs, positions, labels, or of q, k and v.

    contiguous: rank r has the r-th chunk, as torch.chunk cuts, and is a view; the last ranks may
    have fewer or none. zigzag: the r-th of twice as many chunks, and the r-th from the end: with
    causal attention every rank then has as much to do. Nothing is sent.

    Raises ValueError for another layout, IndexError for another dim, RuntimeError without a group.
    """
    group = need_group(group)
    of = layouts.spans(layout, x.shape[dim], dist.get_world_size(group))
    return layouts.part(x, of[dist.get_rank(group)], dim)


@unseen
def unshard(
    x: Tensor,
    *,
    dim: int = 2,
    layout: str = CONTIGUOUS,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The whole, on every rank, of parts as `shard` cuts them; contiguous ones may have any sizes.

    All ranks call it. The gradient of a part is the sum over all ranks' losses.
    Raises as `shard`, and ValueError for parts that the layout does not have.
    """
    group = need_group(group)
    layouts.need_layout(layout)
    found = sizes(x.shape[dim], x.device, group)
    of = layouts.spans_of(layout, found, f"x.shape[{dim}]")
    shapes = [resized(x, dim, n) for n in found]
    parts = Gather.apply(group, "the parts of a tensor", shapes, x)
    return layouts.whole(parts, of, dim)
