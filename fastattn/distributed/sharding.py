"""Cut a tensor that every rank has whole, and put the parts together again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..dispatch.library_ops import opaque_to_dynamo
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
    """Return this rank's part of x along dim.

    x may be inputs, positions or labels, or q, k and v. Nothing is sent.

    Args:
        x: The whole tensor, which every rank has.
        dim: The dimension of the sequence.
        layout: "contiguous": rank r gets a view of the r-th chunk, as torch.chunk cuts; the last
            ranks may get smaller chunks or empty ones. "zigzag": the sequence is cut into twice as
            many chunks, and rank r gets the r-th and the r-th from the end, which gives every rank
            the same work in causal attention.
        group: As in `fastattn.distributed.attention`.

    Shape:
        x: Any, any dtype.
        part: As x, but shorter along dim.

    Returns:
        part.

    Raises:
        ValueError: layout or group is none of these.
        IndexError: x does not have this dim.
        RuntimeError: torch.distributed has no group.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> from fastattn import distributed
        >>> store = dist.HashStore()  # of a group with one rank; torchrun makes groups of several
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> distributed.shard(torch.arange(4), dim=0, layout="zigzag")
        tensor([0, 1, 2, 3])
        >>> dist.destroy_process_group()
    """
    team = need_team(group)
    of = layouts.spans(layout, x.shape[dim], team.ranks)
    return layouts.part(x, of[team.rank], dim)


@opaque_to_dynamo
def unshard(
    x: Tensor,
    *,
    dim: int = 2,
    layout: Layout = CONTIGUOUS,
    group: Any = None,
) -> Tensor:
    """Return the whole tensor, on every rank, from the parts of all ranks.

    All ranks must call it. The gradient of a part is the sum over all ranks' losses.

    Args:
        x: This rank's part, as `shard` cuts it. Contiguous parts may have any sizes.
        dim, layout, group: As in `shard`.

    Shape:
        x: Any, any dtype. The parts of the ranks have equal sizes except along dim.
        whole: As x, but longer along dim.

    Returns:
        whole.

    Raises:
        ValueError: As `shard`, and for parts with sizes that the layout does not give.
        IndexError: As `shard`.
        RuntimeError: As `shard`, and if another rank died, raised or made another call.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> from fastattn import distributed
        >>> store = dist.HashStore()  # of a group with one rank; torchrun makes groups of several
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> x = torch.randn(2, 3, 5)
        >>> part = distributed.shard(x, dim=1, layout="zigzag")
        >>> torch.testing.assert_close(distributed.unshard(part, dim=1, layout="zigzag"), x)
        >>> dist.destroy_process_group()
    """
    team = need_team(group)
    layouts.need_layout(layout)
    sizes = [row[0] for row in team.table([x.shape[dim]], x.device)]
    of = layouts.spans_of(layout, sizes, f"x.shape[{dim}]")
    return gathered(team, x, of, "the parts of a tensor", dim)
