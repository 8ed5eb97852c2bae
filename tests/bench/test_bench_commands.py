"""The harness's other commands, each at a tiny size."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from bench.__main__ import main
from bench.benchmarks import (
    decoding,
    functions,
    latent_attention,
    rank_scaling,
    second_order,
    selected_keys,
    simulation,
    subnormal_cost,
    varlen,
    whole_models,
)
from bench.cases import FORWARD
from bench.masks import SUBNORMAL
from bench.measure import machine
from bench.peers import optional_deps
from bench.peers.registry import BASELINE, SUBJECT
from bench.reporting import console, results, results_page
from fastattn.examples.common import new_figure
from tests.support.bench_helpers import case

pytestmark = pytest.mark.usefixtures("one_thread", "known_ceilings")
SIX_DIGITS = 2e-5  # for two numbers, each stored with six digits
FAST = ["--device", "cpu", "--threads", "1", "--seconds", "0.002"]


def run(folder, *arguments: str) -> dict:
    assert main([*arguments, "--output", str(folder)]) == 0
    (path,) = folder.glob("*.json")
    return results.read(path)


def test_decode_reports_reading(tmp_path, capsys):
    result = run(tmp_path, "decode", *FAST, "--lengths", "64", "--rows", "1", "2")
    assert {(c["M"], c["H"], c["Hk"]) for c in result["cells"]} == {
        (m, *heads) for m in (1, 2) for heads in decoding.HEADS.values()
    }
    for cell in result["cells"]:
        (entry,) = cell["timings"]
        ours = entry["peers"][SUBJECT]
        size = 2 * 8 * 64 * 128 * (4 if cell["dtype"] == "float32" else 2)
        assert ours["kv_gbs"] == pytest.approx(size / ours["median_ms"] / 1e6, rel=SIX_DIGITS)
        assert ours["percent_of_read"] == pytest.approx(ours["kv_gbs"] / 20 * 100, rel=SIX_DIGITS)
    assert "% of read" in capsys.readouterr().out


def test_few_rows_are_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decoding, "TRAINED", ((2, 3, 1, 9), (1, 1, 3, 20)))
    result = run(tmp_path, "few_rows", *FAST)
    found = [(c["B"], c["H"], c["M"], c["N"], c["pass"]) for c in result["cells"]]
    assert found == [(2, 3, 1, 9, "forward+backward"), (1, 1, 3, 20, "forward+backward")]
    assert "M3 N20 full" in capsys.readouterr().out


def test_short_compares_causal_with_full(capsys):
    assert main(["short", "--lengths", "9", "--dims", "8", "--seconds", "0.01"]) == 0
    (_, line) = capsys.readouterr().out.splitlines()
    assert line.split()[:3] == ["float32", "8", "9"]
    ratios = [float(x) for x in line.split()[4:]]
    assert ratios[1] == 0.56 and all(x > 0 for x in ratios)  # 10 / 18


@pytest.mark.slow
def test_overhead_measures_small_lengths(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bench.benchmarks.tiny_call.SMALL", (1, 4))
    monkeypatch.setattr("bench.benchmarks.launch_overhead.CALLS", 2)
    result = run(tmp_path, "overhead", *FAST)
    assert {c["N"] for c in result["cells"]} == {1, 4} and result["overhead"]["timings"]
    output = capsys.readouterr().out
    assert "tiny call" in output and "launch" in output


def test_mha_measures_every_mode(tmp_path, capsys):
    result = run(tmp_path, "mha", *FAST, "--length", "32")
    assert [r["mode"] for r in result["modules"]] == [
        "train",
        "eval",
        "eval + padding",
        "eval + weights",
    ]
    for record in result["modules"]:
        assert record["status"] == "ok" and set(record["reasons"].values()) == {""}
        assert console.speedup_of(record["timings"][0])["median"] > 0
    assert capsys.readouterr().out.count("nn.MultiheadAttention") >= 4


@pytest.mark.slow
def test_memory_records_the_reason_of_a_failed_probe(tmp_path):
    names = ["--peers", "torch-cudnn"]
    result = run(
        tmp_path, "memory", "--device", "cpu", "--lengths", "64", "--masks", "full", *names
    )
    ours, theirs = result["memory"]
    assert ours["peer"] == SUBJECT and ours["extra_bytes"] >= 0 and ours["error"] == ""
    assert theirs["extra_bytes"] is None and theirs["error"] == "runs on CUDA only"
    assert "FAILED: runs on CUDA only" in console.memory_line(theirs)


@pytest.mark.slow
def test_the_ten_calls_run():
    pytest.importorskip("pytest_benchmark")
    options = ["-q", "--benchmark-disable", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "bench/test_calls.py", *options],
        cwd=machine.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "10 passed" in done.stdout, done.stdout


# --- subnormals ------------------------------------------------------------------------------


def test_subnormals_holds_each_cell_against_flushing_by_hand(tmp_path, monkeypatch):
    """The benchmark's cells at small sizes; times are not judged."""
    real = subnormal_cost.cases
    monkeypatch.setattr(subnormal_cost, "cases", lambda *given: real(*given, n=40))
    monkeypatch.setattr(subnormal_cost, "BOUND", 1e9)
    result = run(tmp_path, "subnormals", "--dtypes", "float32", "--seconds", "0.002")
    rows = result["subnormals"]
    assert {row["mask"] for row in rows} == {"full", *SUBNORMAL} and len(rows) == 2 * 5
    for row in rows:
        assert row["status"] == "ok" and set(row["ms"]) == {
            SUBJECT,
            BASELINE,
            subnormal_cost.FLUSHED,
        }
    assert len(list(results_page.subnormals([result]))) == 2 + len(rows)


def test_serving_holds_ours_against_other_ways_to_the_same_numbers(tmp_path, monkeypatch):
    """The benchmark's races at small sizes."""
    real = varlen.races
    monkeypatch.setattr(varlen, "races", lambda dtypes: real(dtypes, scale=1 / 32))
    result = run(tmp_path, "serving", "--dtypes", "float32", "--seconds", "0.002")
    rows = result["serving"]
    assert len(rows) == 2 * 3 + len(varlen.PAGES) + 1
    for row in rows:
        assert row["status"] == "ok", row
        assert row["ratio"]["q1"] <= row["ratio"]["median"] <= row["ratio"]["q3"]
    lines = list(results_page.serving([result]))
    assert len(lines) == 2 + len(rows)


def test_functions_are_held_against_none_and_a_dense_mask(tmp_path, monkeypatch):
    """At small sizes, without torch's compiled function."""
    real = functions.races
    monkeypatch.setattr(functions, "races", lambda dtypes, compiled: real(dtypes, scale=1 / 16))
    rows = run(tmp_path, "flex", "--dtypes", "float32", "--seconds", "0.002")["flex"]
    assert len(rows) == 3 * 4 + 2 + 3 * 4
    for row in rows:
        assert row["status"] == "ok", row
        assert row["ratio"]["q1"] <= row["ratio"]["median"] <= row["ratio"]["q3"]


def test_latent_attention_is_held_against_products_and_keys_of_heads(tmp_path, monkeypatch):
    real = latent_attention.races
    monkeypatch.setattr(latent_attention, "races", lambda dtypes: real(dtypes, scale=1 / 32))
    result = run(tmp_path, "latent", "--dtypes", "float32", "--seconds", "0.002")
    assert len(result["latent"]) == len(latent_attention.HEADS) + 1 + 2
    for row in result["latent"]:
        assert row["status"] == "ok", row
    assert len(list(results_page.latent([result]))) == 2 + len(result["latent"])


def test_selected_keys_are_held_against_gathered_ones_and_products(tmp_path, monkeypatch):
    real = selected_keys.races
    monkeypatch.setattr(selected_keys, "races", lambda dtypes: real(dtypes, scale=1 / 64))
    result = run(tmp_path, "selected", "--dtypes", "float32", "--seconds", "0.002")
    assert len(result["selected"]) == 2 * 3 + 2 + len(selected_keys.INDEXERS)
    for row in result["selected"]:
        assert row["status"] == "ok", row
    assert len(list(results_page.selected([result]))) == 2 + len(result["selected"])


def test_tiny_calls_are_held_against_torchs_function(tmp_path):
    result = run(tmp_path, "tiny", "--seconds", "0.002")
    assert len(result["tiny"]) == 4 * 2 * 2 * 2  # sizes, gradients, masks, functions
    for row in result["tiny"]:
        assert (row["status"], row["dtype"], row["threads"]) == ("ok", "float32", 1), row
        assert (row["aim"] == 0) == ("with gradients" in row["what"])


@pytest.mark.slow
def test_models_hold_ours_against_sdpa(tmp_path, monkeypatch):
    """Whole models at small sizes: a language model, padded, and what convert is for."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    real = whole_models.races
    monkeypatch.setattr(whole_models, "TOKENS", 3)
    monkeypatch.setattr(whole_models, "SIZES", whole_models.SIZES | dict(num_hidden_layers=1))
    monkeypatch.setattr(whole_models, "races", lambda *given, only: real(*given, 1 / 32, only))
    given = ["--lengths", "1024", "--threads", "1", "--seconds", "0.002"]
    only = "Mistral, N = 1024, padded", "encoder", "under autocast"
    result = run(tmp_path, "models", *given, "--only", *only)
    rows, optional = result["models"], sum(map(optional_deps.found, ("torchvision", "open_clip")))
    assert len(rows) == 2 * (3 + 4 + 8) + 2 + optional, rows
    assert all(row["status"] == "ok" for row in rows), rows
    assert len(list(results_page.models([result]))) == 2 + len(rows)


@pytest.mark.slow
def test_derivatives_hold_ours_against_torchs_math_path(tmp_path):
    """At small sizes: time, and memory at two lengths."""
    result = run(tmp_path, "derivatives", "--lengths", "64", "128", "--seconds", "0.002")
    rows, memory = result["derivatives"], result["memory"]
    assert len(rows) == 2 * 6 and all(row["status"] == "ok" for row in rows), rows
    assert len(list(results_page.derivatives([result]))) == 2 + len(rows) + 1 + 2 + 3 * 2
    assert len(memory) == 3 * 2 * 2 and all(row["extra_bytes"] is not None for row in memory)
    assert len(list(second_order.growth(memory))) == 3


@pytest.mark.slow
def test_distributed_holds_ranks_against_one_and_simulates(tmp_path, capsys):
    """Two ranks at small sizes; the simulation's page is the committed one."""
    given = ["--ranks", "2", "--lengths", "64", "128", "--seconds", "0.002"]
    result = run(tmp_path, "distributed", *given)
    rows, memory = result["distributed"], result["memory"]
    assert [row["strategy"] for row in rows] == ["gather", "ring", "ulysses"]
    for row in rows:
        assert row["status"] == "ok", row
        assert row["bytes"] == row["said_bytes"] > 0 and row["ratio"]["median"] > 0
        assert (row["overlap"] is not None) == (row["strategy"] == "ring")
    assert [(row["peer"], row["N"]) for row in memory[:2]] == [("gather", 64), ("gather", 128)]
    assert (
        len(memory) == 2 * 3 and len(list(results_page.distributed([result]))) == 2 + 3 + 1 + 2 + 2
    )
    page = (tmp_path / simulation.PAGE).read_text()
    assert (
        page == (results.FOLDER / simulation.PAGE).read_text() and page in capsys.readouterr().out
    )


def test_the_record_shows_memory_that_falls_with_ranks():
    sizes = {("ring", 64, 2): 100, ("ring", 128, 4): 120, ("usp", 64, 2): 100, ("usp", 128, 4): 130}
    rows = [dict(peer=a, N=n, ranks=p, extra_bytes=x) for (a, n, p), x in sizes.items()]
    assert [x.rpartition(" ")[2] for x in rank_scaling.growth(rows)] == ["met", "MISSED"]


@pytest.mark.parametrize("published", simulation.PUBLISHED, ids=str)
def test_the_simulation_is_near_published_times(published):
    found = sum(simulation.prefill(published).values())
    assert 1 / simulation.FACTOR <= found / published.seconds <= simulation.FACTOR


def test_a_picture_of_where_each_strategy_wins():
    pytest.importorskip("matplotlib")
    figure = simulation.draw(new_figure, lengths=(1 << 17, 1 << 20), ranks=(8, 64, 512))
    assert [len(axis.texts) for axis in figure.axes] == [6, 6]


def test_a_race_with_different_results_is_not_timed():
    one, other = torch.ones(3), torch.tensor([1.0, 1.0, 1.1])
    race = varlen.Race("", "float32", "forward", lambda: [one], lambda: [other])
    row = varlen.measure(race, 0.001)
    assert row["status"] == "failed" and "an error of 0.091" in row["reason"]
    assert "FAILED" in varlen.line(row)


def test_flushing_is_in_force_inside_and_not_after():
    tiny = torch.tensor([1e-39])
    with subnormal_cost.flush_to_zero():
        assert float((tiny * 1.0).double()) == 0
    assert float((tiny * 1.0).double()) > 0


@pytest.mark.parametrize(
    "median, spread, verdict",
    [(1.0, 0.5, "ok"), (1.15, 0.0, "ok"), (1.2, 0.02, "slow"), (1.2, 0.2, "noisy"), (9, 3, "slow")],
)
def test_a_ratio_is_judged_only_if_rounds_agree(median, spread, verdict):
    ratio = {"q1": median - spread / 2, "median": median, "q3": median + spread / 2}
    assert subnormal_cost.verdict({"status": "ok", "ratio": ratio}) == verdict
    assert subnormal_cost.verdict({"status": "failed", "ratio": None}) == "failed"


def test_only_a_doubtful_ratio_is_measured_again(monkeypatch):
    ratios = iter([1.3, 1.2, 1.1, 40.0])

    def record(*_):
        return {"status": "ok", "ratio": {"median": next(ratios)}}

    monkeypatch.setattr(subnormal_cost.run, "race", lambda *arguments: None)
    monkeypatch.setattr(subnormal_cost, "_record", record)
    found = [subnormal_cost.measure(case(), FORWARD) for _ in range(2)]
    assert [(row["ratio"]["median"], row["attempts"]) for row in found] == [(1.1, 3), (40.0, 1)]
