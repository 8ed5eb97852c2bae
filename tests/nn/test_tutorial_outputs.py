"""Tensors that the tutorials behind `fastattn.nn` print, to the digit, on every backend.

The notebook on attention (chapter 3 of a book on language models) prints four decimals, the
overview of attention five digits.
"""

import pytest
import torch

import fastattn
from fastattn import nn
from tests.support.backends import FUSED

INPUTS = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)
MASK = torch.ones(6, 6).tril()
CONTEXTS = """
-0.5337 -0.1051
-0.5323 -0.1080
-0.5323 -0.1079
-0.5297 -0.1076
-0.5311 -0.1066
-0.5299 -0.1081
"""
CAUSAL = """
1.0000 0.0000 0.0000 0.0000 0.0000 0.0000
0.4833 0.5167 0.0000 0.0000 0.0000 0.0000
0.3190 0.3408 0.3402 0.0000 0.0000 0.0000
0.2445 0.2545 0.2542 0.2468 0.0000 0.0000
0.1994 0.2060 0.2058 0.1935 0.1953 0.0000
0.1624 0.1709 0.1706 0.1654 0.1625 0.1682
"""


@pytest.fixture(params=[*FUSED, pytest.param("reference")])
def name(request):
    """The backend for all calls of a test that uses `on`."""
    return request.param


def printed(actual, digits, decimals=4):
    expected = torch.tensor([[float(x) for x in row.split()] for row in digits.strip().split("\n")])
    torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=0.51 * 10**-decimals)


def self_attention(**given):
    """Version 2 of the notebook, whose linear layers are initialized in the order q, k, v."""
    torch.manual_seed(123)
    return nn.SelfAttention(3, 2, qkv_bias=False, **given)


def causal(dropout=0.0):
    torch.manual_seed(123)
    return nn.CausalSelfAttention(3, 2, context_length=6, dropout=dropout)


def test_contexts(on):
    """Cell 26."""
    printed(self_attention()(INPUTS), CONTEXTS)


@pytest.mark.parametrize("way", ["flag", "float mask", "integer mask", "bool mask"])
def test_causal_weights(on, way):
    """Cell 33; the flag or a tensor masks the future."""
    masks = {"float mask": MASK, "integer mask": MASK.long(), "bool mask": MASK.bool()}
    module = self_attention(causal=way == "flag")
    _, weights = module(INPUTS, masks.get(way), need_weights=True)
    printed(weights, CAUSAL)


def test_dropped_weights(on):
    """Cell 35: some of the weights are dropped, and the context uses the others."""
    module = causal(dropout=0.5)
    whole = module.eval()(INPUTS, need_weights=True)[1]
    context, weights = module.train()(INPUTS, need_weights=True)
    kept = weights != 0
    assert kept.any() and not kept[whole != 0].all()
    torch.testing.assert_close(weights[kept], 2 * whole[kept])
    torch.testing.assert_close(context, weights @ module.v_proj(INPUTS))


def test_causal_attention_of_a_batch(on):
    """Cell 38 prints a shape; both items are the sequence of cell 33, which prints its weights."""
    module = causal()
    context, weights = module(torch.stack((INPUTS, INPUTS)), need_weights=True)
    for item in range(2):
        printed(weights[item], CAUSAL)
        torch.testing.assert_close(context[item], weights[item] @ module.v_proj(INPUTS))


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
