"""What a call costs when there is almost nothing to compute: B1 H2 N8 D16, no gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import timing
from .cases import FORWARD, Case
from .peers import Peer
from .verify import Judge

CALLS = 20  # one sample is this many calls
SMALL = (1, 4, 16, 32, 64)  # lengths at which a call is little more than its overhead


def measure(
    device: str, peers: Mapping[str, Peer], threads: Sequence[int] | None = None
) -> dict[str, Any]:
    """Microseconds a call by peer: CPU time on one thread, wall time on all; on a GPU the wall time
    of launching, not waited for."""
    case = Case(device, "float32", "full", B=1, H=2, N=8, D=16)
    judge = Judge(case, gradients=False)
    verdicts = {name: judge(peer, FORWARD).reason for name, peer in peers.items()}
    programs = {name: (_calls(peers[name], case),) for name, bad in verdicts.items() if not bad}
    clocks = [(None, timing.WALL_TIME)] if device == "cuda" else timing.clocks(device, threads)
    timings = []
    for count, clock in clocks:
        with timing.torch_threads(count), torch.no_grad():
            samples = timing.interleaved(programs, clock, seconds=0.3)
        row = {name: _microseconds(rounds) for name, rounds in samples.items()}
        timings.append({"threads": count, "clock": clock.name, "peers": row})
    if device == "cuda":
        torch.cuda.synchronize()
    return {"case": "B1 H2 N8 D16 float32, no gradient", "timings": timings, "errors": verdicts}


def small_cases(device: str) -> list[Case]:
    return [
        Case(device, dtype, "full", B=2, H=8, N=n, D=64)
        for dtype in ("float32", "bfloat16")
        for n in SMALL
    ]


def _calls(peer: Peer, case: Case) -> timing.Phase:
    inputs, call = case.inputs(), peer.prepare(case)

    def calls(_: Any) -> None:
        for _ in range(CALLS):
            call(inputs)

    return calls


def _microseconds(rounds: list[list[float]]) -> dict[str, float]:
    quartiles = timing.quartiles([laps[0] / CALLS for laps in rounds])
    return {f"{key}_us": value * 1e6 for key, value in quartiles.items()}
