"""Steps of decoding: one native call each for `append` and `attention`, with the results of the
general paths; and where these run instead."""

import contextlib
import copy

import pytest
import torch

import fastattn
from fastattn import KVCache
from fastattn.backends.native import libraries, marshalling
from fastattn.dispatch import fast_path
from fastattn.kv_cache import cache as module
from tests.support.backends import INTERPRETED

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="about the native library"),
    pytest.mark.skipif(
        not hasattr(marshalling.extension, "append_rows"),
        reason=f"no extension: {libraries.extension_unavailable()}",
    ),
]
B, HK, H, D = 2, 2, 4, 32


@pytest.fixture
def ran(monkeypatch):
    """A list to which each `append` and `attention` adds whether it was one native call."""
    found = []

    def seen(function):
        def call(*given):
            result = function(*given)
            found.append(result is not None)
            return result

        return call

    monkeypatch.setattr(module, "append_rows", seen(marshalling.append_rows))
    monkeypatch.setattr(fast_path, "attend", seen(marshalling.attend))
    return found


@contextlib.contextmanager
def general():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "append_rows", lambda *given: None)
        patch.setattr(fast_path, "attend", lambda *given: None)
        yield


def tokens(n=1, heads=HK, dtype=torch.float32, seed=0, dim=D):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(B, heads, n, dim, generator=made).to(dtype)


def filled(n=20, **given):
    cache = KVCache(B, HK, D, **dict(capacity=64) | given)
    for x in cache._pool.kept.values():  # equal where nothing is written
        x.untyped_storage().fill_(0)
    k = tokens(n, dtype=cache.dtype, seed=1)
    latent = given.get("latent") is not None
    cache.append(k, *(() if latent else (tokens(n, dtype=cache.dtype, seed=2),)))
    return cache


KINDS = {
    "contiguous": {},
    "pages": dict(page_size=16),
    "one key a page": dict(page_size=1),
    "bfloat16": dict(dtype=torch.bfloat16),
    "float64": dict(dtype=torch.float64),
    "int8": dict(storage=torch.int8),
    "float8": dict(storage=torch.float8_e4m3fn, dtype=torch.float16),
    "int4": dict(storage="int4"),
    "latent": dict(latent=16),
    "growing": dict(capacity=21, grow=True),
}


def state(cache):
    kept = (x.untyped_storage() for x in cache._pool.kept.values())
    raw = [torch.empty(0, dtype=torch.uint8).set_(x).clone() for x in kept]
    return cache.lengths, cache.block_table, *raw


@pytest.mark.parametrize("name", KINDS)
def test_steps_have_the_results_of_the_general_paths(name):
    given = KINDS[name]
    caches = filled(**given), filled(**given)
    for n in (1, 1, 3, 2, 1):
        dtype = caches[0].dtype
        q, k, v = tokens(n, H, dtype, n), tokens(n, HK, dtype, n + 10), tokens(n, HK, dtype, n + 20)
        new = (k,) if "latent" in given else (k, v)
        found = caches[0].step(q, *new)
        with general():
            expected = caches[1].step(q, *new)
        assert found.equal(expected) and found.stride() == expected.stride()
        assert all(map(torch.equal, *map(state, caches)))
        assert caches[0]._slack == caches[1]._slack


def test_a_step_is_one_native_call_each(ran):
    cache = filled()
    ran.clear()
    for _ in range(3):
        cache.step(tokens(1, H), tokens(), tokens())
    assert ran == [True] * 6
    assert cache.lengths.tolist() == [23] * B
    for n in (1, 3, 1):  # rows of an item follow each other in memory
        cache.attention(torch.randn(B, n, H, D).transpose(1, 2))
    assert ran == [True] * 9


ARGUMENTS = {
    "not causal": dict(causal=False),
    "a window": dict(window=(2, 0)),
    "a window, not causal": dict(window=(0, 0), causal=False),
    "causal from the first key": dict(causal=True),
    "a mask": dict(mask=torch.arange(64) % 3 > 0),
    "a bias": dict(mask=torch.linspace(-1, 1, 64)),
    "a mask of no column": dict(mask=torch.zeros(B, 1, 1, 1)),
    "the LSE": dict(return_lse=True),
    "slopes": dict(alibi_slopes=torch.rand(H)),
    "sinks": dict(sinks=torch.randn(H)),
    "a softcap": dict(softcap=3.0),
    "a scale": dict(scale=0.5),
    "invariant rows": dict(row_invariant=True),
    "empty rows": dict(allow_empty_rows=True, window=(2, 0)),
}
GENERAL = {  # which may end in one native call, too
    "a place": dict(causal=False, place=fastattn.Place(bottom_right=True)),
    "drawn dropout": dict(dropout_p=0.5),
    "a function": dict(score_mod=lambda s, b, h, i, j: s + j),
}


@pytest.mark.parametrize("name", ARGUMENTS | GENERAL)
@pytest.mark.parametrize("M", [1, 3])
def test_attention_has_the_results_of_the_general_path(ran, M, name):
    cache, q = filled(), tokens(M, H).transpose(1, 2).contiguous().transpose(1, 2)
    given = (ARGUMENTS | GENERAL)[name]
    ran.clear()
    torch.manual_seed(0)
    found = cache.attention(q, **given)
    assert name in GENERAL or ran == [True]
    torch.manual_seed(0)
    with general():
        expected = cache.attention(q, **given)
    if not isinstance(found, tuple):
        found, expected = (found,), (expected,)
    for x, y in zip(found, expected, strict=True):
        assert x.equal(y) and x.stride() == y.stride()


def test_gradients_of_q_take_the_general_path(ran):
    cache, q = filled(), tokens(1, H).requires_grad_()
    ran.clear()
    (grad,) = torch.autograd.grad(cache.attention(q).sum(), q)
    assert grad.any() and not any(ran)


def test_rows_without_keys_are_refused_or_empty(ran):
    cache = KVCache(B, HK, D, capacity=8)
    with pytest.raises(ValueError, match="see a key"):
        cache.attention(tokens(1, H))
    assert not cache.attention(tokens(1, H), allow_empty_rows=True).any()
    cache.append(tokens(2), tokens(2))
    with pytest.raises(ValueError, match="see a key"):
        cache.attention(tokens(3, H))
    cache.truncate([2, 0])
    with pytest.raises(ValueError, match="item 1 on 0 keys"):
        cache.attention(tokens(1, H))


REFUSED = {  # of new keys: an error, and what it says
    "another width": (lambda k: k[..., :8], "expected"),
    "another number of heads": (lambda k: k[:, :1], "expected"),
    "another number of items": (lambda k: k[:1], "expected"),
    "another dtype": (lambda k: k.double(), "expected torch.float32"),
    "another number of rows": (lambda k: k.repeat(1, 1, 2, 1), "expected"),
    "too many rows": (lambda k: k.repeat(1, 1, 60, 1), "is full|rows"),
    "a gradient": (lambda k: k.requires_grad_(), "requires grad"),
    "three dimensions": (lambda k: k[0], "expected"),
    "no tensor": (lambda k: k.tolist(), "expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_written(name):
    cache = filled()
    cache.append(tokens(), tokens())
    before = state(cache)
    change, words = REFUSED[name]
    for given in ((change(tokens()), tokens()), (tokens(), change(tokens()))):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
            cache.append(*given)
    assert all(map(torch.equal, before, state(cache)))
    both = change(tokens()) if name == "too many rows" else tokens().double()
    with pytest.raises((ValueError, RuntimeError)):
        cache.append(both, both)
    assert all(map(torch.equal, before, state(cache)))


def of_own_pages(cache):
    return [x[:, :1].transpose(1, 2)[:B] for x in (cache.k_pages, cache.v_pages)]


TAKEN = {  # and whether rows of this kind are one native call
    "rows first": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), True),
    "a slice": (lambda x: torch.cat([x, x], 1)[:, ::2], True),
    "expanded": (lambda x: x[:, :1].expand(B, HK, 1, D), True),
    "columns with gaps": (lambda x: torch.cat([x, x], -1)[..., ::2], False),
    "no rows": (lambda x: x[:, :, :0], False),
    "negated": (torch._neg_view, False),
}


@pytest.mark.parametrize("name", TAKEN)
def test_rows_of_any_layout(ran, name):
    change, native = TAKEN[name]
    caches = filled(), filled()
    for cache in caches:
        cache.append(tokens(), tokens())
    ran.clear()
    new = change(tokens(seed=5)), change(tokens(seed=6))
    caches[0].append(*new)
    assert ran == [native]
    with general():
        caches[1].append(*(x.clone() for x in new))
    q = tokens(1, H)
    assert torch.equal(caches[0].attention(q), caches[1].attention(q))


def test_rows_that_are_views_of_the_pages_are_copied_first(ran):
    cache = filled()
    cache.append(tokens(), tokens())
    ran.clear()
    k, v = of_own_pages(cache)
    expected = k.clone(), v.clone()
    cache.append(k, v)
    assert ran == [False]
    last = int(cache.lengths[0]) - 1
    for pages, x in zip((cache.k_pages, cache.v_pages), expected):
        assert torch.equal(pages[:, last : last + 1].transpose(1, 2), x)


def test_modes_see_the_operations(ran):
    cache = filled()
    cache.append(tokens(), tokens())

    class Seen(torch.overrides.TorchFunctionMode):
        names = ()

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.names = *self.names, getattr(function, "__name__", "")
            return function(*args, **kwargs or {})

    ran.clear()
    with Seen() as mode:
        cache.append(tokens(), tokens())
    assert not any(ran) and mode.names


def test_autocast_casts_new_rows(ran):
    cache = filled(dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache.step(tokens(1, H), tokens(), tokens())
    assert not ran[0] and cache.lengths.tolist() == [21] * B


def test_any_mode_of_gradients_may_make_the_steps(ran):
    """Lengths and pages are no inference tensors afterwards: a gradient may follow."""
    cache = filled()
    ran.clear()
    for context in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with context():
            cache.step(tokens(1, H), tokens(), tokens())
    assert ran == [True] * 6
    q = tokens(1, H).requires_grad_()
    cache.attention(q).sum().backward()
    assert q.grad.any()


def test_autograd_knows_that_the_cache_has_changed():
    cache = filled()
    q = tokens(1, H).requires_grad_()
    out = cache.attention(q)
    versions = cache.k_pages._version, cache.v_pages._version, cache._lengths._version
    cache.append(tokens(), tokens())
    now = cache.k_pages._version, cache.v_pages._version, cache._lengths._version
    assert all(x < y for x, y in zip(versions, now))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_fork_that_grows_the_pool_is_followed(ran):
    """The pages of both are new ones then: the kept steps are not for them."""
    cache = filled(capacity=24, page_size=8, grow=True)
    fork = cache.fork([0, 1])
    for x in (cache, fork):
        x.append(tokens(1, seed=3), tokens(1, seed=4))
    k, q = cache.k_pages, tokens(1, H)
    cache.attention(q)
    fork.append(tokens(30, seed=5), tokens(30, seed=6))
    assert fork.k_pages is not k
    for _ in range(3):
        cache.append(tokens(1, seed=7), tokens(1, seed=8))
    alone = filled(capacity=24)
    for seed in (3, 7, 7, 7):
        alone.append(tokens(1, seed=seed), tokens(1, seed=seed + 1))
    torch.testing.assert_close(cache.attention(q), alone.attention(q))


def test_an_item_without_new_rows_leaves_its_page_to_others(ran):
    """A fork that has copied the page of one item alone does not go on in that of the other."""
    cache = filled(grow=True)
    fork, k = cache.fork(), torch.randn(1, HK, D)
    fork.append(k, k, torch.tensor([0, 1, 1]))
    cache.append(tokens(seed=3), tokens(seed=3))
    q = tokens(1, H)
    before = cache.attention(q)
    fork.append(tokens(seed=4), tokens(seed=4))
    assert torch.equal(cache.attention(q), before)
    assert fork.lengths.tolist() == [22, 21]


def test_rows_are_held_against_the_shortest_item_of_now(ran):
    """After steps, which make it longer, and after truncation."""
    cache, q = filled(2), torch.randn(B, 3, H, D).transpose(1, 2)
    with pytest.raises(ValueError, match="see a key"):
        cache.attention(q)
    cache.append(tokens(), tokens())
    for _ in range(3):
        cache.step(tokens(1, H), tokens(), tokens())
    ran.clear()
    cache.attention(q)
    assert ran == [True]
    cache.truncate(2)
    with pytest.raises(ValueError, match="see a key"):
        cache.attention(q)


@pytest.mark.slow
def test_steps_in_compiled_code():
    """Where its graph breaks, torch.compile begins again with a function of ours."""
    caches = filled(), filled()

    def model(cache, q, k, v):
        cache.append(k, v)
        torch._dynamo.graph_break()
        return cache.step(q, k, v) + cache.attention(q, score_mod=lambda s, b, h, i, j: s + i)

    for n in range(3):
        given = tokens(1, H, seed=n), tokens(seed=n), tokens(seed=n + 5)
        found = torch.compile(model, backend="eager")(caches[0], *given)
        torch.testing.assert_close(found, model(caches[1], *given))
    assert torch.equal(caches[0].lengths, caches[1].lengths)


def test_copies_make_steps_of_their_own():
    cache = filled()
    cache.append(tokens(), tokens())
    cache.attention(tokens(1, H))
    copied = copy.deepcopy(cache)
    copied.step(tokens(1, H), tokens(seed=9), tokens(seed=9))
    assert cache.lengths.tolist() == [21] * B and copied.lengths.tolist() == [22] * B
    assert not torch.equal(cache.k_pages, copied.k_pages)


# ------------------------------------------------------------------------------------- truncation


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(
    "lengths", [18, [20, 17], torch.tensor([17, 19]), torch.tensor(18)], ids=str
)
def test_rejected_tokens_are_dropped_in_place(ran, lengths, page_size):
    cache, alone = filled(page_size=page_size), filled(page_size=page_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "_truncate", None)  # nothing else is done
        cache.truncate(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "_shorten", lambda *given: False)
        alone.truncate(lengths)
    ran.clear()
    for x in (cache, alone):
        for seed in range(3):
            x.append(tokens(seed=seed), tokens(seed=seed + 5))
    assert ran[:3] == [True] * 3
    assert torch.equal(cache.lengths, alone.lengths)
    assert torch.equal(cache.block_table, alone.block_table)
    assert cache.pages_free == alone.pages_free
    assert torch.equal(cache.attention(tokens(1, H)), alone.attention(tokens(1, H)))


@pytest.mark.parametrize(
    "lengths", [16, 0, [20, 15], [True, 20], [20.0, 20], 21, -1, [20], "20"], ids=str
)
def test_other_truncations_take_the_general_path(lengths):
    """Those that release pages, and wrong ones."""
    cache = filled(page_size=16)
    try:
        cache.truncate(lengths)
    except (ValueError, TypeError, RuntimeError):
        assert cache.lengths.tolist() == [20, 20]
    else:
        kept = lengths if isinstance(lengths, list) else [lengths]
        assert cache.lengths.tolist() == (kept * B)[:B]
        assert cache.pages_free > 4 or lengths == [20]


REFUSED_LENGTHS = (torch.tensor(3, dtype=torch.int8), {20}, 3.0, None, [None, 1], torch.ones(1, 2))


@pytest.mark.parametrize("lengths", REFUSED_LENGTHS, ids=str)
def test_wrong_lengths_have_the_errors_of_the_general_path(lengths):
    found = []
    for refuse in (False, True):
        cache = filled(page_size=16)
        with pytest.MonkeyPatch.context() as patch:
            if refuse:
                patch.setattr(KVCache, "_shorten", lambda *given: False)
            with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
                cache.truncate(lengths)
        found.append((type(error.value), str(error.value)))
        assert cache.lengths.tolist() == [20, 20]
    assert found[0] == found[1]


def test_truncation_leaves_gradients_of_earlier_calls():
    cache, q = filled(), tokens(1, H).requires_grad_()
    out = cache.attention(q)
    cache.truncate(15)
    out.sum().backward()
    assert q.grad.any()


def test_memory_of_pages_that_moves(ran):
    """As torch.multiprocessing moves it to share it."""
    caches = [filled(page_size=16, storage=x) for x in (None, None, torch.int8, torch.int8)]
    for cache in caches:
        cache.append(tokens(), tokens())
    for cache in caches[::2]:
        for x in (*cache._pool.kept.values(), cache._table):
            x.share_memory_()
    ran.clear()
    for cache in caches:
        cache.append(tokens(seed=3), tokens(seed=4))
    assert ran == [True] * 4
    for moved, left in (caches[:2], caches[2:]):
        assert torch.equal(moved.attention(tokens(1, H)), left.attention(tokens(1, H)))


def test_a_fork_keeps_the_keys_that_the_other_drops():
    """Pages that a fork reads are not written to in place."""
    cache = filled(grow=True)
    fork = cache.fork()
    q = tokens(1, H)
    before = fork.attention(q)
    cache.truncate(15)
    for seed in range(4):
        cache.append(tokens(seed=seed), tokens(seed=seed))
    assert torch.equal(fork.attention(q), before)
    del fork
    cache.truncate(17)
    cache.append(tokens(seed=8), tokens(seed=9))
    assert cache.lengths.tolist() == [18] * B


def test_users_of_pages_after_forks_of_all_items():
    cache = filled(page_size=8)
    forks = [cache.fork(), cache.fork(), cache.fork([1, 1])]
    users = cache._pool.users
    assert users.sum() == (2 + 2 + 2 + 2) * 3
    del forks
    assert users.sum() == 2 * 3 and users.max() == 1


def test_misuse_raises_and_does_not_crash():
    cache = filled()
    cache.append(tokens(), tokens())
    right = cache._step
    k = tokens()
    tensors = right[3]
    for step in (
        *((), right[:5], (3, *right[1:]), (*right[:2], b"x", *right[3:]), "step"),
        *((*right[:3], x, *right[4:]) for x in ((), tensors[1:], (3, *tensors[1:]), None)),
    ):
        with pytest.raises((TypeError, ValueError, SystemError)):
            marshalling.append_rows(step, k, k, 1)
    for lengths in (torch.zeros(3, dtype=torch.int64), torch.zeros(B), torch.zeros(B, 1).long()):
        with pytest.raises(ValueError, match="lengths"):
            marshalling.append_rows((*right[:4], lengths, right[5]), k, k, 1)
    for given in ((), (right,), (right, k, k), (right, k, k, "1")):
        with pytest.raises(TypeError):
            marshalling.append_rows(*given)
    assert marshalling.append_rows(right, k, None, 1) is None
    assert cache.lengths.tolist() == [21] * B
