"""What Triton compiles for a sweep on a GPU, in advance: calls of its kinds, which are recorded."""

import dataclasses
import threading

import pytest

import fastattn
from bench import cases, commands
from bench.cases import FORWARD, PASSES, Case
from bench.measure import isolated_process, precompile
from bench.peers.registry import SUBJECT
from tests.support.bench_helpers import case
from tests.support.marks import parametrize

QUICK = [x for grid in cases.GRIDS["quick on a GPU"] for x in grid.cases("cuda")]


def test_a_sweep_on_a_gpu_is_the_quick_one_for_it(monkeypatch):
    seen = []
    monkeypatch.setattr(commands, "_device", lambda options: "cuda")
    monkeypatch.setattr(commands, "grids", lambda options, preset: seen.append(preset) or ())
    monkeypatch.setattr(isolated_process, "Process", lambda: (_ for _ in ()).throw(KeyError))
    for full in (False, True):
        with pytest.raises(KeyError):
            commands.sweep(commands.Options(full=full))
    assert seen == ["quick on a GPU", "full"]


@parametrize("passes, what", [(PASSES, "backward"), ((FORWARD,), FORWARD)], fast=1)
def test_every_kind_is_run_once_and_the_first_alone(passes, what, monkeypatch):
    runs = []

    def compute(call, x, inputs, what):
        runs.append((x, what, threading.get_ident()))
        if x.N == 512:
            raise RuntimeError("as it will in the cell")

    monkeypatch.setattr(precompile, "compute", compute)
    monkeypatch.setattr(Case, "inputs", lambda self: None)
    monkeypatch.setattr(fastattn, "available_backends", lambda: {"triton": None})
    few = [dataclasses.replace(x, device="cpu") for x in QUICK]
    said = precompile.ahead(few, passes)
    assert runs[0][2] == threading.get_ident() not in {thread for *_, thread in runs[1:]}
    assert [x for x, *_ in sorted(runs, key=lambda x: few.index(x[0]))] == precompile.kinds(few)
    assert {x for _, x, _ in runs} == {what} and f"compiled {len(runs)} kinds" in said


def test_a_crashed_compile_process_is_reported(capsys):
    class Dying:
        def call(self, function, *args):
            raise isolated_process.Died(SUBJECT, "its process died of SIGSEGV")

    commands._compile(Dying(), [case()], PASSES)
    assert capsys.readouterr().err.endswith("ahead: its process died of SIGSEGV\n")
