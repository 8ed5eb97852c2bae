"""fastattn.scaled_dot_product_attention against torch's function of the same name."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fastattn

ours = fastattn.scaled_dot_product_attention
INF = float("inf")


def theirs(*args, **kwargs):
    """torch's function on its math path, the only one that is right for all inputs."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)  # the tensors are tiny: threads would only wait for each other


def rand(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + len(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def same(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    torch.testing.assert_close(a, b, equal_nan=True)


def compare(q, k, v, mask=None, **kwargs):
    """Compare outputs and all gradients with torch's."""
    tensors = [q, k, v] + ([mask] if mask is not None and mask.is_floating_point() else [])
    found = []
    for f in (ours, theirs):
        leaves = [x.detach().requires_grad_() for x in tensors]
        given = leaves[3] if len(leaves) == 4 else mask
        out = f(*leaves[:3], given, **kwargs)
        torch.manual_seed(0)
        dout = torch.randn(out.shape, dtype=out.dtype)  # its layout is not that of out
        grads = torch.autograd.grad(out, leaves, dout)
        found.append((out, *grads))
    for a, b in zip(*found):
        same(a, b)


SHAPES = {  # q, k, v
    "2-D": ((5, 4), (7, 4), (7, 3)),
    "3-D": ((2, 5, 4), (2, 7, 4), (2, 7, 3)),
    "4-D": ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)),
    "5-D": ((2, 2, 3, 5, 4), (2, 2, 3, 7, 4), (2, 2, 3, 7, 4)),
    "6-D": ((2, 1, 2, 3, 5, 4), (2, 1, 2, 3, 7, 4), (2, 1, 2, 3, 7, 4)),
    "square": ((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    "more queries": ((2, 3, 9, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    "one key head": ((2, 3, 5, 4), (2, 1, 7, 4), (2, 1, 7, 4)),
    "one key head, own values": ((2, 3, 5, 4), (2, 1, 7, 4), (2, 3, 7, 4)),
    "one query head": ((2, 1, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)),
    "one query batch": ((1, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)),
    "one value batch": ((2, 3, 5, 4), (2, 3, 7, 4), (1, 3, 7, 4)),
    "mixed ranks": ((2, 3, 5, 4), (7, 4), (3, 7, 4)),
    "3-D with 2-D": ((3, 5, 4), (7, 4), (7, 4)),
    "5-D broadcast": ((2, 1, 3, 5, 4), (3, 1, 7, 4), (2, 3, 1, 7, 4)),
    "no keys": ((2, 3, 5, 4), (2, 3, 0, 4), (2, 3, 0, 4)),
    "no queries": ((2, 3, 0, 4), (2, 3, 7, 4), (2, 3, 7, 4)),
    "no head dim": ((2, 3, 5, 0), (2, 3, 7, 0), (2, 3, 7, 4)),
    "no value dim": ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 0)),
    "no batch": ((0, 3, 5, 4), (0, 3, 7, 4), (0, 3, 7, 4)),
    "no heads": ((2, 0, 5, 4), (2, 0, 7, 4), (2, 0, 7, 4)),
    "empty 5-D": ((2, 0, 3, 5, 4), (2, 0, 3, 7, 4), (2, 0, 3, 7, 4)),
}


def qkv(name, dtype=torch.float64):
    return (rand(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(SHAPES[name]))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, is_causal):
    compare(*qkv(name), is_causal=is_causal)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1, 1e-30])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_scales(is_causal, scale):
    compare(*qkv("4-D"), is_causal=is_causal, scale=scale)


MASKS = [  # scores are (2, 3, 5, 7), or (2, 2, 3, 5, 7)
    ("4-D", (5, 7)),
    ("4-D", (1, 7)),
    ("4-D", (5, 1)),
    ("4-D", (3, 1, 1)),
    ("4-D", (2, 1, 1, 7)),
    ("4-D", (2, 3, 5, 7)),
    ("4-D", (1, 1, 1, 1)),
    ("2-D", (5, 7)),
    ("3-D", (2, 5, 7)),
    ("3-D", (1, 7)),
    ("5-D", (5, 7)),
    ("5-D", (3, 5, 7)),
    ("5-D", (2, 1, 5, 7)),
    ("5-D", (2, 1, 1, 5, 7)),
    ("5-D", (1, 1, 3, 1, 7)),
    ("5-D", (2, 2, 3, 5, 7)),
    ("mixed ranks", (2, 1, 5, 7)),
    ("one query batch", (2, 1, 1, 7)),
    ("one key head", (2, 3, 5, 7)),
]


@pytest.mark.parametrize("kind", ["bool", "float", "float32"])
@pytest.mark.parametrize("name, shape", MASKS, ids=lambda x: str(x))
def test_masks(name, shape, kind):
    mask = rand(*shape)
    if kind == "bool":
        mask = mask > -0.5
    elif kind == "float32":
        mask = mask.float()
    compare(*qkv(name), mask)


@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 1, 1), (4, 4, 4), (4, 2, 4), (6, 3, 2)], ids=str)
@pytest.mark.parametrize("lead", [(), (2,), (2, 2)], ids=str)
def test_gqa(heads, lead):
    q, k, v = (
        rand(*lead, h, n, 4, seed=h) for h, n in zip(heads, (5, 7, 7))
    )  # several ranks of leading dimensions
    compare(q, k, v, enable_gqa=True)
    compare(q, k, v, rand(heads[0], 5, 7), enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    q, k, v = qkv("4-D", dtype)
    exact = theirs(q.double(), k.double(), v.double(), is_causal=True)
    found = ours(q, k, v, is_causal=True)
    assert found.dtype == dtype
    error = (theirs(q, k, v, is_causal=True) - exact).abs().max()
    assert (found - exact).abs().max() <= 2 * error + 2 * torch.finfo(dtype).eps


def test_numpy_scalars():
    q = rand(1, 2, 5, 4, dtype=torch.float32)
    same(ours(q, q, q, scale=np.float32(0.5)), theirs(q, q, q, scale=np.float32(0.5)))
    same(ours(q, q, q, scale=np.int64(2)), theirs(q, q, q, scale=2))
    assert not ours(q, q, q, dropout_p=np.float32(1)).any()


def test_a_float32_mask_with_16_bit_queries():
    q, k, v = qkv("4-D", torch.bfloat16)
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


# ------------------------------------------------------------------------------------ hard values


def test_rows_that_see_nothing_are_zero_with_zero_gradients():
    q, k, v = (x.requires_grad_() for x in qkv("4-D"))
    keep = torch.ones(5, 7, dtype=torch.bool)
    keep[2] = False
    for mask in (keep, torch.zeros(5, 7).double().masked_fill(~keep, -INF)):
        out = ours(q, k, v, mask)
        assert out[:, :, 2].eq(0).all()
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert dq[:, :, 2].eq(0).all()
        assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_a_row_of_finfo_min_is_the_mean():
    for dtype in (torch.float64, torch.float32):
        q, k, v = qkv("4-D", dtype)
        mask = torch.zeros(5, 7, dtype=dtype)
        mask[1] = torch.finfo(dtype).min
        same(ours(q, k, v, mask), theirs(q, k, v, mask))
        torch.testing.assert_close(ours(q, k, v, mask)[:, :, 1], v.mean(-2))


def test_infinity_in_a_mask_is_nan_in_its_row_alone():
    q, k, v = qkv("4-D")
    mask = torch.zeros(5, 7).double()
    mask[3, 2] = INF
    out = ours(q, k, v, mask)
    assert out[:, :, 3].isnan().all() and out[:, :, [0, 1, 2, 4]].isfinite().all()


def test_a_nan_query_row_is_nan_in_its_row_alone():
    q, k, v = qkv("4-D")
    q[:, :, 1] = torch.nan
    out = ours(q, k, v)
    assert out[:, :, 1].isnan().all() and out[:, :, [0, 2, 3, 4]].isfinite().all()


def test_dropout_of_everything_and_of_nothing():
    q, k, v = (x.requires_grad_() for x in qkv("4-D"))
    out = ours(q, k, v, None, 1.0)
    assert out.eq(0).all()
    assert all(g.eq(0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    same(ours(q, k, v, None, 0.0), theirs(q, k, v))
    torch.manual_seed(0)
    dropped = ours(q, k, torch.eye(7).double().expand(2, 3, 7, 7), dropout_p=0.5)
    kept = dropped != 0
    same(dropped[kept], 2 * theirs(q, k, torch.eye(7).double().expand(2, 3, 7, 7))[kept])
    assert 0.25 < kept.double().mean() < 0.75


def test_transposed_expanded_and_offset_inputs():
    wide = rand(2, 5, 3, 3, 11)
    q, k, v = (wide[:, :, i, :, 3:7].transpose(1, 2) for i in range(3))
    compare(q, k, v, is_causal=True)
    compare(q.mT.contiguous().mT, k[:, :1].expand_as(k), v[:1].expand_as(v))
    compare(q, k, v, rand(1, 7)[:, 2:].expand(5, 5))


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


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((Q, K, None), {}),
        ((Q, K, [1]), {}),
        ((Q, K, V, 3), {}),
        ((Q, K, V), dict(dropout_p="a")),
        ((Q, K, V), dict(scale="a")),
        ((Q, K, V, None, 0.0, False, 1.0), {}),
        ((Q, K), {}),
    ],
)
def test_type_errors_as_torch(args, kwargs):
    for f in (ours, F.scaled_dot_product_attention):
        with pytest.raises(TypeError):
            f(*args, **kwargs)


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
