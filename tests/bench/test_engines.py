"""The benchmark beside other engines: its workers, with an engine of a few lines; what it refuses;
its environments, records, page and pictures."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.cpu_engines import cases, environments, measure, peers, process, report
from bench.measure import timing
from bench.peers.registry import BASELINE, SUBJECT
from bench.report import glance, pages, results

pytestmark = pytest.mark.usefixtures("one_thread", "known_ceilings")
ROW = cases.Row(cases.PREFILL, "float32", 2, 3, 4)
# An engine for one item, without a mask: Python and nothing else.
ENGINE = """
import array, math, os
from protocol import Declined, Prepared


def version():
    return "1.2"


def read(path, dtype, shape):
    x = array.array("f", open(path, "rb").read())
    _, heads, n, d = shape
    return [[x[(h * n + i) * d:(h * n + i + 1) * d] for i in range(n)] for h in range(heads)]


def prepare(sizes, tensors, threads, variant):
    if variant == "declines":
        raise Declined(f"takes no {sizes['dtype']}")
    if variant == "dies":
        os._exit(3)
    if variant == "raises":
        raise RuntimeError("of its own")
    heads = list(zip(*(read(*tensors[name]) for name in "qkv")))
    scale, calls = sizes["D"] ** (-0.4 if variant == "wrong" else -0.5), []
    out = array.array("f")

    def call():
        calls.append(0)
        if variant == "dies while timed" and len(calls) > 1:
            os._exit(4)
        del out[:]
        for q, k, v in heads:
            for row in q:
                p = [math.exp(scale * sum(map(float.__mul__, row, key))) for key in k]
                out.extend(sum(map(float.__mul__, p, c)) / sum(p) for c in zip(*v))

    def write(path):
        values = out if variant != "infinite" else [math.inf] * len(out)
        array.array("f", values).tofile(open(path, "wb"))

    print("text of an engine", flush=True)
    return Prepared(call, write, "float16" if variant == "coarse" else "float32")
"""
VARIANTS = ("wrong", "infinite", "declines", "raises", "dies", "dies while timed")


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Every worker runs ENGINE; the only row is ROW."""
    (tmp_path / "tiny.py").write_text(ENGINE)
    monkeypatch.setattr(process, "ADAPTERS", tmp_path)
    monkeypatch.setattr(cases, "ROWS", (replace(ROW, quick=True),))
    real = dict(peers.PEERS)
    peers.PEERS.clear()
    peers.PEERS.update({name: peers.Peer(name, "tiny") for name in (SUBJECT, BASELINE)})
    yield tmp_path
    peers.PEERS.clear()  # and in their order again
    peers.PEERS.update(real)


@pytest.mark.slow
def test_outputs_are_verified_before_they_are_timed(engine):
    """Each reason for which an engine is not timed; the others are."""
    for name in VARIANTS:
        peers.PEERS[name] = peers.Peer(name, "tiny", name)
    with measure.Workers(dict(peers.PEERS), 1) as workers:
        record = measure.measure(ROW, workers, 0.001)
        assert workers.versions[SUBJECT] == "1.2"
        started = [worker.process for worker in workers.running.values()]
    assert all(process.poll() is not None for process in started)
    found = record["peers"]
    assert record["status"] == "ok" and record["rounds"] >= timing.ROUNDS[0]
    for name in (SUBJECT, BASELINE):
        assert found[name]["reason"] == "" and found[name]["ms"] > 0
        assert found[name]["error"] < 1e-6 and found[name]["precision"] == "float32"
    assert 0.2 < found[BASELINE]["ratio"]["median"] < 5
    reasons = {name: found[name]["reason"] for name in VARIANTS}
    assert "its output is off by" in reasons["wrong"] and "5e-06 in float32" in reasons["wrong"]
    assert reasons["infinite"] == "its output is not finite"
    assert reasons["declines"] == "declined: takes no float32" and found["declines"]["declined"]
    assert reasons["raises"] == "raised RuntimeError: of its own"
    assert reasons["dies"].startswith("its process ended with 3")
    assert "ended with 4" in reasons["dies while timed"]
    assert all(found[name]["ms"] is None for name in VARIANTS)


def test_nothing_is_timed_if_ours_is_wrong(engine):
    peers.PEERS[SUBJECT] = peers.Peer(SUBJECT, "tiny", "wrong")
    with measure.Workers(dict(peers.PEERS), 1) as workers:
        record = measure.measure(ROW, workers, 0.001)
    assert record["status"] == "failed" and record["peers"][BASELINE]["ms"] is None
    assert "FAILED, not timed: its output is off" in next(report.lines(record))


def test_the_command_names_what_is_absent_and_saves(engine, monkeypatch, capsys):
    monkeypatch.setattr(environments, "FOLDER", engine / "none")
    absent = environments.Environment("vllm", "MIT", ())
    peers.PEERS["vllm"] = peers.Peer("vllm", "tiny", "", absent)
    given = ["engines", "--quick", "--seconds", "0.001", "--output", str(engine)]
    assert main(given) == 0
    output = capsys.readouterr().out
    assert "vllm: absent; get it by: python -m bench engines --install vllm" in output
    assert f"{ROW.name}: nearest torch" in output and "text of an engine" not in output
    (path,) = engine.glob("*-engines-quick.json")
    saved = results.read(path)
    assert saved["engines"][0]["peers"]["vllm"]["reason"].startswith("absent")
    assert main([*given, "--engines", "none"]) == 2
    assert main([*given, "--rows", "none"]) == 2
    assert "expected parts of these names" in capsys.readouterr().err


SMALL = (
    replace(ROW, Hk=1),
    replace(ROW, causal=True, B=2),
    cases.Row(cases.PACKED, "bfloat16", 2, 5, 8, causal=True, lengths=(2, 5), B=2),
    cases.Row(cases.PACKED, "float32", 2, 5, 8, lengths=(1, 5, 3), B=3),
    cases.Row(cases.DECODE, "float16", 4, 70, 16, Hk=2, M=1, B=2),
    cases.Row(cases.STORAGE, "bfloat16", 4, 70, 32, Hk=2, M=1, storage="int8"),
    cases.Row(cases.STORAGE, "bfloat16", 4, 70, 32, Hk=2, M=1, storage="fp8"),
)


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_ours_and_torchs_adapters_compute_every_kind_of_row(row, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(process.ADAPTERS))
    declined = importlib.import_module("protocol").Declined
    tensors = row.tensors()
    expected = row.expected(tensors)
    files = {name: cases.store(x, tmp_path / name) for name, x in tensors.items()}
    for name, variant in (("ours", ""), ("ours", "unquantised"), ("torch_sdpa", "")):
        adapter = importlib.import_module(name)
        if row.storage if name == "torch_sdpa" else variant and not row.storage:
            with pytest.raises(declined):
                adapter.prepare(row.sizes(), files, 1, variant)
            continue
        ready = adapter.prepare(row.sizes(), files, 1, variant)
        ready.call()
        ready.write(str(tmp_path / "out"))
        out = torch.from_file(str(tmp_path / "out"), size=expected.numel(), dtype=torch.float32)
        verdict = measure.judge(out.view(expected.shape), expected, ready.precision)
        assert verdict.get("reason", "") == "", (name, variant, verdict)


# --- the page and the pictures -------------------------------------------------------------------


def _peer(median: float | None, precision: str = "float32", ms: float | None = 2.0) -> dict:
    ratio = median and {"q1": median, "median": median, "q3": median}
    kept = {"ms": ms, "ratio": ratio, "error": 1e-3, "precision": precision}
    return kept | {"reason": "" if ms else "declined: no", "declined": not ms}


@pytest.fixture
def saved(tmp_path) -> Path:
    """A result in which ggml's quicker cache has more error, and one row that we lack."""
    result = results.start("engines", "cpu", ("float32",), {})
    others = {BASELINE: _peer(2.0), "vllm": _peer(0.9), "ggml q8_0": _peer(0.5, "int8")}
    others |= {"onnxruntime MHA": _peer(None, ms=None), "onnxruntime GQA": _peer(1.5)}
    row = {"row": next(iter(glance.INFERENCE)), "kind": "prefill", "status": "ok"}
    row |= {"reason": "", "width": "float32", "rounds": 5, "load": 0.1}
    first = row | {"peers": {SUBJECT: _peer(None, ms=1.0)} | others}
    lacking = row | {"row": "b", "peers": {SUBJECT: _peer(None, ms=None), "vllm": _peer(None)}}
    result["engines"] = [first, lacking]
    result["versions"] |= {"vllm": "0.32", "ggml": "0.2"}
    path = tmp_path / "a-engines.json"
    path.write_text(json.dumps(result))
    return path


def test_the_page_names_the_nearest_engine_of_equal_error(saved, tmp_path):
    result = results.read(saved)
    assert report.nearest(result["engines"][0]) == ("vllm", 0.9)
    page = tmp_path / "README.md"
    page.write_text("<!-- engines:begin -->\n<!-- engines:end -->\n")
    assert main(["report", str(saved), "--pages", str(page)]) == 0
    text = page.read_text()
    assert "| 1.000 | vllm **0.90** | 2.00 | 1.50 GQA |  | **0.90** |  | 0.50 q8_0 |  |" in text
    assert "| b |  |  |  |  |  | 2.000 ms |" in text
    assert "| ggml q8_0 | 1.0e-03 |" in text
    assert "Engines: vllm 0.32 (Apache-2.0), ggml 0.2 (MIT)." in text
    assert list(report.summary(result))[1] == (
        "1 rows beside engines of at most the error, 1 slower than one"
    )
    assert pages.TABLES["engines"][0] == result["kind"]


# --- engines that are installed ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [x for x in peers.PEERS if peers.PEERS[x].environment])
def test_an_installed_engine_has_the_oracles_numbers(name):
    peer = peers.PEERS[name]
    if reason := peer.environment.absent:
        pytest.skip(f"{name}: {reason}")
    small = [
        replace(row, N=min(row.N, 256), M=min(row.M, 256)) for row in cases.ROWS if not row.lengths
    ]
    small = list({row.name: row for row in small}.values())
    with measure.Workers({name: peer}, 1) as workers:
        found = [measure.verified(row, workers)[name] for row in small]
    assert any(not x["reason"] for x in found)
    assert {x["reason"] for x in found if not x["declined"]} <= {""}
