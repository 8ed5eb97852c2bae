"""Sizes of every kind on every backend and instruction set: every head dim, large ones, edges of
blocks, 0; and the memory order of results. Pairs of arguments are in tests/features."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import fastattn
from fastattn.backends import base
from fastattn.call import spec, validation
from tests.support.backends import (
    DECLARED,
    FUSED,
    every_backend,
    every_dtype,
    everywhere,
    passed,
    small,
    thinned,
)
from tests.support.cases import DTYPES, FEATURE, SHAPES, SINGLES, Dims, build, name_of
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")


def run_all(name, problems):
    passed([line for problem in problems for line in everywhere(name, Verdict(problem))])


def test_backend_is_here():
    """The CPU kernels are part of every build: their absence is a failure, not a skip."""
    assert fastattn.available_backends()["cpu"] is None


def test_the_defaults_of_a_spec_are_those_of_a_plain_call():
    x = torch.zeros(1, 2, 5, 16)
    sizes = dict(B=1, H=2, Hk=2, M=5, N=5, D=16, Dv=16)
    plain = spec.AttentionSpec(**sizes, dtype=x.dtype, device="cpu", scale=0.25)
    assert validation.describe(spec.Tensors(x, x, x), spec.Options()) == plain


@pytest.mark.parametrize("name", base.names())
def test_a_feature_that_a_backend_does_not_name_is_declined(name):
    """A feature flag after all existing ones, like a new feature that no kernel has yet."""
    later = 2 * max(feature.value for feature in spec.Feature)
    sizes = dict(B=1, H=2, Hk=2, M=5, N=5, D=16, Dv=16)
    device = "cpu" if name == "cpu" else "cuda"
    call = spec.AttentionSpec(**sizes, dtype=torch.float16, device=device, scale=0.25)
    assert base.get(name).support.why_not(call) == []
    call.__dict__["features"] = SimpleNamespace(value=call.features.value | later)
    assert base.get(name).support.why_not(call) == [f"does not support feature {later:#x}"]


@every_backend
@parametrize("group, dtype", thinned(range(10), DECLARED), fast=7)
def test_every_head_dim(name, dtype, group):
    """D from 1 to 130, each with an equal and with a different Dv."""
    problems = []
    for dim in range(1 + 13 * group, 14 + 13 * group):
        for value_dim in (dim, 1 + (dim * 37) % 130):
            dims = Dims(1, 1, 1, 9, 11, dim, value_dim)
            problems.append(build(dims, (FEATURE["causal"],), DTYPES[dtype]))
    run_all(name, problems)


@every_backend
@parametrize("dim, dtype", thinned([192, 256, 257, 320, 511, 512], DECLARED), fast=18)
def test_large_head_dims(name, dtype, dim):
    limit = base.get(name).support.max_head_dim
    if dim > limit:
        pytest.skip(f"{name} declares head dims to {limit}")
    sizes = ((dim, dim), (dim, 3), (40, dim))
    problems = [
        build(Dims(1, 2, 1, 35, 70, d, dv), (FEATURE["causal"],), DTYPES[dtype]) for d, dv in sizes
    ]
    run_all(name, problems)


EMPTY = {
    "no_batch": Dims(0, 2, 2, 3, 4, 5, 6),
    "no_heads": Dims(2, 0, 0, 3, 4, 5, 6),
    "no_query_heads": Dims(2, 0, 2, 3, 4, 5, 6),
    "no_queries": Dims(2, 2, 2, 0, 4, 5, 6),
    "no_keys": Dims(2, 2, 2, 3, 0, 5, 6),
    "no_values": Dims(2, 2, 2, 3, 4, 5, 0),
    "no_dims": Dims(2, 2, 2, 3, 4, 0, 6),
    "nothing": Dims(0, 0, 0, 0, 0, 0, 0),
}


@every_dtype
@pytest.mark.parametrize("name", [None, *FUSED])
@pytest.mark.parametrize("dims", EMPTY.values(), ids=EMPTY)
def test_sizes_of_zero(name, dtype, dims):
    """Without keys: zeros and an LSE of -inf. Without head dimensions: the mean of v."""
    problem = build(dims, (FEATURE["lse_loss"],), DTYPES[dtype])
    scale = 1.0 if dims.D == 0 else None
    found = problem.run(fastattn.attention, backend=name, scale=scale)
    exact = problem.to(torch.float64).run(fastattn.reference.attention, scale=scale)
    for what, value in found.items():
        assert value.shape == exact[what].shape, what
        tolerance = dict(rtol=0, atol=4 * torch.finfo(DTYPES[dtype]).eps * 4)
        torch.testing.assert_close(value.double(), exact[what], **tolerance, msg=what)
    if dims.N == 0:
        assert not found["out"].any() and (found["lse"] == -torch.inf).all()


BROADCASTS = list(itertools.product([False, True], repeat=4))  # which of B, H, M, N a mask has


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("keep", small(BROADCASTS, BROADCASTS[::5]), ids=str)
@pytest.mark.parametrize("dims", EMPTY.values(), ids=EMPTY)
def test_mask_gradient_where_nothing_flows(name, dims, keep):
    """Sums over nothing are 0, whichever dimensions the mask is broadcast along."""
    problem = build(dims, (), torch.float32)
    sizes = (dims.B, dims.H, dims.M, dims.N)
    mask = torch.zeros([n if kept else 1 for n, kept in zip(sizes, keep)], requires_grad=True)
    fastattn.attention(
        problem.q, problem.k, problem.v, mask=mask, scale=1.0, backend=name
    ).sum().backward()
    if 0 in sizes:
        assert not mask.grad.any()


@every_backend
@pytest.mark.parametrize("features", SINGLES, ids=name_of)
def test_storage_and_lse(name, features):
    """out and gradients have the memory layout (B,M,H,D); return_lse changes nothing else."""
    problem = build(SHAPES[1], features, torch.float32)
    found = problem.run(fastattn.attention, backend=name)
    for what in ("out", "dq", "dk", "dv"):
        assert found[what].transpose(1, 2).is_contiguous(), what
    kwargs = {x: y for x, y in problem.kwargs.items() if x != "return_lse"}
    with torch.no_grad():
        q, k, v = problem.q, problem.k, problem.v
        out = fastattn.attention(q, k, v, **kwargs, backend=name)
        again, lse = fastattn.attention(q, k, v, **kwargs, return_lse=True, backend=name)
    assert torch.equal(out, found["out"]) and torch.equal(out, again)
    assert lse.shape == out.shape[:3] and lse.is_contiguous()
