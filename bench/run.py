"""The loop: for each case, verify; for each pass that passed, time; one record a cell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import fastattn

from . import timing
from .cases import FORWARD, Sweep
from .machine import load
from .peers import BASELINE, PEERS, SUBJECT, Peer
from .verify import Oracle, Verdict

Record = dict[str, Any]
Peaks = dict[str, float | None]  # dtype -> GF/s of one thread, or of the GPU


def cell_count(sweep: Sweep, device: str) -> int:
    return len(sweep.passes) * sum(1 for _ in sweep.cases(device))


def sweep_cells(sweep: Sweep, device: str, peaks: Peaks) -> Iterator[Record]:
    """Yield one JSON-ready record a cell, as soon as it is done."""
    for case in sweep.cases(device):
        oracle = Oracle(case, sweep.passes)
        q, k, v, _ = oracle.inputs
        choice = fastattn.explain(q, k, v, causal=case.mask == "causal")
        for what in sweep.passes:
            verdicts = {name: _verdict(peer, oracle, what) for name, peer in PEERS.items()}
            failure = verdicts[SUBJECT].reason
            passed = [PEERS[name] for name, verdict in verdicts.items() if not verdict.reason]
            record: Record = {"pass": what}
            record |= {name: getattr(case, name) for name in ("dtype", "mask", "B", "H", "N", "D")}
            record |= {
                "backend": choice.backend,
                "declined": choice.declined,
                "status": "failed" if failure else "ok",
                "reason": failure,
                "verified": oracle.scope(what),
                "peers": {
                    name: {"reason": verdict.reason, "errors": verdict.errors}
                    for name, verdict in verdicts.items()
                },
                "load": load(),
                "timings": [] if failure else _time(oracle, what, passed, sweep.seconds, peaks),
            }
            yield record


def _verdict(peer: Peer, oracle: Oracle, what: str) -> Verdict:
    declined = peer.why_not(oracle.case)
    return Verdict(f"declined: {declined}") if declined else oracle.judge(peer, what)


def _time(
    oracle: Oracle, what: str, peers: list[Peer], seconds: float, peaks: Peaks
) -> list[Record]:
    """One entry for each thread count and phase. A training pass also yields its backward."""
    case = oracle.case
    phases = {FORWARD: [0]} if what == FORWARD else {"backward": [1], what: [0, 1]}
    programs = {peer.name: _program(peer, oracle, what) for peer in peers}
    entries = []
    for threads, clock in timing.clocks(case.device):
        with timing.torch_threads(threads), torch.set_grad_enabled(what != FORWARD):
            samples = timing.interleaved(programs, clock, seconds)
        peak = peaks.get(case.dtype) if threads in (None, 1) else None
        for phase, parts in phases.items():
            totals = {
                name: [sum(laps[i] for i in parts) for laps in rounds]
                for name, rounds in samples.items()
            }
            head = {"threads": threads, "clock": clock.name, "phase": phase}
            entries.append(head | _summary(totals, case.flops(phase), peak))
    return entries


def _program(peer: Peer, oracle: Oracle, what: str) -> timing.Program:
    q, k, v, dout = oracle.inputs
    if what == FORWARD:
        return (lambda _: peer.attention(q, k, v, oracle.case),)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return (
        lambda _: peer.attention(*leaves, oracle.case),
        lambda out: torch.autograd.grad(out, leaves, dout),
    )


def _summary(seconds: dict[str, list[float]], flops: float, peak: float | None) -> Record:
    """Medians and quartiles by peer, and of the ratio to the baseline inside each round."""
    peers: Record = {}
    for name, values in seconds.items():
        quartiles = timing.quartiles(values)
        gflops = flops / quartiles["median"] / 1e9
        peers[name] = {f"{key}_ms": value * 1e3 for key, value in quartiles.items()}
        peers[name] |= {"gflops": gflops, "percent_of_peak": 100 * gflops / peak if peak else None}
    speedup = None
    if BASELINE in seconds:
        rounds = zip(seconds[BASELINE], seconds[SUBJECT], strict=True)
        speedup = timing.quartiles([theirs / ours for theirs, ours in rounds])
    return {"rounds": len(seconds[SUBJECT]), "peers": peers, "speedup": speedup}
