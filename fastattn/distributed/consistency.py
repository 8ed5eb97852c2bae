"""Check before a call that all ranks make the same one: a small exchange of sizes and arguments."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..call.spec import ARGUMENTS
from ..score_mods.tracing import Traced
from .collectives import exchange, waiting


class Own(NamedTuple):
    """What may differ between ranks. seed: drawn if none was given; the first rank's is used.
    mask_rows: whether its mask has `ROWS` or `NO_ROWS`; `UNCLEAR` if the rank has one row."""

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
    """The ranks of a call. groups: one group of all of them; or this rank's group along each
    dimension of a mesh, the outermost first. Ranks count along the last dimension first."""

    groups: tuple[dist.ProcessGroup, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks in each group."""
        return tuple(map(dist.get_world_size, self.groups))

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def rank(self) -> int:
        rank = 0
        for group in self.groups:
            rank = rank * dist.get_world_size(group) + dist.get_rank(group)
        return rank

    def all(self, mine: Any, gather: Callable[[Any, dist.ProcessGroup], list[Any]]) -> list[Any]:
        """The values of all ranks. `gather` collects the values of a group."""
        values = [mine]
        for group in reversed(self.groups):
            values = [x for part in gather(values, group) for x in part]
        return values

    def table(self, row: Sequence[int], device: torch.device) -> list[list[int]]:
        """The rows of all ranks."""

        def gather(rows: list[list[int]], group: dist.ProcessGroup) -> list[list[list[int]]]:
            sent = torch.tensor(rows, dtype=torch.int64, device=device)
            shapes = [tuple(sent.shape)] * dist.get_world_size(group)
            received = exchange([sent] * len(shapes), shapes, group, "what the ranks agree on")
            return torch.stack(received).tolist()

        return self.all(list(row), gather)

    def said(self, what: Any) -> list[Any]:
        """The objects `what` of all ranks, which all call this after `table` has shown a need."""

        def gather(each: list, group: dist.ProcessGroup) -> list[list]:
            received: list[Any] = [None] * dist.get_world_size(group)
            with waiting(group, "what the ranks do not agree on"):
                dist.all_gather_object(received, each, group=group)
            return received

        return self.all(what, gather)


def need_team(group: Any) -> Team:
    """The team of a group of ranks, of a mesh, or of all ranks (None). Raises RuntimeError if
    torch.distributed is not initialised, ValueError for any other group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fastattn.distributed: got no group of ranks, expected torch.distributed to have one: "
            "call torch.distributed.init_process_group, under torchrun or as its help shows"
        )
    if isinstance(group, DeviceMesh):
        groups = tuple(map(group.get_group, range(group.ndim)))
    else:
        groups = (dist.group.WORLD if group is None else group,)
    for x in groups:
        if not isinstance(x, dist.ProcessGroup) or dist.get_rank(x) < 0:
            expected = "a group of ranks that this one is in, a DeviceMesh, or None for all ranks"
            raise ValueError(f"group: got {group!r}, expected {expected}")
    return Team(groups)  # ty: ignore


def agree(
    own: Own,
    facts: Mapping[str, Any],
    trouble: Exception | None,
    device: torch.device,
    team: Team,
) -> list[Own]:
    """The `Own` of every rank. Each rank calls this once a call. facts: values that must be the
    same on all ranks, by the names of arguments. trouble: the error in this rank's own arguments.

    Raises on every rank, with rank and argument: ValueError if facts differ. If a rank has
    `trouble`, it raises that, and the others raise RuntimeError about it.
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
    of_ranks = [Own(*row[1:n]) for row in every]
    if {NO_ROWS, ROWS} <= {x.mask_rows for x in of_ranks}:
        said = ["one row for all" if x.mask_rows == NO_ROWS else "rows" for x in of_ranks]
        raise ValueError(_difference("mask", said))
    return of_ranks


def _difference(name: str, values: Sequence[Any]) -> str:
    first = values[0]
    at = next(r for r, x in enumerate(values) if x != first)
    return f"{name}: got {values[at]} on rank {at}, expected {first}, as on rank 0"


def digest(value: Any) -> int:
    """A hash of 64 bits of the value's repr."""
    hashed = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)


BROADCAST = {argument.name for argument in ARGUMENTS.values() if argument.broadcast}


def facts_of(arguments: Mapping[str, Any], but: Sequence[int] = ()) -> dict[str, Any]:
    """The facts about arguments other than q, k and v. but: a mask's dimensions of which the sizes
    may differ between ranks."""

    def fact(name: str, x: Any) -> Any:
        if isinstance(x, Traced):
            return x.program.text(), *map(told, x.tensors)
        if not isinstance(x, Tensor):
            return x
        return told(x, but) if name in BROADCAST else values_told(x)

    return {name: fact(name, x) for name, x in arguments.items()}


def told(x: Tensor | None, but: Sequence[int] = ()) -> Any:
    """A tensor as a fact, without its values. The sizes at `but` may differ between ranks."""
    if x is None:
        return None
    shape = tuple("any" if d - x.ndim in but else n for d, n in enumerate(x.shape))
    grad = "with gradient" if x.requires_grad and torch.is_grad_enabled() else "without gradient"
    return str(x.dtype), shape, x.device.type, grad


def values_told(x: Tensor) -> Any:
    """The same for a small tensor that every rank has whole, with its values if it is on a CPU."""
    return *told(x), x.detach().tolist() if x.device.type == "cpu" else "unread"
