"""Gradients of keys and values in pages: those of the same keys stored contiguously, summed where
sequences share a page."""

import pytest
import torch

import fastattn
from fastattn.call.spec import Feature
from tests.semantics.test_selected import close
from tests.support.backends import declares, every_backend

pytestmark = pytest.mark.usefixtures("one_thread")


def in_any_order(name):
    """Sequences of one row or none with tables in any order, some with a page twice: the results of
    pages, and of the same keys one after the other."""
    draw = torch.Generator().manual_seed(5)
    lengths = torch.tensor([7, 0, 30, 17, 4, 40])
    rows = torch.tensor([1, 1, 0, 1, 1, 1])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    cu_k = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    table = torch.randint(0, 12, (6, 10), generator=draw)
    table[5], table[3, :5] = torch.arange(10), torch.tensor([3, 7, 3, 3, 9])
    q = torch.randn(5, 4, 16, generator=draw)
    pages = torch.randn(12, 4, 2, 16, generator=draw)

    def paged(q, k, v):
        given = dict(block_table=table, key_lengths=lengths, max_q=1, backend=name)
        return fastattn.attention_packed(q, k, v, cu, return_lse=True, **given)

    def stored(q, k, v):
        k, v = (
            torch.cat([x[table[b]].flatten(0, 1)[: lengths[b]] for b in range(6)]) for x in (k, v)
        )
        return fastattn.attention_packed(q, k, v, cu, cu_k, max_q=1, max_k=40, return_lse=True)

    found = []
    for call in (paged, stored):
        leaves = [x.clone().requires_grad_() for x in (q, pages, pages.flip(0))]
        out, lse = call(*leaves)
        loss = out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0).cos().sum()
        found.append([out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)])
    return found


@every_backend
@pytest.mark.parametrize("number", (1, 2))
def test_tables_in_any_order(name, number):
    declares(name, torch.float32, Feature.PAGED)
    torch.set_num_threads(number)
    try:
        close(*in_any_order(name), 1e-5)
    finally:
        torch.set_num_threads(1)


@every_backend
@pytest.mark.parametrize("rows", (1, 2))
@pytest.mark.parametrize("wanted", ("q", "k", "v", "qv", "kv"))
def test_some_of_the_gradients(name, wanted, rows):
    declares(name, torch.float32, Feature.PAGED)
    draw = torch.Generator().manual_seed(7)
    leaves = dict(
        q=torch.randn(3 * rows, 4, 8, generator=draw),
        k=torch.randn(5, 4, 2, 8, generator=draw),
        v=torch.randn(5, 4, 2, 8, generator=draw),
    )
    cu, table = torch.arange(4) * rows, torch.tensor([[4, 0], [1, 2], [3, 3]])
    given = dict(block_table=table, key_lengths=torch.tensor([7, 8, 2]), max_q=rows, backend=name)

    def grads(wanted):
        given_leaves = {x: y.clone().requires_grad_(x in wanted) for x, y in leaves.items()}
        out = fastattn.attention_packed(**given_leaves, cu_q=cu, **given)
        return torch.autograd.grad(out.sin().sum(), [given_leaves[x] for x in wanted])

    every = dict(zip("qkv", grads("qkv"), strict=True))
    for x, grad in zip(wanted, grads(wanted), strict=True):
        assert torch.equal(grad, every[x])


@every_backend
@pytest.mark.parametrize("masked", (False, True))
def test_pages_have_gradients(name, masked):
    """Sequences of several rows, a page in two sequences and twice in one."""
    declares(name, torch.float32, Feature.PAGED)
    draw = torch.Generator().manual_seed(5)
    q = torch.randn(5, 4, 16, generator=draw)
    pages = torch.randn(3, 4, 2, 16, generator=draw)
    cu, table = torch.tensor([0, 2, 2, 5]), torch.tensor([[2, 0], [0, 0], [1, 1]])
    lengths = torch.tensor([7, 3, 8])
    mask = torch.randn(3, 4, 3, 8, generator=draw) if masked else torch.zeros(())
    rest = dict(causal="bottom_right")

    def paged(q, k, v, mask):
        mask = mask if masked else None
        given = dict(block_table=table, key_lengths=lengths, max_q=3, backend=name, **rest)
        return fastattn.attention_packed(q, k, v, cu, mask=mask, return_lse=True, **given)

    def stored(q, k, v, mask):
        mask = mask if masked else None
        k, v = (
            torch.cat([x[table[b]].flatten(0, 1)[: lengths[b]] for b in range(3)]) for x in (k, v)
        )
        cu_k = torch.tensor([0, 7, 10, 18])
        given = dict(max_q=3, max_k=8, return_lse=True, mask=mask, **rest)
        return fastattn.attention_packed(q, k, v, cu, cu_k, **given)

    def run(call):
        leaves = [x.clone().requires_grad_() for x in (q, pages, pages.flip(0), mask)]
        out, lse = call(*leaves)
        loss = out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0).cos().sum()
        wanted = leaves if masked else leaves[:3]
        return out.detach(), lse.detach(), *torch.autograd.grad(loss, wanted)

    close(run(paged), run(stored), 1e-5)
