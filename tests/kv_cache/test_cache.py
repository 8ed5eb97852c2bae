"""`KVCache`: after any sequence of changes each item has the expected keys, bit for bit, and no
fork changes what it shares with others."""

import copy
import gc
import random

import pytest
import torch

import fastattn
from fastattn import KVCache
from tests.support import cache_model
from tests.support.backends import not_interpreted
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), not_interpreted]

B, H, HK, D, DV = 3, 4, 2, 8, 12
PAGES = (None, 1, 4, 16, 7)


class Model:
    """A cache, and the keys and values that each item should have, as lists of rows."""

    def __init__(self, page_size, seed=0, **more):
        self.generator = torch.Generator().manual_seed(seed)
        given = dict(value_dim=DV, capacity=40, page_size=page_size) | more
        self.cache = KVCache(B, HK, D, **given)
        self.rows = [[] for _ in range(B)]

    def new(self, n):
        size = dict(generator=self.generator)
        return torch.randn(n, HK, D, **size), torch.randn(n, HK, DV, **size)

    def copy(self, cache, rows):
        made = object.__new__(type(self))
        made.generator, made.cache, made.rows = self.generator, cache, rows
        return made

    def append(self, counts):
        news = [self.new(n) for n in counts]
        if len(set(counts)) == 1:
            k, v = (torch.stack(x).transpose(1, 2) for x in zip(*news, strict=True))
            self.cache.append(k, v)
        else:
            k, v = (torch.cat(x) for x in zip(*news, strict=True))
            self.cache.append(k, v, torch.tensor([0, *counts]).cumsum(0))
        for mine, (k, v) in zip(self.rows, news, strict=True):
            mine += list(zip(k, v, strict=True))

    def forked(self, chance):
        items = [chance.randrange(len(self.rows)) for _ in range(chance.randrange(1, 5))]
        return self.copy(self.cache.fork(items), [list(self.rows[b]) for b in items])

    def evict(self, counts):
        self.cache.evict(counts)
        self.rows = [x[n:] for x, n in zip(self.rows, counts, strict=True)]

    def truncate(self, counts):
        self.cache.truncate(torch.tensor(counts))
        self.rows = [x[:n] for x, n in zip(self.rows, counts, strict=True)]

    def check(self, rows=2, **given):
        assert self.cache.lengths.tolist() == [len(x) for x in self.rows]
        q = torch.randn(len(self.rows), H, rows, D, generator=self.generator)
        out, lse = self.cache.attention(q, return_lse=True, allow_empty_rows=True, **given)
        for b, mine in enumerate(self.rows):
            k = torch.stack([k for k, _ in mine]) if mine else torch.zeros(0, HK, D)
            v = torch.stack([v for _, v in mine]) if mine else torch.zeros(0, HK, DV)
            tensors = (q[b : b + 1], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
            expected = fastattn.attention(
                *tensors, **(dict(causal="bottom_right") | given), return_lse=True
            )
            self.compare(out[b : b + 1], expected[0])
            self.compare(lse[b : b + 1], expected[1])

    @staticmethod
    def compare(found, expected):
        assert torch.equal(found, expected)


CHANGES = ("append", "append", "packed", "fork", "evict", "truncate", "free")


def check_changes(first, chance, steps, kept, changes=CHANGES, **given):
    """Check the newest `kept` models, with so many rows, after each of some random changes."""
    models = [first]
    for step in range(steps):
        model = chance.choice(models)
        what = chance.choice(changes)
        counts = [chance.randrange(len(x) + 1) for x in model.rows]
        if what == "append":
            model.append([chance.randrange(6)] * len(model.rows))
        elif what == "packed":
            model.append([chance.randrange(9) for _ in model.rows])
        elif what == "fork":
            models.append(model.forked(chance))
        elif what == "evict":
            model.evict(counts)
        elif what == "truncate":
            model.truncate(counts)
        elif step % 3 == 0:
            model.cache.free([0])
            model.rows[0] = []
        for x in models[-kept:]:
            x.check(rows=1 + step % 3, **given)
        del models[:-kept]


@pytest.mark.parametrize("page_size", PAGES)
def test_any_sequence_of_changes(page_size):
    check_changes(Model(page_size, grow=True), random.Random(page_size or 0), 60, 4)


@pytest.mark.parametrize("page_size", PAGES)
def test_steps_of_one_key_with_forks(page_size):
    """The cache that steps first after a fork varies, and truncations come in between."""
    models = [Model(page_size, grow=True)]
    models[0].append([3, 5, 2])
    for step in range(24):
        for x in models:
            x.append([1] * len(x.rows))
            if step % 7 == 3:
                x.cache.truncate([len(mine) - 1 for mine in x.rows])
                x.rows = [mine[:-1] for mine in x.rows]
        if step % 5 == 1:
            x = models[step % len(models)]
            models.append(x.copy(x.cache.fork(), [list(mine) for mine in x.rows]))
            models = models[-2:] if step % 2 else models[-2:][::-1]
        for x in models:
            x.check()


@pytest.mark.parametrize("page_size", PAGES)
def test_pages_are_freed(page_size):
    model = Model(page_size, grow=True)
    cache = model.cache
    model.append([5, 1, 0])
    forks = [cache.fork(), cache.fork([0, 0])]
    forks[0].append(torch.zeros(B, HK, 2, D), torch.zeros(B, HK, 2, DV))
    for x in (*forks, cache):
        x.free()
        assert x.lengths.sum() == 0
    assert cache.pages_free == cache.k_pages.shape[0]


@parametrize("seed", range(0, 40, 4), fast=2)
def test_against_a_model(seed):
    """Full if and only if no page is left; an error changes nothing; all rows are right."""
    assert sum(cache_model.run(x, 60) for x in range(seed, seed + 4)) > 10


@pytest.mark.parametrize("fault, seen", [("never", "a full cache"), ("too_often", "free pages")])
def test_the_model_finds_a_cache_that_copies(monkeypatch, fault, seen):
    right = KVCache._copied

    def copied(self, items, counts, *more):
        goes_on = torch.full_like(items.goes_on, fault == "never")
        return right(self, items._replace(goes_on=goes_on), counts, *more)

    monkeypatch.setattr(KVCache, "_copied", copied)
    with pytest.raises(AssertionError, match=rf"cache_model.run\(\d+, 60\).* {seen}"):
        for seed in range(40):
            cache_model.run(seed, 60)


@parametrize("page_size", (4, None), fast=1)
def test_a_beam_step_needs_pages_for_all_but_one(page_size):
    model = Model(page_size, capacity=8)
    model.append([6, 7, 0])
    beams = model.copy(model.cache.fork([0, 0, 0]), [list(model.rows[0]) for _ in range(3)])
    del model
    gc.collect()
    beams.cache.truncate([5, 6, 6])
    beams.rows[0].pop()
    free = beams.cache.pages_free
    beams.append([1, 1, 1])
    assert beams.cache.pages_free == free - 2
    beams.check()


def test_a_cache_appends_to_a_page_shared_with_forks():
    """Provided each of its items once was the page's only user, and has dropped nothing since."""
    model = Model(4, capacity=8)
    model.append([5, 6, 7])
    fork = model.copy(model.cache.fork(), [list(x) for x in model.rows])
    assert model.cache.pages_free == 0
    for counts in ([1, 1, 0], [0, 1, 1], [2, 0, 0]):
        model.append(counts)
        model.check()
        fork.check()
    model.truncate([7, 8, 8])
    with pytest.raises(RuntimeError, match="got 1 more pages"):
        model.append([1, 0, 0])


@pytest.mark.parametrize("storage", (None, torch.int8))
def test_rows_of_the_cache_itself(storage):
    """Appending a view of the cache's own pages appends their contents at the call."""
    cache = KVCache(1, HK, D, capacity=12, page_size=6, storage=storage)
    first = torch.randn(1, HK, 3, D)
    cache.append(first, first)
    if storage:
        k = cache.k_pages[:1].transpose(1, 2)
        with pytest.raises(ValueError, match=r"k: got torch\.int8"):
            cache.append(k, k)
        return
    k = cache.k_pages[:1, 1:5].transpose(1, 2)  # two of its rows, and two places not yet written
    expected = torch.cat([first, k], 2)
    cache.append(k, cache.v_pages[:1, 1:5].transpose(1, 2))
    kept = cache.k_pages[cache.block_table[0]].flatten(0, 1)[:7]
    assert torch.equal(kept.nan_to_num(), expected[0].transpose(0, 1).nan_to_num())


def test_a_deep_copy_has_no_pages_of_forks_outside_it():
    model = Model(4, capacity=8, grow=False)
    model.append([4, 4, 4])
    fork = model.cache.fork()
    fork.append(torch.zeros(B, HK, 4, D), torch.zeros(B, HK, 4, DV))
    assert model.cache.pages_free == 0
    assert copy.deepcopy(model.cache).pages_free == 3
    both = copy.deepcopy([model.cache, fork])
    assert both[0]._pool is both[1]._pool and both[0].pages_free == 0


def test_an_append_to_a_full_cache_changes_nothing():
    for page_size, capacity in ((None, 10), (4, 10), (4, 12)):
        model = Model(page_size, capacity=capacity)
        model.append([capacity, 3, 0])
        with pytest.raises(RuntimeError, match=rf"{capacity + 1} keys of item 0, .* = {capacity}"):
            model.append([1, 1, 1])
        model.check()
        model.append([0, capacity - 3, 1])
        model.check()


@pytest.mark.parametrize("page_size", (None, 1, 4, 5))
def test_steps_of_one_key_until_it_is_full(page_size):
    model = Model(page_size, capacity=10)
    for _ in range(10):
        model.append([1, 1, 1])
    with pytest.raises(RuntimeError, match=r"11 keys of item 0, .* = 10"):
        model.append([1, 1, 1])
    model.check()


@pytest.mark.parametrize("page_size", (4, None))
def test_forks_need_their_own_pages(page_size):
    model = Model(page_size, capacity=8)
    model.append([7, 7, 7])
    fork = model.copy(model.cache.fork(), [list(x) for x in model.rows])
    nbytes = model.cache.nbytes
    with pytest.raises(RuntimeError, match=r"3 more pages of . keys to find, .* at most 0"):
        fork.append([1, 1, 1])
    with pytest.raises(RuntimeError, match="is full"):
        fork.cache.evict([1, 1, 1])  # rows that move would need pages, too
    for x in (model, fork):
        x.check()
    fork.cache.grow = True
    fork.append([1, 1, 1])
    assert fork.cache.nbytes == model.cache.nbytes > nbytes
    for x in (model, fork):
        x.check()


def test_growth_keeps_the_contents():
    for page_size in PAGES:
        model = Model(page_size, capacity=3, grow=True)
        for counts in ([2, 2, 2], [9, 0, 1], [30, 30, 1]):
            model.append(counts)
            model.check()
        assert model.cache.capacity >= 41


def test_pages_grow_in_number_and_not_in_size():
    for page_size, capacity in ((4, 4), (4, 3)):
        model = Model(page_size, capacity=capacity, grow=True)
        model.append([50, 0, 1])
        model.check()
        assert model.cache.page_size == page_size
        assert model.cache.k_pages.shape[0] <= 14 + 3 + 14 // 2
    contiguous = Model(None, capacity=4, grow=True)
    contiguous.append([50, 0, 1])
    contiguous.check()
    assert contiguous.cache.block_table.shape == (B, 1)


def test_features_of_attention():
    model = Model(4)
    model.append([5, 17, 0])
    mask = torch.rand(B, 1, 2, 17) < 0.7
    out = model.cache.attention(torch.zeros(B, H, 2, D), mask=mask, allow_empty_rows=True)
    assert out.shape == (B, H, 2, DV)
    model.check(window=(3, 0), sinks=torch.ones(H), softcap=2.0)
    model.check(causal=False, alibi_slopes=torch.rand(H))


def test_prompts_in_chunks_are_prompts():
    """So are packed rows of an item: many of one item and none of the others."""
    whole, parts = Model(16, capacity=100), Model(5, capacity=100)
    whole.append([60, 60, 60])
    q = torch.randn(B, H, 60, D, generator=whole.generator)
    expected = whole.cache.attention(q)
    kv = [torch.stack([torch.stack([r[x] for r in rows]) for rows in whole.rows]) for x in (0, 1)]
    outs = []
    for first, end in ((0, 20), (20, 43), (43, 60)):  # more rows than decode takes
        parts.cache.append(*(x[:, first:end].transpose(1, 2) for x in kv))
        outs.append(parts.cache.attention(q[:, :, first:end]))
    assert torch.equal(torch.cat(outs, 2), expected)
    rows, cu_q = q[1].transpose(0, 1), torch.tensor([0, 0, 60, 60])
    out = whole.cache.attention(rows, cu_q=cu_q)
    assert torch.equal(out, expected[1].transpose(0, 1))


@pytest.mark.slow
def test_a_deleted_fork_frees_its_pages():
    cache = KVCache(1, HK, D, capacity=8, page_size=4)
    some = torch.randn(1, HK, 4, D)
    cache.append(some, some)
    for _ in range(5):
        fork = cache.fork()
        fork.append(some[:, :, :1], some[:, :, :1])
        assert cache.pages_free == 0
        del fork
        gc.collect()
        assert cache.pages_free == 1
    assert cache.lengths.tolist() == [4]


def test_memory_is_accounted():
    cache = KVCache(2, HK, D, capacity=100, page_size=16, dtype=torch.bfloat16)
    assert cache.nbytes == 2 * 2 * 7 * 16 * HK * D * 2
    assert cache.pages_free == 14 and "0 of 14 pages of 16 keys used" in repr(cache)
    assert KVCache(2, HK, D, capacity=100).page_size == 100
    assert cache.k_pages.shape == (14, 16, HK, D) and cache.block_table.shape == (2, 7)
