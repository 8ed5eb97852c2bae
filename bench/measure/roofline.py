"""Measure the machine's limits of arithmetic and memory, in the same run as everything else.

On a CPU the arithmetic limit is a loop of fused multiply-adds (or bf16 dot products) on registers,
on one thread, in short bursts. The same loop is also run for a third of a second, enough for a chip
to lower its clock for wide vectors, and torch's matmul is measured. On a GPU the limit is matmul.
The memory limit is the fastest rate at which torch reads or copies a buffer; on one thread of a CPU
also that of loops that read one, two and four streams of addresses. A CPU has several sizes,
because a small buffer may still be in a cache; the largest is far larger than any cache.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fastattn.backends.native import libraries

from ..cases import DTYPES
from . import timing

BURST_S, BURSTS, SUSTAINED_S = 0.002, 100, 0.3
MATMUL_SIZE = {"cpu": 512, "cuda": 8192}
STREAMS = (1, 2, 4)
BUFFER_BYTES = {"cpu": [mb << 20 for mb in (4, 8, 16, 32, 64, 128, 256)], "cuda": [4 << 30]}


class Limits(NamedTuple):
    """The measured limits; percentages are relative to them."""

    device: str
    compute: dict[str, dict[str, float | None]]  # dtype: the rates that `measure` finds
    memory: list[dict[str, Any]]  # threads, bytes, read_gbs, copy_gbs

    def gflops(self, dtype: str, threads: int | None) -> float | None:
        """The limit of one thread or of the GPU; None for several threads: not measured."""
        key = "matmul_gflops" if self.device == "cuda" else "register_gflops"
        return self.compute.get(dtype, {}).get(key) if threads in (None, 1) else None

    def read_gbs(self, threads: int | None, size: int) -> float | None:
        """Rate of the buffer closest to `size` bytes; None if that is under half the smallest."""
        rows = [row for row in self.memory if row["threads"] == threads]
        if not rows or 2 * size < min(row["bytes"] for row in rows):
            return None
        return min(rows, key=lambda row: abs(math.log(row["bytes"] / size)))["read_gbs"]


def measure(device: str, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """The fields of Limits; None for a figure that is not measured."""
    compute = {
        dtype: {
            "register_gflops": register_gflops(dtype) if device == "cpu" else None,
            "sustained_gflops": sustained_gflops(dtype) if device == "cpu" else None,
            "matmul_gflops": matmul_gflops(device, dtype),
        }
        for dtype in dtypes
    }
    return {"device": device, "compute": compute, "memory": bandwidths(device)}


def register_gflops(dtype: str) -> float | None:
    """The best of many bursts, each shorter than a scheduler's time slice: a busy neighbour can
    only make a burst slower."""
    return max(rates) if (rates := _rates(dtype, BURST_S, BURSTS)) else None


def sustained_gflops(dtype: str) -> float | None:
    return rates[0] if (rates := _rates(dtype, SUSTAINED_S, 1)) else None


def _rates(dtype: str, seconds: float, times: int) -> list[float]:
    """GF/s of `times` register loops of `seconds` CPU time each; [] without our kernels."""
    if libraries.cpu_unavailable():
        return []
    peak = libraries.cpu().entry("fa_cpu_peak", ctypes.c_double, ctypes.c_int64, ctypes.c_double)
    return [peak(libraries.DTYPE[DTYPES[dtype]], seconds) for _ in range(times)]


def matmul_gflops(device: str, dtype: str) -> float:
    size = MATMUL_SIZE[device]
    a = torch.randn(size, size, device=device).to(DTYPES[dtype])
    clock = timing.DeviceClock() if device == "cuda" else timing.THREAD_TIME
    with timing.torch_threads(1 if device == "cpu" else None), torch.no_grad():
        rounds = timing.interleaved({"matmul": (lambda _: a @ a,)}, clock, seconds=0.3)
    return 2.0 * size**3 / min(laps[0] for laps in rounds["matmul"]) / 1e9


def bandwidths(device: str) -> list[dict[str, Any]]:
    """GB/s at each size and thread count."""
    return [row for size in BUFFER_BYTES[device] for row in _bandwidths(device, size)]


def _loops(x: torch.Tensor) -> dict[str, Callable[[], float]]:
    """Loops that read x as so many streams of addresses; {} without our kernels."""
    if libraries.cpu_unavailable():
        return {}
    types = ctypes.c_float, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
    read = libraries.cpu().entry("fa_cpu_read_sum", *types)
    return {
        f"{streams} streams": functools.partial(read, x.data_ptr(), x.numel(), streams)
        for streams in STREAMS
    }


def _bandwidths(device: str, size: int) -> list[dict[str, Any]]:
    """Reading: the best of several reductions. Copying: reads and writes together."""
    x = torch.ones(size // 4, device=device)
    single = _loops(x) if device == "cpu" else {}
    y = torch.empty_like(x)
    ways = {"sum": x.sum, "max": x.amax, "dot": lambda: torch.dot(x, x)}
    rows = []
    for threads, clock in timing.clocks(device):
        reading = ways | (single if threads == 1 else {})
        programs: dict[str, timing.Program] = {
            name: (lambda _, way=way: way(),) for name, way in reading.items()
        }
        programs["copy"] = (lambda _: y.copy_(x),)
        with timing.torch_threads(threads), torch.no_grad():
            rounds = timing.interleaved(programs, clock, seconds=0.0)
        best = {name: min(laps[0] for laps in each) for name, each in rounds.items()}
        read = size / 1e9 / min(best[name] for name in reading)
        copy = 2 * size / 1e9 / best["copy"]
        rows.append({"threads": threads, "bytes": size, "read_gbs": read, "copy_gbs": copy})
    return rows
