"""Clocks, and interleaved rounds: every peer runs in every round, so that load or a changing clock
frequency affects all of them alike. Ratios are taken within a round."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import isolated_process

# A program is a chain of phases. Each gets the result of the one before, and is timed separately.
Phase = Callable[[Any], Any]
Program = Sequence[Phase]

MIN_SAMPLE_S = 0.003
ROUNDS = (5, 41)
L2_BYTES = 256 << 20  # more than any GPU's L2
SLEEP = (2e-4, 2e-2)  # sleep of the device before a phase, in s: added to twice the host's; at most


class Clock:
    name: str
    unmeasured = 0.0  # approximate unmeasured seconds per call
    # What other processes took of all cores' time while `interleaved` last used this clock; None
    # where the system does not count it.
    others: float | None = None

    def sample(self, program: Program, loops: int) -> list[float]:
        """Seconds per call of each phase, averaged over loops calls."""
        raise NotImplementedError

    def host(self, program: Program) -> list[float]:
        """Median seconds that the host took to submit each phase, over all samples; [] if the host
        itself computes."""
        return []


class HostClock(Clock):
    """Times with one of Python's clocks: time.thread_time or time.perf_counter."""

    def __init__(self, name: str, now: Callable[[], float]):
        self.name, self.now = name, now

    def sample(self, program: Program, loops: int) -> list[float]:
        now, total = self.now, [0.0] * len(program)
        for _ in range(loops):
            value = None
            for i, phase in enumerate(program):
                start = now()
                value = phase(value)
                total[i] += now() - start
        return [t / loops for t in total]


class DeviceClock(Clock):
    """CUDA events around each phase, each after a write that empties the L2 cache.

    The device sleeps before the first event for longer than the host takes to submit the phase, so
    that no kernel waits for its launch between the events: they measure the device alone. A call
    that takes the host longer than the device is bound by the host; `host` gives that time.
    """

    name = "device events"
    unmeasured = SLEEP[0] + 1e-4  # the device sleeps, and empties its cache

    def __init__(self, cuda: Any = torch.cuda, now: Callable[[], float] = time.perf_counter):
        self.cuda, self.now = cuda, now
        self.flush = torch.empty(L2_BYTES, dtype=torch.int8, device=cuda.current_device())
        self.hosts: dict[Program, list[list[float]]] = {}  # by program: calls, phases

    @functools.cached_property
    def cycles(self) -> float:
        """Cycles per second, as the device's sleep counts them."""
        count = 1_000_000
        for _ in range(2):  # the first loads the kernel
            begin, end = self._marks()
            begin.record()
            self.cuda._sleep(count)
            end.record()
            self.cuda.synchronize()
        return count / begin.elapsed_time(end) * 1e3

    def _marks(self) -> list[Any]:
        return [self.cuda.Event(enable_timing=True) for _ in range(2)]

    def sample(self, program: Program, loops: int) -> list[float]:
        cycles, hosts = self.cycles, self.hosts.setdefault(program, [])
        marks = []
        for _ in range(loops):
            least = [min(each) for each in zip(*hosts)] or [0.0] * len(program)
            value, row, took = None, [], []
            for phase, known in zip(program, least):
                begin, end = self._marks()
                self.flush.zero_()
                self.cuda._sleep(int(cycles * min(SLEEP[1], SLEEP[0] + 2 * known)))
                begin.record()
                start = self.now()
                value = phase(value)
                took.append(self.now() - start)
                end.record()
                row.append((begin, end))
            hosts.append(took)
            marks.append(row)
        self.cuda.synchronize()
        return [
            statistics.median(begin.elapsed_time(end) for begin, end in each) / 1e3
            for each in zip(*marks, strict=True)
        ]

    def host(self, program: Program) -> list[float]:
        return [statistics.median(each) for each in zip(*self.hosts.get(program, ()))]


THREAD_TIME = HostClock("thread CPU time", time.thread_time)  # unaffected by other processes
WALL_TIME = HostClock("wall time", time.perf_counter)


def clocks(device: str, threads: Sequence[int] | None = None) -> list[tuple[int | None, Clock]]:
    """(threads, clock) pairs to measure with, by default one thread and all; a GPU has no thread
    count."""
    if device == "cuda":
        return [(None, DeviceClock())]
    counts = dict.fromkeys(threads or (1, torch.get_num_threads()))
    return [(count, THREAD_TIME if count == 1 else WALL_TIME) for count in counts]


class Failed(Exception):
    """A program raised while it was timed; the cause is what it raised."""

    def __init__(self, name: str, error: Exception):
        super().__init__(f"{name} raised {type(error).__name__}: {error}")
        self.name = name


@contextlib.contextmanager
def torch_threads(count: int | None) -> Generator[None, None, None]:
    """Set torch's thread count inside the block; None leaves it."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def interleaved(
    programs: Mapping[str, Program], clock: Clock, seconds: float
) -> dict[str, list[list[float]]]:
    """name -> rounds -> seconds per phase, in about `seconds` in total. Raises Failed."""

    def sample(name: str, count: int) -> list[float]:
        with isolated_process.at(name):
            try:
                return clock.sample(programs[name], count)
            except Exception as error:
                raise Failed(name, error) from error

    loops, round_s = {}, 0.0
    for name in programs:
        sample(name, 1)  # warm: first calls allocate, page in and choose kernels
        once = sum(sample(name, 1)) + clock.unmeasured
        loops[name] = max(1, math.ceil(MIN_SAMPLE_S / max(once, 1e-6)))
        round_s += once * loops[name]
    rounds = int(min(ROUNDS[1], max(ROUNDS[0], seconds / round_s)))
    samples: dict[str, list[list[float]]] = {name: [] for name in programs}
    order = list(programs)
    collecting = gc.isenabled()
    gc.disable()
    before = _seconds_used()
    try:
        end = time.perf_counter() + 3 * seconds
        for i in range(rounds):
            if i >= ROUNDS[0] and time.perf_counter() > end:
                break  # slower than the first calls were: other processes hold the cores
            for name in order:
                samples[name].append(sample(name, loops[name]))
            order.reverse()  # no peer always runs after the same one
        clock.others = _share_of_others(before, _seconds_used())
    finally:
        if collecting:
            gc.enable()
    return samples


def _seconds_used() -> tuple[float, float, float] | None:
    """CPU seconds of all processes and of this one, and seconds; None where not counted."""
    try:
        line = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), time.perf_counter()


def _share_of_others(
    before: tuple[float, float, float] | None, after: tuple[float, float, float] | None
) -> float | None:
    if not before or not after:
        return None
    used, ours, wall = (y - x for x, y in zip(before, after))
    return min(1.0, max(0.0, (used - ours) / (wall * (os.cpu_count() or 1))))


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """{"median", "q1", "q3"} of at least one value."""
    if len(values) == 1:
        return dict.fromkeys(("q1", "median", "q3"), values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"q1": q1, "median": median, "q3": q3}
