"""What this machine can do at most, measured in the same run as everything else.

On a CPU the limit is a loop of fused multiply-adds (or bf16 dot products) on registers, one
thread; torch's matmul stands beside it. On a GPU matmul is the limit.
"""

from __future__ import annotations

import ctypes

import torch

from fastattn import native

from . import timing
from .cases import DTYPES

BURST_S, BURSTS = 0.002, 100
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}


def measure(device: str, dtypes: tuple[str, ...]) -> dict[str, dict[str, float | None]]:
    """dtype -> {"register_gflops", "matmul_gflops"}; None where nothing measures it."""
    return {
        dtype: {
            "register_gflops": register_gflops(dtype) if device == "cpu" else None,
            "matmul_gflops": matmul_gflops(device, dtype),
        }
        for dtype in dtypes
    }


def peaks(device: str, ceilings: dict[str, dict[str, float | None]]) -> dict[str, float | None]:
    """dtype -> the figure that "% of peak" is a percentage of."""
    key = "matmul_gflops" if device == "cuda" else "register_gflops"
    return {dtype: row[key] for dtype, row in ceilings.items()}


def register_gflops(dtype: str) -> float | None:
    """The best of many bursts, each shorter than a scheduler's time slice: a busy neighbour can
    only make a burst slower."""
    peak = None if native.cpu_unavailable() else getattr(native.cpu().dll, "fa_cpu_peak", None)
    if peak is None:
        return None
    peak.restype, peak.argtypes = ctypes.c_double, (ctypes.c_int64, ctypes.c_double)
    return max(peak(native.DTYPE[DTYPES[dtype]], BURST_S) for _ in range(BURSTS))


def matmul_gflops(device: str, dtype: str) -> float:
    size = MATMUL_SIZE[device]
    a = torch.randn(size, size, device=device).to(DTYPES[dtype])
    clock = timing.DeviceClock() if device == "cuda" else timing.THREAD_TIME
    with timing.torch_threads(1 if device == "cpu" else None), torch.no_grad():
        rounds = timing.interleaved({"matmul": (lambda _: a @ a,)}, clock, seconds=0.3)
    return 2.0 * size**3 / min(laps[0] for laps in rounds["matmul"]) / 1e9
