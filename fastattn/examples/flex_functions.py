"""Fifteen functions of `flex_gallery`: those that people give to flex_attention, for n tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

HEADS = 4


class Function(NamedTuple):
    """State what a model's attention is.

    Args:
        mask_mod: mask_mod(b, h, i, j) -> bool. None: every key is seen.
        score_mod: score_mod(score, b, h, i, j) -> score. None: scores stay.
        learned: The captured tensor that a model trains, if there is one.
    """

    mask_mod: Callable | None = None
    score_mod: Callable | None = None
    learned: Tensor | None = None


def causal(b, h, i, j):
    return i >= j


def pieces(n: int, seed: int, least: int, most: int) -> Tensor:
    """[n]: the number of the piece that each token is in, for pieces of random lengths."""
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(least, most, (n // least + 1,), generator=draws)
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:n]


def window(n: int) -> Function:
    return Function(lambda b, h, i, j: (i >= j) & (i - j < n // 8))


def prefix(n: int) -> Function:
    return Function(lambda b, h, i, j: (j < n // 3) | (i >= j))


def documents(n: int) -> Function:
    number = pieces(n, 1, n // 16, n // 3)
    return Function(lambda b, h, i, j: (number[i] == number[j]) & (i >= j))


def sinks_and_window(n: int) -> Function:
    return Function(lambda b, h, i, j: (i >= j) & ((i - j < n // 8) | (j < 4)))


def dilated(n: int) -> Function:
    return Function(lambda b, h, i, j: (i >= j) & (i - j < n // 2) & ((i - j) % 4 == 0))


def natten(n: int) -> Function:
    """Neighbourhood attention on an image of 2^k columns: 7 x 7 pixels, moved inside at edges."""
    width = 1 << (n.bit_length() - 1) // 2
    height, reach = n // width, 3

    def mask(b, h, i, j):
        y = (i // width).clamp(reach, height - 1 - reach)
        x = (i % width).clamp(reach, width - 1 - reach)
        return ((y - j // width).abs() <= reach) & ((x - j % width).abs() <= reach)

    return Function(mask)


def block_diffusion(n: int) -> Function:
    """Noised tokens, then clean ones: a noised block sees itself and the clean blocks before it."""
    half, size = n // 2, n // 16

    def mask(b, h, i, j):
        clean_i, clean_j = i >= half, j >= half
        of_i = torch.where(clean_i, i - half, i) // size
        of_j = torch.where(clean_j, j - half, j) // size
        itself = (of_i == of_j) & (clean_i == clean_j)
        before = (of_i > of_j) & clean_j
        return itself | before

    return Function(mask)


def tree(n: int) -> Function:
    """Nodes of a tree in preorder: a node sees its ancestors. The descendants of a node lie between
    it and `end`."""
    draws = torch.Generator().manual_seed(2)
    depth = [0]
    for step in torch.randint(-3, 2, (n - 1,), generator=draws).tolist():
        depth.append(max(1, depth[-1] + step))
    end, open_nodes = [n] * n, []
    for node, at in enumerate(depth):
        while open_nodes and depth[open_nodes[-1]] >= at:
            end[open_nodes.pop()] = node
        open_nodes.append(node)
    ends = torch.tensor(end)
    return Function(lambda b, h, i, j: (j <= i) & (i < ends[j]))


def alibi(n: int) -> Function:
    slopes = torch.exp2(-8.0 / HEADS * torch.arange(1, HEADS + 1))
    return Function(causal, lambda s, b, h, i, j: s + slopes[h] * (j - i))


def t5_buckets(n: int) -> Function:
    """16 buckets of exact distances, 16 that widen with the logarithm up to 128."""
    table = torch.randn(HEADS, 32, generator=torch.Generator().manual_seed(3))

    def score(s, b, h, i, j):
        distance = (i - j).clamp(min=0)
        wide = torch.log(distance.clamp(min=1).float() / 16) / math.log(128 / 16) * 16
        bucket = torch.where(distance < 16, distance, (16 + wide.long()).clamp(max=31))
        return s + table[h, bucket]

    return Function(causal, score, table)


def softcap(n: int) -> Function:
    return Function(causal, lambda s, b, h, i, j: 5 * torch.tanh(s / 5))


def relative_table(n: int) -> Function:
    table = torch.randn(HEADS, 2 * n - 1, generator=torch.Generator().manual_seed(4))
    return Function(None, lambda s, b, h, i, j: s + table[h, i - j + (n - 1)], table)


def graph_distance(n: int) -> Function:
    """Graphormer's: a number for each head and each distance of two nodes of a graph."""
    place = torch.randn(n, 2, generator=torch.Generator().manual_seed(5))
    distance = (torch.cdist(place, place) * 3).long().clamp(max=15)
    table = torch.randn(HEADS, 16, generator=torch.Generator().manual_seed(6))
    return Function(None, lambda s, b, h, i, j: s + table[h, distance[i, j]], table)


def multi_modal_prefix(n: int) -> Function:
    """Text is causal; the tokens of an image see each other. Every third piece is an image."""
    piece = pieces(n, 7, n // 16, n // 6)
    image = torch.where(piece % 3 == 1, piece, -1)
    return Function(lambda b, h, i, j: (i >= j) | ((image[i] == image[j]) & (image[i] >= 0)))


FUNCTIONS: dict[str, Callable[[int], Function]] = {
    "causal": lambda n: Function(causal),
    "window": window,
    "prefix": prefix,
    "documents": documents,
    "sinks and window": sinks_and_window,
    "dilated": dilated,
    "NATTEN 2-D": natten,
    "block diffusion": block_diffusion,
    "tree": tree,
    "ALiBi": alibi,
    "T5 buckets": t5_buckets,
    "softcap": softcap,
    "relative table": relative_table,
    "graph distance": graph_distance,
    "multi-modal prefix": multi_modal_prefix,
}
