"""Tests of the judge, on rows far from zero: it accepts right results and reports wrong ones.

`Plain` is attention as a kernel computes it, in the accumulation dtype: the forward pass saves the
normaliser, and the backward pass recomputes P from it. Each fault is one that a kernel could have.
"""

import pytest
import torch

from fastattn import reference
from tests.support.cases import DTYPES
from tests.support.error_budget import Verdict
from tests.support.large_logit_rows import LARGE, ROWS, accumulator, far_problem
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")


class Plain(torch.autograd.Function):
    """out and LSE from scores, values, sinks (H,), dropout's factors of P, and a fault or None."""

    @staticmethod
    def forward(ctx, s, v, sinks, kept, fault):
        column = sinks[:, None, None].expand(*s.shape[:3], 1)
        m = torch.maximum(s.amax(-1, keepdim=True), column)
        m = torch.where(m == -torch.inf, 0, m)
        l = torch.exp(s - m).sum(-1, keepdim=True) + torch.exp(column - m)
        lse = m + torch.log(l)
        tail = (m - lse) + torch.log(l)
        if fault == "one number":
            tail = torch.zeros_like(lse)
        if fault == "another row's tail":
            tail = tail.roll(1, 0 if tail.shape[0] > 1 else 2)
        if fault == "a uniform row":
            s = torch.where(m < -1e4, torch.where(s == -torch.inf, s, m), s)
        if fault == "rows far away are empty":
            s = s.masked_fill(m < -1e4, -torch.inf)
        ctx.save_for_backward(s, v, sinks, kept, lse, tail)
        return (torch.exp(s - m) / l * kept) @ v, lse.squeeze(-1)

    @staticmethod
    def backward(ctx, dout, dlse):
        s, v, sinks, kept, lse, tail = ctx.saved_tensors
        p = torch.exp((s - lse) - tail)
        dp = (dout @ v.mT) * kept
        delta = (p * dp).sum(-1, keepdim=True) - dlse.unsqueeze(-1)
        share = torch.exp((sinks[:, None, None] - lse) - tail)
        return p * (dp - delta), (p * kept).mT @ dout, -(share * delta).sum((0, 2, 3)), None, None


def plain(problem, fault=None):
    """What `Problem.run` returns, from Plain."""

    def attention(q, k, v, *, mask, return_lse=False, sinks=None, dropout_p=0.0, seed=0, **kwargs):
        dtype, wide = q.dtype, accumulator(q.dtype)
        options = dict.fromkeys(("window", "key_lengths", "alibi_slopes", "softcap", "scale"))
        options |= dict(causal=False) | kwargs
        s = reference.scores(q.to(wide), k.to(wide), mask, **options)
        v = v.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1)
        sinks = s.new_full((q.shape[1],), -torch.inf) if sinks is None else sinks
        kept = reference.dropout(torch.ones_like(s), dropout_p, seed)
        out, lse = Plain.apply(s, v, sinks, kept, fault)
        return (out.to(dtype), lse) if return_lse else out.to(dtype)

    return problem.run(attention)


every_problem = pytest.mark.parametrize(
    "title, value, dtype", [(x, y, z) for x in ROWS for y in LARGE for z in DTYPES]
)


@every_problem
def test_correct_results_pass(title, value, dtype):
    problem = far_problem(title, value, dtype)
    assert not Verdict(problem).about(plain(problem))


# At float16's -65504, float32 still resolves the logits; at -1e9, float64 does.
DIGITS_LEFT = [("float16", "finfo.min"), ("float64", "-1e9")]


def harmless(fault, value, dtype):
    """True if a fault has no effect: a row that absorbs all its logits is uniform anyway, and an
    LSE with digits left keeps log l to a thousandth, finer than 16-bit results."""
    if fault == "a uniform row":
        return (dtype, value) not in DIGITS_LEFT
    return "far away" not in fault and dtype == "float16" and value == "finfo.min"


FAULTS = ("one number", "another row's tail", "a uniform row", "rows far away are empty")


@pytest.mark.slow
@every_problem
@parametrize("fault", FAULTS, fast=1)
def test_faults_are_named(fault, title, value, dtype):
    problem = far_problem(title, value, dtype)
    complaints = Verdict(problem).about(plain(problem, fault))
    assert bool(complaints) != harmless(fault, value, dtype), complaints
