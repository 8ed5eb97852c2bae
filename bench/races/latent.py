"""Latent attention with the sizes of DeepSeek-V3: decoding with absorbed weights beside its matrix
products by torch, and beside keys of heads; prompts beside torch's function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torchs

import fastattn
from fastattn import mla

from ..cases import BOTH, DTYPES, FORWARD, TRAINING
from .race import Race

NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512
KEYS, PROMPT, EXPANDED = 4096, 1024, 512
HEADS = (16, 128)
PRODUCTS = 1.1  # most of two matrix products


def races(dtypes: Sequence[str] = BOTH, scale: float = 1.0) -> Iterator[Race]:
    """`scale` multiplies all lengths, for tests."""
    for dtype in dtypes:
        for heads in HEADS:
            yield beside_products(dtype, heads, int(KEYS * scale))
        yield beside_keys_of_heads(dtype, HEADS[0], int(EXPANDED * scale))
        for what in (FORWARD, TRAINING):
            yield prompt(dtype, what, HEADS[0], int(PROMPT * scale))


def beside_products(dtype: str, heads: int, n: int) -> Race:
    """One token on n latent vectors: attention alone, without the weights of the layer."""
    kind, wide = DTYPES[dtype], LATENT + ROPE
    q, c = torch.randn(1, heads, 1, wide, dtype=kind), torch.randn(1, 1, n, wide, dtype=kind)

    def ours() -> list[Any]:
        return [fastattn.attention(q, c, c[..., :LATENT])]

    def products() -> list[Tensor]:
        scores = (q[0, :, 0] @ c[0, 0].T).float() * wide**-0.5
        p = torch.softmax(scores, -1).to(kind)
        return [(p @ c[0, 0, :, :LATENT])[None, :, None]]

    title = f"absorbed, {heads} heads, {n} keys, over torch's products"
    return Race(title, dtype, FORWARD, ours, products, "at most", PRODUCTS)


def beside_keys_of_heads(dtype: str, heads: int, n: int) -> Race:
    """One token on n latent vectors, with the weights of the layer."""
    q, rotated, keys, weights = layer(dtype, heads, 1, n)

    def ours() -> list[Any]:
        return [mla.decode(q, rotated, keys, weights)]

    def expanded() -> list[Any]:
        return [mla.prefill(q, rotated, keys, weights)]

    title = f"keys of {heads} heads made from {n} over absorbed"
    return Race(title, dtype, FORWARD, ours, expanded, aim=2.0)


def prompt(dtype: str, what: str, heads: int, n: int) -> Race:
    """Causal attention of n rows with keys of heads: D 192, Dv 128."""
    grad = what == TRAINING
    draw: dict[str, Any] = dict(dtype=DTYPES[dtype], requires_grad=grad)
    q, k = (torch.randn(1, heads, n, NOPE + ROPE, **draw) for _ in range(2))
    v = torch.randn(1, heads, n, VALUE, **draw)
    dout = torch.randn(1, heads, n, VALUE, dtype=DTYPES[dtype])

    def run(out: Tensor) -> list[Tensor]:
        return [out, *(torch.autograd.grad(out, (q, k, v), dout) if grad else ())]

    def ours() -> list[Tensor]:
        return run(fastattn.attention(q, k, v, causal=True))

    def theirs() -> list[Tensor]:
        return run(torchs(q, k, v, is_causal=True))

    title = f"torch over a prompt of {n}, D 192, Dv 128"
    return Race(title, dtype, what, ours, theirs, aim=1.0)


def layer(dtype: str, heads: int, rows: int, n: int) -> tuple[Tensor, Tensor, Tensor, mla.Weights]:
    """Queries, latent keys and weights of a layer."""
    kind = DTYPES[dtype]
    q, rotated = (torch.randn(1, heads, rows, x, dtype=kind) for x in (NOPE, ROPE))
    keys = torch.randn(1, 1, n, LATENT + ROPE, dtype=kind)
    weight = torch.randn(heads * (NOPE + VALUE), LATENT) / LATENT**0.5
    return q, rotated, keys, mla.split(weight.to(kind), heads, NOPE)
