"""The benchmark harness: the sweep, its records, and the parts that measure."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import torch

from bench.__main__ import main
from bench.cases import FORWARD, GRIDS, PASSES
from bench.masks import MASKS, SWEPT
from bench.measure import machine, progress, roofline, timing
from bench.peers.registry import BASELINE, SUBJECT
from bench.report import results
from tests.support.bench_helpers import case, hurry, know_ceilings

TINY = ["--device", "cpu", "--lengths", "40", "--dims", "16", "--seconds", "0.002"]
DEFAULT = {SUBJECT, BASELINE}


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    """The result of one run of the program with all of its parts."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        patch.setattr("bench.measure.roofline.BURSTS", 3)
        patch.setattr("bench.measure.roofline.SUSTAINED_S", 0.002)
        patch.setattr("bench.measure.roofline.BUFFER_BYTES", {"cpu": [1 << 12, 4 << 20]})
        patch.setattr("bench.measure.roofline.MATMUL_SIZE", {"cpu": 128})
        assert main([*TINY, "--masks", *SWEPT, "--output", str(folder)]) == 0
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text()) | {"folder": folder}


@pytest.mark.slow
def test_a_run_records_the_machine_and_its_limits(result):
    assert result["schema"] == results.SCHEMA and result["complete"] and result["kind"] == "sweep"
    assert result["machine"]["threads"] == torch.get_num_threads()
    assert result["machine"]["mkl"]["path"] in ("AVX2", "AVX-512", "none", "unknown")
    assert result["versions"]["torch"] == torch.__version__
    for dtype in ("float32", "bfloat16"):
        ceiling = result["ceilings"]["compute"][dtype]
        assert ceiling["matmul_gflops"] > 0
        for rate in (ceiling["register_gflops"], ceiling["sustained_gflops"]):
            assert rate is None or rate > 0
    counts = [row["threads"] for row in result["ceilings"]["memory"]]
    assert counts == 2 * list(dict.fromkeys((1, torch.get_num_threads())))  # for two sizes
    assert all(row["read_gbs"] > 0 < row["copy_gbs"] for row in result["ceilings"]["memory"])


@pytest.mark.slow
def test_the_memory_probe_detects_a_quadratic_buffer(result):
    """torch stores the weights for dropout: 67 MB each. Our results take only 4 MB, and an
    allocator may have a few pages of that free already."""
    extra = {row["peer"]: row for row in result["memory"]}
    assert extra[BASELINE]["N"] == 4096 and extra[BASELINE]["error"] == ""
    assert extra[BASELINE]["extra_bytes"] > 4096**2 * 4
    assert extra[SUBJECT]["extra_bytes"] > 3 * 4096 * 64 * 4


def test_a_run_measures_every_cell_of_its_sweep(result):
    grid = {(c["dtype"], c["mask"], c["N"], c["D"], c["pass"]) for c in result["cells"]}
    assert len(grid) == len(result["cells"]) == 2 * len(SWEPT) * len(PASSES)
    for cell in result["cells"]:
        assert cell["status"] == "ok" and cell["verified"].endswith("every row of all 4 heads")
        wanted = {"out"} if cell["pass"] == FORWARD else {"out", "dq", "dk", "dv"}
        for peer in DEFAULT:
            assert set(cell["peers"][peer]["errors"]) == wanted
        assert {t["threads"] for t in cell["timings"]} == {1, torch.get_num_threads()}
        for entry in cell["timings"]:
            assert entry["clock"] == ("thread CPU time" if entry["threads"] == 1 else "wall time")
            assert entry["rounds"] == 2
            ratio = entry["peers"][BASELINE]["speedup"]
            for q in (ratio, entry["peers"][SUBJECT], entry["peers"][BASELINE]):
                low, middle, high = (q.get(k, q.get(f"{k}_ms")) for k in ("q1", "median", "q3"))
                assert 0 < low <= middle <= high
            assert entry["peers"][SUBJECT]["percent_of_read"] > 0


def test_a_run_draws_its_pictures(result):
    pytest.importorskip("matplotlib")
    (picture,) = result["folder"].glob("*-speedup.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


# --- the parts -------------------------------------------------------------------------------


def test_an_interrupt_keeps_what_is_done(monkeypatch, tmp_path):
    know_ceilings(monkeypatch)
    real = progress.follow

    def interrupted(*arguments):
        stream = real(*arguments)
        yield next(stream)
        raise KeyboardInterrupt

    monkeypatch.setattr(progress, "follow", interrupted)
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    assert main([*TINY, "--sweep-only", "--save"]) == 130
    assert not list(tmp_path.glob("*.*"))  # an incomplete sweep is no result to commit
    (path,) = tmp_path.glob("local/*.json")
    kept = json.loads(path.read_text())
    assert len(kept["cells"]) == 1 and not kept["complete"]
    assert kept["memory"] == []


def test_rounds_are_interleaved_in_alternating_order():
    calls: list[str] = []
    programs = {name: (lambda _, name=name: calls.append(name),) for name in "ab"}
    ticks = iter(range(10**9))
    clock = timing.HostClock("counted", lambda: float(next(ticks)))
    samples = timing.interleaved(programs, clock, seconds=0.0)
    assert {len(rounds) for rounds in samples.values()} == {timing.ROUNDS[0]}
    measured = calls[4:]  # after two warm-up calls of each
    assert measured == list("abbaabbaab")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", [{"N": 300}, {"N": 300, "M": 7}], ids=str)
def test_the_pairs_counted_are_those_that_are_visible(mask, sizes):
    for B in (1, 3) if not MASKS[mask].learned else (1,):
        assert case(mask, B=B, **sizes).pairs() == int(case(mask, B=B, **sizes).visible().sum())


@pytest.mark.parametrize("preset", GRIDS)
def test_the_presets_measure_every_mask_and_no_case_twice(preset):
    cases = [c for grid in GRIDS[preset] for c in grid.cases("cpu")]
    assert len(set(cases)) == len(cases)
    assert {c.mask for c in cases} == set(SWEPT)
    assert {c.dtype for c in cases} == {"float32", "bfloat16", "float16"}


def test_a_machine_that_hides_its_model_has_no_number():
    """Such a machine gives the number of another chip, here that of one without tiles."""
    cpu = {"vendor": "GenuineIntel", "family": "6", "number": "167", "amx": True}
    described = {"device": "cpu", "name": "Intel(R) Xeon(R) Processor", "cpu": cpu}
    assert machine.words(described) == "Intel Xeon with AMX, model hidden"


def test_a_file_has_a_line_for_a_record_and_six_digits(result):
    text = results.text(result | {"folder": ""})
    assert json.loads(text)["cells"] == result["cells"]
    assert text.count("\n") < len(result["cells"]) + 40
    assert results.text({"a": [{"b": 1234567.8, "c": [1 / 3]}], "d": 1234567}) == (
        '{\n"a": [\n {"b": 1234570.0, "c": [0.333333]}\n],\n"d": 1234567\n}\n'
    )


@pytest.mark.parametrize("path", results.committed(), ids=lambda path: path.stem)
def test_every_committed_file_can_be_read_and_is_named_after_its_machine(path):
    kept = results.read(path)
    assert path.stem == results.stem(kept) and kept["complete"]


def test_a_partial_run_has_its_own_name(result):
    sweep = machine.slug(result["machine"])
    assert results.stem(result) == sweep
    whole = result | {"kind": "models", "settings": {"only": []}}
    assert results.stem(whole) == f"{sweep}-models"
    part = whole | {"settings": {"only": ["autocast", "Llama, N = 1024"]}}
    assert results.stem(part) == f"{sweep}-models-autocast-llama-n-1024"


@pytest.mark.parametrize(
    "announced, status, expected",
    [(False, -4, ""), (True, 0, ""), (True, 1, ""), (True, -4, "AVX512_CORE_BF16")],
)
def test_tiles_are_not_measured_without_permission(monkeypatch, announced, status, expected):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    flags = {"flags": "avx2 amx_tile" if announced else "avx2"}
    monkeypatch.setattr(machine, "_cpuinfo", lambda: flags)
    done = subprocess.CompletedProcess([], status)
    monkeypatch.setattr(machine.subprocess, "run", lambda *a, **o: done)
    assert expected in machine.avoid_refused_tiles()
    assert os.environ.get("ONEDNN_MAX_CPU_ISA", "") == expected


@pytest.mark.parametrize("streams", roofline.STREAMS)
@pytest.mark.parametrize("n", (0, 15, 64, 1000, 4099))
def test_a_reading_loop_reads_every_line_once(streams, n):
    """Of numbers 0, 1, 2, 0, ..: those at the end that fill no line of each stream are left out."""
    x = torch.arange(n, dtype=torch.float32) % 3
    each = n // streams // 16 * 16
    if not (loops := roofline._loops(x)):
        pytest.skip("no kernels for this CPU")
    assert loops[f"{streams} streams"]() == x[: streams * each].sum()
