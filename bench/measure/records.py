"""Read and summarise records: the ratios of a cell, what other processes took, means; tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..peers.registry import BASELINE
from .timing import quartiles

Record = dict[str, Any]
RULE = {None: "the GPU, device events", 1: "one thread, thread CPU time"}
MANY = "threads, wall time"
BUSY = 0.1  # of the cores' time: what other processes may take beside a measured wall time


def ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    """Quartiles of the ratio in each round."""
    return quartiles([t / o for t, o in zip(theirs, ours, strict=True)])


def timing_of(cell: Record, threads: int | None) -> Record:
    """The timings of a cell at a thread count; empty if it was not timed."""
    return next((x for x in cell["timings"] if x["threads"] == threads), {})


def busy(timing: Record) -> bool:
    """Whether other processes used the cores during these wall times, which then say nothing."""
    return (timing.get("threads") or 1) > 1 and (timing.get("others") or 0) > BUSY


def speedup_of(entry: Record, peer: str = BASELINE) -> Record | None:
    """Quartiles of our speed-up over a peer; None if it was not timed, or on a busy machine."""
    return None if busy(entry) else entry.get("peers", {}).get(peer, {}).get("speedup")


def first_threads(cells: Sequence[Record]) -> int | None:
    """The thread count that the tables show in full: 1 on a CPU, None on a GPU."""
    return next((t["threads"] for cell in cells for t in cell["timings"]), 1)


def clock_of(threads: int | None) -> str:
    return RULE.get(threads, f"{threads} {MANY}")


def spread(ratio: Record) -> str:
    return f"{ratio['median']:.2f} [{ratio['q1']:.2f} {ratio['q3']:.2f}]"


def geometric_mean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    for entries in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(entries)} |"
