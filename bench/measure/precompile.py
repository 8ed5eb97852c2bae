"""Compile the Triton kernels of a sweep in advance, several at a time.

A kernel is compiled at its first launch, which takes seconds. Compiled one after another, each in
the first cell that needs it, the kernels would take longer than all of the timing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

import fastattn
from fastattn.backends.triton import tile_configs

from ..cases import FORWARD, Case
from ..peers.registry import PEERS, SUBJECT
from . import isolated_process
from .verify import compute

WORKERS = 16  # at most


def kinds(cases: Iterable[Case]) -> list[Case]:
    """The first case of each kind that needs separate kernels. Lengths make no kinds, because
    Triton specializes only on multiples of 16 and on 1."""
    found: dict[tuple, Case] = {}
    for x in cases:
        few = x.M if x.M <= tile_configs.DECODE_ROWS else 0
        odd = x.M % 16, x.N % 16
        kind = (x.dtype, x.mask, x.D, x.H == x.Hk, x.B == 1, x.H == 1, few, odd)
        found.setdefault(kind, x)
    return list(found.values())


def ahead(cases: Sequence[Case], passes: Sequence[str]) -> str:
    """Compile the kernels of every kind of case; what was done. Errors are ignored here: the cell
    raises the same error again and reports it."""
    if fastattn.available_backends()["triton"]:
        return "Triton compiles nothing here"
    begun, chosen = time.monotonic(), kinds(cases)
    what = next((x for x in passes if x != FORWARD), FORWARD)
    with (
        isolated_process.at(SUBJECT),
        ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool,
    ):
        _run(chosen[0], what)  # alone: it sets up the compiler and the driver
        list(pool.map(lambda case: _run(case, what), chosen[1:]))
    with isolated_process.at(SUBJECT):  # frees GPU memory that failed cases left allocated
        isolated_process.recover("compiling ahead")
    return f"compiled {len(chosen)} kinds of calls in {time.monotonic() - begun:.0f} s"


def _run(case: Case, what: str) -> None:
    """Run a case on the calling thread: autograd has only one thread per GPU by default."""
    with contextlib.suppress(Exception), torch.autograd.set_multithreading_enabled(False):
        compute(PEERS[SUBJECT].prepare(case), case, case.inputs(), what)
