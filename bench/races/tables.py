"""The tables of `python -m bench race`: each has rows, or lines that no clock measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..cases import BOTH, FORWARD, TRAINING, Case
from . import (
    derivatives,
    functions,
    generation,
    latent,
    launch,
    packed,
    rotation,
    selected,
    small,
    storage,
)
from .race import SECONDS, Race


class Table(NamedTuple):
    """`rows` takes dtypes and a factor of all lengths. A Race is held against the other's result; a
    Case runs in `whats` against the float64 oracle, beside the sweep's peers. `threads` are counts,
    by default all; `lines` prints what is not timed; `memory` yields records of peak memory."""

    text: str
    rows: Callable[[Sequence[str], float], Iterator[Race | Case]] = lambda dtypes, scale: iter(())
    whats: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = BOTH
    threads: tuple[int, ...] | None = (1,)
    seconds: float = SECONDS
    lines: Callable[[bool], Iterator[str]] | None = None  # of whether they are saved
    memory: Callable[[float], Iterator[dict[str, Any]]] | None = None


F32 = ("float32",)
TABLES = {
    "decode": Table("a few rows on long keys", small.decode, (FORWARD,), threads=None),
    "few-rows": Table(
        "forward and backward of 1 to 3 rows", small.trained, (TRAINING,), F32, None, 1.0
    ),
    "tiny": Table("calls and steps of 1 to 8 rows, beside torch's", small.races, dtypes=F32),
    "short": Table("causal over full at lengths 16 to 512", small.causal, dtypes=F32),
    "serving": Table(
        "packed batches and pages: beside padding, torch, contiguous keys",
        *(packed.races, (), BOTH, None),
    ),
    "generation": Table(
        "tokens of transformers' models beside sdpa; steps of KVCache beside slices",
        *(generation.races, (), BOTH),
        seconds=1.0,
    ),
    "flex": Table("score_mod and mask_mod: beside no function, a dense mask", functions.races),
    "latent": Table("latent attention: beside products, keys of heads, torch", latent.races),
    "rotation": Table("norm_rope: beside torch's operations, compiled, copies", rotation.races),
    "selected": Table("keys that rows select: beside gathered keys, a mask", selected.races),
    "derivatives": Table(
        "jvp and double backward: beside forward, backward, torch; memory",
        *(derivatives.races, (), F32),
        memory=derivatives.memory,
    ),
    "launch": Table("CPU time of a GPU call up to the driver's launch", lines=launch.lines),
    "storage": Table("errors of keys and values in few bits", lines=storage.lines),
}
