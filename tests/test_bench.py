"""The benchmark harness: what it times it has verified, and what fails it never times."""

from __future__ import annotations

import builtins
import json
import math

import pytest
import torch
import torch.nn.functional as F

import fastattn
from bench import claims, machine, memory, overhead, plot, progress, report, run, timing
from bench.__main__ import main
from bench.cases import PASSES, SWEEPS, TRAINING, Case, Sweep
from bench.peers import BASELINE, PEERS, SUBJECT
from bench.verify import Oracle, judged_heads, relative_errors

# The sweep's own cost is fixed by time, so make that small.
TINY = ["--device", "cpu", "--lengths", "40", "--dims", "16", "--seconds", "0.01"]


def sweep(**axes) -> Sweep:
    given = {"lengths": (40,), "dims": (16,), "dtypes": ("float32",), "seconds": 0.01} | axes
    return Sweep("test", **given)


def cells(**axes) -> list[dict]:
    return list(run.sweep_cells(sweep(**axes), "cpu", {"float32": 100.0, "bfloat16": None}))


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    """What one run of the program writes, with all of its parts."""
    folder = tmp_path_factory.mktemp("bench")
    assert main([*TINY, "--output", str(folder)]) == 0
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text()) | {"folder": folder}


def test_a_run_says_where_and_with_what(result):
    assert result["schema"] == 1 and result["complete"] and result["sweep"]["name"] == "custom"
    assert result["machine"]["cpu"]["cores"] >= 1 and result["machine"]["name"]
    assert result["machine"]["threads"] == torch.get_num_threads()
    assert {"isa", "isas", "torch_isa", "mhz"} <= result["machine"]["cpu"].keys()
    assert result["machine"]["mkl"]["path"] in ("AVX2", "AVX-512", "none", "unknown")
    assert result["versions"]["torch"] == torch.__version__
    assert {"start", "end"} == result["load"].keys()
    assert "commit" in result and "created" in result and "seconds" in result
    for dtype in ("float32", "bfloat16"):
        ceiling = result["ceilings"][dtype]
        assert ceiling["matmul_gflops"] > 0
        assert ceiling["register_gflops"] is None or ceiling["register_gflops"] > 0
    for entry in result["overhead"]["timings"]:
        assert set(entry["peers"]) == set(PEERS)
        assert all(row["median_us"] > 0 for row in entry["peers"].values())
    assert result["overhead"]["errors"] == {SUBJECT: "", BASELINE: ""}
    assert result["memory"]["errors"] == {SUBJECT: "", BASELINE: ""}


def test_the_memory_probe_sees_a_quadratic_buffer(result):
    """torch holds the weights when it drops out, 67 MB a copy. Our results alone are 4 MB."""
    extra = result["memory"]["extra_bytes"]
    assert extra[BASELINE] > memory.N**2 * 4
    assert extra[SUBJECT] > 4 * memory.N * memory.SHAPE["D"] * 4


def test_a_run_measures_every_cell_of_its_sweep(result):
    grid = {(c["dtype"], c["mask"], c["N"], c["D"], c["pass"]) for c in result["cells"]}
    assert len(grid) == len(result["cells"]) == 2 * 2 * 2
    for cell in result["cells"]:
        assert cell["status"] == "ok" and cell["verified"].endswith("every row of all 4 heads")
        wanted = {"out", "dq", "dk", "dv"} if cell["pass"] == TRAINING else {"out"}
        for peer in PEERS:
            assert set(cell["peers"][peer]["errors"]) == wanted
        phases = {TRAINING: {"backward", TRAINING}}.get(cell["pass"], {"forward"})
        counts = {1, torch.get_num_threads()}
        assert {(t["phase"], t["threads"]) for t in cell["timings"]} == {
            (phase, count) for phase in phases for count in counts
        }
        for entry in cell["timings"]:
            assert entry["clock"] == ("thread CPU time" if entry["threads"] == 1 else "wall time")
            assert entry["rounds"] >= timing.ROUNDS[0]
            for q in (entry["speedup"], entry["peers"][SUBJECT], entry["peers"][BASELINE]):
                low, middle, high = (q.get(k, q.get(f"{k}_ms")) for k in ("q1", "median", "q3"))
                assert 0 < low <= middle <= high


def test_a_run_draws_its_picture(result):
    pytest.importorskip("matplotlib")
    (picture,) = result["folder"].glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_sentence_says_so(result, monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "matplotlib is not installed" in plot.draw(result, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


# --- a wrong kernel --------------------------------------------------------------------------


def wrong_output(q, k, v, **arguments):
    return F.scaled_dot_product_attention(q, k, v, is_causal=arguments["causal"]) * 1.01


def wrong_gradient(q, k, v, **arguments):
    """The right output, and a dv that is 1% off."""
    off = v.detach() + 1.01 * (v - v.detach())
    return F.scaled_dot_product_attention(q, k, off, is_causal=arguments["causal"])


def not_finite(q, k, v, **arguments):
    out = F.scaled_dot_product_attention(q, k, v, is_causal=arguments["causal"])
    return torch.where(torch.arange(out.shape[-2])[:, None] == 3, float("nan"), out)


def raises(q, k, v, **arguments):
    raise RuntimeError("no such kernel")


@pytest.fixture
def timed(monkeypatch) -> list[str]:
    """The names of the peers that the harness times."""
    names: list[str] = []
    real = timing.interleaved

    def spy(programs, clock, seconds):
        names.extend(programs)
        return real(programs, clock, seconds)

    monkeypatch.setattr(timing, "interleaved", spy)
    return names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kernel, reason",
    [
        (wrong_output, "out is off by"),
        (not_finite, "out is not finite"),
        (raises, "no such kernel"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_wrong_kernel_is_shown_as_failed_and_never_timed(
    kernel, reason, dtype, monkeypatch, timed
):
    monkeypatch.setattr(fastattn, "attention", kernel)
    records = cells(dtypes=(dtype,))
    assert len(records) == 4 and timed == []
    for record in records:
        assert record["status"] == "failed" and reason in record["reason"]
        assert record["timings"] == []
        assert "FAILED, not timed" in report.one_line(record)
    assert "FAILED" in "\n".join(report.table(records))


def test_a_wrong_tiny_call_is_not_timed(monkeypatch, timed):
    monkeypatch.setattr(fastattn, "attention", wrong_output)
    measured = overhead.measure("cpu")
    assert SUBJECT not in timed and "out is off by" in measured["errors"][SUBJECT]
    assert all(set(entry["peers"]) == {BASELINE} for entry in measured["timings"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_gradient_fails_the_training_pass_alone(dtype, monkeypatch, timed):
    monkeypatch.setattr(fastattn, "attention", wrong_gradient)
    for record in cells(dtypes=(dtype,)):
        if record["pass"] == TRAINING:
            assert record["status"] == "failed" and record["reason"].startswith("dv is off by")
            assert record["timings"] == []
        else:
            assert record["status"] == "ok" and record["timings"]
    assert set(timed) == set(PEERS)


def test_one_wrong_row_is_seen_among_larger_ones():
    """Causal rows shrink with their number: the last is lost in a norm over all of them."""
    size = torch.arange(1, 1025, dtype=torch.float64).rsqrt()[:, None]
    expected = torch.randn(1, 1024, 16, dtype=torch.float64) * size
    actual = expected.clone()
    actual[0, -1] = 0
    whole, worst = relative_errors(actual, expected)
    assert whole < 0.05 and worst > 0.1
    assert relative_errors(expected, expected) == (0.0, 0.0)


def test_when_not_every_head_is_judged_the_last_one_is():
    heads = judged_heads(Case("cpu", "bfloat16", "causal", B=4, H=16, N=1024, D=128))
    assert 1 <= len(heads) < 64 and heads[-1] == 63 and sorted(set(heads)) == heads
    assert judged_heads(Case("cpu", "float32", "full", B=2, H=4, N=16, D=16)) == list(range(8))


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_blocked_oracle_is_the_oracle(mask, monkeypatch):
    """Blocks of 7 rows: a causal block sees the keys before it and no others."""
    monkeypatch.setattr("bench.verify.BLOCK_ELEMENTS", 7 * 40 * 4)
    oracle = Oracle(Case("cpu", "float32", mask, B=1, H=4, N=40, D=16), PASSES)
    q, k, v, dout = (x.double() for x in oracle.inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = fastattn.reference.attention(*leaves, causal=mask == "causal")
    whole = (out, *torch.autograd.grad(out, leaves, dout))
    for name, expected in zip(("out", "dq", "dk", "dv"), whole, strict=True):
        torch.testing.assert_close(oracle.expected[name], expected[0], rtol=1e-12, atol=1e-13)


def test_a_failed_baseline_leaves_ours_timed_without_a_ratio(monkeypatch, timed):
    monkeypatch.setattr(F, "scaled_dot_product_attention", raises)
    (record,) = cells(masks=("full",), passes=("forward",))
    assert record["status"] == "ok" and set(timed) == {SUBJECT}
    assert all(entry["speedup"] is None for entry in record["timings"])
    assert "no such kernel" in record["peers"][BASELINE]["reason"]
    assert "\n".join(report.table([record]))


# --- the parts -------------------------------------------------------------------------------


def test_an_interrupt_keeps_what_is_done(monkeypatch, tmp_path):
    real = progress.follow

    def interrupted(records, total):
        stream = real(records, total)
        yield next(stream)
        raise KeyboardInterrupt

    monkeypatch.setattr(progress, "follow", interrupted)
    monkeypatch.setattr("bench.__main__.RESULTS", tmp_path)
    assert main([*TINY, "--sweep-only", "--save"]) == 130
    assert not list(tmp_path.glob("*.*"))  # half a sweep is no result to commit
    (path,) = tmp_path.glob("local/*.json")
    kept = json.loads(path.read_text())
    assert len(kept["cells"]) == 1 and not kept["complete"]
    assert kept["overhead"] is None and kept["memory"] is None


def test_rounds_are_interleaved_and_nobody_always_comes_second():
    calls: list[str] = []
    programs = {name: (lambda _, name=name: calls.append(name),) for name in "ab"}
    ticks = iter(range(10**9))
    clock = timing.HostClock("counted", lambda: float(next(ticks)))
    samples = timing.interleaved(programs, clock, seconds=0.0)
    assert {len(rounds) for rounds in samples.values()} == {timing.ROUNDS[0]}
    measured = calls[4:]  # two warm calls each
    assert measured == list("abbaabbaab")


def test_phases_are_timed_apart_and_hand_on_their_results():
    ticks = iter([0.0, 1.0, 10.0, 13.0])
    clock = timing.HostClock("counted", lambda: next(ticks))
    program = (lambda _: "out", lambda out: out + "!")
    assert clock.sample(program, 1) == [1.0, 3.0]


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), timing.torch_threads(1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_useful_flops():
    case = Case("cpu", "float32", "full", B=2, H=3, N=8, D=16)
    assert case.flops("forward") == 4 * 8 * 8 * 16 * 6
    assert case.flops(TRAINING) == case.flops("forward") + case.flops("backward")
    causal = Case("cpu", "float32", "causal", B=2, H=3, N=8, D=16)
    assert math.isclose(causal.flops("forward") / case.flops("forward"), 36 / 64)


def test_quick_measures_what_is_claimed():
    quick = SWEEPS["quick"]
    assert claims.N in quick.lengths and claims.D in quick.dims
    assert {claim[0] for claim in claims.SPEEDUPS} <= set(quick.dtypes)


def test_claims_are_judged_by_what_was_measured():
    entry = {"threads": 1, "phase": "forward", "speedup": {"median": 1.79}}
    entry["peers"] = {SUBJECT: {"percent_of_peak": 70.0}}
    cell = {"dtype": "float32", "mask": "full", "pass": "forward", "D": 64, "N": 2048}
    result = {
        "machine": {"device": "cpu"},
        "cells": [cell | {"timings": [entry]}],
        "overhead": {"timings": [{"peers": {SUBJECT: {"median_us": 9.0}}}]},
        "memory": {"case": "", "extra_bytes": {SUBJECT: 21_000_000}},
    }
    met = [claim["met"] for claim in claims.judge(result)]
    assert met == [False, None, None, None, None, None, True, False]
    entry["speedup"]["median"] = 1.8
    judged = claims.judge(result)[0]
    assert judged["met"] is True and math.isclose(judged["possible"], 1.8 / 0.7)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("AMD EPYC", "amd-epyc-25-17"),
        ("AMD EPYC 9654 96-Core Processor", "amd-epyc-9654"),
        ("Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz", "intel-xeon-platinum-8488c"),
    ],
)
def test_the_file_is_named_after_the_device(name, expected):
    cpu = {"family": "25", "number": "17"}
    assert machine.slug({"device": "cpu", "name": name, "cpu": cpu}) == expected
    assert machine.slug({"device": "cuda", "name": "NVIDIA H200", "cpu": cpu}) == "nvidia-h200"
