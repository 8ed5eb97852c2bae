"""`KVCache`: after any sequence of changes each item has the expected keys, bit for bit, and no
fork changes what it shares with others."""

import copy

import pytest
import torch

import fastattn
from fastattn import KVCache
from tests.support import cache_model
from tests.support.backends import not_interpreted
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), not_interpreted]

B, H, HK, D, DV = 3, 4, 2, 8, 12


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
            assert torch.equal(out[b : b + 1], expected[0])
            assert torch.equal(lse[b : b + 1], expected[1])


@parametrize("seed", range(0, 40, 4), fast=2)
def test_against_a_model(seed):
    """Full if and only if no page is left; an error changes nothing; all rows are right."""
    assert sum(cache_model.run(x, 60) for x in range(seed, seed + 4)) > 10


@pytest.mark.parametrize("fault", ["never", "too_often"])
def test_the_model_finds_a_cache_that_copies(monkeypatch, fault):
    right = KVCache._copied

    def copied(self, items, counts, *more):
        goes_on = torch.full_like(items.goes_on, fault == "never")
        return right(self, items._replace(goes_on=goes_on), counts, *more)

    monkeypatch.setattr(KVCache, "_copied", copied)
    with pytest.raises(AssertionError, match=r"cache_model.run\(\d+, 60\)"):
        for seed in range(40):
            cache_model.run(seed, 60)


def test_rows_of_the_cache_itself():
    """Appending a view of the cache's own pages appends their contents at the call."""
    cache = KVCache(1, HK, D, capacity=12, page_size=6)
    first = torch.randn(1, HK, 3, D)
    cache.append(first, first)
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
