"""`attention_weights`: the probabilities are the output of attention with v = I.

So the judge needs no change: with v = I the oracle's output is the matrix of weights, and the
gradient of the weights is the gradient of the output. To test a constant normaliser, the gradient
dlse = sum_j w dw is added, which cancels the gradient through the normaliser.
"""

from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.call.spec import Feature
from tests.features import calls, factors
from tests.support.backends import declares, every_backend, on_variants, passed, small, thinned
from tests.support.cases import DTYPES, FEATURES, PLAIN, build, name_of, square
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")
WITHOUT_V = [f for f in FEATURES if f.group not in ("values", "lse", "dout")]
MEANS = ["per_head", "mean"]
ALONE = [PLAIN, *((f,) for f in WITHOUT_V)]
# Weights are the output of these calls, with v of N columns. In the interpreter, of fewer sizes.
ROWS = factors.rows(
    "dense",
    **factors.ONE_PROBLEM,
    **small(
        dict(M=(17, 1, 4, 9, 65, 129), N=(33, 1, 16, 65, 129), D=(16, 1, 3, 33, 64)),
        dict(M=(17, 1), N=(33, 1), D=(16, 3), dtype=("float32", "bfloat16")),
    ),
    **dict(B=(2, 1), Dv=(1,), lse=("no",), v_layout=("contiguous",), dout_layout=("contiguous",)),
    **dict(row_invariant=(False,), way=("any",), grad=("all",)),
)


def with_identity(problem, average):
    """The attention problem with the weights of `problem` as output; dout is then (B,H,M,N)."""
    batch, kv_heads, n, _ = problem.k.shape
    heads, m, dtype = problem.q.shape[1], problem.q.shape[2], problem.q.dtype
    identity = torch.eye(n, dtype=dtype).expand(batch, kv_heads, n, n)
    generator = torch.Generator().manual_seed(n)
    dout = torch.randn(batch, heads, m, n, generator=generator, dtype=torch.float64).to(dtype)
    if average:
        dout = dout[:, :1].expand_as(dout)
    needs_grad = tuple(x for x in problem.needs_grad if x != "v")
    return replace(problem, v=identity, dout=dout, needs_grad=needs_grad)


def ask(problem, name, average, lse=None):
    """The results of `Problem.run` with attention_weights."""

    def attention(q, k, v, **kwargs):
        return fastattn.attention_weights(
            q, k, **kwargs, lse=lse, average_heads=average, backend=name
        )

    dout = problem.dout[:, 0] if average else problem.dout
    return replace(problem, dout=dout).run(attention)


class Averaged(Verdict):
    """The verdict on the mean over heads: outputs averaged, gradients from dout / H."""

    def __init__(self, problem):
        heads = problem.q.shape[1]
        super().__init__(replace(problem, dout=problem.dout / heads))
        for values in (self.exact, self.bounds):
            values["out"] = values["out"].mean(1)


def about_weights(name, problem, average):
    problem = with_identity(problem, average)
    verdict = (Averaged if average else Verdict)(problem)
    found = []
    for isa in on_variants(name, problem.q.dtype):
        got = ask(problem, name, average)
        found += [f"{problem.name} {isa or ''}: {line}" for line in verdict.about(got)]
    return found


@every_backend
@parametrize("n, row", enumerate(ROWS), fast=40)
def test_weights(name, n, row):
    """Every second mean over heads."""
    declares(name, DTYPES[row["dtype"]], Feature.WEIGHTS)
    passed(about_weights(name, calls.problem(row), average=n % 2 == 1))


def of_constant_lse(problem, average):
    """(the verdict on weights with a given, constant normaliser, that normaliser)."""
    heads = problem.q.shape[1]
    share = problem.dout / heads if average else problem.dout
    kwargs = problem.kwargs
    with torch.no_grad():
        exact = problem.to(torch.float64)
        weights, lse = fastattn.reference.attention(
            exact.q, exact.k, exact.v, **exact.kwargs, return_lse=True
        )
    dlse = (weights * share.double()).sum(-1)
    judged = replace(problem, dout=share, dlse=dlse.float(), kwargs=kwargs | {"return_lse": True})
    verdict = Verdict(judged)
    for values in (verdict.exact, verdict.bounds):
        del values["lse"]
        values["out"] = values["out"].mean(1) if average else values["out"]
        values.pop("dsinks", None)
    return verdict, lse.float()


@every_backend
@pytest.mark.parametrize("features, mean", thinned(ALONE, MEANS), ids=name_of)
def test_a_given_lse_is_a_constant(name, features, mean):
    average = mean == "mean"
    problem = with_identity(build(square(2, 2, 35, 17), features, torch.float32), average)
    verdict, lse = of_constant_lse(problem, average)
    found = []
    for isa in on_variants(name, problem.q.dtype):
        got = ask(problem, name, average, lse=lse)
        if "sinks" in problem.needs_grad:
            assert not got.pop("dsinks").any(), isa  # sinks affect the normaliser only
        found += [f"{problem.name} {isa or ''}: {line}" for line in verdict.about(got)]
    passed(found)
