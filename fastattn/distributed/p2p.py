"""Messages from rank to rank around a ring, sent while something is computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Shape, waiting


class Hop:
    """A transfer in progress: to the rank `step` further, and from the rank `step` before.

    All tensors have one dtype. shapes: those of the received tensors.
    """

    group: dist.ProcessGroup
    what: str
    shapes: Sequence[Shape]
    sent: Tensor
    sizes: list[int]
    received: Tensor
    works: list[dist.Work]

    def __init__(
        self,
        tensors: Sequence[Tensor],
        shapes: Sequence[Shape],
        group: dist.ProcessGroup,
        what: str,
        step: int = 1,
    ):
        self.group, self.what, self.shapes = group, what, shapes
        self.sent = torch.cat([x.reshape(-1) for x in tensors])
        self.sizes = [torch.Size(x).numel() for x in shapes]
        self.received = self.sent.new_empty(sum(self.sizes))
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        each = (dist.isend, self.sent, rank + step), (dist.irecv, self.received, rank - step)
        # Empty messages are not sent: both sides know the sizes.
        posted = [
            dist.P2POp(send, x, group=group, group_peer=peer % ranks)
            for send, x, peer in each
            if x.numel()
        ]
        with waiting(group, what):
            self.works = dist.batch_isend_irecv(posted) if posted else []

    def arrived(self) -> list[Tensor]:
        with waiting(self.group, self.what):
            for work in self.works:
                work.wait()
        return [x.view(shape) for x, shape in zip(self.received.split(self.sizes), self.shapes)]
