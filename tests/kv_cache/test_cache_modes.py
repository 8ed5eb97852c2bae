"""A KVCache under torch's modes, on another default device, copied, and in autocast."""

import copy
import gc
import itertools
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastattn import KVCache, attention_packed
from tests.kv_cache.test_cache import DV, HK, B, D, H, Model
from tests.support.backends import not_interpreted
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), not_interpreted]


def test_any_mode():
    """A cache that is made, filled or forked in inference mode can be used outside it, and vice
    versa; autocast casts new keys, not stored ones."""
    q, k = torch.randn(B, H, 1, D), torch.randn(B, HK, 3, D)
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad] * 2
    for first, second in itertools.pairwise(modes):
        with first():
            cache = KVCache(B, HK, D, capacity=8, page_size=4, grow=True)
            cache.append(k, k)
        with second():
            fork = cache.fork()
            for x in (cache, fork):
                x.append(torch.cat([k] * 4, 2), torch.cat([k] * 4, 2))
                x.evict(5)
                x.truncate(6)
        with first():
            assert torch.equal(cache.attention(q), fork.attention(q))
    with torch.autocast("cpu", torch.bfloat16):
        out = cache.attention(q.bfloat16())
    assert out.dtype == torch.float32
    assert torch.equal(out, cache.attention(q.bfloat16().float()))


def test_earlier_tables_and_lengths_stay_unchanged():
    cache = Model(4).cache
    table, lengths = cache.block_table, cache.lengths
    before = table.clone(), lengths.clone()
    cache.append(torch.randn(B, HK, 9, D), torch.randn(B, HK, 9, DV))
    assert torch.equal(table, before[0]) and torch.equal(lengths, before[1])


def test_any_mode_of_offsets():
    """Offsets that a call in inference mode caches can be used by one with gradients."""
    cache = Model(4).cache
    cache.append(torch.randn(B, HK, 5, D), torch.randn(B, HK, 5, DV))
    q = torch.randn(B, H, 2, D)
    with torch.inference_mode():
        out = cache.attention(q)
    assert torch.equal(cache.attention(q.requires_grad_()), out)


def test_another_default_device():
    with torch.device("meta"):
        cache = KVCache(B, HK, D, capacity=8, page_size=4, device="cpu", grow=True)
        k = torch.ones(B, HK, 3, D, device="cpu")
        cache.append(k, k)
        fork = cache.fork([0, 2])
        fork.append(k[:2], k[:2])
        cache.evict([1, 0, 2])
        cache.truncate(1)
        cache.free([0])
        assert cache.lengths.tolist() == [0, 1, 1]
        cache.append(
            k[0].transpose(0, 1), k[0].transpose(0, 1), torch.tensor([0, 1, 3, 3], device="cpu")
        )


def inside(mode):
    def run(collect):
        with mode():
            collect()

    return run


def under(transform):
    def run(collect):
        return transform(lambda x: (collect(), x.sum())[1])(torch.ones(2))

    return run


FREED = dict(fake=inside(FakeTensorMode), meta=inside(lambda: torch.device("meta")))
FREED |= dict(inference=inside(torch.inference_mode), grad=under(torch.func.grad))
FREED |= dict(vmap=under(torch.func.vmap), functionalised=under(torch.func.functionalize))


@pytest.mark.parametrize("where", FREED)
def test_pages_are_freed_anywhere(where):
    cache = KVCache(1, HK, D, capacity=8, page_size=4, grow=True)
    k = torch.ones(1, HK, 3, D)
    cache.append(k, k)
    fork = cache.fork()
    fork.append(k, k)
    before, forks = cache.pages_free, [fork]
    del fork
    FREED[where](lambda: (forks.clear(), gc.collect()))
    assert cache.pages_free == before + 2


COPIES = {"shallow": copy.copy, "deep": copy.deepcopy}
COPIES["pickled"] = lambda x: pickle.loads(pickle.dumps(x))


@parametrize("kind", COPIES, fast=1)
def test_copies(kind):
    """A shallow copy is a fork. Other copies have a pool of their own, which is freed with them."""
    model = Model(4, grow=True)
    model.append([3, 5, 0])
    made = COPIES[kind](model.cache)
    assert (made._pool is model.cache._pool) == (kind == "shallow")
    other = model.copy(made, [list(x) for x in model.rows])
    other.append([2, 1, 1])
    for x in (other, model):
        x.check()
    fork, pool = made.fork(), made._pool
    used = (pool.users > 0).sum()
    del made, other, x
    gc.collect()
    fork.free()
    assert (pool.users > 0).sum() == (3 if kind == "shallow" else 0) < used


def test_autocast_casts_the_inputs():
    cache = KVCache(B, HK, D, capacity=8)
    k, q = torch.randn(B, HK, 3, D).bfloat16(), torch.randn(B, H, 1, D).bfloat16()
    mask = torch.randn(1, 1, 1, 3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        cache.append(k, k)
        out = cache.attention(q, mask=mask)
        with pytest.raises(ValueError, match=r"q.dtype|k.dtype|dtype"):
            cache.attention(q.double())
    assert torch.equal(out, cache.attention(q.float(), mask=mask.float()))


def test_four_bits():
    """Autocast casts queries and new rows, not pages; q's gradient raises."""
    cache = KVCache(1, 2, 32, capacity=8, page_size=4, storage="int4")
    with torch.autocast("cpu", torch.bfloat16):
        cache.append(*torch.randn(2, 1, 2, 5, 32).bfloat16())
        out = cache.attention(torch.randn(1, 2, 1, 32).bfloat16())
    assert out.dtype == torch.float32
    with torch.inference_mode():
        cache.append(*torch.randn(2, 1, 2, 1, 32))
    q = torch.randn(1, 2, 1, 32, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"four bits a number.* no gradient"):
        cache.attention(q).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("storage", (None, "int4"))
def test_a_step_is_compiled_and_exported(storage, tmp_path):
    cache = KVCache(2, 2, 64, capacity=20, page_size=8, storage=storage)
    cache.append(*torch.randn(2, 2, 2, 11, 64))
    q = torch.randn(2, 4, 1, 64)
    expected = cache.attention(q)

    class Step(torch.nn.Module):
        def forward(self, q, k, v, table, lengths):
            rows, cu_q = q.transpose(1, 2).flatten(0, 1), torch.arange(3)
            out = attention_packed(
                *(rows, k, v, cu_q), **dict(block_table=table, key_lengths=lengths, max_q=1)
            )
            return out.unflatten(0, (2, 1)).transpose(1, 2)

    given = q, cache.k_pages, cache.v_pages, cache.block_table, cache.lengths
    compiled = torch.compile(Step(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), expected)
    torch.export.save(torch.export.export(Step(), given), tmp_path / "step.pt2")
    program = torch.export.load(tmp_path / "step.pt2")
    torch.testing.assert_close(program.module()(*given), expected)
