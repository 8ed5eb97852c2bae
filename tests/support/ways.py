"""Ways to call attention with q, k and v (B,H,N,D), for tests of what torch does around a call."""

import torch
from torch.nn import functional as F

import fastattn


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_sdpa(q, k, v):
    with fastattn.sdpa():
        return F.scaled_dot_product_attention(q, k, v)


def with_lse(q, k, v):
    out, lse = fastattn.attention(q, k, v, return_lse=True)
    return out + lse[..., None]


def rows(x):
    """x as rows of consecutive sequences, (B N,H,D)."""
    return x.transpose(1, 2).flatten(0, 1)


def offsets(x):
    return torch.arange(x.shape[0] + 1) * x.shape[2]


def packed(q, k, v):
    return fastattn.attention_packed(*map(rows, (q, k, v)), offsets(q), offsets(k))


def multihead(q, k, v, need_weights=True):
    """A module of the first head's columns, with the same parameters at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = fastattn.MultiheadAttention(q.shape[-1], 2, batch_first=True)
    out, weights = layer(q[:, 0], k[:, 0], v[:, 0], need_weights=need_weights)
    return out if weights is None else out + weights.square().sum()


def out_alone(q, k, v):
    return multihead(q, k, v, need_weights=False)


def mapped(q, k, v):
    return torch.func.vmap(fastattn.attention)(*(x[None] for x in (q, k, v)))
