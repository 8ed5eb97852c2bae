"""The tensors that the tutorials behind `fastattn.nn` print, to the digit, on every backend.

The notebook on attention (chapter 3 of a book on language models) prints four decimals, the
overview of attention five digits.
"""

import pytest
import torch
from runners import FUSED

import fastattn
from fastattn import backend, nn, ops

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


@pytest.fixture(params=[*FUSED, pytest.param("reference")])
def on(request, monkeypatch):
    """Every call inside runs on this backend."""
    chosen = backend.get(request.param)
    monkeypatch.setattr(ops, "choose", lambda spec, name: chosen)
    ops._plans.clear()
    yield request.param
    ops._plans.clear()


def printed(actual, digits, decimals=4):
    expected = torch.tensor([[float(x) for x in row.split()] for row in digits.strip().split("\n")])
    torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=0.51 * 10**-decimals)


WEIGHTS = """
0.2098 0.2006 0.1981 0.1242 0.1220 0.1452
0.1385 0.2379 0.2333 0.1240 0.1082 0.1581
0.1390 0.2369 0.2326 0.1242 0.1108 0.1565
0.1435 0.2074 0.2046 0.1462 0.1263 0.1720
0.1526 0.1958 0.1975 0.1367 0.1879 0.1295
0.1385 0.2184 0.2128 0.1420 0.0988 0.1896
"""
CONTEXT = """
0.4421 0.5931 0.5790
0.4419 0.6515 0.5683
0.4431 0.6496 0.5671
0.4304 0.6298 0.5510
0.4671 0.5910 0.5266
0.4177 0.6503 0.5645
"""


def test_attention_without_parameters(on):
    """Cells 13 and 15; of one query, cells 9 and 10."""
    attention = nn.ScaledDotProductAttention(scale=1.0)
    context, weights = attention(INPUTS, INPUTS, INPUTS, need_weights=True)
    printed(weights, WEIGHTS)
    printed(context, CONTEXT)
    context, weights = attention(INPUTS[1:2], INPUTS, INPUTS, need_weights=True)
    printed(weights, WEIGHTS.strip().split("\n")[1])
    printed(context, CONTEXT.strip().split("\n")[1])


def with_parameters():
    """`SelfAttention` with the weights of cell 17: uniform, drawn one after the other."""
    torch.manual_seed(123)
    module = nn.SelfAttention(3, 2, qkv_bias=False)
    torch.manual_seed(123)
    for proj in (module.q_proj, module.k_proj, module.v_proj):
        proj.weight = torch.nn.Parameter(torch.rand(3, 2).T)
    return module


def test_self_attention_with_uniform_weights(on):
    """Cells 18 to 24."""
    module = with_parameters()
    printed(module.q_proj(INPUTS[1:2]), "0.4306 1.4551")
    scores = module.q_proj(INPUTS[1]) @ module.k_proj(INPUTS).T
    printed(scores[None], "1.2705 1.8524 1.8111 1.0795 0.5577 1.5440")
    context, weights = module(INPUTS, need_weights=True)
    printed(weights[1:2], "0.1500 0.2264 0.2199 0.1311 0.0906 0.1820")
    printed(
        context,
        """
0.2996 0.8053
0.3061 0.8210
0.3058 0.8203
0.2948 0.7939
0.2927 0.7891
0.2990 0.8040
""",
    )


def test_self_attention_with_linear_layers(on):
    """Cells 26 and 27: the layers are made in the document's order, from its seed."""
    torch.manual_seed(123)
    module = nn.SelfAttention(3, 2, qkv_bias=False)
    context, weights = module(INPUTS, need_weights=True)
    printed(
        context,
        """
-0.5337 -0.1051
-0.5323 -0.1080
-0.5323 -0.1079
-0.5297 -0.1076
-0.5311 -0.1066
-0.5299 -0.1081
""",
    )
    printed(
        weights,
        """
0.1717 0.1762 0.1761 0.1555 0.1627 0.1579
0.1636 0.1749 0.1746 0.1612 0.1605 0.1652
0.1637 0.1749 0.1746 0.1611 0.1606 0.1651
0.1636 0.1704 0.1702 0.1652 0.1632 0.1674
0.1667 0.1722 0.1721 0.1618 0.1633 0.1639
0.1624 0.1709 0.1706 0.1654 0.1625 0.1682
""",
    )


CAUSAL = """
1.0000 0.0000 0.0000 0.0000 0.0000 0.0000
0.4833 0.5167 0.0000 0.0000 0.0000 0.0000
0.3190 0.3408 0.3402 0.0000 0.0000 0.0000
0.2445 0.2545 0.2542 0.2468 0.0000 0.0000
0.1994 0.2060 0.2058 0.1935 0.1953 0.0000
0.1624 0.1709 0.1706 0.1654 0.1625 0.1682
"""


@pytest.mark.parametrize("way", ["causal", "float mask", "integer mask", "bool mask"])
def test_causal_weights(on, way):
    """Cells 30 and 33: whether the future is masked by the flag or by a tensor."""
    torch.manual_seed(123)
    module = nn.SelfAttention(3, 2, qkv_bias=False, causal=way == "causal")
    ones = torch.ones(6, 6).tril()
    masks = {"float mask": ones, "integer mask": ones.long(), "bool mask": ones.bool()}
    _, weights = module(INPUTS, masks.get(way), need_weights=True)
    printed(weights, CAUSAL)


def test_dropped_weights(on):
    """Cell 35: each weight is 0 or twice itself. (Today's torch draws others than the printed.)"""
    torch.manual_seed(123)
    module = nn.CausalSelfAttention(3, 2, 6, dropout=0.5)
    whole = module.eval()(INPUTS, need_weights=True)[1]
    context, weights = module.train()(INPUTS, need_weights=True)
    kept = weights != 0
    assert kept.any() and not kept[whole != 0].all()
    torch.testing.assert_close(weights[kept], 2 * whole[kept])
    torch.testing.assert_close(context, weights @ module.v_proj(INPUTS))


def test_causal_attention_of_a_batch(on):
    """Cell 38 prints a shape; both items are the sequence above, whose weights are known."""
    torch.manual_seed(123)
    module = nn.CausalSelfAttention(3, 2, context_length=6)
    context, weights = module(torch.stack((INPUTS, INPUTS)), need_weights=True)
    assert context.shape == (2, 6, 2)
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
    """The tutorial's demonstration: 30 queries on 50 keys, values of another size."""
    torch.manual_seed(0)
    q, k, v = torch.rand(3, 30, 128), torch.rand(3, 50, 128), torch.rand(3, 50, 256)
    out, weights = nn.ScaledDotProductAttention()(q, k, v, need_weights=True)
    assert out.shape == (3, 30, 256) and weights.shape == (3, 30, 50)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 30))


def test_backends_were_chosen(on):
    assert fastattn.backends()[on] is None
