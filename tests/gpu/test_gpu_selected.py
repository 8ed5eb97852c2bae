"""On a GPU: attention to selected keys against its definition, and the choice of keys against the
CPU's. tests/semantics/test_selected.py has the same for CPUs and in the interpreter."""

import pytest
import torch

import fastattn
from tests.semantics import test_selected as selected
from tests.semantics.test_selection import whole
from tests.support.gpu import BACKENDS, DTYPES, every_dtype, on_gpu

pytestmark = on_gpu
NAMES = [
    pytest.param(name, marks=[pytest.mark.skip(reason=str(why))] * bool(why))
    for name, why in BACKENDS.items()
]
SHAPES = {
    # heads, key heads, D, Dv, block, indices of a row
    "16 heads on one, keys": (16, 1, 64, 64, 1, 30),
    "4 heads on 2, blocks of 4": (4, 2, 40, 24, 4, 6),
    "3 heads, blocks of 16": (3, 3, 128, 128, 16, 2),
}


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


@every_dtype
@pytest.mark.parametrize("what", [x for x in selected.GIVEN if x != "sinks"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("groups", selected.GROUPS)
@pytest.mark.parametrize("name", NAMES)
def test_selected_keys(name, groups, shape, what, dtype):
    H, Hk, D, Dv, block, count = SHAPES[shape]
    if name == "cuda" and dtype == "float32":
        pytest.skip("cuda has no float32")
    given = selected.GIVEN[what]
    indices = selected.chosen(selected.GROUPS[groups](H, Hk), block, count)
    leaves = selected.tensors(H, Hk, D, Dv, DTYPES[dtype])
    found = selected.results(on_device(name, indices, block, given), leaves)

    def exact(**x):
        x = {name: y.double() for name, y in x.items()}
        return selected.formula(indices=indices, block=block, **x, **given)

    bound = 1e-4 if dtype == "float32" else selected.BOUND[dtype]
    selected.close(found, selected.results(exact, leaves), bound)


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
