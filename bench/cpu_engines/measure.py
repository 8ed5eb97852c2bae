"""A row: the same tensors for every peer, each verified against float64, then interleaved rounds.

Times are CPU seconds of a worker's whole process, so that an engine's threads count."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..measure import machine, run, timing, verify
from ..measure.records import ratio
from ..peers.registry import SUBJECT
from . import process
from .cases import Row, store
from .peers import Peer

Record = dict[str, Any]
SECONDS = 4.0
# Bounds (whole tensor, worst row) on the relative error, as in `verify`, of caches of eight and
# four bits, too. In this order of error, the first that an output satisfies is its precision.
BOUNDS = {
    **{name: verify.BOUNDS[name] for name in ("float32", "float16", "bfloat16")},
    "int8": (2e-2, 4e-2),
    "fp8": (6e-2, 1.2e-1),
    "int4": (2.5e-1, 5e-1),
}


class ProcessTime(timing.Clock):
    """A program is the `sample` of a worker."""

    name = "process CPU time"

    def sample(self, program: timing.Program, loops: int) -> list[float]:
        return [phase(loops) for phase in program]


class Workers:
    """A process for each peer, started when first asked for, and again after it died."""

    def __init__(self, peers: Mapping[str, Peer], threads: int):
        self.peers, self.threads = peers, threads
        self.absent = {
            name: peer.environment.absent
            for name, peer in peers.items()
            if peer.environment and peer.environment.absent
        }
        self.running: dict[str, process.Worker] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.running.values():
            worker.close()

    @property
    def versions(self) -> dict[str, str]:
        """Of the engines that ran."""
        return {worker.peer.family: worker.version for worker in self.running.values()}

    def of(self, name: str) -> process.Worker:
        """Raises Failed if the peer is absent or does not start."""
        if reason := self.absent.get(name):
            raise process.Failed(reason)
        worker = self.running.get(name)
        if worker is None or worker.process.poll() is not None:
            if worker:
                worker.close()
            self.running.pop(name, None)
            self.running[name] = process.Worker(self.peers[name], self.threads)
        return self.running[name]


def measure(row: Row, workers: Workers, seconds: float = SECONDS) -> Record:
    """Nothing is timed if our own output is wrong. If ours declines the row, others are timed, and
    there is no ratio."""
    peers = verified(row, workers)
    record: Record = {"row": row.name, "kind": row.kind, "width": row.width, "dtype": row.dtype}
    record |= {"threads": workers.threads, "load": machine.load()[0], "peers": peers}
    ours = peers[SUBJECT]
    if ours["reason"] and not ours["declined"]:
        return record | {"status": "failed", "reason": ours["reason"], "rounds": 0}
    programs = {
        name: (workers.of(name).sample,) for name, peer in peers.items() if not peer["reason"]
    }
    samples, reasons = run.timed(programs, ProcessTime(), seconds)
    for name, reason in reasons.items():
        peers[name]["reason"] = reason
    laps = {name: [lap[0] for lap in rounds] for name, rounds in samples.items()}
    for name, lap in laps.items():
        peers[name]["ms"] = 1e3 * timing.quartiles(lap)["median"]
        if SUBJECT in laps and name != SUBJECT:
            peers[name]["ratio"] = ratio(lap, laps[SUBJECT])
    rounds = max((len(lap) for lap in laps.values()), default=0)
    failed = reasons.get(SUBJECT, "")
    status = "failed" if failed else "ok"
    return record | {"status": status, "reason": failed, "rounds": rounds}


def verified(row: Row, workers: Workers) -> dict[str, Record]:
    """By peer: the error against float64, and the reason why it is not timed."""
    tensors = row.tensors()
    expected = row.expected(tensors)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: store(x, Path(folder) / name) for name, x in tensors.items()}
        for name in workers.peers:
            entry: Record = {"ms": None, "ratio": None, "error": None, "precision": None}
            entry |= {"reason": "", "declined": False}
            try:
                path = Path(folder) / f"out of {name}"
                claimed = workers.of(name).prepare(row.sizes(), files, path)
                actual = torch.from_file(str(path), size=expected.numel(), dtype=torch.float32)
                entry |= judge(actual.view(expected.shape), expected, claimed)
            except process.Declined as declined:
                entry |= {"reason": f"declined: {declined}", "declined": True}
            except (process.Failed, RuntimeError) as error:
                entry["reason"] = str(error)
            found[name] = entry
    return found


def judge(actual: Tensor, expected: Tensor, claimed: str) -> Record:
    """The error, the precision that the output has, and the reason if that is less than claimed."""
    if not torch.isfinite(actual).all():
        return {"reason": "its output is not finite"}
    error, worst = verify.relative_errors(actual.double(), expected)
    met = [name for name, (most, row) in BOUNDS.items() if error <= most and worst <= row]
    found = {"error": error, "precision": met[0] if met else None}
    if claimed in met:
        return found
    most, row = BOUNDS[claimed]
    reason = f"its output is off by {error:.1e} (at most {most:.0e} in {claimed}),"
    return found | {"reason": f"{reason} its worst row by {worst:.1e} (at most {row:.0e})"}
