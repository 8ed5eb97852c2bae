"""Extra memory of attention with dropout, forward and backward, each peer in a fresh process.

    python -m bench.memory fastattn cpu 4096     prints the extra bytes at the peak

The outputs and gradients count as extra; q, k, v and whatever the first call sets up do not.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import fastattn

from .machine import ROOT
from .peers import BASELINE, SUBJECT

N = 4096
SHAPE = {"B": 1, "H": 1, "D": 64}
DROPOUT = 0.1
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
CALLS: dict[str, Callable[..., Any]] = {
    SUBJECT: lambda q, k, v: fastattn.attention(q, k, v, dropout_p=DROPOUT, seed=0),
    BASELINE: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT),
}


def measure(device: str, n: int = N) -> dict[str, Any]:
    """Extra bytes by peer; for a peer that failed None, and its last words under "errors"."""
    python = [sys.executable, "-m", "bench.memory"]
    probes = {
        name: subprocess.Popen([*python, name, device, str(n)], cwd=ROOT, text=True, **PIPES)
        for name in CALLS
    }
    extra: dict[str, int | None] = {}
    errors: dict[str, str] = {}
    for name, probe in probes.items():
        printed, said = probe.communicate()
        failed = probe.returncode != 0
        extra[name] = None if failed else int(printed.split()[-1])
        errors[name] = said.strip().rpartition("\n")[2] if failed else ""
    sizes = f"B{SHAPE['B']} H{SHAPE['H']} N{n} D{SHAPE['D']}"
    case = f"{sizes} float32, dropout {DROPOUT}, forward+backward"
    return {"case": case, "extra_bytes": extra, "errors": errors}


def extra_bytes(peer: str, device: str, n: int) -> int:
    # Libraries, thread pools and caches are not this call's memory.
    _backward(peer, *_inputs(device, 64))
    reset, peak = (_device_reset, _device_peak) if device == "cuda" else (_host_reset, _host_peak)
    q, k, v = _inputs(device, n)
    before = reset()
    _backward(peer, q, k, v)
    return max(0, peak() - before)


def _inputs(device: str, n: int) -> list[torch.Tensor]:
    shape = (SHAPE["B"], SHAPE["H"], n, SHAPE["D"])
    return [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]


def _backward(peer: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    CALLS[peer](q, k, v).sum().backward()


def _device_reset() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _device_peak() -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _host_reset() -> int:
    """Forget the peak so far and return the resident bytes. Without this the peak is that of
    importing torch, or even of the parent process, which ru_maxrss keeps across exec."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return _host_peak()


def _host_peak() -> int:
    try:
        return _status("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    if not found:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=CALLS)
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("n", type=int)
    arguments = parser.parse_args()
    print(extra_bytes(arguments.peer, arguments.device, arguments.n))
