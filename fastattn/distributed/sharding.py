"""Cut a tensor that every rank has whole, and put the parts together again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..dispatch.library_ops import unseen
from . import layout as layouts
from .consistency import need_team
from .global_call import gathered
from .layout import CONTIGUOUS, Layout


def shard(
    x: Tensor,
    *,
    dim: int = 2,
    layout: Layout = CONTIGUOUS,
    group: Any = None,
) -> Tensor:
    """This rank's part of x along dim: of inputs, positions, labels, or of q, k and v.

    contiguous: rank r gets a view of the r-th chunk, as torch.chunk cuts; the last ranks may get
    smaller chunks or empty ones. zigzag: rank r gets the r-th of twice as many chunks, and the r-th
    from the end, which gives every rank the same work in causal attention. Nothing is sent. group:
    as in `attention`.

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
    """The whole, on every rank, from parts as `shard` cuts them; contiguous ones may have any size.

    All ranks must call it. The gradient of a part is the sum over all ranks' losses.
    Raises as `shard`, and ValueError for parts with sizes that the layout does not give.
    """
    team = need_team(group)
    layouts.need_layout(layout)
    sizes = [row[0] for row in team.table([x.shape[dim]], x.device)]
    of = layouts.spans_of(layout, sizes, f"x.shape[{dim}]")
    return gathered(team, x, of, "the parts of a tensor", dim)
