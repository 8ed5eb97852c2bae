"""Keys of a cache in few bits are stored less an offset: the errors are those of keys without one.
That scores are whole, in all that they have a part in, is tested by rows of tests/features."""

import copy
import itertools
import math

import pytest
import torch

import fastattn
from fastattn import KVCache
from fastattn.call.int4 import dequantised_int4
from fastattn.call.quantisation import NAMES, dequantised
from fastattn.dispatch import dispatcher
from fastattn.kv_cache.key_offset import FEWEST
from fastattn.score_mods.lowering import MOST_COPIED
from tests.support.backends import not_interpreted

pytestmark = pytest.mark.usefixtures("one_thread")

B, H, HK, D = 2, 4, 2, 64
STORAGES = {"int4": "int4"} | {name: dtype for dtype, name in NAMES.items()}
every_storage = pytest.mark.parametrize("storage", STORAGES)


def tensors(n, offset=100.0, dtype=torch.float32, seed=0):
    """q, k and v; k has an offset in every third channel, of another size in each."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, heads, n, D, generator=draw) for heads in (H, HK, HK))
    sizes = offset * torch.linspace(-1, 1, D) * (torch.arange(D) % 3 == 0)
    return [x.to(dtype) for x in (q, k + sizes * torch.tensor([1.0, -2.0])[:, None, None], v)]


def made(storage, dtype=torch.float32, **given):
    sizes = dict(capacity=400, page_size=16, dtype=dtype) | given
    return KVCache(B, HK, D, storage=STORAGES[storage], **sizes)


def stored(cache):
    """The keys and values that the cache has, (B,Hk,n,D) in float64, of equally long items."""
    n, found = int(cache.lengths[0]), []
    for pages, scales in ((cache.k_pages, cache.k_scales), (cache.v_pages, cache.v_scales)):
        if scales is None:
            values = dequantised_int4(pages, torch.float64)
        else:
            values = dequantised(pages, scales, torch.float64)
        found.append(values[cache.block_table].flatten(1, 2)[:, :n].transpose(1, 2))
    offset = 0 if cache.key_offset is None else cache.key_offset
    return found[0] + offset[:, None].double(), found[1]


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@not_interpreted
@every_storage
@pytest.mark.parametrize("page_size", (None, 16))
def test_the_error_does_not_depend_on_an_offset(page_size, storage):
    """A prompt, a fork, evicted and dropped keys, and tokens one by one, dense and packed."""
    errors = {}
    for offset in (0.0, 100.0, 10000.0):
        q, k, v = tensors(200, offset)
        cache = made(storage, page_size=page_size, grow=True)
        cache.append(k[:, :, :150], v[:, :, :150])
        cache.evict(20)
        cache.truncate(100)
        fork = cache.fork()
        for at in range(120, 200, 40):
            fork.append(k[:, :, at : at + 40], v[:, :, at : at + 40])
        for at in range(180, 183):
            packed = (x[:, :, at] for x in (k, v))
            cache.append(*packed, torch.arange(B + 1))
        for x, keys in ((fork, [*range(20, 200)]), (cache, [*range(20, 120), 180, 181, 182])):
            given = q.double(), k[:, :, keys].double(), v[:, :, keys].double()
            exact = fastattn.reference.attention(*given, causal="bottom_right", window=(99, 0))
            out = x.attention(q, window=(99, 0), allow_empty_rows=True)
            errors.setdefault(len(keys), []).append(error(out, exact))
    for without, *others in errors.values():
        assert all(x < 1.1 * without for x in others), errors


def bent(score, b, h, i, j):
    return score * (1 + 0.1 * h) + torch.sin(score) + 0.01 * (i - j) * b


CALLS = {
    "lse": {},
    "sinks": dict(sinks=torch.tensor([0.5, -3.0, 300.0, -torch.inf])),
    "softcap": dict(softcap=20.0),
    "score_mod": dict(score_mod=bent),
}


@pytest.mark.slow
@not_interpreted
def test_scores_are_whole_in_more_rows_than_a_score_mod_captures():
    heads, rows, size = 64, MOST_COPIED // 64 + 1, 8
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, rows, size, generator=draw)
    k, v = torch.randn(2, 1, 2, 20, size, generator=draw)
    caches = [KVCache(1, 2, size, capacity=20, storage=x) for x in (torch.int8, None)]
    for x in caches:
        x.append(k + 10, v)
    packed = q[0].transpose(0, 1), torch.tensor([0, rows])
    given = dict(softcap=9.0, causal=False)
    found, plain = (x.attention(q, **given) for x in caches)
    assert error(found, plain.double()) < 0.02
    few = caches[0].attention(q[:, :, :9], **given)  # captured
    torch.testing.assert_close(found[:, :, :9], few, rtol=2e-4, atol=2e-4)
    given |= dict(row_invariant=True)
    found = caches[0].attention(packed[0], cu_q=packed[1], **given)
    one = caches[0].attention(q[:, :, :1], **given)
    assert torch.equal(found[:1], one[0].transpose(0, 1))
    masks = []

    def observer(run, op, t, o):
        masks.append(t.mask)
        return run(op, t, o)

    with dispatcher.observed(observer):  # no mask (B,H,M,N) in the place of a captured tensor
        caches[0].attention(q, score_mod=lambda s, b, h, i, j: s + 0.1 * h * j, causal=False)
    assert masks == [None]
    with pytest.raises(ValueError, match=r"^q\.dtype: got torch.int64"):
        caches[0].attention(q.long(), **given)


@not_interpreted
@pytest.mark.parametrize("call", ("lse", "sinks", "softcap"))
def test_a_row_has_the_same_bits_among_others(call):
    q, k, v = tensors(40)
    cache = made("int8")
    cache.append(k, v)
    given = dict(CALLS[call], return_lse=True, row_invariant=True)
    whole = cache.attention(q, **given)
    alone = cache.attention(q[:, :, -1:], **given)
    for x, y in zip(whole, alone):
        assert torch.equal(x[:, :, -1:], y)


@not_interpreted
@pytest.mark.parametrize("call", ("lse", "sinks", "score_mod"))
def test_rows_without_a_key_are_empty(call):
    q, k, v = tensors(40)
    cache = made("int8")
    cache.append(k, v)
    cache.free([1])
    given = CALLS[call] | dict(return_lse=True, allow_empty_rows=True)
    q[1] = torch.nan  # garbage of an unused item
    out, lse = cache.attention(q[:, :, :1], **given)
    sinks = given.get("sinks", torch.full((H,), -torch.inf))
    assert not out[1].any() and torch.equal(lse[1, :, 0], sinks) and out[0].isfinite().all()


@not_interpreted
@every_storage
def test_keys_without_an_offset_keep_their_bits(storage):
    """Nothing is subtracted from normal data, from channels that are large, and from few keys."""
    large = torch.ones(D)
    large[:2] = 20.0
    for n, sizes in itertools.product((1, FEWEST // B, 20, 150), (1.0, large)):
        _, k, v = tensors(n, 0.0)
        k[:, :, :1, 5] += 30 * (n > 50)  # the first token is far from the others
        cache = made(storage)
        cache.append(k * sizes, v)
        assert cache.key_offset is None, n
    cache = made(storage)
    cache.append(*(x[:, :, : FEWEST // B - 1] for x in tensors(9)[1:]))
    assert cache.key_offset is None


@not_interpreted
def test_what_is_not_finite_decides_nothing():
    for bad in (torch.nan, torch.inf, -torch.inf):
        _, k, v = tensors(20)
        k[0, 1, 3, 0] = bad
        cache = made("int8")
        cache.append(k, v)
        offset = cache.key_offset
        assert offset.isfinite().all() and offset[1, 0] == 0 and offset[0, 0] < -90
        assert math.isfinite(float(stored(cache)[0][0, 0].sum()))


@not_interpreted
def test_the_first_keys_decide():
    """Those that come while no page is used, by this cache or by a fork."""
    (_, k, v), (_, other, _) = tensors(20), tensors(20, -50.0, seed=1)
    cache = made("int8")
    cache.append(k[:, :, :0], v[:, :, :0])
    assert cache.key_offset is None
    cache.append(k, v)
    offset = cache.key_offset.clone()
    torch.testing.assert_close(offset, k.mean((0, 2)), rtol=0, atol=1.0)
    fork = cache.fork()
    cache.free()
    cache.append(other, v)
    assert torch.equal(cache.key_offset, offset) and torch.equal(fork.key_offset, offset)
    for x in (cache, fork, cache := copy.deepcopy(cache)):
        x.free()
    assert torch.equal(cache.key_offset, offset)
    cache.append(other, v)
    torch.testing.assert_close(cache.key_offset, other.mean((0, 2)), rtol=0, atol=1.0)
    cache.free()
    cache.append(*torch.randn(2, B, HK, 20, D))
    assert cache.key_offset is None


@pytest.mark.slow
@not_interpreted
def test_compiled():
    q, k, v = tensors(40)
    cache = made("int8")
    cache.append(k, v)
    for call, backend in (("sinks", None), ("softcap", None), ("softcap", "reference")):
        given = dict(CALLS[call], return_lse=True, backend=backend)
        whole = torch.compile(cache.attention, backend="eager", fullgraph=True)
        for x, y in zip(whole(q, **given), cache.attention(q, **given), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@not_interpreted
def test_wrong_arguments_are_named():
    q, k, v = tensors(40)
    cache = made("int8")
    cache.append(k, v)
    wrong = {
        "sinks": (q, dict(sinks=torch.zeros(H + 1))),
        "sinks.dtype": (q, dict(sinks=torch.zeros(H, dtype=torch.int64))),
        "k": (q[..., 1:], dict(softcap=2.0)),
        "softcap": (q, dict(softcap=-2.0)),
        "place": (q, dict(place=3, softcap=2.0)),
    }
    for name, (x, given) in wrong.items():
        with pytest.raises((ValueError, TypeError), match=f"^{name}: got"):
            cache.attention(x, **given)
    with pytest.raises(TypeError, match="sinks: got list"):
        cache.attention(q, sinks=[0.0] * H)
    with pytest.raises(NotImplementedError, match="score_mod: the kernels of this device run no"):
        cache.attention(q, score_mod=bent, backend="reference")  # as any cache
