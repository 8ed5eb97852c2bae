"""Extra memory of attention, forward and backward, each peer at each length in a fresh process.

    python -m bench.measure.peak_memory fastattn cpu dropout 4096  # prints the bytes

The outputs and gradients count as extra; q, k, v, a mask and what the first call sets up do not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastattn.examples.memory import peak_bytes, reset_peak

from ..cases import TRAINING, Case
from ..masks import MASKS
from ..peers.registry import BASELINE, PEERS, SUBJECT
from .machine import ROOT
from .verify import compute

Record = dict[str, Any]
LENGTHS = (1024, 2048, 4096)
SHAPE: Record = {"B": 1, "H": 1, "D": 64}
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def measure(
    device: str,
    lengths: Sequence[int] = LENGTHS[-1:],
    masks: Sequence[str] = ("dropout",),
    peers: Sequence[str] = (SUBJECT, BASELINE),
) -> list[Record]:
    """A record for each mask, length and peer: extra_bytes, or None and the last line as error."""
    return [row for mask in masks for n in lengths for row in _together(device, mask, n, peers)]


def _together(device: str, mask: str, n: int, peers: Sequence[str]) -> list[Record]:
    python = [sys.executable, "-m", "bench.measure.peak_memory"]

    def probe(name: str) -> subprocess.Popen:
        return subprocess.Popen([*python, name, device, mask, str(n)], cwd=ROOT, text=True, **PIPES)

    # In parallel on a CPU. One by one on a GPU, where they would share its memory.
    probes = {} if device == "cuda" else {name: probe(name) for name in peers}
    records = []
    for name in peers:
        running = probes.get(name) or probe(name)
        stdout, stderr = running.communicate()
        failed = running.returncode != 0
        extra = None if failed else int(stdout.split()[-1])
        error = ""
        if failed:
            error = stderr.strip().rpartition("\n")[2] or f"ended with status {running.returncode}"
        case = {"mask": mask, "N": n, "dtype": "float32", "pass": TRAINING} | SHAPE
        records.append(case | {"peer": name, "extra_bytes": extra, "error": error})
    return records


def extra_bytes(peer: str, device: str, mask: str, n: int) -> int:
    # A first call sets up libraries, thread pools and caches, which are not counted.
    _prepared(peer, device, mask, 64)()
    work = _prepared(peer, device, mask, n)
    reset, peak = (_device_reset, _device_peak) if device == "cuda" else (reset_peak, peak_bytes)
    before = reset()
    work()
    return max(0, peak() - before)


def _prepared(peer: str, device: str, mask: str, n: int) -> Callable[[], Any]:
    case = Case(device, "float32", mask, N=n, **SHAPE)
    if declined := PEERS[peer].why_not(case, TRAINING):
        raise SystemExit(declined)
    call, inputs = PEERS[peer].prepare(case), case.inputs()
    return lambda: compute(call, case, inputs, TRAINING)


def _device_reset() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _device_peak() -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("mask", choices=MASKS)
    parser.add_argument("n", type=int)
    arguments = parser.parse_args()
    print(extra_bytes(arguments.peer, arguments.device, arguments.mask, arguments.n))
