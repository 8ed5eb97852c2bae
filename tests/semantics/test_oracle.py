"""The oracle that judges the kernels, tested against still more naive implementations."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastattn import reference
from tests.support import naive
from tests.support.cases import (
    DTYPES,
    FEATURE,
    FEATURES,
    PAIRS,
    SHAPES,
    Dims,
    build,
    name_of,
    square,
)
from tests.support.marks import parametrize

ALONE = [(), *((feature,) for feature in FEATURES)]
COMBINED = [
    tuple(FEATURE[name] for name in names)
    for names in (
        ("bottom_right", "window", "lengths", "alibi_batch", "gqa", "many_queries"),
        ("causal", "left_window", "softcap", "sinks", "dropout", "bias_grad", "few_queries"),
        ("bottom_right", "right_window", "lengths", "softcap", "padding_mask", "mqa", "dropout"),
        ("own_key", "lengths", "alibi", "sinks", "head_bias_grad", "negative_scale"),
        ("bottom_right", "lengths", "sinks", "alibi_batch", "dropout", "key_bias_grad"),
    )
]


@pytest.mark.parametrize("features", ALONE + COMBINED, ids=name_of)
def test_oracle_is_the_scalar_loops(features):
    problem = build(square(2, 2, 7, 3), features, torch.float64)
    kwargs = {x: y for x, y in problem.kwargs.items() if x != "return_lse"}
    want = naive.loops(problem.q, problem.k, problem.v, **kwargs)
    got = reference.attention(
        problem.q, problem.k, problem.v, **kwargs, return_lse=True, return_weights=True
    )
    for name, x, y in zip(("out", "lse", "weights"), got, want, strict=True):
        np.testing.assert_allclose(x.detach().numpy(), y, rtol=1e-12, atol=1e-13, err_msg=name)


@parametrize("features", PAIRS, ids=name_of, fast=300)
def test_oracle_is_the_baseline_in_float64(features):
    """torch's softmax and a softmax written out agree, in values and gradients."""
    problem = build(square(2, 2, 11, 3), features, torch.float64)
    want, got = problem.run(naive.baseline), problem.run(reference.attention)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("what", ["plain", "causal", "padding_mask", "bias_grad"])
def test_oracle_is_torchs_math(what):
    features = () if what == "plain" else (FEATURE[what],)
    dims = Dims(B=2, H=4, Hk=2, M=9, N=13, D=5, Dv=6)
    problem = build(dims, features, torch.float64)
    q, k, v, kwargs = problem.q, problem.k, problem.v, problem.kwargs
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = F.scaled_dot_product_attention(
            q, k, v, kwargs.get("mask"), is_causal=what == "causal", enable_gqa=True
        )
    got = reference.attention(q, k, v, **kwargs)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@parametrize("features", COMBINED, ids=name_of, fast=1)
def test_oracles_gradients_are_differences(features):
    problem = build(square(2, 2, 4, 3), features, torch.float64)
    if "key_lengths" in problem.kwargs:  # finite differences need finite values past the lengths
        problem.k.nan_to_num_(0.5), problem.v.nan_to_num_(0.5)
    if torch.is_tensor(problem.kwargs.get("mask")) and problem.kwargs["mask"].is_floating_point():
        problem.kwargs["mask"].clamp_(min=-30)
    given = problem.tensors()
    leaves = [given[name].contiguous().requires_grad_() for name in problem.needs_grad]

    def call(*leaves):
        now = given | dict(zip(problem.needs_grad, leaves, strict=True)) | dict(return_lse=True)
        q, k, v = (now.pop(x) for x in "qkv")
        out, lse = reference.attention(q, k, v, **now)
        return out, lse.masked_fill(lse == -torch.inf, 0)  # differences of infinities are NaN

    assert torch.autograd.gradcheck(call, leaves)


# Random123's kat_vectors for philox4x32-10: counter, key, result.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text):
    return [int(x, 16) for x in text.split()]


@pytest.mark.parametrize("counter, key, result", KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter, key, result):
    low, high = words(key)
    seed = high << 32 | low
    ours = reference.philox(tuple(torch.tensor(x) for x in words(counter)), seed)
    assert [int(x) for x in ours] == words(result)
    assert [int(x) for x in naive.philox(words(counter), words(key))] == words(result)
    signed = seed - 2**64 if seed >= 2**63 else seed  # an int64 tensor holds the same bits
    assert [int(x) for x in reference.philox(tuple(map(torch.tensor, words(counter))), signed)] == (
        words(result)
    )


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_keep_mask_is_numpys(seed, p):
    shape = (2, 3, 5, 11)  # 11 keys: the last block of four is not whole
    ours = reference.keep_mask(shape, p, seed)
    assert torch.equal(ours, naive.keep(seed, p, shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_oracle_takes_any_dtype(dtype):
    problem = build(SHAPES[1], (FEATURE["causal"], FEATURE["sinks"]), DTYPES[dtype])
    out, lse = reference.attention(
        problem.q, problem.k, problem.v, **problem.kwargs, return_lse=True
    )
    exact = torch.float64 if dtype == "float64" else torch.float32
    assert out.dtype == DTYPES[dtype] and lse.dtype == exact
    assert math.isfinite(out.float().sum())


def test_extras_come_in_order():
    q = torch.randn(1, 1, 3, 2)
    out, lse, weights = reference.attention(q, q, q, return_lse=True, return_weights=True)
    assert out.shape == (1, 1, 3, 2) and lse.shape == (1, 1, 3) and weights.shape == (1, 1, 3, 3)
    assert isinstance(reference.attention(q, q, q), torch.Tensor)
