"""A score_mod that is taken apart means the same; others are left whole."""

import pytest
import torch

from fastattn.score_mods.additive import as_sum, conjunction
from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.tracing import merge, trace_mask_mod, trace_score_mod
from tests.support.flex_functions import (
    GENERAL,
    MASK_MODS,
    SCORE_MODS,
    B,
    H,
    modified,
    visible,
)
from tests.support.program_operators import indices

M, N = 33, 46
WHERE = indices(B, H, M, N)
INF = float("inf")
SEVERAL = {
    "two biases": lambda s, b, h, i, j: s + i * 0.5 - (j * 0.25 + h),
    "three biases": lambda s, b, h, i, j: i * 0.5 + (h * 2.0 + (s - j * 0.25)),
    "two conditions": lambda s, b, h, i, j: torch.where(
        i >= j, torch.where(j % 5 == 0, -INF, s), -INF
    ),
    "both, and a cap": lambda s, b, h, i, j: (
        torch.where(i >= j, 2 * torch.tanh(s / 2) - i, -INF) + h
    ),
}
SUMS = SCORE_MODS | SEVERAL


@pytest.mark.parametrize("name", SUMS)
def test_the_parts_are_the_score(name):
    scores = torch.randn(B, H, M, N)
    program, tensors = trace_score_mod(SUMS[name])
    cap, bias, mask = as_sum(program)
    found = scores if cap is None else cap * torch.tanh(scores / cap)
    if bias is not None:
        found = found + evaluate(bias, tensors, **WHERE)
    if mask is not None:
        found = found.masked_fill(~evaluate(mask, tensors, **WHERE), -torch.inf)
    expected = modified(SUMS[name], scores)
    torch.testing.assert_close(found.expand(expected.shape), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GENERAL)
def test_others_stay_whole(name):
    assert as_sum(trace_score_mod(GENERAL[name]).program) is None


CAPS = {"softcap": 5.0, "softcap and bias": 3.0, "alibi": None, "the score": None}


def test_softcaps():
    found = {name: as_sum(trace_score_mod(SCORE_MODS[name]).program).softcap for name in CAPS}
    assert found == CAPS


NEAR = {
    "a score below a bias": lambda s, b, h, i, j: i - s,
    "a score twice": lambda s, b, h, i, j: s + s,
    "a condition of the score": lambda s, b, h, i, j: torch.where(s > 0, s, -float("inf")),
    "a finite floor": lambda s, b, h, i, j: torch.where(i > j, s, -1e30),
    "a cap of a sum": lambda s, b, h, i, j: 2 * torch.tanh((s + i) / 2),
    "no score": lambda s, b, h, i, j: i - j,
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_stay_whole(name):
    assert as_sum(trace_score_mod(NEAR[name]).program) is None


@pytest.mark.parametrize(
    "names", [("tree", "causal"), ("documents", "prefix"), ("lengths", "tree")]
)
def test_conjunctions(names):
    first, second = (trace_mask_mod(MASK_MODS[x]) for x in names)
    *programs, tensors = merge(first, second)
    found = evaluate(conjunction(*programs), tensors, **WHERE)
    expected = visible(MASK_MODS[names[0]], M, N) & visible(MASK_MODS[names[1]], M, N)
    assert torch.equal(found.expand(B, H, M, N), expected)
    assert conjunction(None, programs[0]) == programs[0] and conjunction(None) is None
