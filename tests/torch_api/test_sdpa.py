"""fastattn.scaled_dot_product_attention against torch's function of the same name: masks of torch's
own class, dropout, errors. Values and gradients by shape and mask: test_sdpa_layout.py."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fastattn
from tests.support.torch_calls import rand

ours = fastattn.scaled_dot_product_attention


def theirs(*args, **kwargs):
    """torch's function on its math path, the only one that is right for all inputs."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def same(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    torch.testing.assert_close(a, b, equal_nan=True)


def qkv(dtype=torch.float64):
    shapes = (2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)
    return (rand(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))


def test_a_float32_mask_with_16_bit_queries():
    q, k, v = qkv(torch.bfloat16)
    mask = rand(5, 7, dtype=torch.float32)
    exact = theirs(q.double(), k.double(), v.double(), mask.double())
    torch.testing.assert_close(ours(q, k, v, mask).double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [(5, 7), (7, 5), (5, 5), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_causal_bias(make, size):
    L, S = size
    q, k, v = rand(2, 3, L, 4), rand(2, 3, S, 4, seed=1), rand(2, 3, S, 4, seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that L > S gives NaN; ours does not
        bias = make(L, S)
    diagonal = S - L if make is causal_lower_right else 0
    keep = torch.ones(L, S, dtype=torch.bool).tril(diagonal)
    same(ours(q, k, v, bias), theirs(q, k, v, keep))
    same(ours(q[0], k[0], v[0], bias), theirs(q[0], k[0], v[0], keep))


def test_dropout_scales_what_it_keeps():
    q, k, _ = qkv()
    v = torch.eye(7).double().expand(2, 3, 7, 7)
    torch.manual_seed(0)
    dropped = ours(q, k, v, dropout_p=0.5)
    kept = dropped != 0
    same(dropped[kept], 2 * theirs(q, k, v)[kept])
    assert 0.25 < kept.double().mean() < 0.75


# ------------------------------------------------------------------------------------------ errors

Q, K, V = rand(2, 4, 5, 4), rand(2, 4, 7, 4), rand(2, 4, 7, 3)

ERRORS = {
    "one dimension": ((Q[0, 0, 0], K, V), {}, "at least 2 dimensional"),
    "dtypes": ((Q.float(), K, V), {}, "to have the same dtype"),
    "devices": ((Q, K.to("meta"), V), {}, "to have the same device type"),
    "head dims": ((Q, K[..., :3], V), {}, "Expected size"),
    "key lengths": ((Q, K, V[:, :, :6]), {}, "Expected size"),
    "heads": ((Q, K[:, :2], V[:, :2]), {}, "must match"),
    "batches": ((Q[[0, 0, 0]], K, V), {}, "must match"),
    "gqa heads": (
        (Q, K[:, :3], V[:, :3]),
        dict(enable_gqa=True),
        "Number of heads in key and value",
    ),
    "more key heads": ((Q[:, :2], K, V), dict(enable_gqa=True), "Number of heads in key"),
    "gqa of matrices": ((Q[0, 0], K[0, 0], V[0, 0]), dict(enable_gqa=True), "enable_gqa"),
    "mask dtype": ((Q, K, V, torch.zeros(5, 7).int()), {}, "Expected attn_mask dtype"),
    "mask in double": (
        (Q.float(), K.float(), V.float(), rand(5, 7)),
        {},
        "Expected attn_mask dtype",
    ),
    "mask size": ((Q, K, V, rand(5, 6)), {}, "must match"),
    "mask rank": ((Q, K, V, rand(1, 1, 1, 5, 7)), {}, "dimensions"),
    "mask batch": ((Q[0], K[0], V[0], rand(3, 5, 7)), {}, "mask"),
    "mask lead": ((Q[None], K[None], V[None], rand(3, 1, 1, 5, 7)), {}, "mask"),
    "mask and causal": ((Q, K, V, rand(5, 7)), dict(is_causal=True), "should not be set"),
    "dropout over 1": ((Q, K, V), dict(dropout_p=1.5), "between 0 and 1"),
    "dropout below 0": ((Q, K, V), dict(dropout_p=-0.5), "between 0 and 1"),
    "dropout nan": ((Q, K, V), dict(dropout_p=torch.nan), "between 0 and 1"),
    "scale nan": ((Q, K, V), dict(scale=torch.nan), "scale"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    args, kwargs, message = ERRORS[name]
    with pytest.raises((RuntimeError, ValueError), match=message):
        ours(*args, **kwargs)


def test_causal_bias_errors():
    with pytest.raises(ValueError, match="CausalBias should not be used"):
        ours(Q, K, V, causal_lower_right(5, 7), is_causal=True)
    with pytest.raises(RuntimeError, match="must match"):
        ours(Q, K, V, causal_lower_right(5, 8))


def test_integers_and_complex_numbers_are_refused():
    for dtype in (torch.int32, torch.complex64):
        with pytest.raises(ValueError, match="dtype"):
            ours(*(x.to(dtype) for x in (Q, K, V)))


def test_compiles_with_a_symbolic_length_and_a_mask_of_constant_size():
    @torch.compile(fullgraph=True, backend="eager")
    def call(q, mask):
        return fastattn.scaled_dot_product_attention(q, q, q, mask)

    q, mask = torch.randn(1, 2, 5, 8), torch.randn(5, 5)
    torch._dynamo.maybe_mark_dynamic(q, 2)
    torch.testing.assert_close(call(q, mask), F.scaled_dot_product_attention(q, q, q, mask))
