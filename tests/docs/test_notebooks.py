"""The notebooks run, and print what is kept in them. `make docs-update` keeps new outputs."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import math
import pprint
import re
from pathlib import Path

import pytest
import torch

from tests.support.checkout import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")

pytestmark = pytest.mark.skipif(not NOTEBOOKS, reason="no docs: not a checkout")


def run(code: str, names: dict) -> tuple[str, str]:
    """What a cell prints, and the text of its last expression, as a notebook shows it."""
    tree, last = ast.parse(code), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        value = None if last is None else eval(compile(last, "cell", "eval"), names)
    return printed.getvalue(), "" if value is None else pprint.pformat(value, sort_dicts=False)


def kept(cell: dict) -> tuple[str, str]:
    """The printed text and the value that the notebook has for a cell; pictures have neither."""
    outputs = cell["outputs"]
    assert all(x["output_type"] != "error" and x.get("name") != "stderr" for x in outputs)
    printed = [line for x in outputs if x["output_type"] == "stream" for line in x["text"]]
    values = [x["data"]["text/plain"] for x in outputs if x["output_type"] == "execute_result"]
    return "".join(printed), "".join(values[0]) if values else ""


def assert_like(found: str, expected: str) -> None:
    """The same words, and the same numbers but for the last printed digit."""
    words = [
        re.sub(r"(?<=[\[(]) | (?=[\])])", "", re.sub(r"\s+", " ", NUMBER.sub("#", x)))
        for x in (found, expected)
    ]
    assert words[0] == words[1]
    for one, two in zip(NUMBER.findall(found), NUMBER.findall(expected)):
        last_digit = 0 if "e" in two else 1.01 * 10 ** -len(two.partition(".")[2])
        assert math.isclose(float(one), float(two), rel_tol=1e-3, abs_tol=last_digit)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_kept(path: Path, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    options, state = vars(torch._tensor_str.PRINT_OPTS).copy(), torch.get_rng_state()
    names: dict = {"__name__": "__main__"}
    try:
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                code = "".join(cell["source"])
                assert cell["execution_count"], f"was not run: {code}"
                for found, expected in zip(run(code, names), kept(cell)):
                    assert_like(found, expected)
    finally:
        vars(torch._tensor_str.PRINT_OPTS).update(options)
        torch.set_rng_state(state)
