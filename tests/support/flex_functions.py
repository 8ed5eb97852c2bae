"""score_mods and mask_mods that people write, for B items, H heads, and LENGTH rows and keys.

`tests/score_mods/gallery.py` has many more, of fewer keys.
"""

import pytest
import torch

from fastattn.require_torch import TORCH_VERSION
from tests.support.program_operators import indices

B, H, LENGTH = 2, 4, 64
generator = torch.Generator().manual_seed(0)


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator).to(dtype)


DOCUMENTS = torch.tensor([0] * 9 + [1] * 24 + [2] + [3] * 30)
OF_ITEMS = torch.stack([DOCUMENTS, DOCUMENTS.flip(0)])
PADDING = torch.arange(LENGTH) < torch.tensor([[41], [64]])
LENGTHS = torch.tensor([41, 64])
PREFIXES = torch.tensor([12, 30], dtype=torch.int32)
PARENTS = (torch.arange(LENGTH)[:, None] >> torch.arange(6)) == (
    torch.arange(LENGTH)[:, None, None] >> torch.arange(6)
)
ANCESTORS = PARENTS.any(-1)  # j is i shifted right by some bits: a path in a binary tree
SLOPES = 2.0 ** -torch.arange(1.0, H + 1)
TABLE = drawn(H, 2 * LENGTH)
BUCKETS = drawn(32, H)
DISTANCES = torch.randint(0, 5, (LENGTH, LENGTH), generator=generator)
OF_DISTANCE = drawn(H, 5, dtype=torch.bfloat16)
BIAS = drawn(B, H, LENGTH, LENGTH)
SCALES = drawn(H).exp()


def bucket(distance):
    """The bucket of a distance, as in T5: exact up to 8, then by the logarithm. No distance lies on
    the edge of a bucket, where float32 and float64 may differ."""
    near = distance.abs()
    far = 8 + (torch.log(near.float().clamp(min=1) / 8) / torch.log(torch.tensor(16.0)) * 7.9).int()
    return torch.where(near < 8, near, far.clamp(max=15)) + torch.where(distance > 0, 16, 0)


MASK_MODS = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j <= 9),
    "both sides": lambda b, h, i, j: (i - j).abs() <= 6,
    "prefix": lambda b, h, i, j: (j < PREFIXES[b]) | (i >= j),
    "documents": lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j),
    "documents of items": lambda b, h, i, j: OF_ITEMS[b, i] == OF_ITEMS[b, j],
    "padding": lambda b, h, i, j: PADDING[b, j],
    "lengths": lambda b, h, i, j: j < LENGTHS[b],
    "tree": lambda b, h, i, j: ANCESTORS[i, j],
    "heads differ": lambda b, h, i, j: torch.where(h < 2, i >= j, i <= j),
    "rows without keys": lambda b, h, i, j: (i > 5) & torch.logical_not(j > i),
}

# Those of the second table have no form that kernels have.
SCORE_MODS = {
    "the score": lambda s, b, h, i, j: s,
    "softcap": lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0),
    "softcap and bias": lambda s, b, h, i, j: 3 * (s / 3).tanh() + BIAS[b, h, i, j],
    "alibi": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    "slopes of heads": lambda s, b, h, i, j: s + torch.exp2(-((h + 1) * 8.0 / H)) * (j - i),
    "relative": lambda s, b, h, i, j: s + (j - i) * 0.05,
    "table": lambda s, b, h, i, j: s + TABLE[h, i - j + LENGTH],
    "chained": lambda s, b, h, i, j: s + BIAS[b][h][i][j],
    "rows and columns": lambda s, b, h, i, j: BIAS[..., i, j][b, h] + s,
    "negative index": lambda s, b, h, i, j: s + TABLE[h, -1 - j],
    "T5": lambda s, b, h, i, j: s + BUCKETS[bucket(j - i), h],
    "graph": lambda s, b, h, i, j: s + OF_DISTANCE[h, DISTANCES[i, j]],
    "hidden keys": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
    "hidden keys, turned": lambda s, b, h, i, j: torch.where(i < j, -float("inf"), s + h),
    "a scale for each key": lambda s, b, h, i, j: s - (1 + j % 3).float().log(),
}
GENERAL = {
    "a scale for each head": lambda s, b, h, i, j: s * SCALES[h],
    "two scores": lambda s, b, h, i, j: s * torch.sigmoid(s) + BIAS[b, h, i, j],
    "clamped": lambda s, b, h, i, j: s.clamp(-1.0, 1.0),
    "a cap below a cap": lambda s, b, h, i, j: 2 * torch.tanh(s / 3),
    "a floor at hidden keys": lambda s, b, h, i, j: torch.where(i >= j, s, -1e4),
}


def visible(function, M, N, heads=H, items=B):
    """(B,H,M,N) bool: what a mask_mod shows, by torch on whole tensors."""
    sizes = items, heads, M, N
    return torch.as_tensor(function(*indices(*sizes).values())).expand(sizes)


def modified(function, scores):
    """The scores (B,H,M,N) that a score_mod makes of these, by torch's vmap: one number at a time,
    as the function expects."""
    of_keys = torch.vmap(function, (0, None, None, None, 0))
    of_rows = torch.vmap(of_keys, (0, None, None, 0, None))
    of_heads = torch.vmap(of_rows, (0, None, 0, None, None))
    of_items = torch.vmap(of_heads, (0, 0, None, None, None))
    try:
        return of_items(scores, *map(torch.arange, scores.shape))
    except RuntimeError as error:
        if ".item()" in str(error) and TORCH_VERSION < (2, 11):
            pytest.skip("torch's vmap indexes a tensor by two numbers from 2.11 on")
        raise
