"""A cache asks Linux for huge pages for its pages, new and grown, and for nothing else."""

import copy
from pathlib import Path

import pytest
import torch

from fastattn import KVCache
from fastattn.kv_cache import huge_pages
from tests.support.backends import not_interpreted
from tests.support.marks import parametrize

pytestmark = not_interpreted

SMAPS = Path("/proc/self/smaps")


def flags(x):
    """The VmFlags of the mapping that has the middle of x."""
    at, here = x.data_ptr() + x.nbytes // 2, False
    for line in SMAPS.read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":") and "-" in first:
            low, high = (int(edge, 16) for edge in first.split("-"))
            here = low <= at < high
        elif here and first == "VmFlags:":
            return rest.split()
    pytest.skip("this system does not list the flags of mappings")


@pytest.fixture
def listed():
    if not SMAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no huge pages on request")


@parametrize("storage", (None, torch.int8, "int4"), ids=str, fast=1)
def test_pages_have_the_flag(listed, storage):
    """32 MiB of keys or more: malloc gives that a mapping of its own."""
    cache = KVCache(1, 8, 128, capacity=1 << 16, page_size=1 << 16, storage=storage, grow=True)
    assert "hg" in flags(cache.k_pages) and "hg" in flags(cache.v_pages)
    cache.append(*torch.ones(2, 1, 8, 3, 128))
    before, fork = cache.k_pages.data_ptr(), cache.fork()
    fork.append(*torch.ones(2, 1, 8, 1, 128))  # copies the page: the pool grows
    assert cache.k_pages.data_ptr() != before and cache.k_pages.shape[0] == 2
    assert "hg" in flags(cache.k_pages) and "hg" in flags(cache.v_pages)


def test_a_longer_page_has_the_flag(listed):
    cache = KVCache(1, 8, 128, capacity=1 << 14, grow=True)
    cache.append(*torch.ones(2, 1, 8, 1, 128).expand(2, 1, 8, (1 << 14) + 1, 128))
    assert cache.page_size == 1 << 15 and "hg" in flags(cache.k_pages)
    assert bool((cache.k_pages[0, : (1 << 14) + 1] == 1).all())


def test_only_whole_pages_of_large_tensors_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda *given: asked.append(given))
    monkeypatch.setattr(huge_pages.mmap, "MADV_HUGEPAGE", 14, raising=False)
    x = torch.empty(huge_pages.SMALLEST + 4096, dtype=torch.int8)[1:]
    assert huge_pages.advised(x) is x
    ((first, size, advice),) = asked
    assert first % huge_pages.mmap.PAGESIZE == 0 and advice == 14
    assert x.data_ptr() <= first < x.data_ptr() + huge_pages.mmap.PAGESIZE
    assert first + size == x.data_ptr() + x.nbytes
    huge_pages.advised(torch.empty(huge_pages.SMALLEST - 1, dtype=torch.int8))
    huge_pages.advised(torch.empty(huge_pages.SMALLEST, device="meta"))
    with torch._subclasses.FakeTensorMode():
        huge_pages.advised(torch.empty(huge_pages.SMALLEST))
    assert len(asked) == 1


@pytest.mark.parametrize("madvise", (None, lambda *given: -1))
def test_a_system_that_refuses(monkeypatch, madvise):
    monkeypatch.setattr(huge_pages, "_madvise", lambda: madvise)
    cache = KVCache(1, 2, 64, capacity=1 << 14, grow=True)
    cache.append(*torch.ones(2, 1, 2, 5, 64))
    for x in (cache, copy.deepcopy(cache)):
        assert bool((x.attention(torch.ones(1, 2, 1, 64)) == 1).all())


def test_a_system_without_the_function(monkeypatch):
    monkeypatch.delattr(huge_pages.mmap, "MADV_HUGEPAGE", raising=False)
    assert huge_pages._madvise.__wrapped__() is None
