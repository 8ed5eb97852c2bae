"""The harness's other commands, each at a tiny size."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.benchmarks import (
    decoding,
    peak_memory,
    performance_targets,
    rank_scaling,
    second_order,
    simulation,
    subnormal_cost,
    varlen,
    whole_models,
)
from bench.cases import BACKWARD, BOTH, FORWARD
from bench.masks import MASKS, SUBNORMAL
from bench.measure import machine
from bench.measure.machine import AMX, FULL, HALF, NARROW
from bench.peers import optional_deps
from bench.peers.registry import BASELINE, SUBJECT
from bench.plots import pictures, plot_readme
from bench.reporting import comparison, console, results, results_page
from fastattn.examples.common import new_figure
from tests.support.bench_helpers import LIMITS, case, cells, hurry, know_ceilings

pytestmark = pytest.mark.usefixtures("one_thread")
SIX_DIGITS = 2e-5  # for two numbers, each stored with six digits
FAST = ["--device", "cpu", "--threads", "1", "--seconds", "0.002"]


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    know_ceilings(monkeypatch)
    hurry(monkeypatch)


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


def test_memory_records_the_reason_of_a_failed_probe(tmp_path):
    names = ["--peers", "torch-cudnn"]
    result = run(
        tmp_path, "memory", "--device", "cpu", "--lengths", "64", "--masks", "full", *names
    )
    ours, theirs = result["memory"]
    assert ours["peer"] == SUBJECT and ours["extra_bytes"] >= 0 and ours["error"] == ""
    assert theirs["extra_bytes"] is None and theirs["error"] == "runs on CUDA only"
    assert "FAILED: runs on CUDA only" in console.memory_line(theirs)


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


# --- targets ---------------------------------------------------------------------------------


def test_targets_have_names_of_their_own():
    names = [target.name for target in performance_targets.TARGETS]
    assert len(set(names)) == len(names)
    assert main(["targets", "--list", "--only", "no such target"]) == 2


@pytest.fixture
def tiny_targets(monkeypatch):
    """A target for each way to measure, with cases far from the limits of the machine."""
    monkeypatch.setattr(performance_targets, "SECONDS", 0.002)
    small, other = case(N=8), case("causal", N=8)
    rows = [
        # The rival is ours, for which the machine sets no limit: never beyond it.
        performance_targets.Target(
            "a ratio", 1e9, "x", performance_targets.Race(small, "x", FORWARD, SUBJECT, other)
        ),
        performance_targets.Target(
            "a percentage", 1e-9, "% of peak", performance_targets.Race(small, "% of peak")
        ),
        performance_targets.Target(
            "backward", 0, "x", performance_targets.Race(small, "x", BACKWARD)
        ),
        performance_targets.Target(
            "of ours", 0, "x", performance_targets.Race(small, "x", FORWARD, SUBJECT, other)
        ),
        performance_targets.Target(
            "no rival", 0, "x", performance_targets.Race(small, "x", FORWARD, "torch-cudnn")
        ),
        performance_targets.Target(
            "no such isa", 0, "x", performance_targets.Race(small, "x", isa="mmx")
        ),
        performance_targets.Target(
            "every isa",
            0,
            "x",
            performance_targets.Race(small, "x", isa=performance_targets.isas()[-1]),
        ),
        performance_targets.Target("threads", 0, "x", performance_targets.Scaling(small)),
    ]
    monkeypatch.setattr(performance_targets, "TARGETS", rows)


def test_targets_are_measured_and_judged(tiny_targets, tmp_path, capsys, threads):
    threads(2)
    before = performance_targets.isas() and performance_targets.libraries.cpu_isa()
    result = run(tmp_path, "targets")
    met = {row["name"]: row["met"] for row in result["targets"]}
    wanted = dict.fromkeys(met, True) | {"a ratio": False, "no rival": None, "no such isa": None}
    assert met == wanted
    reasons = {row["name"]: row["reason"] for row in result["targets"]}
    assert reasons["no rival"] == "declined: runs on CUDA only"
    assert reasons["no such isa"] == "this machine has no mmx kernels"
    printed = capsys.readouterr().out
    assert "NOT MET: a ratio" in printed and "not measured: no rival" in printed
    assert performance_targets.libraries.cpu_isa() == before


def test_targets_may_be_selected_and_strict(tiny_targets, tmp_path):
    assert run(tmp_path, "targets", "--only", "percent")["targets"][0]["name"] == "a percentage"
    assert main(["targets", "--strict", "--only", "a ratio", "--output", str(tmp_path)]) == 1


def test_at_most_is_the_rule_of_sizes():
    def found(value):
        return lambda limits: {"measured": value, "reason": ""}

    def judged(unit):
        rows = (performance_targets.Target("", 12.0, unit, found(x)) for x in (11, 12, 13))
        return [row.judge(LIMITS, FULL)["met"] for row in rows]

    assert judged("MB") == [True, True, False] and judged("x") == [False, True, True]


def test_a_target_may_differ_by_class_of_machine():
    """The gain over torch depends on the machine's units; a share of the peak does not."""
    everywhere = performance_targets.Target("a", 82.0, "% of peak", None)
    some, tiles = (
        performance_targets.Target("b", of, "x", None)
        for of in ({FULL: 2.0, HALF: 1.5}, {AMX: 3.0})
    )
    kinds = (AMX, FULL, HALF, NARROW)
    assert [everywhere.bound_on(kind) for kind in kinds] == [82.0] * 4
    assert [some.bound_on(kind) for kind in kinds] == [None, 2.0, 1.5, 1.5]
    assert [tiles.bound_on(kind) for kind in kinds] == [3.0, None, None, None]
    for kind in kinds:
        assert all(target.bound_on(kind) for target in performance_targets.selected(kind))
    assert (
        len(performance_targets.selected(AMX, ["M16"]))
        > len(performance_targets.selected(HALF, ["M16"]))
        == 0
    )


@pytest.mark.parametrize(
    "vendor, family, number, amx, isas, kind",
    [
        ("GenuineIntel", "6", "207", True, ["avx512_bf16", "avx512"], AMX),
        ("GenuineIntel", "6", "85", False, ["avx512", "avx2"], FULL),
        ("AuthenticAMD", "26", "2", False, ["avx512_bf16"], FULL),
        ("AuthenticAMD", "25", "97", False, ["avx512_bf16"], HALF),
        ("AuthenticAMD", "25", "1", False, ["avx2"], NARROW),
        ("", "", "", False, ["generic"], NARROW),
        ("GenuineIntel", "19", "1", False, ["avx512"], FULL),
    ],
)
def test_the_class_of_a_cpu(vendor, family, number, amx, isas, kind, monkeypatch):
    for name in machine.WITHOUT_TILES:
        monkeypatch.delenv(name, raising=False)
    cpu = {"vendor": vendor, "family": family, "number": number, "amx": amx, "isas": isas}
    assert machine.units(cpu) == kind


def test_a_wrong_kernel_meets_no_target(tiny_targets, monkeypatch, tmp_path):
    import fastattn

    real = fastattn.attention
    monkeypatch.setattr(fastattn, "attention", lambda *a, **o: real(*a, **o) * 1.01)
    assert main(["targets", "--only", "percent", "--output", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("*.json")
    (row,) = results.read(path)["targets"]
    assert row["met"] is None and row["failed"] and "out is off by" in row["reason"]


def test_an_unreachable_target_is_distinguished_from_a_missed_one():
    """At 80% of the peak and 2.0 times its rival's speed, a call could at best reach 2.5 times."""
    met, missed = _target(True), _target(False)
    beyond = missed | {"target": 2.6}
    unknown = beyond | {"percent": None}
    percent = beyond | {"unit": "% of peak", "measured": 80.0, "target": 82.0}
    found = [console.beyond(row) for row in (met, missed, beyond, unknown, percent)]
    assert found == [False, False, True, False, False]
    assert "beyond this machine: n" in console.target_line(beyond)
    rows = [results_page._verdict(row) for row in (met, missed, beyond, percent)]
    assert rows == [
        "2 (aim 1, limit 2.50) met",
        "2 (aim 1, limit 2.50) **missed**",
        "2 (aim 2.6, limit 2.50) beyond this machine",
        "80 (aim 82) **missed**",
    ]


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
    assert len(rows) == 2 * (3 + 4) + 2 + optional, rows
    assert all(row["status"] == "ok" for row in rows), rows
    assert len(list(results_page.models([result]))) == 2 + len(rows)


def test_derivatives_hold_ours_against_torchs_math_path(tmp_path):
    """At small sizes: time, and memory at two lengths."""
    result = run(tmp_path, "derivatives", "--lengths", "64", "128", "--seconds", "0.002")
    rows, memory = result["derivatives"], result["memory"]
    assert len(rows) == 2 * 6 and all(row["status"] == "ok" for row in rows), rows
    assert len(list(results_page.derivatives([result]))) == 2 + len(rows) + 1 + 2 + 3 * 2
    assert len(memory) == 3 * 2 * 2 and all(row["extra_bytes"] is not None for row in memory)
    assert len(list(second_order.growth(memory))) == 3


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


# --- files -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> dict:
    """A sweep of three lengths with two lengths of memory."""
    with pytest.MonkeyPatch.context() as patch:
        know_ceilings(patch)
        result = results.start("sweep", "cpu", ("float32",), {})
    cases = [case(mask, N=n, D=64) for mask in ("full", "causal", "window") for n in (16, 32, 64)]
    result["cells"] = cells(*cases)
    size = {"full": 100, "dropout": 1000}
    result["memory"] = [
        {"mask": mask, "N": n, "dtype": "float32", "pass": "forward+backward", "peer": peer}
        | {"extra_bytes": n * size[mask], "error": ""}
        | peak_memory.SHAPE
        for mask in size
        for n in (1024, 2048)
        for peer in (SUBJECT, BASELINE)
    ]
    return json.loads(json.dumps(result))


@pytest.fixture
def files(sweep, tmp_path):
    """A result, and another in which one cell is half as fast."""
    slower = copy.deepcopy(sweep)
    peers = slower["cells"][4]["timings"][0]["peers"]
    peers[SUBJECT]["median_ms"] *= 2
    paths = []
    for name, result in (("a", sweep), ("b", slower)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(result))
    return paths


def test_compare_finds_a_planted_regression(files, sweep, capsys):
    assert main(["compare", *map(str, files)]) == 0
    first = capsys.readouterr().out.splitlines()[1]
    planted = sweep["cells"][4]
    assert first.split()[:2] == ["0.50", "1.00"]
    assert f"{planted['mask']} " in first and f"N{planted['N']} " in first
    assert first.endswith(f"{planted['pass']}, 1 thread")
    assert main(["compare", *map(str, files), "--fail-under", "0.9"]) == 1
    assert "1 under 0.9: FAILED" in capsys.readouterr().out
    assert main(["compare", *map(str, files), "--fail-under", "0.4"]) == 0
    assert main(["compare", str(files[0]), str(files[0]), "--fail-under", "0.99"]) == 0


def test_compare_takes_a_failed_cell_for_a_regression(files, sweep, capsys):
    broken = copy.deepcopy(sweep)
    broken["cells"][0] |= {"status": "failed", "timings": []}
    files[1].write_text(json.dumps(broken))
    assert main(["compare", *map(str, files), "--fail-under", "0.5"]) == 1
    assert "FAILED in the second" in capsys.readouterr().out


def test_compare_without_common_cells_fails(files, sweep, capsys):
    files[1].write_text(json.dumps(sweep | {"cells": []}))
    assert main(["compare", *map(str, files), "--fail-under", "0.5"]) == 1
    assert "no timed cell in common" in capsys.readouterr().out


@pytest.mark.parametrize("text, reason", [("{}", "got schema None"), ("x", "got no JSON")])
def test_a_file_of_another_kind_is_refused(text, reason, tmp_path, capsys):
    path = tmp_path / "old.json"
    path.write_text(text)
    assert main(["plot", str(path)]) == 2
    assert reason in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "absent.json")]) == 2


def test_plot_draws_every_picture(files):
    pytest.importorskip("matplotlib")
    assert main(["plot", str(files[0])]) == 0
    for suffix in pictures.PICTURES:
        picture = files[0].with_name(f"a{suffix}.png")
        assert picture.read_bytes().startswith(b"\x89PNG"), suffix


def test_the_picture_of_the_readme_has_a_bar_for_each_feature_and_dtype():
    pytest.importorskip("matplotlib")
    (path,) = results.FOLDER.glob("amd-zen-4-256-bit-units.json")
    kept = results.read(path)
    speed, extra = plot_readme.draw([kept], new_figure).axes
    assert len(speed.patches) == len(plot_readme.NAMES) * len(BOTH) and len(extra.patches) == 2
    widths = sorted(bar.get_width() for bar in speed.patches)
    texts = [text.get_text() for text in speed.texts]
    assert f"{widths[-1]:.1f}×" in texts and f"{widths[0]:.1f}×" in texts and "torch = 1" in texts
    (alone,) = plot_readme.draw([kept | {"memory": []}], new_figure).axes
    assert len(alone.patches) == len(speed.patches)
    rest = kept | {"cells": [c for c in kept["cells"] if c["mask"] != "window"]}
    assert plot_readme.draw([rest], new_figure) is None
    older = kept["machine"]["cpu"] | {"number": "33"}
    other = kept | {"machine": kept["machine"] | {"cpu": older}}
    *each, extra = plot_readme.draw([rest, kept, other], new_figure).axes
    titles = [axis.get_title(loc="left") for axis in each]
    assert titles == ["AMD Zen 4, 256-bit units", "AMD Zen 3, 256-bit units"]


def test_a_report_is_written_between_markers(files, tmp_path, sweep):
    text = "before\n<!-- speed:begin -->\nold\n<!-- speed:end -->\nafter\n"
    page = tmp_path / "README.md"
    page.write_text(text)
    assert main(["report", str(files[0]), "--pages", str(page)]) == 0
    written = page.read_text()
    assert written.startswith("before\n<!-- speed:begin -->\n- `a.json`: ")
    assert written.endswith("<!-- speed:end -->\nafter\n") and "old" not in written
    assert "| D=64 | machine | full, N=64 | causal, N=64 | window, N=64 |" in written
    assert re.search(r"\| float32 forward \| [^|]+ \| \d+\.\d\dx, \d+% \|", written)
    assert main(["report", str(files[0]), "--pages", str(page)]) == 0
    assert page.read_text() == written  # a second report changes nothing


@pytest.mark.parametrize(
    "text",
    ["no marker", "<!-- speed:begin -->", "<!-- speed:end --><!-- speed:begin -->"],
)
def test_a_page_without_its_markers_is_left_alone(text, files, tmp_path, capsys):
    page = tmp_path / "README.md"
    page.write_text(text)
    assert main(["report", str(files[0]), "--pages", str(page)]) == 2
    assert page.read_text() == text and "expected" in capsys.readouterr().err


def test_every_table_has_a_row_for_what_was_measured(sweep):
    rows = list(results_page.memory([sweep]))
    assert rows[0] == "| extra MB, forward+backward | fastattn | torch |" and len(rows) == 2 + 4
    kinds = {name: kind for name, (kind, _) in results_page.TABLES.items()}
    path = Path("a.json")
    assert set(results_page.tables({path: sweep})) == {"speed"} and kinds["speed"] == "sweep"
    assert not results_page.tables({path: sweep | {"kind": "overhead"}})
    sweep = sweep | {"targets": [_target(True), _target(None) | {"name": "m"}]}
    head, _, first, second = results_page.targets([sweep])
    assert head == f"| target | {machine.words(sweep['machine'])} |"
    assert first == "| n | 2 (aim 1, limit 2.50) met |" and second == "| m | why |"
    assert set(MASKS) >= {cell["mask"] for cell in sweep["cells"]}


def _target(met: bool | None) -> dict:
    row = {"name": "n", "rule": "at least", "target": 1.0, "unit": "x", "measured": 2.0}
    return row | {"met": met, "reason": "why", "ratio": 2.0, "percent": 80.0, "limit": "% of peak"}


def test_a_ratio_at_the_limit_is_printed_if_near():
    assert console.ratio_at_limit(_target(True)) == pytest.approx(2.5)
    assert "80% of peak, at most 2.50x" in console.target_line(_target(True))
    for blank in ({"ratio": None}, {"percent": None}, {"percent": 3.0}):
        assert console.ratio_at_limit(_target(True) | blank) is None


def test_reading_is_compared_with_a_buffer_of_its_size():
    """Data that fits a cache is read faster than memory; tiny data has no bandwidth limit."""
    row = {"threads": 1, "copy_gbs": 1.0}
    rows = [row | {"bytes": mb << 20, "read_gbs": gbs} for mb, gbs in ((4, 50.0), (256, 20.0))]
    limits = LIMITS._replace(memory=rows)
    found = [limits.read_gbs(1, size << 20) for size in (1, 2, 16, 64, 1024)]
    assert found == [None, 50.0, 50.0, 20.0, 20.0] and limits.read_gbs(2, 4 << 20) is None


def test_a_slowdown_that_torch_shares_is_no_regression():
    """A slowdown that torch shares is the machine's; a faster machine does not hide one of ours."""
    ratios = {"slower alone": (0.5, 1.0), "slower with torch": (0.5, 0.5), "failed": (0.0, None)}
    ratios |= {"slower, torch faster": (0.8, 1.5), "no torch": (0.8, None), "faster": (1.2, 0.5)}
    found = [comparison.Change(ratio, name, torch) for name, (ratio, torch) in ratios.items()]
    worse = {change.cell for change in comparison.regressions(found, 0.9)}
    assert worse == {"slower alone", "failed", "slower, torch faster", "no torch"}
