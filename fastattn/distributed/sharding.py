"""Cutting what every rank has whole, and putting it together again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..operators import unseen
from . import layout as layouts
from .agreement import need_team
from .layout import CONTIGUOUS, Layout
from .whole import gathered


def shard(
    x: Tensor,
    *,
    dim: int = 2,
    layout: Layout = CONTIGUOUS,
    group: Any = None,
) -> Tensor:
    """This rank's part of x along dim: of inputs, positions, labels, or of q, k and v.

    contiguous: rank r has the r-th chunk, as torch.chunk cuts, and is a view; the last ranks may
    have fewer or none. zigzag: the r-th of twice as many chunks, and the r-th from the end: with
    causal attention every rank then has as much to do. Nothing is sent. group: as `attention`
    takes it.

    Raises ValueError for another layout, IndexError for another dim, RuntimeError without a group.
    """
    team = need_team(group)
    of = layouts.spans(layout, x.shape[dim], team.ranks)
    return layouts.part(x, of[team.rank], dim)


@unseen
def unshard(
    x: Tensor,
    *,
    dim: int = 2,
    layout: Layout = CONTIGUOUS,
    group: Any = None,
) -> Tensor:
    """The whole, on every rank, of parts as `shard` cuts them; contiguous ones may have any sizes.

    All ranks call it. The gradient of a part is the sum over all ranks' losses.
    Raises as `shard`, and ValueError for parts that the layout does not have.
    """
    team = need_team(group)
    layouts.need_layout(layout)
    sizes = [row[0] for row in team.table([x.shape[dim]], x.device)]
    of = layouts.spans_of(layout, sizes, f"x.shape[{dim}]")
    return gathered(team, x, of, "the parts of a tensor", dim)
