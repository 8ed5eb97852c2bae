"""Peers that crash cost their own entry alone: each cell is measured in a separate process."""

import dataclasses
import os

import pytest

from bench.__main__ import main
from bench.cases import FORWARD, TRAINING, Case
from bench.measure import (
    isolated_process,
    machine,
    peak_memory,
    records,
    roofline,
    run,
)
from bench.peers.registry import BASELINE, SUBJECT
from bench.races import small
from bench.report import console, results
from tests.support.bench_helpers import LIMITS, case, hurry
from tests.support.marks import parametrize

# ------------------------------------------------------------------------------- a separate process


ENDINGS = {
    "aborts": "its process died of SIGABRT",
    "fills": "raised OutOfMemoryError: CUDA out of memory. Tried to allocate 7 GiB",
    "poisons": "raised RuntimeError: CUDA error: an illegal memory access was encountered; the GPU "
    "was lost to its process",
}
CRASHING = (SUBJECT, BASELINE, "aborts", "fills while timed", "poisons while timed")
NONE = dict.fromkeys(("memory", "complete"), ())


@pytest.fixture(scope="module")
def crashed():
    """The records of two cases and two passes, with peers that crash in every way."""
    with (
        pytest.MonkeyPatch.context() as patch,
        isolated_process.Process("tests.support.crashing_peers") as process,
    ):
        patch.setattr(run, "LIVES", 1)
        assert len({process.call(os.getpid) for _ in range(2)} - {os.getpid()}) == 1  # it stays
        with pytest.raises(isolated_process.Raised, match="raised ZeroDivisionError: float divmod"):
            process.call(divmod, 1.0, 0.0)
        plan = run.Plan((FORWARD, TRAINING), CRASHING, LIMITS, 0.002, (1,))
        yield list(run.cells((case(N=20), case(N=30)), plan, process))


@pytest.mark.slow
def test_a_peer_that_crashes_loses_only_its_own_entry(crashed):
    cells = [(n, what) for n in (20, 30) for what in (FORWARD, TRAINING)]
    assert [(x["N"], x["pass"]) for x in crashed] == cells
    for cell in crashed:
        assert cell["status"] == "ok" and cell["backend"] == "cpu", cell
        (entry,) = cell["timings"]
        assert set(entry["peers"]) == {SUBJECT, BASELINE}
        assert records.speedup_of(entry)["median"] > 0
        assert set(cell["peers"]) == set(CRASHING) and not cell["peers"][BASELINE]["reason"]


@pytest.mark.slow
@parametrize("name", CRASHING[2:], fast=1)
def test_the_entry_has_the_exit_status(name, crashed):
    first, *_, last = (cell["peers"][name]["reason"] for cell in crashed)
    kind, _, _ = name.partition(" while ")
    if kind == "aborts":
        assert first == ENDINGS[kind]
    elif kind == "fills":
        assert first == f"{ENDINGS[kind]}, while timed"
    else:
        said, _, lost = ENDINGS[kind].partition("; ")
        assert first == f"{said}, while timed; {lost}"
    # A process that only ran out of memory survives, so its peer may be tried again.
    assert last == (first if kind == "fills" else "not tried: it ended the process in 1 cells")
    count = 4 if kind == "fills" else 2
    assert f"{name}: no time in {count} cells" in "\n".join(
        console.summary(NONE | {"cells": crashed})
    )


class Here:
    """A Process without another one. GPU work is replaced by small work on the CPU."""

    def __init__(self):
        self.log, self.living = [], False

    def __enter__(self):
        return self

    def __exit__(self, *about):
        self.close()

    def close(self):
        self.living = False

    def call(self, function, *args):
        self.living = True
        self.log.append((function, args))
        if function is roofline.measure:
            compute = dict.fromkeys(args[1], LIMITS.compute["float32"])
            return LIMITS._replace(compute=compute)._asdict()
        found = function(*map(self.small, args))
        return found | {"device": "cuda"} if function is machine.describe else found

    def small(self, x):
        if isinstance(x, Case):
            return dataclasses.replace(x, device="cpu", B=1, H=2, Hk=2)
        return "cpu" if x == "cuda" else x


@parametrize("command", ["sweep", "race decode", "memory"], fast=1)
def test_only_the_measuring_process_uses_the_gpu(command, monkeypatch, tmp_path):
    """As exclusive compute mode requires. This torch has no CUDA: using it here would raise."""
    process = Here()
    hurry(monkeypatch)
    monkeypatch.setattr(isolated_process, "Process", lambda: process)
    monkeypatch.setattr(small, "LENGTHS", (4,))
    given = ["--device", "cuda", "--output", str(tmp_path), "--peers", BASELINE]
    given += [] if command == "memory" else ["--seconds", "0.002", "--dtypes", "bfloat16"]
    given += [] if command.startswith("race") else ["--lengths", "40"]
    given += ["--dims", "16"] if command == "sweep" else []
    assert main([*command.split(), *given]) == 0
    (path,) = tmp_path.glob("*.json")
    found = results.read(path)
    assert found["machine"]["device"] == "cuda" and (found["cells"] or found["memory"])
    probed = peak_memory.extra_bytes in {function for function, _ in process.log}
    assert probed == (command in ("sweep", "memory")) and not process.living
