"""What is recognised in a function means the same; near misses stay functions."""

import pytest
import torch

from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.recognition import mask_parts, score_parts
from fastattn.score_mods.tracing import trace_mask_mod, trace_score_mod
from tests.support.flex_functions import (
    GENERAL,
    MASK_MODS,
    SCORE_MODS,
    B,
    H,
    indices,
    modified,
    visible,
)

M, N = 33, 46
WHERE = dict(zip("bhij", indices(M, N)))


def within(left, right):
    i, j = WHERE["i"], WHERE["j"]
    keep = torch.ones(1, 1, M, N, dtype=torch.bool)
    keep = keep if left is None else keep & (j >= i - left)
    return keep if right is None else keep & (j <= i + right)


@pytest.mark.parametrize("name", MASK_MODS)
def test_parts_of_a_mask_are_the_mask(name):
    program, tensors = trace_mask_mod(MASK_MODS[name])
    left, right, rest = mask_parts(program)
    found = within(left, right)
    if rest is not None:
        found = found & evaluate(rest, tensors, **WHERE)
    assert torch.equal(found.expand(B, H, M, N), visible(MASK_MODS[name], M, N))


# (left, right, whether something stays a function)
BANDS = {
    "causal": (None, 0, False),
    "causal, turned": (None, 0, False),
    "window": (9, 0, False),
    "edges of a window": (8, 4, False),
    "documents": (None, 0, True),
    "sinks and window": (None, 0, True),
    "causal with an offset": (None, None, True),  # the offset is a tensor
    "python's True": (None, None, False),
}


@pytest.mark.parametrize("name", BANDS)
def test_bands(name):
    left, right, rest = mask_parts(trace_mask_mod(MASK_MODS[name]).program)
    assert (left, right, rest is not None) == BANDS[name]


EDGES = {
    "i - j > 3": (lambda b, h, i, j: i - j > 3, (None, None)),  # no edge of a window is below 0
    "i >= j + 3": (lambda b, h, i, j: i >= j + 3, (None, None)),
    "i + 3 > j": (lambda b, h, i, j: i + 3 > j, (None, 2)),
    "3 >= j - i": (lambda b, h, i, j: 3 >= j - i, (None, 3)),
    "-j <= 2 - i": (lambda b, h, i, j: -j <= 2 - i, (2, None)),
    "both": (lambda b, h, i, j: (i - j < 5) & (i - j <= 7) & (j <= i + 1), (4, 1)),
    "i >= 2 * j": (lambda b, h, i, j: i >= 2 * j, (None, None)),
    "i + j >= 3": (lambda b, h, i, j: i + j >= 3, (None, None)),
    "i >= b": (lambda b, h, i, j: i >= b, (None, None)),
    "not (i < j)": (lambda b, h, i, j: ~(i < j), (None, None)),
    "either": (lambda b, h, i, j: (i >= j) | (j < 4), (None, None)),
    "floats": (lambda b, h, i, j: i >= j + 0.5, (None, None)),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name):
    function, edges = EDGES[name]
    program, tensors = trace_mask_mod(function)
    left, right, rest = mask_parts(program)
    assert (left, right) == edges
    found = within(left, right)
    if rest is not None:
        found = found & evaluate(rest, tensors, **WHERE)
    assert torch.equal(found.expand(B, H, M, N), visible(function, M, N))


@pytest.mark.parametrize("name", SCORE_MODS)
def test_parts_of_a_score_are_the_score(name):
    scores = torch.randn(B, H, M, N)
    program, tensors = trace_score_mod(SCORE_MODS[name])
    cap, bias, mask = score_parts(program)
    found = scores if cap is None else cap * torch.tanh(scores / cap)
    if bias is not None:
        found = found + evaluate(bias, tensors, **WHERE)
    if mask is not None:
        found = found.masked_fill(~evaluate(mask, tensors, **WHERE), -torch.inf)
    expected = modified(SCORE_MODS[name], scores)
    torch.testing.assert_close(found.expand(expected.shape), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GENERAL)
def test_other_scores_stay_functions(name):
    assert score_parts(trace_score_mod(GENERAL[name]).program) is None


def test_softcaps():
    caps = {name: score_parts(trace_score_mod(SCORE_MODS[name]).program).softcap for name in CAPS}
    assert caps == CAPS


CAPS = {"softcap": 5.0, "softcap and bias": 3.0, "alibi": None, "the score": None}


@pytest.mark.parametrize("cap", [-2.0, 0.0])
def test_a_cap_below_zero_is_none(cap):
    program, _ = trace_score_mod(lambda s, b, h, i, j: cap * torch.tanh(s / cap))
    assert score_parts(program) is None
