"""`fastattn.flash_attn.bert_padding`: padded to packed and back, against loops over tokens."""

import pytest
import torch

from fastattn.flash_attn import bert_padding as bp

MASKS = {
    "right": [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]],
    "left": [[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]],
    "holes": [[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]],
}


def hidden(mask, *shape):
    x = torch.arange(1.0, 1 + 12 * torch.Size(shape).numel())
    return x.view(*mask.shape, *shape).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_tokens_go_there_and_back(name, shape, dtype):
    mask = torch.tensor(MASKS[name]).to(dtype)
    x = hidden(mask, *shape)
    tokens, indices, cu, longest, used = bp.unpad_input(x, mask)
    places = [(b, n) for b in range(3) for n in range(4) if mask[b, n]]
    assert torch.equal(tokens, torch.stack([x[at] for at in places]))
    assert indices.tolist() == [4 * b + n for b, n in places] and indices.dtype == torch.int64
    lengths = [int(row.sum()) for row in mask]
    assert cu.tolist() == [sum(lengths[:b]) for b in range(4)] and cu.dtype == torch.int32
    assert type(longest) is int and longest == max(lengths)
    assert used.tolist() == lengths and used.dtype == torch.int32
    padded = bp.pad_input(tokens, indices, 3, 4)
    real = mask.bool().view(3, 4, *(1 for _ in shape))
    assert torch.equal(padded, x * real)
    (gradient,) = torch.autograd.grad((padded * x.detach()).sum(), x)
    assert torch.equal(gradient, (x * real).detach())


def test_reserved_but_unused_places():
    mask, unused = torch.tensor(MASKS["right"]), torch.tensor([[0, 0, 0, 1], [0, 1, 0, 0], [0] * 4])
    x = hidden(mask, 2)
    for a, b in ((mask, unused), (mask.bool(), unused.bool())):
        tokens, indices, cu, longest, used = bp.unpad_input(x, a, b)
        assert indices.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]
        assert cu.tolist() == [0, 4, 6, 10] and longest == 4 and used.tolist() == [3, 1, 4]
        assert torch.equal(tokens, x.flatten(0, 1)[indices])


def test_several_sequences_in_a_row():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 2)
    found = bp.unpad_input_for_concatenated_sequences(x, lengths)
    tokens, indices, cu, longest = found
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert cu.tolist() == [0, 2, 5, 8, 10, 16] and cu.dtype == torch.int32 and longest == 6
    assert torch.equal(tokens, x.flatten(0, 1)[indices])


def test_rows_by_index():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 4])
    assert torch.equal(bp.index_first_axis(x, indices), x[indices])
    rows, same = bp.index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices]) and torch.equal(same, x)
    assert torch.autograd.gradcheck(lambda x: bp.index_first_axis_residual(x, indices), x)
    indices = torch.tensor([4, 0])
    put = bp.index_put_first_axis(x[:2], indices, 6)
    assert torch.equal(put[indices], x[:2]) and not put[[1, 2, 3, 5]].any()
    assert torch.autograd.gradcheck(lambda x: bp.index_put_first_axis(x[:2], indices, 6), x)
    assert torch.autograd.gradcheck(lambda x: bp.index_first_axis(x, indices), x)
