"""The gradient of a mask that the batch or heads share is the sum of the gradients that each item
and head has, added in this order: to the last bit in float32 and float64, on any number of
threads."""

import pytest
import torch

import fastattn
from tests.support.backends import on_variants
from tests.support.marks import parametrize

B, H, N, D = 3, 4, 300, 16  # three blocks of keys
SHARED = {"items": (1, H), "heads": (B, 1), "both": (1, 1)}
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
LENGTHS = {"": None, "lengths": torch.tensor([300, 0, 130])}  # an item sees nothing, one not all


def inputs(dtype, rows, key_heads, shared):
    generator = torch.Generator().manual_seed(0)
    shapes = (H, rows), (key_heads, N), (key_heads, N), (H, rows)
    q, k, v, dout = (torch.randn(B, h, n, D, generator=generator).to(dtype) for h, n in shapes)
    mask = torch.randn(*shared, rows, N, generator=generator).to(dtype)
    mask[..., 40:170] = -torch.inf  # all of a block, for tiles
    return q, k, v, dout, mask


def of_mask(q, k, v, dout, mask, **kwargs):
    mask.requires_grad_()
    out = fastattn.attention(q, k, v, mask=mask, causal="bottom_right", backend="cpu", **kwargs)
    return torch.autograd.grad(out, mask, dout)[0]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=[x or "whole" for x in LENGTHS])
@pytest.mark.parametrize("key_heads", [H, 2], ids=["heads", "groups"])
@pytest.mark.parametrize("rows", [49, 300])
@pytest.mark.parametrize("shared", SHARED.values(), ids=list(SHARED))
@parametrize("dtype", DTYPES, ids=[str(x)[6:] for x in DTYPES], fast=2)
def test_sums_of_what_items_and_heads_have(dtype, shared, rows, key_heads, lengths, threads):
    *given, mask = inputs(dtype, rows, key_heads, shared)
    for isa in on_variants("cpu", dtype):
        threads(1)
        each = of_mask(*given, mask.expand(B, H, rows, N).clone(), key_lengths=lengths)
        exact = dtype in (torch.float32, torch.float64)
        expected = torch.zeros(mask.shape, dtype=dtype if exact else torch.float32)
        for b in range(B):
            for h in range(H):
                expected[b % shared[0], h % shared[1]] += each[b, h]
        for count in (1, 3):
            threads(count)
            found = of_mask(*given, mask.detach().clone(), key_lengths=lengths)
            if exact:
                assert torch.equal(found, expected), (isa, count)
            else:
                least = torch.finfo(dtype).eps * each.abs().max() * B * H
                assert (found - expected).abs().max() <= least, (isa, count)
