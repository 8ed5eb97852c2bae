"""Gradients of keys and values in pages: those of the same keys stored contiguously, summed where
sequences share a page."""

import pytest
import torch

import fastattn
from fastattn.call.spec import Feature
from tests.semantics.test_selected import close
from tests.support.backends import declares, every_backend

pytestmark = pytest.mark.usefixtures("one_thread")


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
