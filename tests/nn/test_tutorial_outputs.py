"""The tensors printed in the tutorials behind `fastattn.nn`, to the digit, on every backend.

The notebook on attention (chapter 3 of a book on language models) prints four decimals, the
overview of attention five digits.
"""

from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn import nn
from fastattn.examples import attention_notebook
from fastattn.examples.notebook_cells import (
    COMPUTE,
    INPUTS,
    KEPT,
    MASK,
    STEPS,
    TOLERANCE,
)
from tests.support.backends import FUSED

NAMED = {step.name: step for step in STEPS}
CAUSAL, DROPPED = NAMED["cell 33: causal weights"], NAMED["cell 35: weights, dropped out"]


@pytest.fixture(params=[*FUSED, pytest.param("reference")])
def name(request):
    """The backend for all calls of a test that uses `on`."""
    return request.param


def printed(actual, digits, decimals=4):
    expected = torch.tensor([[float(x) for x in row.split()] for row in digits.strip().split("\n")])
    torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=0.51 * 10**-decimals)


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_notebook(on, step):
    assert step.difference(step.compute()) <= TOLERANCE


def test_every_computation_has_its_step():
    assert list(COMPUTE) == list(NAMED) and len(NAMED) == len(STEPS)
    assert set(KEPT) < set(COMPUTE)


def test_one_wrong_digit_fails(monkeypatch, capsys):
    wrong = [
        replace(CAUSAL, printed=CAUSAL.printed.replace("0.5167", digits))
        for digits in ("0.5168", "-inf", "nan")
    ]
    wrong.append(replace(CAUSAL, printed=CAUSAL.printed.partition("\n")[0]))
    assert not any(step.difference(CAUSAL.compute()) <= TOLERANCE for step in wrong)
    draw = replace(DROPPED, printed=DROPPED.printed.replace("1.0335", "1.0336"))
    assert draw.difference(DROPPED.compute()) > TOLERANCE
    assert DROPPED.difference(CAUSAL.compute()) > TOLERANCE
    assert attention_notebook.main([]) == 0
    assert capsys.readouterr().out.count("proved") == 2
    monkeypatch.setattr(attention_notebook, "STEPS", [*STEPS, wrong[0]])
    assert attention_notebook.main([]) == 1


def test_picture_of_the_notebook():
    """Each square has its number, except those of future tokens."""
    pytest.importorskip("matplotlib")
    found = {name: NAMED[name].compute() for name in attention_notebook.PANELS}
    axes = attention_notebook.picture(found).axes
    assert [len(axis.texts) for axis in axes] == [36, 36, 21, 21]


@pytest.mark.parametrize("way", ["flag", "float mask", "integer mask", "bool mask"])
def test_causal_weights(on, way):
    """Cell 33; the flag or a tensor masks the future."""
    torch.manual_seed(123)
    module = nn.SelfAttention(3, 2, qkv_bias=False, causal=way == "flag")
    masks = {"float mask": MASK, "integer mask": MASK.long(), "bool mask": MASK.bool()}
    _, weights = module(INPUTS, masks.get(way), need_weights=True)
    assert CAUSAL.difference(weights) <= TOLERANCE


def test_self_attention_of_the_overview(on):
    """The overview's three tokens, with projections of small integers."""
    x = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 2.0, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    module = nn.SelfAttention(4, 3, qkv_bias=False)
    projections = {
        module.q_proj: [[1, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]],
        module.k_proj: [[0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]],
        module.v_proj: [[0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]],
    }
    for proj, columns in projections.items():
        proj.weight = torch.nn.Parameter(torch.tensor(columns, dtype=torch.float32).T)
    printed(module.q_proj(x) @ module.k_proj(x).T, "2 4 4\n4 16 12\n4 12 10")
    out, weights = module(x, need_weights=True)
    expected = torch.tensor(
        [
            [1.3613e-01, 4.3194e-01, 4.3194e-01],
            [8.9045e-04, 9.0884e-01, 9.0267e-02],
            [7.4449e-03, 7.5471e-01, 2.3785e-01],
        ]
    )
    torch.testing.assert_close(weights.detach(), expected, rtol=6e-5, atol=0)
    printed(out, "1.8639 6.3194 1.7042\n1.9991 7.8141 0.2735\n1.9926 7.4796 0.7359")


def test_shapes_of_scaled_dot_product_attention(on):
    """The tutorial's demonstration: 30 queries, 50 keys, and a larger value dim."""
    torch.manual_seed(0)
    q, k, v = torch.rand(3, 30, 128), torch.rand(3, 50, 128), torch.rand(3, 50, 256)
    out, weights = nn.ScaledDotProductAttention()(q, k, v, need_weights=True)
    assert out.shape == (3, 30, 256) and weights.shape == (3, 30, 50)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 30))


def test_backends_were_chosen(on):
    assert fastattn.available_backends()[on] is None
