"""Simulate the CPU library's tasks on many cores: `run_phase` of csrc/cpu/runtime/library.cpp, with
task times that were measured on one core.

Phases follow one another. Each thread of a phase takes the next task until none is left. The model:

- A phase wakes its threads and joins them: WAKE seconds for each doubling of their number. All
  phases of a call have as many.
- Threads take tasks in turn, TAKE seconds each if there are several: the counter of tasks moves
  from core to core.
- Running tasks read and write memory at the rates that they have alone, until these add up to the
  machine's; then all running tasks are slowed down alike.
- A task of a chained phase ends at least `lag` seconds after the task `chain` before it: both add
  to the same sums, in turn.

Not in it: transfers between caches, clock frequencies that fall with the number of busy cores, and
other processes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Of a parallel region of libgomp with two threads that spin, on two cores, measured: 0.9 us. It is
# assumed that each doubling costs as much.
WAKE = 0.9e-6
TAKE = 1e-7  # of a cache line that another core wrote: two crossings of a server's chip, assumed
# The share of the data sheet's rate that reading reaches. STREAM reaches 0.8 to 0.9.
SUSTAINED = 0.8


@dataclass(frozen=True)
class Machine:
    """channel: bytes a second of one memory channel, of `channels` on each of `nodes`. link: bytes
    a second that a node's cores read from other nodes; infinite for one node."""

    name: str
    cores: int
    channels: int
    channel: float
    nodes: int = 1
    link: float = math.inf

    def memory(self, placement: str = "local") -> float:
        """Bytes a second that all cores read. local: each core from its own node. interleaved: from
        pages in turn on all nodes. one node: from one, where one thread's first touch puts them."""
        node = SUSTAINED * self.channels * self.channel
        if placement == "local" or self.nodes == 1:
            return self.nodes * node
        if placement == "interleaved":
            return min(self.nodes * node, self.link * self.nodes**2 / (self.nodes - 1))
        if placement != "one node":
            raise ValueError(
                f"placement: got {placement!r}, expected local, interleaved or one node"
            )
        # A task takes as long on either node, so cores of other nodes read their share by links.
        return min(node, self.link * self.nodes / (self.nodes - 1))

    def with_cores(self, cores: int) -> Machine:
        """The machine of which only so many cores run threads."""
        return Machine(self.name, cores, self.channels, self.channel, self.nodes, self.link)


class Tasks(NamedTuple):
    """A phase. seconds: of each task alone, in order. bytes: that all of them move to and from
    memory, in proportion to seconds. chain, lag: see above; 0 for tasks in any order."""

    seconds: Sequence[float]
    bytes: float = 0.0
    chain: int = 0
    lag: float = 0.0


class Result(NamedTuple):
    """seconds: until the last task of the last phase ends. busy: seconds of cores that run tasks,
    at whatever speed. bounds: seconds that each limit alone would cause."""

    seconds: float
    busy: float
    cores: int
    bounds: dict[str, float]

    @property
    def imbalance(self) -> float:
        """The share of the cores' time in which they run no task."""
        return 1 - self.busy / (self.cores * self.seconds)

    @property
    def bound(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])


def threads_of(work: float, cores: int, tasks: int) -> int:
    """Threads of all phases: `run_phase` wakes one for each 2^20 of work, but no more than the
    phase with the most tasks has."""
    return max(1, int(min(cores, 1 + work / 2**20, tasks)))


def run(
    phases: Sequence[Tasks],
    machine: Machine,
    work: float = math.inf,
    placement: str = "local",
    wake: float = WAKE,
    take: float = TAKE,
) -> Result:
    """Simulate the phases of a call. work: as in `threads_of`."""
    cores, memory = machine.cores, machine.memory(placement)
    total = busy = 0.0
    bounds = dict.fromkeys(("compute", "memory", "tasks", "threads", "wake"), 0.0)
    threads = threads_of(work, cores, max(len(x.seconds) for x in phases))
    for phase in phases:
        waking = wake * math.ceil(math.log2(threads)) if len(phase.seconds) > 1 else 0.0
        seconds, ran = _phase(phase, threads, memory, take if threads > 1 else 0.0)
        total += waking + seconds
        busy += ran
        alone = sum(phase.seconds)
        bounds["compute"] += alone / cores
        bounds["memory"] += phase.bytes / memory
        bounds["wake"] += waking
        bounds["tasks"] += _longest(phase)
        allowed = threads_of(work, cores, cores)
        bounds["threads"] += alone / allowed if allowed < min(cores, len(phase.seconds)) else 0.0
    return Result(total, busy, cores, bounds)


def _longest(phase: Tasks) -> float:
    """The time of a phase on any number of cores with any memory."""
    ends: list[float] = []
    for i, seconds in enumerate(phase.seconds):
        before = ends[i - phase.chain] + phase.lag if 0 < phase.chain <= i else 0.0
        ends.append(max(seconds, before))
    return max(ends)


def _phase(phase: Tasks, threads: int, memory: float, take: float) -> tuple[float, float]:
    """Seconds of a phase, and of its threads in tasks.

    `now` is time, `done` the seconds that a task that runs since the start has done. Memory slows
    all running tasks alike, so a task ends when `done` has risen by its seconds.
    """
    rate = phase.bytes / sum(phase.seconds) if phase.bytes else 0.0  # of one running task
    now = done = busy = free = 0.0  # free: when the counter can be taken again
    starts: deque[float] = deque()  # when waiting threads have taken their tasks
    running: list[tuple[float, int]] = []  # (done at the end, task)
    held: list[tuple[float, int]] = []  # (end, task), of tasks that wait for the one before
    began: dict[int, float] = {}
    ends: dict[int, float] = {}  # of ended tasks
    blocked: dict[int, int] = {}  # task -> the task that waits for its end
    given = taken = 0

    def ask() -> None:
        nonlocal free, given
        if given < len(phase.seconds):
            given += 1
            free = max(free, now) + take
            starts.append(free)

    def end(task: int) -> None:
        nonlocal busy
        ends[task] = now
        busy += now - began[task]
        ask()
        if task in blocked:
            after = blocked.pop(task)
            heapq.heappush(held, (now + phase.lag, after))

    for _ in range(threads):
        ask()
    while starts or running or held or blocked:
        speed = min(1.0, memory / (rate * len(running))) if running and rate else 1.0
        computed = now + (running[0][0] - done) / speed if running else math.inf
        start = starts[0] if starts else math.inf
        waited = held[0][0] if held else math.inf
        at = min(computed, start, waited)
        done, now = done + (at - now) * speed, at
        if at == start:
            starts.popleft()
            began[taken] = now
            heapq.heappush(running, (done + phase.seconds[taken], taken))
            taken += 1
        elif at == computed:
            done, task = heapq.heappop(running)
            before = task - phase.chain
            if phase.chain == 0 or before < 0:
                end(task)
            elif before not in ends:
                blocked[before] = task
            else:
                heapq.heappush(held, (max(now, ends[before] + phase.lag), task))
        else:
            end(heapq.heappop(held)[1])
    return now, busy


# Published figures: AMD's and Intel's pages of these processors. Turin Dense's other memory rate,
# DDR5-6400, is for some boards only.
GENOA_64 = Machine("EPYC 9554, 64 cores, 12 x DDR5-4800", 64, 12, 38.4e9)
GENOA_96 = Machine("EPYC 9654, 96 cores, 12 x DDR5-4800", 96, 12, 38.4e9)
GRANITE_RAPIDS = Machine("Xeon 6980P, 128 cores, 12 x MRDIMM-8800", 128, 12, 70.4e9)
TURIN = Machine("EPYC 9965, 192 cores, 12 x DDR5-6000", 192, 12, 48e9)
# Four xGMI links of 16 lanes at 32 GT/s, each way.
TWO_GENOA = Machine("two EPYC 9554, 128 cores, two nodes", 128, 12, 38.4e9, nodes=2, link=4 * 64e9)
MACHINES = (GENOA_64, GENOA_96, GRANITE_RAPIDS, TURIN, TWO_GENOA)
