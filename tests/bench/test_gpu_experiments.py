"""`python -m bench.gpu_experiments`: a rehearsal, and decisions that follow their numbers."""

import json
import time

import pytest
import torch

from bench import gpu_experiments
from bench.gpu_experiments import ANY, CUDA, EXPERIMENTS, MEASURES, TRITON, TURNS, settled

NAMED = {x.name: x for x in EXPERIMENTS}


@pytest.mark.slow
def test_the_rehearsal_settles_every_experiment(tmp_path, capsys, threads):
    threads(1)
    assert gpu_experiments.main(["--rehearse", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert found["rehearsal"] and [x["name"] for x in found["records"]] == [*NAMED]
    assert all(x["decision"] for x in found["records"])
    assert capsys.readouterr().out.startswith("A rehearsal: ")


@pytest.mark.parametrize("name", NAMED)
def test_a_decision_follows_its_number(name, monkeypatch):
    """Times on both sides of the bound."""
    x = NAMED[name]
    cells = {CUDA: 1.0, TRITON: 1.0, TURNS: 1.0, ANY: 1.0, "cudnn": 1.0}
    cells |= {"equal": 1.0, "share of the rest": 1.0}
    decisions = {}
    for better in (0.01, 1000.0):
        over = dict.fromkeys((CUDA, TURNS, "equal", "share of the rest"), better)
        found = cells | over
        monkeypatch.setattr(gpu_experiments, "programs", lambda *given: {})
        monkeypatch.setitem(MEASURES, x.kind, lambda *given, found=found: found)
        decisions[better] = settled(x, gpu_experiments.rehearsed())["decision"]
    assert decisions == {0.01: x.no, 1000.0: x.yes}


@pytest.mark.parametrize("slow", [CUDA, "cudnn"])
def test_the_way_that_takes_longer_to_submit_decides(slow, monkeypatch):
    """By the measure itself, in calls per microsecond."""
    x = NAMED["time to submit"]
    made = {name: lambda name=name: time.sleep(1e-4 * (name == slow)) for name in x.ways}
    monkeypatch.setattr(gpu_experiments, "programs", lambda *given: made)
    decision = settled(x, gpu_experiments.rehearsed())["decision"]
    assert decision == (x.no if slow == CUDA else x.yes)


def test_a_name_of_no_experiment_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--only: got \['nosuch'\], expected some of \['order"):
        gpu_experiments.main(["--rehearse", "--only", "nosuch", "--output", str(tmp_path)])
    assert not [*tmp_path.iterdir()]


def test_a_way_to_another_result_is_not_timed():
    where = gpu_experiments.rehearsed()
    wrong = where.ways | {TRITON: lambda call, q, k, v: torch.zeros_like(q)}
    record = settled(NAMED["forward, softcap"], where._replace(ways=wrong))
    assert "triton differs from cuda by" in record["failed"] and "decision" not in record
    assert ": failed: ValueError" in next(gpu_experiments.lines(record))


def test_tflops_are_of_the_pairs_that_are_seen():
    call = gpu_experiments.Call(128, 8192)
    pairs = 8192 * 8193 / 2
    assert call.tflop() == 4 * 128 * pairs * 2 * 16 / 1e12
    assert call._replace(backward=True).tflop() == pytest.approx(2.5 * call.tflop())
    assert call._replace(causal=False, M=1).tflop() == 4 * 128 * 8192 * 2 * 16 / 1e12


def test_the_time_ends_it(tmp_path, capsys):
    given = ["--rehearse", "--minutes", "-1", "--output", str(tmp_path)]
    assert gpu_experiments.main(given) == 1
    assert f"{len(EXPERIMENTS)} are left" in capsys.readouterr().err
