"""New rows of a cache: the CPU library writes the bits that torch's operations write, to the same
places. It leaves rows to them that it may not write."""

from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import KVCache
from fastattn.backends.native import libraries
from fastattn.backends.native.marshalling import append_rows
from fastattn.call.int4 import BLOCK
from fastattn.call.quantisation import NAMES
from fastattn.kv_cache import cache, new_rows
from tests.support.backends import every_dtype, not_interpreted
from tests.support.cases import DTYPES
from tests.support.marks import parametrize

pytestmark = not_interpreted

STORAGES = {"as given": None, "int4": "int4"} | {name: dtype for dtype, name in NAMES.items()}
every_storage = pytest.mark.parametrize("storage", STORAGES)
WIDTHS = (1, 3, 8, 31, 32, 33, 64, 96, 160)
MOST = torch.finfo(torch.float32).max
SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, MOST, -MOST, 3.39e38, 3e38, -3e38)
SPECIAL += (2.0**-126, 65504.0, 1e-45, -1e-45, 1e-40, -1e-39, 6e-8, -6e-5, 448.0, -127.0)
SPECIAL += (1e200, -1e200, 1e-300)


def rows_of(dtype, n, d, seed=0):
    """Rows (n,d) of all sizes: numbers alike, or far apart, or equal; halves, which stay
    halves when they are divided by a scale; in some rows a few that are special."""
    generator = torch.Generator().manual_seed(seed)
    size = dict(generator=generator, dtype=torch.float64)

    def powers(most, *shape):
        return 2.0 ** torch.randint(-most, most, shape, generator=generator)

    def chosen(share, *shape):
        return torch.rand(*shape, **size) < share

    sizes = torch.where(chosen(0.5, n, 1), powers(9, n, 1), powers(140, n, 1))
    x = torch.randn(n, d, **size) * sizes
    x = torch.where(chosen(0.3, n, 1), x * powers(60, n, d), x)
    halves = torch.randint(-254, 255, (n, d), generator=generator) / 2
    halves[:, 0] = torch.tensor([127, 448, 57344], dtype=halves.dtype)[torch.arange(n) % 3]
    x = torch.where(chosen(0.2, n, 1), halves, x)
    halves = torch.randint(0, 31, (n, d), generator=generator) / 2
    halves[:, :2] = torch.tensor([0.0, 15.0])[:d]
    x = torch.where(chosen(0.2, n, 1), halves, x)
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    some = special[torch.randint(len(special), (n, d), generator=generator)]
    x = torch.where(chosen(0.05, n, 1), some[:, :1], x)
    return torch.where(chosen(0.5, n, 1) & chosen(0.03, n, d), some, x).to(dtype)


@contextmanager
def by_torch():
    """Let torch's operations write all rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_rows, "_is_direct", lambda *given: False)
        patch.setattr(cache, "append_rows", lambda *given: None)
        yield


@contextmanager
def counted():
    """The names of the rows that the library writes."""
    before, found = new_rows._append, []

    def step(*given):
        n = append_rows(*given)
        found.extend([] if n is None else ["k"] if given[2] is None else ["k", "v"])
        return n

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            new_rows, "_append", lambda given, *more: (before(given, *more), found.extend(given))
        )
        patch.setattr(cache, "append_rows", step)
        yield found


def filled(changes, **given):
    cache = KVCache(**given)
    for change in changes:
        cache.append(*change)
    return cache


def other_rows(changes, **given):
    """Names of items and tensors of which the library writes other bits than torch."""
    with counted() as direct:
        found = filled(changes, **given)
    assert len(direct) == 2 * len(changes)
    with by_torch():
        expected = filled(changes, **given)
    assert torch.equal(found.lengths, expected.lengths)
    for b in range(found.batch):
        both = found._rows(b, 0), expected._rows(b, 0)
        for name in both[1]:
            x, y = (of[name].contiguous().view(torch.uint8) for of in both)
            if not torch.equal(x, y):
                yield f"item {b}, {name}"


def appended(dtype, d, dv, rows=60, seed=0):
    """Appended one after the other to two items of three heads: a prompt, a single token, and
    sequences of several lengths."""
    draw = rows_of(dtype, 9 * rows, max(d, dv), seed).view(3, -1, 3, max(d, dv))
    k, v = draw[..., :d], draw.flip(1)[..., :dv]
    dense = [tuple(x[:2, i:j].transpose(1, 2) for x in (k, v)) for i, j in ((0, rows), (5, 6))]
    return [*dense, (k[2, :rows], v[2, :rows], torch.tensor([0, rows // 3, rows]))]


def widths(storage):
    return [d for d in WIDTHS if storage != "int4" or d % BLOCK == 0]


@every_storage
def test_many_items_of_few_rows(storage):
    """A task of the library has rows of many items, and some items have none."""
    counts = torch.randint(0, 4, (150,), generator=torch.Generator().manual_seed(4))
    counts[:2] = torch.tensor([0, 40])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    k, v = torch.randn(2, int(cu[-1]), 2, 32)
    sizes = dict(batch=150, heads=2, head_dim=32, capacity=90, page_size=5)
    given = dict(dtype=torch.float32, storage=STORAGES[storage])
    assert not list(other_rows([(k, v, cu), (v, k, cu)], **sizes, **given))


@every_storage
def test_pages_of_any_layout(storage):
    """A page has the rows of a head one after the other, also after growth. The pages of caches
    that were saved before had those of a token; they are written and read as well."""
    of = STORAGES[storage]
    sizes = dict(batch=2, heads=3, head_dim=64, dtype=torch.float32, storage=of, page_size=7)
    cache = filled(appended(torch.float32, 64, 64), capacity=8, grow=True, **sizes)
    other = KVCache(capacity=8, grow=True, **sizes)
    tokens = {x: y.contiguous() for x, y in other._pool.kept.items()}
    other._pool.kept = tokens
    for change in appended(torch.float32, 64, 64)[1:2]:
        other.append(*change)
    assert all(x is tokens[name] for name, x in other._pool.kept.items())
    for pages in (cache.k_pages, cache.v_pages):
        assert pages.stride(1) == pages.shape[3] and pages.stride(2) == 7 * pages.shape[3]
    plain = filled(appended(torch.float32, 64, 64)[1:2], capacity=8, grow=True, **sizes)
    q = torch.randn(2, 3, 1, 64)
    found, expected = (x.attention(q) for x in (other, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@every_dtype
@every_storage
def test_rows_have_the_bits_of_torchs_operations(storage, dtype):
    of = STORAGES[storage]
    for d, dv in zip(widths(storage), reversed(widths(storage)), strict=True):
        sizes = dict(batch=2, heads=3, head_dim=d, value_dim=dv, dtype=DTYPES[dtype], storage=of)
        for page_size in (None, 7):
            changes = appended(DTYPES[dtype], d, dv, seed=d)
            others = other_rows(changes, capacity=200, page_size=page_size, **sizes)
            assert not list(others), (d, dv, page_size)


@every_dtype
@pytest.mark.parametrize("storage", [x for x in STORAGES if STORAGES[x]])
def test_rows_less_an_offset_have_the_bits_of_torchs_operations(storage, dtype, threads):
    of = STORAGES[storage]
    for d, count in ((1, 1), (33, 1), (64, 3), (160, 1)):
        if of == "int4" and d % BLOCK:
            continue
        shift = torch.linspace(-90, 90, 3 * d).view(3, 1, d)
        k = torch.randn(2, 3, 40, d, generator=torch.Generator().manual_seed(d))
        k, v = ((x + 3 * shift).to(DTYPES[dtype]) for x in (k, k.flip(2)))
        packed = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        changes = [(k, v), (k[:, :, :1], v[:, :, :1]), (*packed, torch.tensor([0, 50, 80]))]
        sizes = dict(batch=2, heads=3, head_dim=d, dtype=DTYPES[dtype], storage=of)
        threads(count)
        assert not list(other_rows(changes, capacity=200, page_size=7, **sizes)), d
        cache = filled(changes, capacity=200, **sizes)
        assert cache.key_offset.count_nonzero() > d


@pytest.mark.usefixtures("one_thread")  # torch flushes on the thread that asks for it
@every_storage
def test_rows_when_subnormal_numbers_are_flushed(storage):
    of = STORAGES[storage]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush them")
    try:
        for dtype in DTYPES.values():
            sizes = dict(batch=2, heads=3, head_dim=64, dtype=dtype, storage=of)
            assert not list(other_rows(appended(dtype, 64, 64), capacity=200, **sizes)), dtype
    finally:
        torch.set_flush_denormal(False)


@parametrize("count", (1, 2, 5), fast=2)
@every_storage
def test_any_number_of_threads(storage, count, threads):
    threads(count)
    changes = appended(torch.bfloat16, 96, 64, rows=1000)
    sizes = dict(batch=2, heads=3, head_dim=96, value_dim=64, dtype=torch.bfloat16)
    given = sizes | dict(capacity=3000, page_size=16, storage=STORAGES[storage])
    assert not list(other_rows(changes, **given))


LAYOUTS = {
    "by heads": lambda x: x.contiguous(),
    "by tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "with a gap": lambda x: torch.cat([x, x + 1], -1)[..., : x.shape[-1]],
    "at an offset": lambda x: torch.cat([x[..., :3], x], -1)[..., 3:],
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "every second token": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "one item for all": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@every_storage
def test_rows_of_any_strides(storage, layout):
    x = rows_of(torch.float32, 2 * 3 * 40, 64).view(2, 3, 40, 64)
    x, y = (LAYOUTS[layout](x) for x in (x, x.flip(2)))
    sequences = x.transpose(1, 2)[0], y.transpose(1, 2)[0], torch.tensor([0, 13, 40])
    sizes = dict(batch=2, heads=3, head_dim=64, capacity=90, storage=STORAGES[storage])
    assert not list(other_rows([(x, y), sequences], **sizes))


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **kwargs or {})


class Passing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


def test_a_mode_sees_the_operations_that_write():
    k = torch.randn(1, 2, 3, 32)
    for storage in STORAGES.values():
        cache = KVCache(1, 2, 32, capacity=9, storage=storage)
        with Seen() as mode, counted() as direct:
            cache.append(k, k)
        assert any("index_put" in x for x in mode.seen) and not direct


def test_what_is_left_to_torch(monkeypatch):
    k = torch.randn(1, 2, 3, 32)
    apart = k.repeat_interleave(2, -1)[..., ::2]
    negative = torch.complex(k, k).conj().imag  # its memory has the opposite sign
    for storage in STORAGES.values():
        cache = KVCache(1, 2, 32, capacity=90, storage=storage)
        with counted() as direct:
            for x in (apart, negative, k[:, :, :0]):
                cache.append(x, k[:, :, : x.shape[2]])
            with Passing():
                cache.append(k, k)
            monkeypatch.setattr(libraries, "cpu_unavailable", lambda: "it was not built")
            cache.append(k, k)
            monkeypatch.undo()
            assert not direct
            with torch.no_grad():
                cache.append(k, torch.nn.Parameter(k))
            assert direct
        with by_torch():
            expected = KVCache(1, 2, 32, capacity=90, storage=storage)
            for x in (k, -k, k, k, k):
                expected.append(x, k)
        for x, y in zip(cache._rows(0, 0).values(), expected._rows(0, 0).values(), strict=True):
            assert torch.equal(*(z.contiguous().view(torch.uint8) for z in (x, y)))


def test_no_memory_of_other_kinds():
    k = torch.randn(1, 2, 3, 32)
    kept = KVCache(1, 2, 32, capacity=9, storage=torch.int8)._pool.kept
    assert new_rows._is_direct(kept, dict(k=k, v=k))
    with FakeTensorMode():
        x = torch.empty(1, 2, 3, 32)
    assert not new_rows._is_direct(kept, dict(k=x, v=x))
    meta = KVCache(1, 2, 32, capacity=9, storage=torch.int8, device="meta")
    x = torch.empty(1, 2, 3, 32, device="meta")
    assert not new_rows._is_direct(meta._pool.kept, dict(k=x, v=x))
    own = KVCache(1, 2, 32, capacity=9)
    x = own.k_pages[:, :3].transpose(1, 2)
    assert not new_rows._is_direct(own._pool.kept, dict(k=k, v=x))


def test_rows_in_compiled_code():
    k = torch.randn(1, 2, 3, 32)

    def step(x):
        return x + new_rows._is_direct(kept, dict(k=x, v=x))

    kept = KVCache(1, 2, 32, capacity=9)._pool.kept
    assert torch.equal(step(k), k + 1)
    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(k), k)


def test_a_page_that_is_not_there_is_not_written():
    cache = filled([appended(torch.float32, 32, 32)[0]], batch=2, heads=3, head_dim=32, capacity=90)
    before = cache.k_pages.clone()
    k = torch.zeros(2, 3, 3, 32)
    longer, table = cache.lengths + 3, cache.block_table
    tables = table.clone(), table + 1, table - 1
    tables[0][1] = 10**12
    wrong = [(x, longer) for x in tables] + [(table, longer - 61), (table, longer + 90)]
    for state in wrong:
        with pytest.raises(RuntimeError, match="got a table without pages for new rows"):
            new_rows._append(dict(k=k, v=k), None, None, cache._pool.kept, *state)
    assert torch.equal(cache.k_pages.view(torch.int32), before.view(torch.int32))


def test_autograd_notices_rows_written_after_a_call():
    """As if torch's operations had written them."""
    for way in (counted, by_torch):
        cache, k = KVCache(1, 2, 32, capacity=9), torch.randn(1, 2, 3, 32)
        cache.append(k, k)
        q = torch.randn(1, 2, 1, 32, requires_grad=True)
        out = cache.attention(q)
        with way():
            cache.append(k, k)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
