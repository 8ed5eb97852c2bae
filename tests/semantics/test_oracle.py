"""The oracle that judges the kernels, tested against still more naive implementations."""

import math

import pytest
import torch
import torch.nn.functional as F

from fastattn import reference
from tests.features import calls, factors
from tests.support import naive
from tests.support.cases import DTYPES, FEATURE, SHAPES, Dims, build
from tests.support.marks import parametrize

# Where all scores are finfo.min, torch differentiates its logsumexp wrongly: each score less the
# rounded result is 0, so that each key has the weight 1.
ROWS = factors.rows(
    "dense",
    **factors.ONE_PROBLEM,
    mask=tuple(x for x in factors.SCORES["mask"] if x != "finfo.min"),
    **dict(M=(5, 1, 17), N=(7, 1, 33), D=(3, 1, 8), Dv=(3, 1, 5), dtype=("float64",), B=(4, 1)),
    **dict(
        row_invariant=(False,), values=("normal",), grad=("all",), heads=((2, 2), (4, 2), (3, 1))
    ),
)


@parametrize("row", ROWS, fast=60)
def test_oracle_is_the_baseline_in_float64(row):
    """torch's softmax and a softmax written out agree, in values, gradients and weights."""
    problem = calls.problem(row)
    want, got = problem.run(naive.baseline), problem.run(reference.attention)
    given = {x: y for x, y in problem.tensors().items() if x != "return_lse"}
    want["weights"] = naive.baseline(**given, return_weights=True)
    got["weights"] = reference.attention(**given, return_weights=True)[1]
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
