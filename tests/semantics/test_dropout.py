"""Dropout: draws follow Philox, are fair, and are the same in forward, backward and all backends.

With q = 0 every probability is 1/N, and v = I copies the probabilities to the output: what is not
zero was kept. dout = I copies them to dv, transposed.
"""

import math

import torch

import fastattn
from tests.support import naive
from tests.support.backends import DECLARED, every_backend, not_interpreted, on_variants
from tests.support.backends import small as at_most
from tests.support.cases import DTYPES
from tests.support.marks import parametrize

P = 0.3
SEED = 0x1234_5678_9ABC_DEF0


def revealed(name, seed, shape, p=P, dtype=torch.float32):
    """(forward, backward): (B,H,M,N) bool masks of the probabilities that each pass kept."""
    batch, heads, m, n = shape
    q, k = (
        torch.zeros(batch, heads, m, 8, dtype=dtype),
        torch.zeros(batch, heads, n, 8, dtype=dtype),
    )
    v = torch.eye(n, dtype=dtype).expand(batch, heads, n, n).requires_grad_()
    out = fastattn.attention(q, k, v, dropout_p=p, seed=seed, backend=name)
    # dv[j,d] = sum_i w[i,j] dout[i,d]: with dout = I, column i of dv is row i of the weights.
    dout = torch.eye(m, n, dtype=dtype).expand(batch, heads, m, n)
    (dv,) = torch.autograd.grad(out, v, dout)
    backward = dv.mT[:, :, :m] if m <= n else None
    values = out.detach()
    kept = values[values != 0].double()
    if 0 < p < 1 and kept.numel():
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            kept, torch.full_like(kept, 1 / (n * (1 - p))), rtol=tolerance, atol=0
        )
    return values != 0, backward != 0


@every_backend
@parametrize("dtype", [x for x in DECLARED if x != "float16"], fast=1)
@parametrize("p", [1e-3, P, 0.5, 0.9], fast=2)
def test_mask_is_philox_forward_and_backward(name, p, dtype):
    """Bit for bit, at sizes that are no multiple of a tile or of a block of four."""
    dtype, shape = DTYPES[dtype], at_most((2, 3, 131, 205), (2, 2, 37, 39))
    for seed in (SEED, -1, 3):
        want = naive.keep(seed, p, shape)
        for isa in on_variants(name, dtype):
            forward, backward = revealed(name, seed, shape, p, dtype)
            assert torch.equal(forward, want), isa
            assert torch.equal(backward, want), isa


def z_of_chi_square(counts, expected, variance):
    """Wilson and Hilferty: the cube root of chi-square over its degrees is nearly normal."""
    degrees = counts.numel()
    chi = ((counts - expected) ** 2 / variance).sum().item() / degrees
    spread = 2 / (9 * degrees)
    return (chi ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@not_interpreted
@every_backend
def test_a_million_draws_are_fair(name):
    shape = (2, 5, 220, 500)
    kept = revealed(name, SEED, shape)[0].double()
    total, keep = kept.numel(), 1 - P
    assert total > 10**6
    assert abs(kept.sum() - total * keep) / math.sqrt(total * keep * P) < 4.5
    for dims in ((0, 1, 3), (0, 1, 2), (0, 2, 3), (1, 2, 3), (2, 3), (3,), (2,)):
        counts = kept.sum(dims)
        draws = total / counts.numel()
        z = z_of_chi_square(counts, draws * keep, draws * keep * P)
        assert abs(z) < 4.75, f"summed over {dims}"  # p > 1e-6
    # Neighbouring draws are independent.
    for dim in range(4):
        for step in (1, 2, 4, 64):
            if kept.shape[dim] <= step:
                continue
            same = kept.narrow(dim, step, kept.shape[dim] - step)
            same = same == kept.narrow(dim, 0, kept.shape[dim] - step)
            chance = keep**2 + P**2
            z = (same.sum() - same.numel() * chance) / math.sqrt(
                same.numel() * chance * (1 - chance)
            )
            assert abs(z) < 4.75, f"neighbours {step} apart along {dim}"


def small(grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 2, 33, 16, generator=generator).requires_grad_(grad) for _ in "qkv"]


@every_backend
def test_seed_is_read_when_the_kernel_runs(name):
    """Backward draws as forward did, although the caller has changed the seed tensor since."""
    q, k, v = small(grad=True)
    seed = torch.tensor([5])
    out = fastattn.attention(q, k, v, dropout_p=P, seed=seed, backend=name)
    want = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    try:
        seed.add_(1)
        got = torch.autograd.grad(out.sum(), (q, k, v))
    except RuntimeError as error:  # autograd may raise instead; another mask is never drawn
        assert "modified by an inplace operation" in str(error)
        return
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@every_backend
def test_p_of_one_drops_all(name):
    q, k, v = small(grad=True)
    for isa in on_variants(name):
        out, lse = fastattn.attention(q, k, v, dropout_p=1.0, seed=1, return_lse=True, backend=name)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert not out.any() and lse.isfinite().all(), isa
        assert not any(x.any() for x in grads), isa
