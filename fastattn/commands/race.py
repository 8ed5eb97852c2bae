"""Races: programs take turns, and their times are compared within a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
ROUNDS = 9
SAMPLE = 0.02  # the least seconds of a sample
MARGIN = 0.97  # another than the first wins only if it takes at most so much of its time, and
# less in three of four rounds: other load must not choose
FLUSHED = 256 << 20  # bytes that are written before a sample: more than an L2 cache


class Ratio(NamedTuple):
    """A program's time over that of the first, within a round."""

    median: float
    high: float  # the upper quartile of the rounds

    @classmethod
    def of(cls, rounds: Iterable[float]) -> Ratio:
        _, median, high = statistics.quantiles(rounds, n=4, method="inclusive")
        return cls(median, high)


class Clock(Protocol):
    """Takes the seconds of one call of a program."""

    def __call__(self, name: Any, program: Callable[[], Any]) -> float: ...


class HostClock:
    """Wall time of the fastest call of a sample, which other processes disturb least, after one
    call that does not count: the program before has used the caches."""

    def __call__(self, name: Any, program: Callable[[], Any]) -> float:
        program()
        first = start = time.perf_counter()
        fastest = float("inf")
        while start - first < SAMPLE:
            program()
            end = time.perf_counter()
            fastest, start = min(fastest, end - start), end
        return fastest


class DeviceClock:
    """The time between CUDA events, behind a write that empties the L2 cache and a sleep of the
    device, during which the host submits the program."""

    def __call__(self, name: Any, program: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.empty(FLUSHED, dtype=torch.int8, device="cuda").zero_()
        torch.cuda._sleep(2_000_000)
        begin.record()
        program()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


def race(
    programs: Mapping[Name, Callable[[], Any]], clock: Clock, rounds: int = ROUNDS
) -> tuple[dict[Name, Ratio], dict[Name, str]]:
    """The ratios of programs by name, over the first one that runs; and why others do not run."""
    failed: dict[Name, str] = {}
    for name, program in programs.items():  # the first calls compile
        try:
            clock(name, program)
        except Exception as error:  # a tile that does not fit, a compiler's error
            failed[name] = f"{type(error).__name__}: {error}"
    names = [name for name in programs if name not in failed]
    seconds: dict[Name, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            seconds[name].append(clock(name, programs[name]))
        names.reverse()  # no program always runs after the same one
    first = next((name for name in programs if name not in failed), None)
    if first is None:
        return {}, failed
    ratios = {
        name: Ratio.of(x / y for x, y in zip(some, seconds[first]))
        for name, some in seconds.items()
    }
    return {name: ratios[name] for name in programs if name in ratios}, failed


def winner(ratios: Mapping[Name, Ratio]) -> Name:
    """The fastest; the first one unless another is faster by a margin, and nearly always."""
    able = [x for x, ratio in ratios.items() if ratio.median <= MARGIN and ratio.high < 1]
    return min(able, key=ratios.__getitem__, default=next(iter(ratios)))
