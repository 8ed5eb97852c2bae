"""What a call costs when there is almost nothing to compute: B1 H2 N8 D16, beside every peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..cases import FORWARD, TRAINING, Case
from ..peers.registry import BASELINE, PEERS, Peer
from . import isolated_process, timing
from .records import ratio
from .run import program, timed
from .verify import Judge

CALLS = 20  # one sample is this many calls


def measure(
    device: str,
    peers: Mapping[str, Peer],
    threads: Sequence[int] | None = None,
    process: isolated_process.Process | None = None,
) -> dict[str, Any]:
    """Microseconds per call by pass and peer, and the speed-up of each over torch: CPU time on one
    thread, wall time on all; on a GPU the wall time of launches, without waiting for results. The
    work runs in `process`, if it is given, and continues without a peer that ends the process."""
    if process is None:
        return _measure(device, peers, threads)
    lost: dict[str, str] = {}
    while True:
        left = [name for name in peers if name not in lost]
        try:
            found = process.call(_measure_named, device, left, threads)
        except isolated_process.Died as death:
            if death.at is None or death.at in lost:
                raise
            lost[death.at] = str(death)
            continue
        return found | {"errors": found["errors"] | lost}


def _measure_named(
    device: str, names: Sequence[str], threads: Sequence[int] | None
) -> dict[str, Any]:
    return _measure(device, {name: PEERS[name] for name in names}, threads)


def _measure(
    device: str, peers: Mapping[str, Peer], threads: Sequence[int] | None
) -> dict[str, Any]:
    case = Case(device, "float32", "full", B=1, H=2, N=8, D=16)
    clocks = [(None, timing.WALL_TIME)] if device == "cuda" else timing.clocks(device, threads)
    timings, errors = [], dict.fromkeys(peers, "")
    for what in (FORWARD, TRAINING):
        judge = Judge(case, gradients=what != FORWARD)
        for name, peer in peers.items():
            with isolated_process.at(name):
                errors[name] = errors[name] or judge(peer, what).reason
        programs = {
            name: (_calls(program(peer, case, what, judge.oracle.inputs)),)
            for name, peer in peers.items()
            if not errors[name]
        }
        for count, clock in clocks:
            with timing.torch_threads(count), torch.set_grad_enabled(what != FORWARD):
                samples, failed = timed(programs, clock, 0.3)
            errors |= failed
            laps = {name: [x[0] / CALLS for x in rounds] for name, rounds in samples.items()}
            row = {name: _microseconds(laps, name) for name in laps}
            about = {"threads": count, "clock": clock.name, "others": clock.others}
            timings.append({"pass": what, **about, "peers": row})
    if device == "cuda":
        torch.cuda.synchronize()
    return {"case": "B1 H2 N8 D16 float32", "timings": timings, "errors": errors}


def _calls(phases: timing.Program) -> timing.Phase:
    def calls(_: Any) -> None:
        for _ in range(CALLS):
            value = None
            for phase in phases:
                value = phase(value)

    return calls


def _microseconds(laps: Mapping[str, list[float]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{key}_us": value * 1e6 for key, value in timing.quartiles(laps[name]).items()
    }
    if name != BASELINE and BASELINE in laps:
        found["speedup"] = ratio(laps[BASELINE], laps[name])
    return found
