"""Tiles and splits that were measured: those of the user's file, or a search while `tune` measures.

Without a file, and outside a search, the tables of tile_configs.py decide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ...call.spec import AttentionSpec
from ..measured import files
from .tile_configs import Config

Choice = Config | int  # a tile, or a number of parts
# Of the functions that launch each choice, the one to take: the first is the default. None if
# nothing was measured.
Race = Callable[["Key", dict[Choice, Callable[[], Any]]], Choice | None]


class Key(NamedTuple):
    """What a choice depends on, on one chip. Calls with equal keys get the same choice."""

    which: str  # the pass, or "splits"
    dtype: str
    D: int
    Dv: int
    flags: tuple[str, ...]  # the constants that the kernel is compiled for
    group: int  # query heads per key head
    M: int  # sizes are rounded up to powers of two
    N: int
    heads: int  # of all batch items together
    window: int  # how many keys a row sees


def key(which: str, spec: AttentionSpec, **constexprs: object) -> Key:
    """The key of one pass of a call. constexprs: the constants that its kernel is compiled for."""
    return Key(
        which=which,
        dtype=str(spec.dtype),
        D=spec.D,
        Dv=spec.Dv,
        flags=tuple(f"{name}={value}" for name, value in constexprs.items()),
        group=spec.H // spec.Hk,
        M=bucket(spec.M),
        N=bucket(spec.N),
        heads=bucket(spec.B * spec.H),
        window=bucket(min(spec.left + spec.right + 1, spec.N)),
    )


def bucket(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


class _Search(NamedTuple):
    race: Race
    found: dict[Key, Choice]


_searches: list[_Search] = []


@contextmanager
def searching(race: Race, found: dict[Key, Choice]) -> Generator[None]:
    """In the block, each key that is not found yet is raced when it comes up."""
    search = _Search(race, found)
    _searches.append(search)
    try:
        yield
    finally:
        _searches.remove(search)


def searches() -> bool:
    """True inside the block of `searching`."""
    return bool(_searches)


@functools.cache
def stored(device: torch.device) -> dict[Key, Choice]:
    """The choices of the user's file for a GPU."""
    return files.choices(device, "tiles", parsed, {}) if device.type == "cuda" else {}


def parsed(written: list[list[Any]]) -> dict[Key, Choice]:
    """What `written` makes. Raises TypeError or ValueError for anything else."""
    found: dict[Key, Choice] = {}
    for fields, choice in written:
        one = Key(**fields)
        tile = [choice] if isinstance(choice, int) else choice
        if not all(type(x) is int for x in tile):
            raise ValueError(f"got {choice!r}, expected whole numbers")
        found[one._replace(flags=tuple(one.flags))] = (
            choice if isinstance(choice, int) else Config(*choice)
        )
    return found


def written(found: dict[Key, Choice]) -> list[list[Any]]:
    """Choices as a file has them."""
    return [[x._asdict(), y] for x, y in found.items()]


def active(device: torch.device) -> bool:
    """True if there is a search, or a choice that was measured."""
    return bool(_searches or stored(device))


def best(
    key: Key,
    device: torch.device,
    default: Choice,
    candidates: Iterable[Choice],
    launch: Callable[[Any], Any],
) -> Any:
    """The measured choice of `default` and `candidates`; `default` where none was measured.
    launch: launches a choice."""
    choices = list(dict.fromkeys([default, *candidates]))
    if not _searches:
        choice = stored(device).get(key, default)
        return choice if choice in choices else default  # it may be of other tables
    race, found = _searches[-1]
    if key not in found and len(choices) > 1:
        choice = race(key, {x: functools.partial(launch, x) for x in choices})
        if choice is not None:
            found[key] = choice
    return found.get(key, default)
