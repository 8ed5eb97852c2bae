"""On a GPU: bits of attention to selected keys, and the choice of keys against the CPU's."""

import pytest
import torch

import fastattn
from tests.semantics import test_selected as selected
from tests.semantics.test_selection import whole
from tests.support.gpu import BACKENDS, on_gpu

pytestmark = on_gpu
NAMES = [
    pytest.param(name, marks=[pytest.mark.skip(reason=str(why))] * bool(why))
    for name, why in BACKENDS.items()
]


def on_device(name, indices, block, given):
    moved = {x: y.cuda() if isinstance(y, torch.Tensor) else y for x, y in given.items()}

    def call(**leaves):
        out, lse = fastattn.attention_selected(
            **{x: y.cuda() for x, y in leaves.items()},
            **dict(indices=indices.cuda(), block=block, return_lse=True, backend=name),
            **moved,
        )
        return out.cpu(), lse.cpu()

    return call


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_have_the_same_bits(name):
    leaves = selected.tensors(16, 1, 64, 64, torch.bfloat16)
    call = on_device(name, selected.chosen(1, 1, 30), 1, {})
    for x, y in zip(selected.results(call, leaves), selected.results(call, leaves), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("causal", (False, True, "bottom_right"))
def test_the_choice_is_that_of_a_cpu(causal):
    """Numbers are whole: sums are exact."""
    q, k, w = whole(2, 8, 50, 32), whole(2, 300, 32), whole(2, 8, 50, seed=1)
    lengths = torch.tensor([300, 77])
    given = dict(causal=causal, key_lengths=lengths)
    found = fastattn.lightning_index(
        *(x.cuda() for x in (q, k, w)), 20, causal=causal, key_lengths=lengths.cuda()
    )
    assert torch.equal(found.cpu(), fastattn.lightning_index(q, k, w, 20, **given))
    q, k = whole(2, 4, 50, 16), whole(2, 2, 320, 16)
    found = fastattn.top_blocks(q.cuda(), k.cuda(), 16, 5, causal=causal)
    assert torch.equal(found.cpu(), fastattn.top_blocks(q, k, 16, 5, causal=causal))
