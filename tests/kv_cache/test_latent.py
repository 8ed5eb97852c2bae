"""A cache of latent vectors: values are the first numbers of keys, in their memory (any changes to
it: cache_model.py). And both ways of latent attention."""

import pytest
import torch

import fastattn
from fastattn import KVCache, mla
from fastattn.call.int4 import dequantised_int4, quantised_int4
from tests.support.backends import not_interpreted

pytestmark = [pytest.mark.usefixtures("one_thread"), not_interpreted]

B, H, D, L = 3, 4, 9, 6
STORAGES = (None, torch.int8, torch.float8_e4m3fn)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_values_are_the_first_numbers_of_keys(storage):
    given = dict(capacity=20, page_size=4, storage=storage)
    cache = KVCache(B, 1, D, latent=L, **given)
    assert cache.v_pages.data_ptr() == cache.k_pages.data_ptr()
    assert cache.v_pages.shape == (*cache.k_pages.shape[:3], L)
    same = cache.v_scales is cache.k_scales
    assert same and (storage is None) == (cache.k_scales is None)
    numbers = 4 if storage is None else 1
    page_bytes = cache.k_pages.shape[1] * (D * numbers + (0 if storage is None else 4))
    assert cache.nbytes == cache.k_pages.shape[0] * page_bytes
    assert cache.nbytes < KVCache(B, 1, D, value_dim=L, **given).nbytes


@pytest.mark.parametrize("page", (None, 7))
def test_four_bits(page):
    """Values are the first blocks of keys: what they mean is what `decode` reads."""
    cache = KVCache(B, 1, 96, latent=64, capacity=20, page_size=page, storage="int4")
    k = torch.randn(B, 1, 9, 96)
    cache.append(k)
    assert cache.v_pages.shape[-1] == 40 and cache.v_pages.data_ptr() == cache.k_pages.data_ptr()
    weights = mla.split(torch.randn(H * (16 + 8), 64) / 8, H, 16)
    q, rotated = torch.randn(B, H, 1, 16), torch.randn(B, H, 1, 32)
    rows = dequantised_int4(quantised_int4(k), torch.float32)
    expected = mla.decode(q, rotated, rows, weights)
    torch.testing.assert_close(mla.decode(q, rotated, cache, weights), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_casts_what_is_appended(dtype):
    cache = KVCache(1, 1, D, latent=L, capacity=8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        cache.append(torch.randn(1, 1, 3, D).to(dtype))
        assert cache.attention(torch.randn(1, H, 1, D)).shape == (1, H, 1, L)


@pytest.mark.parametrize("latent", [0, 1, D])
def test_any_part_of_a_key(latent):
    cache = KVCache(2, 2, D, latent=latent, capacity=8, page_size=4)
    k = torch.randn(2, 2, 5, D)
    cache.append(k)
    q = torch.randn(2, 4, 2, D)
    expected = fastattn.attention(q, k, k[..., :latent], causal="bottom_right")
    torch.testing.assert_close(cache.attention(q), expected)


# ------------------------------------------------------------------------- the two ways of a layer

HEADS, NOPE, ROPE, VALUE, LATENT = 4, 24, 8, 20, 40


def problem(dtype, M=9, N=70, batch=2):
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    weight = drawn(HEADS * (NOPE + VALUE), LATENT) / LATENT**0.5
    q, p = drawn(batch, HEADS, M, NOPE), drawn(batch, HEADS, M, ROPE)
    both = mla.keys(drawn(batch, 1, N, LATENT), drawn(batch, 1, N, ROPE))
    return q, p, both, weight


def plain(q, p, both, weight, causal):
    """The definition, head by head, in float64."""
    outs = []
    c, r = both[:, 0, :, :LATENT], both[:, 0, :, LATENT:]
    for h, part in enumerate(weight.view(HEADS, NOPE + VALUE, LATENT)):
        k, v = c @ part[:NOPE].T, c @ part[NOPE:].T
        scores = (q[:, h] @ k.mT + p[:, h] @ r.mT) * (NOPE + ROPE) ** -0.5
        if causal:
            M, N = scores.shape[-2:]
            seen = torch.ones(M, N, dtype=torch.bool).tril(N - M)
            scores = scores.masked_fill(~seen, -torch.inf)
        outs.append(scores.softmax(-1) @ v)
    return torch.stack(outs, 1)


BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
@pytest.mark.parametrize("way", [mla.decode, mla.prefill])
def test_both_ways_are_the_definition(way, causal, dtype):
    """Out, and the gradients by all of queries, keys and weights."""
    given = [x.requires_grad_() for x in problem(dtype)]
    exact = [x.detach().double().requires_grad_() for x in given]
    q, p, both, weight = given
    out = way(q, p, both, mla.split(weight, HEADS, NOPE), causal=causal)
    expected = plain(*exact, causal)
    grads = torch.autograd.grad(out.double().square().sum(), given)
    exact_grads = torch.autograd.grad(expected.square().sum(), exact)
    for x, y in zip((out, *grads), (expected, *exact_grads), strict=True):
        bound = BOUNDS[dtype] * float(1 + y.detach().abs().max())
        torch.testing.assert_close(x.double(), y, rtol=0, atol=bound)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("page", [None, 16])
def test_tokens_from_a_cache(page, storage):
    """A prompt by `prefill`, then tokens by `decode`: the rows of one causal call."""
    q, p, both, weight = problem(torch.float32, M=70)
    weights = mla.split(weight, HEADS, NOPE)
    whole = mla.prefill(q, p, both, weights, causal=True)
    cache = KVCache(
        2, 1, LATENT + ROPE, latent=LATENT, capacity=70, page_size=page, storage=storage
    )
    cache.append(both[:, :, :60])
    bound = 1e-5 if storage is None else 0.1
    for at, n in ((60, 1), (61, 1), (62, 8)):
        rows = slice(at, at + n)
        cache.append(both[:, :, rows])
        out, lse = mla.decode(q[:, :, rows], p[:, :, rows], cache, weights, return_lse=True)
        torch.testing.assert_close(out, whole[:, :, rows], rtol=0, atol=bound)
        assert lse.shape == (2, HEADS, n)


def test_scale_and_arguments_are_those_of_attention():
    q, p, both, weight = problem(torch.float64)
    weights = mla.split(weight, HEADS, NOPE)
    given = dict(
        scale=0.3,
        softcap=4.0,
        sinks=torch.randn(HEADS, dtype=torch.float64),
        key_lengths=torch.tensor([70, 33]),
        return_lse=True,
    )
    for x, y in zip(
        mla.decode(q, p, both, weights, **given), mla.prefill(q, p, both, weights, **given)
    ):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_weights_are_views_and_join():
    weight = torch.randn(HEADS * (NOPE + VALUE), LATENT)
    weights = mla.split(weight, HEADS, NOPE)
    assert torch.equal(mla.join(weights), weight)
    assert weights.k.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_what_does_not_fit_is_refused():
    q, p, both, weight = problem(torch.float32)
    weights = mla.split(weight, HEADS, NOPE)
    cache = KVCache(2, 1, LATENT + ROPE, value_dim=LATENT - 1, capacity=8)
    wrong = [
        (lambda: mla.split(weight, 3, NOPE), "weight: got .*, expected .*H = 3"),
        (lambda: mla.split(weight, HEADS, 99), "weight: got .*Dn = 99"),
        (lambda: mla.split(weight[0], HEADS, NOPE), "weight: got"),
        (lambda: mla.decode(q[..., 1:], p, both, weights), "q: got .*H = 4"),
        (lambda: mla.decode(q[:, 1:], p, both, weights), "q: got"),
        (lambda: mla.decode(q, p[:, :, 1:], both, weights), "q_rotated: got"),
        (lambda: mla.decode(q, p, both[..., 1:], weights), "keys: got .*L = 40 and R = 8"),
        (lambda: mla.prefill(q, p, both.expand(-1, 2, -1, -1), weights), "keys: got"),
        (lambda: mla.decode(q, p, cache, weights), "keys: got KVCache.*latent=40"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="keys: got a KVCache, expected a tensor"):
        mla.prefill(q, p, KVCache(2, 1, LATENT + ROPE, latent=LATENT, capacity=8), weights)


@pytest.mark.slow
def test_compiled():
    q, p, both, weight = problem(torch.float32)
    weights = mla.split(weight, HEADS, NOPE)
    for way in (mla.decode, mla.prefill):
        whole = torch.compile(way, backend="eager", fullgraph=True)
        assert torch.equal(whole(q, p, both, weights), way(q, p, both, weights))
