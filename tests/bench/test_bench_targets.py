"""The targets of the harness: each is measured, and judged against the limits of a machine."""

from __future__ import annotations

import pytest

from bench.__main__ import main
from bench.benchmarks import (
    performance_targets,
)
from bench.cases import BACKWARD, FORWARD
from bench.measure import machine
from bench.measure.machine import AMX, FULL, HALF, NARROW
from bench.peers.registry import SUBJECT
from bench.reporting import console, results, results_page
from tests.bench.test_bench_commands import run
from tests.support.bench_helpers import LIMITS, case

pytestmark = pytest.mark.usefixtures("one_thread", "known_ceilings")


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
