"""What a call costs when there is almost nothing to compute: B1 H2 N8 D16, no gradient."""

from __future__ import annotations

from typing import Any

import torch

from . import timing
from .cases import FORWARD, Case
from .peers import PEERS, Peer
from .verify import Oracle

CALLS = 20  # one sample is this many calls


def measure(device: str) -> dict[str, Any]:
    """Microseconds a call by peer: CPU time on one thread, wall time on all; on a GPU the wall time
    of launching, not waited for."""
    case = Case(device, "float32", "full", B=1, H=2, N=8, D=16)
    oracle = Oracle(case, (FORWARD,))
    verdicts = {name: oracle.judge(peer, FORWARD).reason for name, peer in PEERS.items()}
    programs = {name: (_calls(PEERS[name], case),) for name, bad in verdicts.items() if not bad}
    clocks = [(None, timing.WALL_TIME)] if device == "cuda" else timing.clocks(device)
    timings = []
    for threads, clock in clocks:
        with timing.torch_threads(threads), torch.no_grad():
            samples = timing.interleaved(programs, clock, seconds=0.3)
        row = {name: _microseconds(rounds) for name, rounds in samples.items()}
        timings.append({"threads": threads, "clock": clock.name, "peers": row})
    if device == "cuda":
        torch.cuda.synchronize()
    return {"case": "B1 H2 N8 D16 float32, no gradient", "timings": timings, "errors": verdicts}


def _calls(peer: Peer, case: Case) -> timing.Phase:
    q, k, v, _ = case.tensors()

    def calls(_: Any) -> None:
        for _ in range(CALLS):
            peer.attention(q, k, v, case)

    return calls


def _microseconds(rounds: list[list[float]]) -> dict[str, float]:
    quartiles = timing.quartiles([laps[0] / CALLS for laps in rounds])
    return {f"{key}_us": value * 1e6 for key, value in quartiles.items()}
