"""attention_packed under torch.compile, vmap and its counter of flops; gradients by differences."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn.backends.native import launcher
from fastattn.call.spec import Feature
from tests.semantics.test_packed import SIZES, batch, complaints
from tests.support.backends import not_interpreted, passed
from tests.support.cases import DTYPES, FEATURE, PLAIN

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@not_interpreted
def test_packed_is_compiled():
    made = batch((FEATURE["bottom_right"], FEATURE["sinks"]), torch.float32)
    compiled = torch.compile(fastattn.attention_packed, fullgraph=True, backend="aot_eager")
    eager, found = made.run(), made.run(compiled)
    assert all(torch.equal(eager[x], found[x]) for x in eager)


@not_interpreted
def test_packed_of_any_size_is_compiled_once():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda q, cu: fastattn.attention_packed(q, q, q, cu, cu, causal=True),
        fullgraph=True,
        dynamic=True,
        backend=count,
    )
    for n in (10, 11, 7, 30):
        q, cu = torch.randn(n, 2, 8), torch.tensor([0, 4, n])
        expected = fastattn.attention_packed(q, q, q, cu, cu, causal=True)
        assert torch.equal(compiled(q, cu), expected)
    assert len(graphs) == 1


@not_interpreted
def test_packed_is_mapped():
    """vmap over keys, with queries and offsets shared."""
    made = batch((FEATURE["causal"],), torch.float32)
    q, k, v, cu_q, cu_k = (made.given[x] for x in ("q", "k", "v", "cu_q", "cu_k"))
    keys = torch.stack([k, k.flip(0), -k])

    def attention(k):
        return fastattn.attention_packed(q, k, v, cu_q, cu_k, max_q=70, max_k=130, causal=True)

    expected = torch.stack([attention(k) for k in keys])
    assert torch.equal(torch.func.vmap(attention)(keys), expected)


@not_interpreted
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_gradients_of_a_shared_mask_fit_in_memory(dtype, monkeypatch):
    """Without memory for one gradient per sequence, they are summed sequence by sequence; other
    results keep their bits."""
    names = ("head_bias_grad", "sinks", "gqa", "lse_loss", "lengths", "alibi_batch")
    made = batch([FEATURE[x] for x in names], DTYPES[dtype])
    before = made.run()
    monkeypatch.setattr(launcher, "ROOM", 0)
    asked = []
    each = launcher.backward_in_turn
    monkeypatch.setattr(launcher, "backward_in_turn", lambda *x: asked.append(1) or each(*x))
    after = made.run()
    assert asked
    passed(list(complaints(made, after)))
    for name in after.keys() - {"dmask", "dsinks"}:
        assert torch.equal(before[name], after[name]), name


def test_packed_is_explained():
    made = batch((FEATURE["sinks"],), torch.float32)
    found = fastattn.explain(**made.given)
    assert found.spec.features & Feature.PACKED and found.spec.B == len(SIZES)
    assert "packed" in str(found)


@not_interpreted
def test_flops_are_those_of_the_sequences():
    made = batch(PLAIN, torch.float32)
    with FlopCounterMode(display=False) as counter:
        made.run()
    scores = sum(m * n for m, n in SIZES)
    assert counter.get_total_flops() == 2 * 2 * scores * (2 * 8 + 5 * 8)
