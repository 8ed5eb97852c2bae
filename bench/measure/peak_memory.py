"""Extra memory of attention, forward and backward, each peer at each length in a fresh process.

The outputs and gradients count as extra; q, k, v, a mask and what the first call sets up do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fastattn.examples.memory import peak_bytes, reset_peak

from ..cases import TRAINING, Case
from ..peers.registry import BASELINE, PEERS, SUBJECT
from . import isolated_process
from .records import Record
from .verify import compute

LENGTHS = (1024, 2048, 4096)
SHAPE: Record = {"B": 1, "H": 1, "D": 64}


def measure(
    device: str,
    lengths: Sequence[int] = LENGTHS[-1:],
    masks: Sequence[str] = ("dropout",),
    peers: Sequence[str] = (SUBJECT, BASELINE),
) -> Iterator[Record]:
    """A record for each mask, length and peer: extra_bytes, or None and the reason as error."""
    for mask, n, peer in itertools.product(masks, lengths, peers):
        yield _record(device, mask, n, peer)


def _record(device: str, mask: str, n: int, peer: str) -> Record:
    extra, error = None, PEERS[peer].why_not(_case(device, mask, n), TRAINING)
    if not error:
        try:
            extra = isolated_process.once(extra_bytes, peer, device, mask, n)
        except (isolated_process.Died, isolated_process.Raised) as caught:
            error = str(caught)
    about = {"mask": mask, "N": n, "dtype": "float32", "pass": TRAINING} | SHAPE
    return about | {"peer": peer, "extra_bytes": extra, "error": error}


def extra_bytes(peer: str, device: str, mask: str, n: int) -> int:
    # A first call sets up libraries, thread pools and caches, which are not counted.
    _prepared(peer, _case(device, mask, 64))()
    work = _prepared(peer, _case(device, mask, n))
    reset, peak = (_device_reset, _device_peak) if device == "cuda" else (reset_peak, peak_bytes)
    before = reset()
    work()
    return max(0, peak() - before)


def _case(device: str, mask: str, n: int) -> Case:
    return Case(device, "float32", mask, N=n, **SHAPE)


def _prepared(peer: str, case: Case) -> Callable[[], Any]:
    call, inputs = PEERS[peer].prepare(case), case.inputs()
    return lambda: compute(call, case, inputs, TRAINING)


def _device_reset() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _device_peak() -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
