"""Do all ranks make the same call? One small exchange before it, and what each finds out there."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..spec import ARGUMENTS
from .collectives import exchange, waiting


class Own(NamedTuple):
    """What each rank has of its own. seed: drawn, where none was given; the first rank's counts.
    mask_rows: what its mask has, as far as this rank can tell: `UNCLEAR` if it has one row."""

    rows: int
    keys: int
    seed: int
    mask_rows: int


NO_ROWS, ROWS, UNCLEAR = range(3)
NOTHING = Own(0, 0, 0, UNCLEAR)


def mask_rows(mask: Tensor | None, rows: int) -> int:
    if mask is None or mask.ndim < 2 or (mask.shape[-2] == 1 != rows):
        return NO_ROWS
    return UNCLEAR if rows == 1 else ROWS


class Team(NamedTuple):
    """The ranks of a call. groups: one of all of them; or those of a mesh's dimensions that this
    rank is in, the outermost first: ranks count along the last one first."""

    groups: tuple[dist.ProcessGroup, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many ranks each has."""
        return tuple(map(dist.get_world_size, self.groups))

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def rank(self) -> int:
        found = 0
        for group in self.groups:
            found = found * dist.get_world_size(group) + dist.get_rank(group)
        return found

    def all(self, mine: Any, gather: Callable[[Any, dist.ProcessGroup], list[Any]]) -> list[Any]:
        """What each rank has; `gather` does it for a group."""
        found = [mine]
        for group in reversed(self.groups):
            found = [x for part in gather(found, group) for x in part]
        return found

    def table(self, row: Sequence[int], device: torch.device) -> list[list[int]]:
        """The row of each rank."""

        def gather(rows: list[list[int]], group: dist.ProcessGroup) -> list[list[list[int]]]:
            sent = torch.tensor(rows, dtype=torch.int64, device=device)
            shapes = [tuple(sent.shape)] * dist.get_world_size(group)
            found = exchange([sent] * len(shapes), shapes, group, "what the ranks agree on")
            return torch.stack(found).tolist()

        return self.all(list(row), gather)

    def said(self, what: Any) -> list[Any]:
        """By each rank, once all know that there is something to say."""

        def gather(each: list, group: dist.ProcessGroup) -> list[list]:
            found: list[Any] = [None] * dist.get_world_size(group)
            with waiting(group, "what the ranks do not agree on"):
                dist.all_gather_object(found, each, group=group)
            return found

        return self.all(what, gather)


def need_team(group: Any) -> Team:
    """Of a group of ranks, of a mesh, or of all ranks. Raises RuntimeError where there is none,
    ValueError for what is none of these."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fastattn.distributed: got no group of ranks, expected torch.distributed to have one: "
            "call torch.distributed.init_process_group, under torchrun or as its help shows"
        )
    if isinstance(group, DeviceMesh):
        found = tuple(map(group.get_group, range(group.ndim)))
    else:
        found = (dist.group.WORLD if group is None else group,)
    for x in found:
        if not isinstance(x, dist.ProcessGroup) or dist.get_rank(x) < 0:
            expected = "a group of ranks that this one is in, a DeviceMesh, or None for all ranks"
            raise ValueError(f"group: got {group!r}, expected {expected}")
    return Team(found)  # ty: ignore


def agree(
    own: Own,
    facts: Mapping[str, Any],
    trouble: Exception | None,
    device: torch.device,
    team: Team,
) -> list[Own]:
    """What every rank has; each calls this once a call. facts: what must be the same, by the names
    of arguments.

    Raises on every rank, with rank and argument: ValueError where facts differ; the `trouble` that
    a rank has with its own arguments there, and RuntimeError about it on the others.
    """
    mine = [trouble is not None, *own, *map(digest, facts.values())]
    every = team.table(mine, device)
    n = 1 + len(own)
    failed = [r for r, row in enumerate(every) if row[0]]
    names = [name for at, name in enumerate(facts, n) if len({row[at] for row in every}) > 1]
    if failed or names:
        said = team.said(repr(trouble) if failed else {x: facts[x] for x in names})
        if trouble is not None:
            raise trouble
        if failed:
            raise RuntimeError(f"rank {failed[0]} of {len(every)} raised {said[failed[0]]}")
        raise ValueError("; ".join(_difference(name, [x[name] for x in said]) for name in names))
    found = [Own(*row[1:n]) for row in every]
    if {NO_ROWS, ROWS} <= {x.mask_rows for x in found}:
        said = ["one row for all" if x.mask_rows == NO_ROWS else "rows" for x in found]
        raise ValueError(_difference("mask", said))
    return found


def _difference(name: str, values: Sequence[Any]) -> str:
    first = values[0]
    at = next(r for r, x in enumerate(values) if x != first)
    return f"{name}: got {values[at]} on rank {at}, expected {first}, as on rank 0"


def digest(value: Any) -> int:
    """64 bits of what repr says."""
    found = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


BROADCAST = {argument.public for argument in ARGUMENTS.values() if argument.broadcast}


def facts_of(arguments: Mapping[str, Any], but: Sequence[int] = ()) -> dict[str, Any]:
    """Of arguments beside q, k and v. but: sizes of a mask that ranks may have of their own."""

    def fact(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return told(x, but) if name in BROADCAST else values_told(x)

    return {name: fact(name, x) for name, x in arguments.items()}


def told(x: Tensor | None, but: Sequence[int] = ()) -> Any:
    """A tensor as a fact: all but the sizes at `but`, which ranks may have of their own."""
    if x is None:
        return None
    shape = tuple("any" if d - x.ndim in but else n for d, n in enumerate(x.shape))
    grad = "with gradient" if x.requires_grad and torch.is_grad_enabled() else "without gradient"
    return str(x.dtype), shape, x.device.type, grad


def values_told(x: Tensor) -> Any:
    """The same of a small tensor that is the whole call's, with its values if they lie at hand."""
    return *told(x), x.detach().tolist() if x.device.type == "cpu" else "unread"
