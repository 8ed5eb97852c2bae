"""The cost of subnormal numbers: our call as it is, against the same call in a thread that flushes
them to zero.

A result below 1.2e-38 traps into microcode on Intel, at some hundred cycles each. Softmax makes
millions of such numbers: exp of a score far below its row's maximum, and products with it. Kernels
that make none take the same time either way. Flush-to-zero is a setting of the thread, so
everything here runs on one. The cell "full" has no subnormals: the distance of its ratio from 1 is
measurement noise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch

from ..cases import BOTH, FORWARD, Case
from ..masks import SUBNORMAL
from ..measure import run, timing
from ..measure.verify import Judge
from ..peers.registry import BASELINE, PEERS, SUBJECT

Record = dict[str, Any]
FLUSHED = "flushed"
MASKS = ("full", *SUBNORMAL)
BOUND = 1.15  # highest ok ratio: time as it is, over time flushed
QUIET = 0.1  # quartiles further apart, relative to the ratio, are inconclusive
CLEAR = 1.5  # load from other processes does not change interleaved rounds that much
ATTEMPTS = 3
SECONDS = 0.4


@contextlib.contextmanager
def flush_to_zero() -> Generator[None, None, None]:
    """Subnormal operands and results are 0 in this thread, inside the block."""
    if not torch.set_flush_denormal(True):
        raise ValueError("this CPU cannot flush subnormal numbers to zero: nothing to compare with")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def cases(
    dtypes: Sequence[str] = BOTH, masks: Sequence[str] = MASKS, n: int = 1024
) -> Iterator[Case]:
    for dtype in dtypes:
        for mask in masks:
            yield Case("cpu", dtype, mask, B=2, H=4, N=n, D=64)


def measure(case: Case, what: str, seconds: float = SECONDS, rival: bool = True) -> Record:
    """Measure a cell: as it is, flushed and torch's, in interleaved rounds. A ratio between BOUND
    and CLEAR is measured up to ATTEMPTS times and the lowest is kept: load raises and lowers
    ratios, slow kernels raise them every time."""
    peers = {SUBJECT: PEERS[SUBJECT], FLUSHED: PEERS[SUBJECT]} | (
        {BASELINE: PEERS[BASELINE]} if rival else {}
    )
    contenders = {
        name: run.Contender(
            peer, case, flush_to_zero if name == FLUSHED else contextlib.nullcontext
        )
        for name, peer in peers.items()
    }
    judges = {case: Judge(case, gradients=what != FORWARD)}
    found: list[Record] = []
    while len(found) < ATTEMPTS:
        heat = run.race(contenders, what, [(1, timing.THREAD_TIME)], seconds, judges)
        record = _record(case, what, heat)
        found.append(record)
        if record["status"] != "ok" or not BOUND < record["ratio"]["median"] < CLEAR:
            break
    return min(found, key=lambda x: x["ratio"]["median"] if x["ratio"] else 0.0) | {
        "attempts": len(found)
    }


def _record(case: Case, what: str, heat: run.Heat) -> Record:
    reason = next((heat.verdicts[x].reason for x in (SUBJECT, FLUSHED)), "")
    cell = {"dtype": case.dtype, "mask": case.mask, "N": case.N, "pass": what, "reason": reason}
    if reason or not heat.laps:
        return cell | {"status": "failed", "rounds": 0, "ms": {}, "ratio": None}
    seconds = run.totals(heat.laps[0].samples, what)
    ms = {name: 1e3 * timing.quartiles(values)["median"] for name, values in seconds.items()}
    ratio = run.ratio(seconds[SUBJECT], seconds[FLUSHED])
    return cell | {"status": "ok", "rounds": len(seconds[SUBJECT]), "ms": ms, "ratio": ratio}


def verdict(record: Record) -> str:
    """ "ok", "slow", "noisy" where the rounds disagree too much to say, or "failed"."""
    if record["status"] != "ok":
        return "failed"
    ratio = record["ratio"]
    if ratio["median"] <= BOUND:
        return "ok"
    noisy = ratio["q1"] <= BOUND and ratio["q3"] - ratio["q1"] > QUIET * ratio["median"]
    return "noisy" if noisy else "slow"
