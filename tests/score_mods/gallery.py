"""Known functions of flex_attention, written anew: of attention-gym, transformers and papers.

Each captures tensors of the sizes below. A mask_mod has four arguments, a score_mod five.
"""

import functools
import math

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from tests.support.program_operators import indices

B, H, N = 2, 3, 12
INDICES = indices(B, H, N, N)

_G = torch.Generator().manual_seed(35)


def normal(*shape):
    return torch.randn(*shape, generator=_G)


def ints(high, *shape, low=0):
    return torch.randint(low, high, shape, generator=_G)


DOCS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3], dtype=torch.int32)
OFFSETS = torch.tensor([0, 3, 8, 10, 12])
LENGTHS = torch.tensor([7, 12])
PADDING = torch.arange(N) < LENGTHS[:, None]
BIAS = normal(B, H, N, N)
RELATIVE = normal(H, 2 * N - 1)
SLOPES = torch.exp2(-torch.arange(1.0, H + 1))
POSITIONS = torch.cat([torch.arange(3), torch.arange(5), torch.arange(2), torch.arange(2)])
GROUPS = torch.tensor([[-1, -1, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1]] * B)
LEFT = torch.tensor([0, 2])
DISTANCE = ints(5, B, N, N)
SPATIAL = normal(H, 5)
GLOBAL = torch.arange(N) % 5 == 0
SCALAR = torch.tensor(0.75)
PARENT = ints(2, N, N).bool()


def causal(b, h, i, j):
    return i >= j


def documents(b, h, i, j):
    return DOCS[i] == DOCS[j]


def per_document(inner):
    def mask(b, h, i, j):
        inside = inner(b, h, i - OFFSETS[DOCS[i]], j - OFFSETS[DOCS[j]])
        return (DOCS[i] == DOCS[j]) & inside

    return mask


def natten(b, h, i, j, *, width=4, k=3):
    iy, ix, jy, jx = i // width, i % width, j // width, j % width
    cx = ix.clamp(k // 2, width - 1 - k // 2)
    cy = iy.clamp(k // 2, N // width - 1 - k // 2)
    return ((cx - jx).abs() <= k // 2) & ((cy - jy).abs() <= k // 2)


def morton(b, h, i, j):
    def unmix(z):
        x = z & 5
        x = (x ^ (x >> 1)) & 3
        return x

    near = (unmix(i) - unmix(j)).abs() <= 1
    return near & ((unmix(i >> 1) - unmix(j >> 1)).abs() <= 1)


def block_diffusion(b, h, i, j, *, half=N // 2, size=2):
    noised_i, noised_j = i < half, j < half
    block_i = torch.where(noised_i, i // size, (i - half) // size)
    block_j = torch.where(noised_j, j // size, (j - half) // size)
    diagonal = (block_i == block_j) & (noised_i == noised_j)
    offset = (block_i > block_j) & ~noised_j & noised_i
    return diagonal | offset | ((block_i >= block_j) & ~noised_i & ~noised_j)


def chunked(b, h, i, j):
    return (j - LEFT[b]) // 4 == (i - LEFT[b]) // 4


def blockwise(b, h, i, j):
    group = GROUPS[b, i]
    return (group == GROUPS[b, j]) & (group >= 0)


def remapped(b, h, i, j):
    return causal(b, h, POSITIONS[i], POSITIONS[j]) & documents(b, h, i, j)


def transformers_and(b, h, i, j):
    result = i.new_ones((), dtype=torch.bool)
    for mask in (causal, documents):
        result = result & mask(b, h, i, j).to(result.device)
    return result


class Window:
    def __init__(self, width):
        self.width = width

    def __call__(self, b, h, i, j):
        return (i >= j) & (i - j <= self.width)


MASKS = {
    "causal": causal,
    "no mask": noop_mask,
    "window": Window(4),
    "window by overlay": and_masks(lambda b, h, i, j: j > i - 5, causal),
    "window, both sides": lambda b, h, i, j: abs(i - j) <= 3,
    "prefix": or_masks(causal, lambda b, h, i, j: j < 5),
    "documents": documents,
    "documents, causal": and_masks(documents, causal),
    "packed causal": per_document(causal),
    "packed window": per_document(functools.partial(lambda w, b, h, i, j: i - j < w, 2)),
    "global and window": lambda b, h, i, j: ((i - j).abs() <= 2) | GLOBAL[j] | GLOBAL[i],
    "sinks and window": lambda b, h, i, j: ((i >= j) & (i - j <= 3)) | ((i >= 2) & (j < 2)),
    "dilated": lambda b, h, i, j: ((i - j).abs() <= 6) & (((i - j).abs() % 2) == 0),
    "natten": natten,
    "tiled natten": lambda b, h, i, j: natten(b, h, i // 2 * 2 + j % 2, j),
    "morton": morton,
    "block diffusion": block_diffusion,
    "padding": lambda b, h, i, j: PADDING[b, j],
    "padding, chained": lambda b, h, i, j: PADDING[b][j],
    "lengths": lambda b, h, i, j: j < LENGTHS[b],
    "chunked": and_masks(chunked, causal),
    "blockwise": or_masks(blockwise, causal),
    "packed positions": remapped,
    "offset": lambda b, h, i, j: causal(b, h, i + LENGTHS[0] - 7, j),
    "and of transformers": transformers_and,
    "not": lambda b, h, i, j: ~(i < j) & torch.logical_not(i == 3),
    "tree": lambda b, h, i, j: PARENT[i, j] | (i == j),
    "of heads": lambda b, h, i, j: torch.where(h == 0, i >= j, i <= j),
    "negative index": lambda b, h, i, j: PADDING[b, -1 - j],
    "a bool": lambda b, h, i, j: True,
}


def t5_bucket(s, b, h, i, j):
    d = i - j
    n = torch.abs(d)
    large = 4 + (torch.log(n.float() / 4 + 1e-6) / math.log(2) * 2).to(torch.long)
    large = torch.minimum(large, torch.full_like(large, 7))
    bucket = torch.where(n < 4, n, large) + (d < 0).to(torch.long) * 8
    return s + RELATIVE[h, bucket]


def transformers_score(s, b, h, i, j):
    s = 20.0 * torch.tanh(s / 20.0)
    return s + BIAS[b][0][i][j] + BIAS[b, h, i, j]


def sandwich(s, b, h, i, j):
    d = (i - j).to(s.dtype)
    return s + (torch.cos(d * 0.1) + torch.cos(d * 0.01) - 2) * (8.0 * (h + 1) / H)


SCORES = {
    "as it is": lambda s, b, h, i, j: s,
    "alibi": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "alibi, both sides": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    "alibi, computed": lambda s, b, h, i, j: s + torch.exp2(-((h + 1) * 8.0 / H)) * (j - i),
    "softcap": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    "softcap, sigmoid": lambda s, b, h, i, j: 20 * (2 * torch.sigmoid(s / 10) - 1),
    "relative": lambda s, b, h, i, j: s + RELATIVE[h, i - j + N - 1],
    "bias": lambda s, b, h, i, j: s + BIAS[b, h, i, j],
    "bias, chained": lambda s, b, h, i, j: s + BIAS[b][h][i][j],
    "bias, a view": lambda s, b, h, i, j: s + BIAS[:, 1, ..., :][b][i, j] * BIAS[0, h, :, 2][i],
    "spatial": lambda s, b, h, i, j: s + SPATIAL[h, DISTANCE[b, i, j]],
    "edges": lambda s, b, h, i, j: (
        s + (SPATIAL[h][DISTANCE[b, i, j]] + SPATIAL[h, DISTANCE[b, j, i]]) / 2
    ),
    "t5": t5_bucket,
    "transformers": transformers_score,
    "sandwich": sandwich,
    "relu": lambda s, b, h, i, j: torch.nn.functional.relu(s),
    "relu squared": lambda s, b, h, i, j: torch.relu(s) ** 2,
    "gelu": lambda s, b, h, i, j: torch.nn.functional.gelu(s),
    "silu": lambda s, b, h, i, j: torch.nn.functional.silu(s),
    "hidden": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
    "masked_fill": lambda s, b, h, i, j: s.masked_fill(i < j, float("-inf")),
    "scalar": lambda s, b, h, i, j: s * SCALAR.exp() + SCALAR,
    "constants": lambda s, b, h, i, j: s * torch.tensor(2.0) + s.new_full((), 3) + s.new_ones(()),
    "in place": lambda s, b, h, i, j: s.clone().add_(1).mul_(h + 1),
    "clamp": lambda s, b, h, i, j: s.clamp(-0.5, 0.5) + torch.clamp(i - j, min=-2) + s.clip(max=1),
    "integers": lambda s, b, h, i, j: (
        s + (i - j) // 3 + (i - j) % 5 + torch.div(j - i, 3, rounding_mode="trunc") + (i << 2 | 1)
    ),
    "modulo of floats": lambda s, b, h, i, j: torch.remainder(s, 0.3) + torch.fmod(s, -0.7),
    "casts": lambda s, b, h, i, j: (s * 3).int() + (i > j).float() + s.bool().long() + s.type_as(s),
    "powers": lambda s, b, h, i, j: s.abs().pow(1.5) + i**2 + 2**h + 1.5 ** s.reciprocal().sign(),
    "roundings": lambda s, b, h, i, j: s.floor() + torch.ceil(s) * 2 + (s * 8).round() + s.trunc(),
    "not a number": lambda s, b, h, i, j: torch.where(torch.isinf(s) | s.isnan(), 0.0, s),
    "a constant": lambda s, b, h, i, j: 1,
    "logic": lambda s, b, h, i, j: s * ((i ^ j) & 3) + (~i | j) + torch.logical_and(i, j),
    "rsub": lambda s, b, h, i, j: 1 - s + torch.rsub(i, j) + torch.add(s, j, alpha=2),
    "extremes": lambda s, b, h, i, j: torch.max(s, SCALAR) + s.minimum(SCALAR) + i.max(j),
}
