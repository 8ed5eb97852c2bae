"""The whole call, of which the ranks' calls are parts, and functions that strategies share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..call.place import Place
from ..call.spec import ARGUMENTS, DIFFERENTIABLE
from . import layout
from .collectives import Gather, Shape, Shared
from .consistency import Team
from .layout import Spans


class GlobalCall(NamedTuple):
    """arguments: those of `fastattn.attention`, by name; slopes and sinks are the whole call's.
    mask_rows: True if the mask has a row for each of this rank's rows, False if it has one row for
    the whole call. place: the position of the whole call in heads and items."""

    team: Team
    rows: Spans
    keys: Spans
    arguments: dict[str, Any]
    mask_rows: bool
    place: Place

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of a team that has only one."""
        (found,) = self.team.groups
        return found

    @property
    def rank(self) -> int:
        return self.team.rank

    @property
    def ranks(self) -> int:
        return self.team.ranks

    def at(self, row: int = 0, head: int = 0) -> Place:
        """The place of a call that begins at this row and head of the whole, and has all keys."""
        rows, keys = (sum(map(layout.size_of, of)) for of in (self.rows, self.keys))
        return self.place._replace(row=row, head=self.place.head + head, rows=rows, keys=keys)

    def shared(self, name: str) -> Tensor | None:
        """An argument that every rank has whole: its gradient is the sum over ranks."""
        x = self.arguments[name]
        if x is not None and x.requires_grad:
            for group in self.team.groups:
                x = Shared.apply(group, name, x)
        return x

    def differentiable(self) -> dict[str, Tensor | None]:
        """The arguments other than q, k and v that can have gradients, in the form that strategies
        must use: the gradient of what every rank has whole is summed over ranks."""
        names = [name for name in DIFFERENTIABLE if name in self.arguments]
        own = [name for name in names if self.mask_rows and ARGUMENTS[name].broadcast]
        return {x: self.arguments[x] if x in own else self.shared(x) for x in names}


def gathered(team: Team, x: Tensor, of: Spans, what: str, dim: int = 2) -> Tensor:
    """All ranks' x along dim, in the order of the sequence."""
    sizes, n = [layout.size_of(own) for own in of], 1
    blocks = (x,)  # each block is from n ranks
    for group in reversed(team.groups):
        n *= len(blocks)
        x = torch.cat(blocks, dim) if len(blocks) > 1 else blocks[0]
        ranks = dist.get_world_size(group)
        first = team.rank // (n * ranks) * n * ranks
        each = (sizes[first + r * n : first + r * n + n] for r in range(ranks))
        shapes = [resized(x, dim, sum(of_each)) for of_each in each]
        blocks = Gather.apply(group, what, shapes, x)
    parts = (block.split(sizes[r * n : r * n + n], dim) for r, block in enumerate(blocks))
    return layout.whole([x for of_block in parts for x in of_block], of, dim)


def resized(x: Tensor, dim: int, size: int) -> Shape:
    shape = list(x.shape)
    shape[dim] = size
    return tuple(shape)


def of_all(x: Tensor, rows: int) -> Tensor:
    """x with as many rows as all ranks have, expanded from one element."""
    return x.new_empty(()).expand(resized(x, 2, rows))


def heads_of(x: Tensor | None, own: Sequence[int] | slice, dim: int) -> Tensor | None:
    """The heads `own` along dim. x itself if it has one for all heads, or no such dimension."""
    if x is None or x.ndim < -dim or x.shape[dim] == 1:
        return x
    return x[(..., own, *(slice(None),) * (-dim - 1))]
