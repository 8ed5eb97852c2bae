"""Compile the Triton kernels of a sweep in advance, several at a time, and count them.

A kernel is compiled at its first launch, which takes seconds. Compiled one after another, each in
the first cell that needs it, the kernels would take longer than all of the timing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

import fastattn
from fastattn.backends.triton import tile_configs

from ..cases import FORWARD, Case
from ..peers.registry import PEERS, SUBJECT
from . import isolated_process
from .verify import compute

WORKERS = 16  # at most
_names: list[str] = []  # kernels that this process has compiled


def count() -> int:
    """How many kernels this process has compiled since the first call of `count`."""
    if importlib.util.find_spec("triton") is None:
        return 0
    from triton import knobs

    if getattr(knobs.compilation, "listener", _listen) is None:
        knobs.compilation.listener = _listen
    return len(_names)


def _listen(*, src: Any, cache_hit: bool, **about: Any) -> None:
    if not cache_hit:
        _names.append(getattr(src, "name", "a kernel"))


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


def ahead(cases: Sequence[Case], passes: Sequence[str]) -> Iterator[str]:
    """Compile the kernels of every kind of case, and yield a line of progress for each. Errors are
    ignored here: the cell raises the same error again and reports it."""
    if fastattn.available_backends()["triton"]:
        return
    begun, before, chosen = time.monotonic(), count(), kinds(cases)
    what = next((x for x in passes if x != FORWARD), FORWARD)

    def progress_line(done: int, case: Case) -> str:
        spent = f"{count() - before} kernels in {time.monotonic() - begun:.0f} s"
        return f"compiled {done} of {len(chosen)} kinds of calls, {case}: {spent}"

    with (
        isolated_process.at(SUBJECT),
        ThreadPoolExecutor(min(WORKERS, os.cpu_count() or 1)) as pool,
    ):
        _run(chosen[0], what)  # alone: it sets up the compiler and the driver
        yield progress_line(1, chosen[0])
        jobs = {pool.submit(_run, case, what): case for case in chosen[1:]}
        for done, job in enumerate(as_completed(jobs), 2):
            yield progress_line(done, jobs[job])
    with isolated_process.at(SUBJECT):
        isolated_process.recover(
            "compiling ahead"
        )  # frees GPU memory that failed cases left allocated


def _run(case: Case, what: str) -> None:
    """Run a case on the calling thread: autograd has only one thread per GPU by default."""
    with contextlib.suppress(Exception), torch.autograd.set_multithreading_enabled(False):
        compute(PEERS[SUBJECT].prepare(case), case, case.inputs(), what)
