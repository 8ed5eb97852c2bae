"""Times of the tasks that the CPU library makes of a call, on one thread: `fa_cpu_task_times` of
csrc/abi.h. `scheduler` simulates many cores from them."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fastattn.backends.native import libraries
from fastattn.backends.native.cpu import Cpu
from fastattn.backends.native.launcher import PLACES, Prepared
from fastattn.backends.native.marshalling import pack
from fastattn.call.spec import AttentionSpec, Tensors

PHASES = 10  # FA_PHASES
FLUSH_BYTES = 512 << 20  # more than any cache
PARTS = 32  # of a phase, each with the mean time of its tasks


class Call(NamedTuple):
    """Sizes as in csrc/abi.h. `what`: "forward" or "backward"."""

    what: str
    B: int
    H: int
    Hk: int
    M: int
    N: int
    D: int
    causal: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def work(self) -> float:
        """By which the library wakes threads: `work_of` in csrc/cpu/runtime/packed_batch.h."""
        read = 2 * self.B * self.Hk * self.N * self.D * self.dtype.itemsize
        return 1 + self.B * self.H * self.M * self.N * 2.0 * self.D + 2 * read

    @property
    def bytes(self) -> float:
        """Each tensor read or written once."""
        rows, keys = self.B * self.H * self.M, self.B * self.Hk * self.N
        once = 2 * (rows + keys) * self.D * self.dtype.itemsize
        return once if self.what == "forward" else 2 * once


class Phase(NamedTuple):
    """tasks: how many. seconds: mean times of equal parts of them, in the order of tasks."""

    tasks: int
    seconds: list[float]

    def each(self) -> list[float]:
        """A time for each task."""
        return [x for x, n in zip(self.seconds, _sizes(self.tasks)) for _ in range(n)]


def _sizes(tasks: int) -> list[int]:
    parts = min(tasks, PARTS)
    return [(i + 1) * tasks // parts - i * tasks // parts for i in range(parts)]


class _Timed(Cpu):
    """The CPU backend; a launch finds tasks instead."""

    def __init__(self, threads: int, room: int):
        self.threads, self.room = threads, room

    def _launch(
        self, which: int, like: Prepared, t: Tensors, after: tuple[torch.Tensor | None, ...]
    ) -> None:
        entry = libraries.cpu().entry(
            *("fa_cpu_task_times", ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
        )
        counts, seconds = (ctypes.c_int64 * PHASES)(), (ctypes.c_double * max(1, self.room))()
        params = pack(like.form, PLACES[which], (*t, *after), self.threads)
        status = entry(params, which, counts, seconds, self.room)
        if status != libraries.OK:
            raise RuntimeError(f"fa_cpu_task_times: got status {status}, expected {libraries.OK}")
        self.tasks = [x for x in counts if x]
        times = iter(seconds)
        self.seconds = [list(itertools.islice(times, x)) for x in self.tasks] if self.room else []


class Runs:
    """A call with its tensors, to run or to time by tasks."""

    def __init__(self, call: Call):
        self.call = call
        self.spec = AttentionSpec(
            **dict[str, Any](
                zip(("B", "H", "Hk", "M", "N", "D", "Dv"), (*call[1:7], call.D), strict=True)
            ),
            dtype=call.dtype,
            device="cpu",
            scale=call.D**-0.5,
            **dict[str, Any](right=0, bottom_right=True) if call.causal else {},
        )

        def normal(heads: int, rows: int) -> torch.Tensor:
            return torch.randn(call.B, heads, rows, call.D).to(call.dtype)

        keys = normal(call.Hk, call.N), normal(call.Hk, call.N)
        self.tensors = Tensors(normal(call.H, call.M), *keys)
        if call.what == "backward":
            self.out, self.normaliser = Cpu().forward(self.spec, self.tensors)
            self.dout = torch.randn_like(self.out)

    def run(self, backend: Cpu) -> None:
        if self.call.what == "forward":
            backend.forward(self.spec, self.tensors)
            return
        wanted = self.out, self.normaliser, self.dout, None, ("q", "k", "v")
        backend.backward(self.spec, self.tensors, *wanted)

    def flush(self) -> None:
        """Before a run of one row: a model's other layers have put its keys out of the caches."""
        if self.call.M == 1:
            flush()

    def counts(self, threads: int) -> list[int]:
        """The number of tasks of each phase, for so many threads."""
        timed = _Timed(threads, 0)
        self.run(timed)
        return timed.tasks

    def phases(self, threads: int, budget: float, least: int = 3) -> list[Phase]:
        """The least times of `least` runs or more, in about `budget` seconds."""
        counts = self.counts(threads)
        found: list[list[Phase]] = []
        begin = time.perf_counter()
        while len(found) < least or time.perf_counter() - begin < budget:
            self.flush()
            timed = _Timed(threads, sum(counts))
            self.run(timed)
            found.append([Phase(len(x), list(_means(x))) for x in timed.seconds])
        return least_of(found)


def least_of(runs: Sequence[Sequence[Phase]]) -> list[Phase]:
    """Phases with the least times of some runs of one call."""
    return [
        Phase(same[0].tasks, [min(x) for x in zip(*(phase.seconds for phase in same))])
        for same in zip(*runs)
    ]


def _means(seconds: Sequence[float]) -> Iterator[float]:
    times = iter(seconds)
    for n in _sizes(len(seconds)):
        yield sum(itertools.islice(times, n)) / n


_flushed: list[torch.Tensor] = []


def flush() -> None:
    """Put what the caches have out of them."""
    if not _flushed:
        _flushed.append(torch.zeros(FLUSH_BYTES // 4))
    _flushed[0].add_(1)
