"""Helpers for the tests of `fastattn.nn`: attention as tutorials write it, and a comparison."""

import math

import torch


def naive(q, k, v, mask=None, causal=False, scale=None):
    """Attention as tutorials write it, except that a row with every key hidden is 0. The last
    causal row is aligned with the last key."""
    m, n = q.shape[-2], k.shape[-2]
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    keep = torch.ones(m, n, dtype=torch.bool)
    keep = keep.tril(n - m) if causal else keep
    keep = keep if mask is None else keep & (mask != 0)
    p = torch.softmax(s.masked_fill(~keep, -torch.inf), -1)
    p = torch.where(keep.any(-1, keepdim=True), p, 0.0)
    return p @ v, p


def same(found, expected, leaves):
    """Equal values, and equal gradients of a loss on all of them. Both sides are float32: where
    terms as large as the largest gradient cancel, each side's result is off by their roundings."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)
    losses = [sum((x * x).sum() for x in results) for results in (found, expected)]
    grads = [torch.autograd.grad(loss, leaves) for loss in losses]
    largest = max(y.abs().max().item() for y in grads[1])
    atol = max(1e-5, 2 * torch.finfo(torch.float32).eps * largest)
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=atol)
