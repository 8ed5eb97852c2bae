"""Rounding errors in float32. They do not grow with the head dim, as products are summed in
chains of limited length. They do not grow with the size of scores, as every pass computes the
same scores."""

import pytest
import torch

import fastattn
from tests.support.backends import of_cpu_blocks, variant, variants
from tests.support.cases import Dims, build

pytestmark = of_cpu_blocks
ROWS, KEYS = 64, 400


def errors(d):
    """name -> |x - oracle| / |oracle|, for out and the gradients."""
    problem = build(Dims(1, 2, 2, ROWS, KEYS, d, d), (), torch.float32)
    exact = problem.to(torch.float64).run(fastattn.reference.attention)
    found = problem.run(fastattn.attention, backend="cpu")
    return {x: float((found[x] - exact[x]).norm() / exact[x].norm()) for x in exact}


@pytest.mark.parametrize("isa", variants("cpu", torch.float32))
def test_does_not_grow_with_the_head_dim(isa, one_thread):
    with variant(isa):
        least = errors(64)
        for d in (97, 128, 256, 511):
            for name, error in errors(d).items():
                assert error <= 1.25 * least[name], (d, name, least[name])


@pytest.mark.parametrize("size", [1, 30, 1e3, 1e5])
@pytest.mark.parametrize("m", [1, 3, 8, 12, 40])
@pytest.mark.parametrize("isa", variants("cpu", torch.float32))
def test_a_score_is_the_same_in_every_pass(isa, m, size, one_thread):
    """Backward computes weights from the LSE of forward. For few rows forward computes scores by
    another kernel than for many. Weights still sum to 1 in each row, and dV agrees with them,
    although the rounding of a score is 1e-2 at the largest size."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 4, n, 64, generator=generator) for n in (m, 300, 300, m))
    q, k = q * size**0.5, k[:, :2] * size**0.5
    v = v[:, :2].clone().requires_grad_()
    with variant(isa):
        out = fastattn.attention(q, k, v, backend="cpu")
        (dv,) = torch.autograd.grad(out, v, dout)
        weights = fastattn.attention_weights(q, k, backend="cpu").double()
    assert (weights.sum(-1) - 1).abs().max() < 1e-6
    expected = (weights.mT @ dout.double()).unflatten(1, (2, 2)).sum(2)
    assert (dv - expected).norm() < 1e-6 * expected.norm()
