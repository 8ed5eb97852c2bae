"""`fastattn.merge`: combine the results of blocks of keys into those of one call.
test_selected.py and test_flash_attn_passes.py merge the results of kernels."""

import pytest
import torch

from fastattn import merge


def parts_of(*shape, dtype=torch.float64, parts=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [
        (
            torch.randn(*shape, 5, generator=g, dtype=torch.float64).to(dtype),
            torch.randn(shape, generator=g, dtype=torch.float64).to(wide),
        )
        for _ in range(parts)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 7), (7, 3), ()], ids=str)  # packed rows, too
def test_a_merge_equals_the_softmax_of_all_parts(shape, dtype):
    parts = parts_of(*shape, dtype=dtype)
    out, lse = merge(parts)
    outs, lses = (torch.stack(x).double() for x in zip(*parts))
    shares = torch.softmax(lses, 0)[..., None]
    torch.testing.assert_close(out, (outs * shares).sum(0).to(dtype))
    torch.testing.assert_close(lse, torch.logsumexp(lses, 0).to(lse.dtype))
    assert lse.dtype == parts[0][1].dtype


def test_gradient_of_a_merge():
    parts = parts_of(2, 3, 4)
    flat = [x.requires_grad_() for part in parts for x in part]
    assert torch.autograd.gradcheck(lambda *x: merge(list(zip(x[::2], x[1::2]))), flat)


def test_rows_hidden_in_one_part_or_in_all():
    parts = parts_of(4, dtype=torch.float32)
    with torch.no_grad():
        for at, (out, lse) in enumerate(parts):
            empty = [0] if at else [0, 1]
            out[empty], lse[empty] = 0, -torch.inf
    flat = [x.requires_grad_() for part in parts for x in part]
    out, lse = merge(parts)
    assert not out[0].any() and lse[0] == -torch.inf
    torch.testing.assert_close((out[1], lse[1]), tuple(x[1] for x in merge(parts[1:])))
    grads = torch.autograd.grad((out.sum() + lse[1:].sum()), flat)
    assert all(x.isfinite().all() for x in grads)
    assert not any(x[0].any() for x in grads)


def test_one_part_is_itself():
    ((out, lse),) = parts_of(4, parts=1)
    found = merge([(out, lse)])
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)


def test_far_logits_stay_finite():
    out = torch.ones(2, 3, 5)
    lse = torch.full((2, 3), 3e38)
    found, level = merge([(out, lse), (2 * out, lse), (out, -lse)])
    torch.testing.assert_close(found, 1.5 * out)
    assert torch.equal(level, lse)


@pytest.mark.parametrize(
    "change, kind, message",
    [
        (lambda p: [], ValueError, "parts: got none"),
        (lambda p: [p[0], p[1][0]], TypeError, r"parts\[1\]: got Tensor, expected tensors \(out"),
        (lambda p: [p[0], (p[1][0], None)], TypeError, r"parts\[1\]: got tuple"),
        (lambda p: [p[0], (p[1][0][1:], p[1][1])], ValueError, r"parts\[1\]: got out"),
        (lambda p: [p[0], (p[1][0].float(), p[1][1])], ValueError, r"parts\[1\]: got out"),
        (lambda p: [(p[0][0], p[0][1].float())], ValueError, r"parts\[0\]: got lse"),
        (lambda p: [(p[0][0], p[0][1][:1])], ValueError, r"parts\[0\]: got lse"),
    ],
)
def test_parts_of_other_shapes_raise(change, kind, message):
    with pytest.raises(kind, match=message):
        merge(change(parts_of(2, 3)))
