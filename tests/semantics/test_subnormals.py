"""No P and no dS is subnormal, tiny values are not lost, and threads' FP state is unchanged.

A subnormal number costs an Intel core some 150 cycles. On every machine, results show whether
kernels make any: the weights are P, and the gradient of a full float mask is dS.
"""

import math

import pytest
import torch

import fastattn
from tests.support.backends import on_variants, variant, variants

# Sizes of scores that give exponentials below the smallest normal number.
PEAK = {torch.float32: 30, torch.float64: 300, torch.bfloat16: 30}


def subnormal(x):
    return ((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum().item()


def randn(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def peaked(dtype, m, heads=2):
    n, size = 300, PEAK[dtype]
    q, k, v = (randn(1, heads, rows, 32, dtype=dtype) for rows in (m, n, n))
    return [x.requires_grad_() for x in (q * size, k.flip(2), v)]


def features(dtype, m, n=300):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    zeros = torch.zeros(m, n, dtype=wide)
    hidden = torch.arange(n) < torch.arange(m)[:, None] % 7 * 40
    slope = 20.0 if dtype == torch.float64 else 1.0
    return {
        "plain": {},
        "causal": dict(causal="bottom_right"),
        "False": dict(mask=~hidden),
        "-inf": dict(mask=zeros.masked_fill(hidden, -math.inf)),
        "finfo.min": dict(mask=zeros.masked_fill(hidden, torch.finfo(wide).min)),
        "alibi": dict(alibi_slopes=torch.tensor([slope, slope / 16], dtype=wide)),
        "softcap": dict(softcap=60.0 if wide == torch.float32 else 500.0),
        "sinks": dict(sinks=torch.tensor([80.0, -3.0], dtype=wide)),
        "dropout": dict(dropout_p=0.3, seed=1),
    }


@pytest.mark.parametrize("feature", features(torch.float32, 1))
@pytest.mark.parametrize("m", [1, 70])
@pytest.mark.parametrize("dtype", PEAK, ids=lambda x: str(x)[6:])
def test_probabilities_are_zero_or_normal(dtype, m, feature):
    arguments = features(dtype, m)[feature]
    for isa in on_variants("cpu"):
        q, k, _ = peaked(dtype, m)
        weights = fastattn.attention_weights(q, k, **arguments, backend="cpu")
        assert not subnormal(weights), isa
        assert (weights == 0).any() and (weights > 0).any(), isa


@pytest.mark.parametrize("feature", [x for x in features(torch.float32, 1) if x != "False"])
@pytest.mark.parametrize("dtype", PEAK, ids=lambda x: str(x)[6:])
def test_gradients_of_scores_are_zero_or_normal(dtype, feature):
    m, n = 70, 300
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    arguments = features(dtype, m)[feature]
    given = arguments.pop("mask", torch.zeros(())).to(wide)
    for isa in on_variants("cpu"):
        q, k, v = peaked(dtype, m)
        mask = given.expand(1, 2, m, n).clone().requires_grad_()
        out = fastattn.attention(q, k, v, mask=mask, **arguments, backend="cpu")
        (ds,) = torch.autograd.grad(out, mask, randn(*out.shape, dtype=dtype))
        assert not subnormal(ds), isa
        assert ds.any(), isa


@pytest.mark.parametrize("m", [1, 70])
@pytest.mark.parametrize("isa", variants("cpu"))
def test_tiny_values_have_their_mean(isa, m):
    """2e-38 is a normal number, though most of the terms that add up to it are subnormal."""
    q, k = (randn(1, 2, rows, 32, dtype=torch.float32) for rows in (m, 300))
    v = torch.full((1, 2, 300, 32), 2e-38)
    with variant(isa):
        out = fastattn.attention(q, k, v, backend="cpu")
    torch.testing.assert_close(out, v[:, :, :1].expand_as(out), rtol=1e-5, atol=0)


def test_a_callers_flush_mode_is_kept():
    q, k, v = peaked(torch.float32, 300)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush")
    try:
        fastattn.attention(q, k, v, backend="cpu").sum().backward()
        assert (torch.tensor([1e-40]) * 1).item() == 0
    finally:
        torch.set_flush_denormal(False)
