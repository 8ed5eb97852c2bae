"""The least and the largest value over a call: never too narrow."""

import pytest
import torch
from hypothesis import given, settings

from fastattn.score_mods.bounds import bounds, extremes
from fastattn.score_mods.evaluate import evaluate_all
from fastattn.score_mods.tracing import trace_mask_mod, trace_score_mod
from tests.score_mods.gallery import INDICES, B, H, N
from tests.score_mods.trees import Tree, trees

INPUTS = {"b": (0, B - 1), "h": (0, H - 1), "i": (0, N - 1), "j": (0, N - 1)}


def check(traced):
    tensors = [x.detach() for x in traced.tensors]
    found = bounds(traced.program, INPUTS, extremes(dict(enumerate(tensors))))
    values = evaluate_all(traced.program, tensors, score=torch.randn(B, H, N, N), **INDICES)
    for value, limits, x in zip(traced.program.values, found, values):
        if limits is None:
            continue
        x = x[x.isfinite()] if x.is_floating_point() else x
        if x.numel():
            lo, hi = float(x.min()), float(x.max())
            slack = 1e-5 * max(abs(lo), abs(hi)) if value.kind == "float" else 0
            assert limits[0] - slack <= lo and hi <= limits[1] + slack, value
    return found


@pytest.mark.slow
@given(trees("bool", scores=False))
@settings(max_examples=100, deadline=None)
def test_random_trees(tree: Tree):
    check(trace_mask_mod(tree.function))


KNOWN = {  # an expression of whole numbers, and its bounds
    "a difference": (lambda i, j: i - j, (-11, 11)),
    "a product": (lambda i, j: (i - 3) * (j + 1), (-36, 96)),
    "a remainder": (lambda i, j: (i - j) % 5, (0, 4)),
    "a quotient": (lambda i, j: (i - j) // 4, (-3, 2)),
    "a quotient of floats": (lambda i, j: ((i - 3) / (j + 1)).to(torch.int64), (-3, 8)),
    "a distance": (lambda i, j: (i - j).abs(), (0, 11)),
    "a clamp": (lambda i, j: (i * i).clamp(2, 9), (2, 9)),
    "some bits": (lambda i, j: (i - j) & 7, (0, 7)),
    "a shift": (lambda i, j: i << 3, (0, 88)),
    "a bucket by a logarithm": (
        lambda i, j: (torch.log((i + 1).float()) * 4).to(torch.int64),
        (-1, 10),
    ),
    "a bucket by log1p": (lambda i, j: (torch.log1p(i.float()) * 4).to(torch.int64), (-1, 10)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_expressions(name):
    function, expected = KNOWN[name]
    found = check(trace_mask_mod(lambda b, h, i, j: function(i, j) == 100))
    assert expected in found


def test_scores_are_not_known():
    found = check(trace_score_mod(lambda s, b, h, i, j: s * s + s.to(torch.int64)))
    assert found[-1] is None and (-(2**30), 2**30) in found
