"""The commands besides the sweep: each row of the tables of `race`, memory, models; and errors of
storages in few bits."""

from __future__ import annotations

import re

import pytest
import torch

from bench import families, models
from bench.__main__ import main
from bench.cases import FORWARD, TRAINING
from bench.measure import machine, timing
from bench.measure.records import speedup_of
from bench.peers import optional_deps
from bench.peers.registry import SUBJECT
from bench.races import derivatives, generation, launch, race, storage
from bench.races.tables import TABLES
from bench.report import console, pages, results
from tests.support.backends import not_interpreted
from tests.support.checkout import ROOT
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread", "known_ceilings"), not_interpreted]
FAST = ["--threads", "1", "--seconds", "0.002"]
# Rows of a table at a scale, in float32 on one thread.
ROWS = {"short": 12, "serving": 10, "flex": 26, "latent": 5, "selected": 10}
ROWS |= {"derivatives": 12, "tiny": 28, "generation": 20, "rotation": 15}
SCALE = {"short": 1 / 8, "derivatives": 1 / 32}


def run(folder, *arguments: str) -> dict:
    assert main([*arguments, "--output", str(folder)]) == 0
    (path,) = folder.glob("*.json")
    return results.read(path)


@parametrize("name", ROWS, fast=6)
def test_each_row_of_a_table_is_held_against_the_other_way(name, tmp_path, monkeypatch):
    """At small sizes: the numbers agree, then both are timed."""
    monkeypatch.setattr(derivatives, "MEMORY_LENGTHS", (2048,))
    if name == "generation":
        pytest.importorskip("transformers", reason="transformers is not installed")
        monkeypatch.setattr(generation, "TOKENS", 3)
        monkeypatch.setattr(generation, "SIZES", generation.SIZES | dict(num_hidden_layers=1))
    scale = str(SCALE.get(name, 1 / 64))
    result = run(tmp_path, "race", name, "--dtypes", "float32", "--scale", scale, *FAST)
    rows = result[name]
    assert len(rows) == ROWS[name] == len({(row["what"], row["pass"]) for row in rows})
    for row in rows:
        assert (row["status"], row["threads"]) == ("ok", 1), row
        assert row["ratio"]["q1"] <= row["ratio"]["median"] <= row["ratio"]["q3"]
    if name in pages.TABLES:
        assert len(list(pages.TABLES[name][1]([result]))) >= 2 + len(rows)
    assert bool(result["memory"]) == (name == "derivatives")


def test_every_table_is_tested():
    timed = {name for name, table in TABLES.items() if not table.whats and not table.lines}
    assert timed == set(ROWS)


@pytest.mark.parametrize("name, cells", [("decode", 18), ("few-rows", 7)])
def test_rows_against_the_oracle_are_cells(name, cells, tmp_path, capsys):
    given = ["--device", "cpu", "--dtypes", "float32", "--scale", "0.01", *FAST]
    result = run(tmp_path, "race", name, *given)
    assert len(result["cells"]) == cells and result["kind"] == name
    for cell in result["cells"]:
        assert cell["status"] == "ok" and speedup_of(cell["timings"][0])["median"] > 0
    assert ("% of read" in capsys.readouterr().out) == (name == "decode")


def test_rows_are_chosen_by_their_names(tmp_path):
    given = ["--scale", "0.02", "--only", "prompt", *FAST]
    rows = run(tmp_path, "race", "latent", *given)["latent"]
    assert len(rows) == 4 and all("prompt" in row["what"] for row in rows)
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    (path,) = tmp_path.glob("*.json")
    assert path.stem.endswith("latent-prompt")  # a part never replaces the whole


def test_a_race_with_different_results_is_not_timed(monkeypatch):
    monkeypatch.setattr(timing, "interleaved", None)
    one, other = torch.ones(3), torch.tensor([1.0, 1.0, 1.1])
    row = race.measure(race.Race("", "float32", "forward", lambda: [one], lambda: [other]), 0.001)
    assert row["status"] == "failed" and "an error of 0.091" in row["reason"]
    assert "FAILED" in console.race_line(row)


def test_a_wrong_row_fails_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(race, "TOLERANCE", dict.fromkeys(race.TOLERANCE, -1.0))
    given = ["--scale", "0.02", "--only", "prompt", "--output", str(tmp_path), *FAST]
    assert main(["race", "latent", *given]) == 1


@pytest.mark.slow
def test_memory_records_the_reason_of_a_failed_probe(tmp_path):
    sizes = ["--device", "cpu", "--lengths", "64", "--masks", "full"]
    ours, theirs = run(tmp_path, "memory", *sizes, "--peers", "torch-cudnn")["memory"]
    assert ours["peer"] == SUBJECT and ours["extra_bytes"] >= 0 and ours["error"] == ""
    assert theirs["extra_bytes"] is None and theirs["error"] == "runs on CUDA only"
    assert "FAILED: runs on CUDA only" in console.memory_line(theirs)


@pytest.mark.slow
def test_models_hold_ours_against_sdpa(tmp_path, monkeypatch):
    """Whole models at small sizes: a language model, padded, and what convert is for."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(models, "SIZES", models.SIZES | dict(num_hidden_layers=1))
    only = "Mistral, N = 1024, padded", "encoder", "under autocast"
    given = ["--lengths", "1024", "--scale", str(1 / 32), *FAST]
    result = run(tmp_path, "models", *given, "--only", *only)
    rows, optional = result["models"], sum(map(optional_deps.found, ("torchvision", "open_clip")))
    assert len(rows) == 2 * (2 + 4 + 8) + 2 + optional, rows
    assert all(row["status"] == "ok" for row in rows), rows
    assert len(list(pages.races([result]))) == 2 + len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", families.MODELS)
def test_families_hold_ours_against_sdpa(name, tmp_path, monkeypatch):
    """Inference and training; and none of our side's attention is torch's."""
    for library in ("transformers", "diffusers"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.setattr(families, "LAYERS", 1)
    given = ["--dtypes", "float32", "--scale", str(1 / 32), *FAST]
    rows = run(tmp_path, "models", *given, "--only", f"{name}, forward")["models"]
    assert {row["pass"]: row["status"] for row in rows} == {FORWARD: "ok", TRAINING: "ok"}, rows
    with families.registered():
        pair, out = families.pair(name, torch.float32, 1 / 32)
        counts = [torchs_calls(out, model) for model in pair]
    assert counts[0] == 0 < counts[1]


def torchs_calls(out, model):
    with torch.no_grad(), torch.profiler.profile() as profile:
        out(model)
    return sum(x.name == "aten::scaled_dot_product_attention" for x in profile.events())


@pytest.mark.slow
def test_launches_are_timed_or_the_reason_is_given(monkeypatch, capsys):
    monkeypatch.setattr(launch, "CALLS", 2)
    assert main(["race", "launch"]) == 0
    head, cuda, *triton = capsys.readouterr().out.splitlines()
    assert "CPU time of a call" in head and triton
    assert all("forward" in x or "not measured" in x for x in (cuda, *triton))


# -- storages in few bits --------------------------------------------------------------------------


def block(*numbers):
    x = torch.zeros(1, 1, 32, 32, dtype=torch.float64)
    x[0, 0, 0, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    return x


def test_q4_0_has_sixteen_steps_of_an_eighth():
    """The largest number is -8 of its steps, so numbers of its sign end at 7 of them."""
    found = storage.q4_0(block(-4.0, 4.0, 1.2, -0.2, 0.3))
    assert found[0, 0, 0, :5].tolist() == [-4.0, 3.5, 1.0, 0.0, 0.5]
    assert not found[0, 0, 0, 5:].any() and not found[0, 0, 1:].any()


def test_groups_along_rows_and_along_tokens():
    x = block(-1.0, 14.0, 3.4)
    rows = storage.along_rows(32)(x)
    assert rows[0, 0, 0, :4].tolist() == [-1.0, 14.0, 3.0, 0.0] and not rows[0, 0, 1:].any()
    assert torch.equal(storage.along_tokens(32)(x.mT), rows.mT)


@pytest.mark.parametrize("data", storage.DATA)
def test_the_figures_that_are_kept(data):
    """The file has today's errors, and the guide has the file's table."""
    text = (machine.RESULTS / storage.FILE).read_text()
    table = text.partition("\n\n")[2].strip()
    assert table in (ROOT / "docs/guides/decoding.md").read_text()
    head, _, *rows = ([x.strip() for x in line.split("|")[1:-1]] for line in table.splitlines())
    kept = {row[0]: row[head.index(f"{data}, D 64")] for row in rows}
    for found in storage.measure(data, 64):
        typical, worst = map(float, re.findall(r"[\d.]+", kept[found["storage"]]))
        assert 100 * found["typical"] == pytest.approx(typical, rel=0.07), found
        assert 100 * found["worst"] == pytest.approx(worst, rel=0.07), found
