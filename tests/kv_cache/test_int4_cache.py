"""A cache with numbers of four bits: after any changes it has the bytes of its rows, and attention
to it is that to the dequantised rows, with the documented error."""

import copy
import pickle
import random

import pytest
import torch

import fastattn
from fastattn import KVCache, mla
from fastattn.call.int4 import dequantised_int4, quantised_int4
from fastattn.call.spec import Feature
from tests.kv_cache.test_cache import HK, B, H, Model, check_changes
from tests.semantics.test_int4 import every_backend
from tests.support.backends import declares, not_interpreted
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), not_interpreted]

D, DV = 64, 32
PAGES = (None, 1, 7, 16, 129)


class Stored(Model):
    """A cache, and the rows in four bits that each item should have."""

    def __init__(self, page_size, seed=0, dtype=torch.float32, **more):
        self.generator = torch.Generator().manual_seed(seed)
        given = dict(value_dim=DV, capacity=40, page_size=page_size, dtype=dtype) | more
        self.cache = KVCache(B, HK, D, storage="int4", **given)
        self.rows = [[] for _ in range(B)]

    def new(self, n):
        size = dict(generator=self.generator)
        rows = torch.randn(n, HK, D, **size), torch.randn(n, HK, DV, **size)
        return tuple(x.to(self.cache.dtype) for x in rows)

    def check(self, name="reference", rows=2, close=1e-5):
        cache = self.cache
        assert cache.lengths.tolist() == [len(x) for x in self.rows]
        q = torch.randn(len(self.rows), H, rows, D, generator=self.generator).to(cache.dtype)
        out, lse = cache.attention(q, return_lse=True, allow_empty_rows=True, backend=name)
        for b, mine in enumerate(self.rows):
            given = [q[b : b + 1].double()]
            for at, pages in enumerate((cache.k_pages, cache.v_pages)):
                empty = torch.zeros(0, HK, (D, DV)[at], dtype=cache.dtype)
                numbers = torch.stack([row[at] for row in mine]) if mine else empty
                expected = quantised_int4(numbers)
                found = pages[cache.block_table[b]].flatten(0, 1)[: len(mine)]
                assert torch.equal(found, expected)
                values = dequantised_int4(expected, torch.float64)
                given.append(values.transpose(0, 1)[None])
            exact = fastattn.attention(*given, causal="bottom_right", return_lse=True)
            for x, y in zip((out, lse), exact, strict=True):
                torch.testing.assert_close(x[b : b + 1].double(), y, rtol=close, atol=close)


@every_backend
@parametrize("page_size", PAGES, fast=2)
def test_any_sequence_of_changes(name, page_size):
    declares(name, torch.float32, Feature.INT4)
    chance = random.Random(page_size or 0)
    check_changes(Stored(page_size, grow=True), chance, 30, 3, name=name)


@every_backend
def test_growth_keeps_rows(name):
    declares(name, torch.float32, Feature.INT4)
    for page_size in PAGES:
        model = Stored(page_size, capacity=3, grow=True)
        for counts in ([2, 2, 2], [9, 0, 1], [30, 30, 1]):
            model.append(counts)
            model.check(name)


@every_backend
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
def test_queries_of_every_dtype(name, dtype):
    declares(name, dtype, Feature.INT4)
    model = Stored(7, dtype=dtype)
    model.append([5, 5, 5])
    model.append([3, 0, 9])
    model.check(name, close=0.05 if dtype.itemsize == 2 else 1e-5)
    q = torch.randn(4, 2 * HK, D).to(dtype)  # rows of all items, one after the other
    cu_q = torch.tensor([0, 1, 1, 4])
    packed = model.cache.attention(q, cu_q=cu_q, backend=name)
    alone = model.cache.fork([2]).attention(q[1:].transpose(0, 1)[None], backend=name)
    close = dict(rtol=0, atol=0.05) if dtype.itemsize == 2 else {}
    torch.testing.assert_close(packed[1:].transpose(0, 1)[None], alone, **close)


@every_backend
def test_a_prompt_and_its_steps(name):
    """A packed prefill, then steps of one token, as the whole at once: the same bytes."""
    declares(name, torch.bfloat16, Feature.INT4)
    steps, whole = (KVCache(B, HK, D, capacity=40, page_size=16, storage="int4") for _ in range(2))
    k, v = torch.randn(2, B, HK, 20, D)
    cu = torch.tensor([0, 17, 34, 51])
    packed = (x[:, :, :17].transpose(1, 2).flatten(0, 1) for x in (k, v))
    steps.append(*packed, cu)
    for at in range(17, 20):
        steps.append(k[:, :, at : at + 1], v[:, :, at : at + 1])
    whole.append(k, v)
    q = torch.randn(B, H, 1, D)
    assert torch.equal(steps.attention(q, backend=name), whole.attention(q, backend=name))


@every_backend
@pytest.mark.parametrize("kind", ("copy", "deepcopy", "pickle", "fork"))
def test_copies(name, kind):
    declares(name, torch.float32, Feature.INT4)
    model = Stored(4)
    model.append([5, 1, 3])
    make = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
        "fork": lambda cache: cache.fork(),
    }[kind]
    other = model.copy(make(model.cache), [list(x) for x in model.rows])
    assert other.cache.storage == "int4" and repr(other.cache) == repr(model.cache)
    for x in (other, model):
        x.append([2, 2, 2])
    for x in (other, model):
        x.check(name)


@every_backend
@pytest.mark.parametrize("page", (None, 7))
def test_latent(name, page):
    """Values are the first blocks of keys: the same bytes, and the results of an ordinary cache."""
    declares(name, torch.float32, Feature.INT4)
    given = dict(capacity=20, page_size=page, storage="int4")
    plain = KVCache(B, 1, 96, value_dim=64, **given)
    latent = KVCache(B, 1, 96, latent=64, **given)
    k = torch.randn(B, 1, 9, 96)
    plain.append(k, k[..., :64]), latent.append(k)
    assert latent.v_pages.shape[-1] == 40 and latent.nbytes * 100 == plain.nbytes * 60
    assert latent.v_pages.data_ptr() == latent.k_pages.data_ptr()
    q = torch.randn(B, H, 2, 96)
    outs = [x.attention(q, backend=name) for x in (plain, latent)]
    assert outs[0].shape == (B, H, 2, 64)
    torch.testing.assert_close(*outs)
    weights = mla.split(torch.randn(H * (16 + 8), 64) / 8, H, 16)
    q, rotated = torch.randn(B, H, 1, 16), torch.randn(B, H, 1, 32)
    rows = dequantised_int4(quantised_int4(k), torch.float32)
    expected = mla.decode(q, rotated, rows, weights)
    found = mla.decode(q, rotated, latent, weights, backend=name)
    torch.testing.assert_close(found, expected)


@every_backend
def test_modes(name):
    """Autocast casts queries and new rows, not pages; q's gradient raises."""
    declares(name, torch.float32, Feature.INT4)
    cache = KVCache(1, 2, 32, capacity=8, page_size=4, storage="int4")
    with torch.autocast("cpu", torch.bfloat16):
        cache.append(*torch.randn(2, 1, 2, 5, 32).bfloat16())
        out = cache.attention(torch.randn(1, 2, 1, 32).bfloat16(), backend=name)
    assert out.dtype == torch.float32
    with torch.inference_mode():
        cache.append(*torch.randn(2, 1, 2, 1, 32))
    q = torch.randn(1, 2, 1, 32, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"four bits a number.* no gradient"):
        cache.attention(q, backend=name).sum().backward()


@every_backend
def test_a_step_is_compiled_and_exported(name, tmp_path):
    declares(name, torch.float32, Feature.INT4)
    cache = KVCache(2, 2, 64, capacity=20, page_size=8, storage="int4")
    cache.append(*torch.randn(2, 2, 2, 11, 64))
    q = torch.randn(2, 4, 1, 64)
    expected = cache.attention(q, backend=name)

    class Step(torch.nn.Module):
        def forward(self, q, k, v, table, lengths):
            rows, cu_q = q.transpose(1, 2).flatten(0, 1), torch.arange(3)
            out = fastattn.attention_packed(
                *(rows, k, v, cu_q),
                **dict(block_table=table, key_lengths=lengths, max_q=1, backend=name),
            )
            return out.unflatten(0, (2, 1)).transpose(1, 2)

    given = q, cache.k_pages, cache.v_pages, cache.block_table, cache.lengths
    compiled = torch.compile(Step(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), expected)
    torch.export.save(torch.export.export(Step(), given), tmp_path / "step.pt2")
    program = torch.export.load(tmp_path / "step.pt2")
    torch.testing.assert_close(program.module()(*given), expected)


@every_backend
@pytest.mark.parametrize("d", (64, 128))
def test_the_error_is_as_documented(name, d):
    """Errors against float64 of the appended rows: typical of all outputs, and in the worst row."""
    declares(name, torch.float32, Feature.INT4)
    generator = torch.Generator().manual_seed(d)
    k, v = torch.randn(2, 4, 4, 1000, d, generator=generator)
    q = torch.randn(4, 8, 4, d, generator=generator)
    exact = fastattn.reference.attention(q.double(), k.double(), v.double(), causal="bottom_right")
    cache = KVCache(4, 4, d, capacity=1000, page_size=48, storage="int4")
    cache.append(k, v)
    error = cache.attention(q, backend=name).double() - exact
    typical = error.norm() / exact.norm()
    worst = (error.norm(dim=-1) / exact.norm(dim=-1)).max()
    assert 0.1 < typical <= 0.12 and 0.14 < worst <= 0.18


def test_sizes_and_names():
    sizes = dict(capacity=100, page_size=16, dtype=torch.bfloat16)
    cache = KVCache(2, 3, 64, value_dim=32, storage="int4", **sizes)
    assert cache.nbytes == 14 * 16 * 3 * (40 + 20)  # 5 bits a number
    assert cache.dtype == torch.bfloat16 and cache.storage == "int4"
    assert cache.k_scales is None and cache.v_scales is None
    assert cache.k_pages.shape == (14, 16, 3, 40) and cache.v_pages.shape == (14, 16, 3, 20)
    assert cache.k_pages.dtype == torch.uint8
    assert "3 heads of 64, int4, 0 of 14 pages" in repr(cache)


X = torch.zeros(2, 3, 1, 64)
WRONG = {
    "head_dim: got 48, expected a multiple of 32": lambda c: KVCache(
        1, 2, 48, capacity=4, storage="int4"
    ),
    "value_dim: got 8, expected a multiple of 32": lambda c: KVCache(
        1, 2, 64, value_dim=8, capacity=4, storage="int4"
    ),
    "latent: got 40, expected a multiple of 32": lambda c: KVCache(
        1, 2, 64, latent=40, capacity=4, storage="int4"
    ),
    "storage: got 'int5', expected None for torch.float32, .*int4": lambda c: KVCache(
        1, 2, 64, capacity=4, storage="int5"
    ),
    "storage: got torch.uint8, expected None": lambda c: KVCache(
        1, 2, 64, capacity=4, storage=torch.uint8
    ),
    r"k: got \(2, 3, 1, 40\), expected .* D = 64": lambda c: c.append(X[..., :40], X),
    r"v: got \(2, 3, 1, 32\), expected .* D = 64": lambda c: c.append(X, X[..., :32]),
    r"k: got \(6, 1, 64\), expected \(T, Hk, D\) with Hk = 3": lambda c: c.append(
        X.flatten(0, 1), X.flatten(0, 1), torch.tensor([0, 1, 2])
    ),
    "k: got torch.uint8 on cpu, expected torch.float32": lambda c: c.append(X.byte(), X),
    "v: got torch.float64 on cpu, expected torch.float32": lambda c: c.append(X, X.double()),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_refused(message):
    cache = KVCache(2, 3, 64, capacity=9, page_size=4, storage="int4")
    cache.append(X, X)
    with pytest.raises((ValueError, TypeError), match=message):
        WRONG[message](cache)
    assert cache.lengths.tolist() == [1, 1]


def test_a_non_finite_number_makes_its_block_nan():
    """Only 32 columns of the head that has it, where a value does."""
    for bad in (torch.nan, torch.inf):
        cache = KVCache(1, 2, 64, capacity=9, page_size=4, storage="int4")
        k = torch.ones(1, 2, 5, 64)
        v = k.clone()
        v[0, 1, 2, 35] = bad
        cache.append(k, v)
        out = cache.attention(torch.ones(1, 2, 1, 64), backend="reference")
        expected = torch.ones(1, 2, 1, 64)
        assert out[0, 1, 0, 32:].isnan().all()
        expected[0, 1, 0, 32:] = out[0, 1, 0, 32:] = 1
        torch.testing.assert_close(out, expected)
