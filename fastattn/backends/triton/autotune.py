"""FASTATTN_AUTOTUNE=1: time a few tiles on the current GPU, once for each kind of call.

The fastest is stored in FASTATTN_CACHE_DIR, else in $XDG_CACHE_HOME/fastattn or ~/.cache/fastattn:
one JSON file for each kind of call, so that concurrent processes do not overwrite each other's
results. Without FASTATTN_AUTOTUNE nothing is timed, read or written: the tables of tile_configs.py
are used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ...call.environment import setting
from ...call.spec import AttentionSpec
from .tile_configs import Config, triton_version


class Key(NamedTuple):
    """The key of a search. Calls with equal keys get the same tile."""

    device: str  # the GPU's name
    triton: str  # Triton's version
    which: str  # the pass
    dtype: str
    D: int
    Dv: int
    flags: tuple[str, ...]  # the constants that the kernel is compiled for
    group: int  # query heads per key head
    M: int  # sizes are rounded up to powers of two
    N: int
    heads: int  # of all batch items together
    window: int  # how many keys a row sees


def enabled() -> bool:
    """True if the user asks for searches."""
    return setting("FASTATTN_AUTOTUNE") == "1"


def key(which: str, spec: AttentionSpec, device: torch.device, **constexprs: object) -> Key:
    """The key of one pass of a call. constexprs: the constants that its kernel is compiled for."""
    return Key(
        device=torch.cuda.get_device_name(device),
        triton=str(triton_version()),
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


_known: dict[tuple[Path, Key], Config] = {}


def best(
    key: Key, default: Config, candidates: Iterable[Config], time: Callable[[Config], float]
) -> Config:
    """The fastest of `default` and `candidates`. time: launches a tile, returns its time, any unit.

    A candidate that raises is skipped, because not every tile fits every chip. Nothing can be timed
    while a CUDA graph is captured: `default` is used then, and a later call does the search.
    """
    choices = list(dict.fromkeys([default, *candidates]))
    if len(choices) == 1:
        return default
    where = folder()
    if tile := _known.get((where, key)):
        return tile
    path = where / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.json"
    tile = _read(path, key)
    if tile not in choices:  # no file, a damaged one, or one from other tables
        if torch.cuda.is_current_stream_capturing():
            return default
        times = _times(choices, time)
        tile = min(times, key=times.__getitem__, default=default)
        if times:  # else no tile runs: the caller's launch raises the error
            _write(path, key, tile)
    _known[where, key] = tile
    return tile


def _times(choices: Iterable[Config], time: Callable[[Config], float]) -> dict[Config, float]:
    times = {}
    for config in choices:
        with contextlib.suppress(Exception):  # out of resources, or a compiler error
            times[config] = time(config)
    return times


def folder() -> Path:
    """The folder of stored tiles."""
    if chosen := os.environ.get("FASTATTN_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastattn"


def _read(path: Path, key: Key) -> Config | None:
    try:
        stored = json.loads(path.read_text())
        if stored["key"] == json.loads(json.dumps(key._asdict())):
            return Config(**stored["config"])
    except (OSError, ValueError, TypeError, KeyError):
        pass  # absent, unreadable or damaged: search, then rewrite it
    return None


def _write(path: Path, key: Key, config: Config) -> None:
    """Write the file atomically. If it cannot be written, every process searches again."""
    text = json.dumps(dict(key=key._asdict(), config=config._asdict()), indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            file = Path(scratch) / path.name
            file.write_text(text + "\n")
            os.replace(file, path)
    except OSError as error:
        _tell_unwritable(path.parent, str(error))


@functools.cache
def _tell_unwritable(where: Path, why: str) -> None:
    warnings.warn(
        f"what FASTATTN_AUTOTUNE found cannot be kept ({why}): every process searches anew, for "
        f"seconds for each kind of call; FASTATTN_CACHE_DIR names another folder than {where}",
        stacklevel=2,
    )
