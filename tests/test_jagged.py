"""torch's jagged tensors through `scaled_dot_product_attention`: each sequence by itself."""

import pytest
import torch
from runners import not_interpreted

import fastattn

pytestmark = [
    not_interpreted,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

ROWS, KEYS = (5, 0, 33, 1), (7, 3, 40, 0)


def jagged(lengths, heads=2, dim=16, grad=True):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.randn(sum(lengths), heads, dim, requires_grad=grad)
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2), values


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("key_heads", (2, 1))
def test_each_sequence_by_itself(causal, key_heads):
    (q, q_rows), (k, k_rows), (v, v_rows) = (
        jagged(ROWS),
        jagged(KEYS, key_heads),
        jagged(KEYS, key_heads, 24),
    )
    k = torch.nested.nested_tensor_from_jagged(k_rows, v.offsets()).transpose(1, 2)
    given = dict(is_causal=causal, enable_gqa=key_heads == 1)
    out = fastattn.scaled_dot_product_attention(q, k, v, **given)
    assert out.is_nested and out.shape[:2] == q.shape[:2] and out.shape[2] == q.shape[2]
    found = torch.autograd.grad(out.values().square().sum(), (q_rows, k_rows, v_rows))
    parts = [
        fastattn.scaled_dot_product_attention(*(x[None] for x in one), **given)[0]
        for one in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)
    ]
    for x, y in zip(out.unbind(), parts, strict=True):
        assert torch.equal(x, y)
    total = sum(x.square().sum() for x in parts)
    expected = torch.autograd.grad(total, (q_rows, k_rows, v_rows))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_it_is_compiled():
    """With the longest known beforehand, and not."""

    def attention(x):
        x = x.transpose(1, 2)
        return fastattn.scaled_dot_product_attention(x, x, x, is_causal=True)

    compiled = torch.compile(attention, backend="aot_eager")
    for lengths in ((5, 9), (3, 30)):
        rows = [torch.randn(n, 2, 16) for n in lengths]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged)
        assert torch.equal(compiled(x).values(), attention(x).values())


def test_it_is_torchs():
    """Where torch has it too: the same tensors, in and out."""
    q, _ = jagged((5, 9, 33), grad=False)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    ours = fastattn.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(ours.values(), theirs.values())
    assert (ours + q).shape == q.shape == theirs.shape


def test_what_is_refused():
    q, _ = jagged(ROWS)
    other, _ = jagged(KEYS)
    dense, flat = torch.zeros(4, 2, 5, 16), q.select(1, 0)
    for arguments, message in (
        ((q, q, q, torch.ones(1, 1)), "attn_mask: got one beside jagged"),
        ((q, q, other), "value: got sequences at .*, expected .*, as key has"),
        ((flat, flat, flat), r"query: got 3 dimensions, expected 4 \(B, H, L\*, E\)"),
        ((q, *(jagged(KEYS, 1)[0],) * 2), "heads, expected as many each, or enable_gqa"),
        ((q, q, q, None, 1.5), "dropout probability"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fastattn.scaled_dot_product_attention(*arguments)
    for tensors in ((q, dense, dense), (dense, q, q)):
        with pytest.raises(TypeError, match="got a nested tensor, expected a dense one"):
            fastattn.scaled_dot_product_attention(*tensors)
    starts = torch.tensor([0, 1, 2])
    holes = torch.nested.narrow(torch.zeros(3, 9, 2, 16), 1, starts, 4, torch.jagged)
    with pytest.raises(RuntimeError, match=r"holes, expected x.contiguous\(\)"):
        fastattn.scaled_dot_product_attention(*(holes.transpose(1, 2),) * 3)
