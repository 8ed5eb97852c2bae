"""The call that all ranks make together, of which each rank computes a part, and functions that
several strategies use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..call.spec import ARGUMENTS, DIFFERENTIABLE, Place, acc_dtype
from ..score_mods.tracing import trace_mask_mod, trace_score_mod
from . import layout
from .collectives import Gather, Shape, Shared
from .consistency import Team
from .layout import Spans


class GlobalCall(NamedTuple):
    """The call that all ranks make together.

    team: the ranks.
    rows: for each rank the spans of query rows that it owns.
    keys: for each rank the spans of keys that it owns.
    arguments: those of `fastattn.attention` or of `fastattn.attention_packed`, by name; slopes and
        sinks are the whole call's.
    mask_rows: True if each rank holds the mask's rows for its own rows; False if every rank holds
        the whole mask, which has one row or is that of a packed batch, or if there is no mask.
    place: the position of the whole call in a still larger call, in heads and items of the batch.
    """

    team: Team
    rows: Spans
    keys: Spans
    arguments: dict[str, Any]
    mask_rows: bool
    place: Place

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of a team that has only one."""
        (group,) = self.team.groups
        return group

    @property
    def rank(self) -> int:
        return self.team.rank

    @property
    def ranks(self) -> int:
        return self.team.ranks

    def at(self, row: int = 0, head: int = 0) -> Place:
        """The place of a part of the whole call: it begins at this row and head, and has all keys.
        The rows and keys of the place are those of the whole call."""
        rows, keys = (sum(map(layout.size_of, of)) for of in (self.rows, self.keys))
        return self.place._replace(row=row, head=self.place.head + head, rows=rows, keys=keys)

    def shared(self, name: str) -> Tensor | None:
        """An argument of which every rank holds the same whole tensor. Its gradient is summed over
        ranks."""
        x = self.arguments[name]
        return None if x is None else _shared(self.team, name, x)

    def differentiable(self) -> dict[str, Tensor | None]:
        """The arguments other than q, k and v that can have gradients, in the form that strategies
        must use.

        The gradient of a tensor that every rank holds whole is summed over ranks (`shared`). With
        `mask_rows` a rank holds its own rows of the mask (the argument that is declared with
        `broadcast`), so the gradient of the mask is not summed.
        """
        names = [name for name in DIFFERENTIABLE if name in self.arguments]
        own = [name for name in names if self.mask_rows and ARGUMENTS[name].broadcast]
        return {x: self.arguments[x] if x in own else self.shared(x) for x in names}


NO_FUNCTIONS = dict.fromkeys(("score_mod", "mask_mod"))  # arguments of a call without them


def traced(given: Mapping[str, Any], q: Tensor) -> dict[str, Any]:
    """The arguments with a score_mod and a mask_mod traced, for a call of this q.

    Raises:
        TypeError, NotImplementedError, IndexError: As the functions of `score_mods.tracing`.
    """
    arguments = dict(given)
    if given["score_mod"] is not None:
        dtype = acc_dtype(q.dtype)
        arguments["score_mod"] = trace_score_mod(given["score_mod"], device=q.device, dtype=dtype)
    if given["mask_mod"] is not None:
        arguments["mask_mod"] = trace_mask_mod(given["mask_mod"], device=q.device)
    return arguments


def shared_functions(given: Mapping[str, Any], team: Team) -> dict[str, Any]:
    """The arguments with the captured tensors of traced functions shared: each rank holds them
    whole, and their gradients are summed over ranks."""
    arguments = dict(given)
    for name in NO_FUNCTIONS:
        if given[name] is not None:
            tensors = tuple(_shared(team, f"a tensor of {name}", x) for x in given[name].tensors)
            arguments[name] = given[name]._replace(tensors=tensors)
    return arguments


def _shared(team: Team, name: str, x: Tensor) -> Tensor:
    if x.requires_grad:
        for group in team.groups:
            x = Shared.apply(group, name, x)
    return x


def gathered(team: Team, x: Tensor, spans: Spans, tensor_name: str, dim: int = 2) -> Tensor:
    """The x of all ranks, concatenated along dim in the order of the sequence.

    spans: for each rank the spans of the sequence that its x holds.
    tensor_name: names the tensor in errors, as "all keys".

    The groups of the team are nested. The innermost group, which is the last, gathers first. Each
    further group gathers what the groups inside it have gathered.
    """
    sizes = [layout.size_of(own) for own in spans]  # of each rank's x along dim
    gathered_blocks, ranks_per_block = (x,), 1  # in the order of ranks
    for group in reversed(team.groups):
        ranks_per_block *= len(gathered_blocks)
        x = torch.cat(gathered_blocks, dim) if len(gathered_blocks) > 1 else gathered_blocks[0]
        group_size = dist.get_world_size(group)
        ranks_per_gather = ranks_per_block * group_size
        first_rank = team.rank // ranks_per_gather * ranks_per_gather
        block_starts = range(first_rank, first_rank + ranks_per_gather, ranks_per_block)
        shapes = [
            resized(x, dim, sum(sizes[start : start + ranks_per_block])) for start in block_starts
        ]
        gathered_blocks = Gather.apply(group, tensor_name, shapes, x)
    rank_tensors = []
    for index, block in enumerate(gathered_blocks):
        start = index * ranks_per_block
        rank_tensors += block.split(sizes[start : start + ranks_per_block], dim)
    return layout.whole(rank_tensors, spans, dim)


def resized(x: Tensor, dim: int, size: int) -> Shape:
    """The shape of x with another size of dimension `dim`."""
    shape = list(x.shape)
    shape[dim] = size
    return tuple(shape)


def placeholder_with_all_rows(x: Tensor, rows: int) -> Tensor:
    """A tensor like x, but with `rows`, the rows of all ranks, as the size of dimension 2. It is
    for checks of shapes and dtypes. Its values are undefined: all are one uninitialised element."""
    return x.new_empty(()).expand(resized(x, 2, rows))


def heads_of(x: Tensor | None, own: Sequence[int] | slice, dim: int) -> Tensor | None:
    """The heads `own` of x along the dimension `dim`, which counts from the end (negative). Returns
    x itself if it has one entry for all heads, or no such dimension."""
    if x is None or x.ndim < -dim or x.shape[dim] == 1:
        return x
    return x[(..., own, *(slice(None),) * (-dim - 1))]
