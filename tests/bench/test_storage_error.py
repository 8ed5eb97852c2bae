"""`python -m bench storage_error`: its imitations of other storages, and the kept figures."""

import re

import pytest
import torch

from bench.benchmarks import storage_error
from bench.reporting.results import FOLDER
from tests.support.backends import not_interpreted
from tests.support.checkout import ROOT
from tests.support.marks import parametrize

pytestmark = not_interpreted


def block(*numbers):
    x = torch.zeros(1, 1, 32, 32, dtype=torch.float64)
    x[0, 0, 0, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    return x


def test_q4_0_has_sixteen_steps_of_an_eighth():
    """The largest number is -8 of its steps, so numbers of its sign end at 7 of them."""
    found = storage_error.q4_0(block(-4.0, 4.0, 1.2, -0.2, 0.3))
    assert found[0, 0, 0, :5].tolist() == [-4.0, 3.5, 1.0, 0.0, 0.5]
    assert not found[0, 0, 0, 5:].any() and not found[0, 0, 1:].any()


def test_groups_along_rows_and_along_tokens():
    x = block(-1.0, 14.0, 3.4)
    rows = storage_error.along_rows(32)(x)
    assert rows[0, 0, 0, :4].tolist() == [-1.0, 14.0, 3.0, 0.0] and not rows[0, 0, 1:].any()
    tokens = storage_error.along_tokens(32)(x.mT)
    assert torch.equal(tokens, rows.mT)
    for group in (32, 64):
        x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
        x[..., 5] *= 100  # only its own channel is coarse
        error = (storage_error.along_tokens(group)(x) - x).abs().amax((0, 1, 2))
        assert error[5] > 5 and error[torch.arange(64) != 5].max() < 0.4


def test_the_command(monkeypatch, tmp_path, capsys):
    from bench.__main__ import main

    real = storage_error.measure
    monkeypatch.setattr(storage_error, "measure", lambda data, d: real(data, d, keys=64))
    monkeypatch.setattr(storage_error, "FOLDER", tmp_path)
    assert main(["storage_error", "--save"]) == 0
    text = (tmp_path / storage_error.FILE).read_text()
    assert capsys.readouterr().out == text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(storage_error.STORAGES)
    assert len(re.findall(r"[\d.]+% \([\d.]+%\)", text)) == 8 * len(storage_error.STORAGES)


@parametrize("data", storage_error.DATA, fast=2)
def test_the_figures_that_are_kept(data):
    """The file has today's errors, and the guide has the file's table."""
    text = (FOLDER / storage_error.FILE).read_text()
    table = text.partition("\n\n")[2].strip()
    guide = ROOT / "docs/guides/decoding.md"
    assert table in guide.read_text()
    head, _, *rows = ([x.strip() for x in line.split("|")[1:-1]] for line in table.splitlines())
    kept = {row[0]: row[head.index(f"{data}, D 64")] for row in rows}
    for found in storage_error.measure(data, 64):
        typical, worst = map(float, re.findall(r"[\d.]+", kept[found["storage"]]))
        assert 100 * found["typical"] == pytest.approx(typical, rel=0.07), found
        assert 100 * found["worst"] == pytest.approx(worst, rel=0.07), found
