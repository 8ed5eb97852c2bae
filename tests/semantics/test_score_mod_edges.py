"""Derivatives of score_mods at infinities, zeros, kinks and branches that are not taken, in every
backend: those of torch's autograd. A score of -inf has none, whatever its function has there."""

import pytest
import torch

import fastattn
from fastattn.backends.base import get
from fastattn.call.spec import Feature
from tests.support.backends import (
    FUSED,
    INTERPRETED,
    declares,
    every_call,
    small,
    variant,
    variants,
)
from tests.support.cases import DTYPES
from tests.support.marks import parametrize
from tests.support.program_operators import AT_EDGES, POINTS, at_edges, by_function

pytestmark = pytest.mark.usefixtures("one_thread")
B, D = len(POINTS), 16
IN_INTERPRETER = ["rsqrt", "rsqrt, of a branch", "pow, -1", "pow, of inf", "exp", "log", "sqrt"]
IN_INTERPRETER += ["remainder, by it", "div, by a branch", "sigmoid", "tanh", "round", "fmod"]


def passes(function, dtype):
    """The LSE of items with one key each, which have the scores function(POINTS); its gradients
    by a captured number and by q, its tangent, and its second derivative by q."""
    table = torch.tensor(POINTS, dtype=dtype).requires_grad_()
    row = torch.eye(1, D, dtype=dtype).expand(B, 1, 1, D)
    q, k, v = row.clone().requires_grad_(), row, torch.ones_like(row)

    def lse(q, table):
        given = dict(score_mod=lambda s, b, h, i, j: function(table[b] - (s - 1)))  # s is 1
        given |= dict(scale=1.0, return_lse=True)
        return fastattn.attention(q, k, v, **given)[1].flatten()

    value = lse(q, table)
    by_table, by_q = torch.autograd.grad(value.sum(), (table, q))
    fixed = table.detach()
    moved = torch.func.jvp(lambda q: lse(q, fixed), (row,), (row,))[1]
    (slope,) = torch.autograd.grad(lse(q, fixed).sum(), q, create_graph=True)
    (bend,) = torch.autograd.grad(slope[..., 0].sum(), q)
    return value.detach(), by_table, -by_q[..., 0].flatten(), -moved, bend[..., 0].flatten()


@pytest.mark.parametrize("name", FUSED + ["reference"] * (not INTERPRETED))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@parametrize("function", small(list(AT_EDGES), IN_INTERPRETER), fast=8)
def test_derivatives_at_edges(name, function, dtype):
    declares(name, DTYPES[dtype], Feature.SCORE_MOD | Feature.TANGENTS)
    points = torch.tensor(POINTS, dtype=torch.float64)
    f, slope, bend = by_function(at_edges(function), points)
    hidden, finite = f == -torch.inf, f.isfinite()
    bound = dict(rtol=1e-4, atol=1e-5) if dtype == "float32" else dict(rtol=1e-9, atol=1e-9)
    for isa in variants(name, DTYPES[dtype]):
        with variant(isa), every_call(get(name)):  # the reference's passes, too
            value, *slopes, bent = passes(at_edges(function), DTYPES[dtype])
        value, bent = value.double(), bent.double()
        torch.testing.assert_close(value[finite | hidden], f[finite | hidden], **bound)
        for found in slopes:
            assert not found[hidden].any(), isa
            torch.testing.assert_close(
                found.double()[finite], slope[finite], equal_nan=True, **bound
            )
        both = finite & slope.isfinite()
        torch.testing.assert_close(bent[both], bend[both], equal_nan=True, **bound)
