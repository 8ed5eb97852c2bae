"""Attention to keys that each row selects: beside gathered keys and matrix products by torch, a
dense mask in torch's function, and forward; and the indexer beside its products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torchs

import fastattn

from ..cases import BOTH, DTYPES, FORWARD, TRAINING
from .race import Race

KEYS = 16384


class Shape(NamedTuple):
    name: str
    rows: int
    heads: int
    key_heads: int
    D: int
    Dv: int
    count: int
    block: int


SHAPES = (
    Shape("256 keys", 512, 16, 1, 128, 128, 256, 1),
    Shape("4 blocks of 64", 512, 16, 1, 128, 128, 4, 64),
    Shape("2,048 keys, D 576", 32, 16, 1, 576, 512, 2048, 1),
)
# (heads, head dim, rows, chosen) of indexers: DeepSeek-V3.2's, and half its heads
INDEXERS = ((64, 128, 64, 2048), (32, 128, 64, 2048))


def races(dtypes: Sequence[str] = BOTH, scale: float = 1.0) -> Iterator[Race]:
    """`scale` multiplies the keys and the rows, for tests."""
    for dtype in dtypes:
        for shape in SHAPES:
            n, rows = int(KEYS * scale), max(1, int(shape.rows * scale))
            count = max(1, int(shape.count * scale))
            yield from of_shape(dtype, shape._replace(rows=rows, count=count), n)
        for heads, dim, rows, count in INDEXERS:
            yield indexer(dtype, heads, dim, max(1, int(rows * scale)), int(KEYS * scale), count)


def of_shape(dtype: str, shape: Shape, n: int) -> Iterator[Race]:
    kind = DTYPES[dtype]
    _, rows, H, Hk, D, Dv, count, block = shape
    q, k, v = (
        torch.randn(1, h, m, d, dtype=kind, requires_grad=True)
        for h, m, d in ((H, rows, D), (Hk, n, D), (Hk, n, Dv))
    )
    dout = torch.randn(1, H, rows, Dv, dtype=kind)
    blocks = n // block
    chosen = torch.stack([torch.randperm(blocks)[:count].sort()[0] for _ in range(rows)])
    indices = chosen.to(torch.int32)[None, None]
    keys = (chosen[..., None] * block + torch.arange(block)).flatten(1)
    mask = torch.zeros(rows, n, dtype=torch.bool).scatter_(1, keys, True)

    def ours() -> list[Tensor]:
        with torch.no_grad():
            return [fastattn.attention_selected(q, k, v, indices, block=block)]

    def gathered() -> list[Tensor]:
        with torch.no_grad():
            near, values = k[0, 0][keys], v[0, 0][keys]
            p = torch.softmax((q[0].transpose(0, 1) @ near.mT).float() * D**-0.5, -1)
            return [(p.to(kind) @ values).transpose(0, 1)[None]]

    def masked() -> list[Tensor]:
        with torch.no_grad():
            wide = (x.expand(-1, H, -1, -1) for x in (k, v))
            return [torchs(q, *wide, attn_mask=mask)]

    out = fastattn.attention_selected(q, k, v, indices, block=block)

    def backward() -> list[Tensor]:
        return list(torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))

    named = f"{shape.name} of {n}"
    if D == Dv:
        yield Race(f"gathered keys over {named}", dtype, FORWARD, ours, gathered, aim=4.0)
        yield Race(f"a dense mask in torch over {named}", dtype, FORWARD, ours, masked, aim=8.0)
    else:
        # The products alone, of keys that are gathered already.
        near = k.detach()[0, 0][keys]
        rows_first, p = q.detach()[0].transpose(0, 1), torch.rand(rows, H, len(keys[0])).to(kind)

        def products() -> list[Tensor]:
            return [rows_first @ near.mT, p @ near[..., :Dv]]

        name = f"{named}, over products of gathered keys"
        yield Race(name, dtype, FORWARD, ours, products, "at most", 2.0, same=False)
    name = f"backward over forward, {named}"
    yield Race(name, dtype, TRAINING, backward, ours, "at most", 3.0, same=False)


def indexer(dtype: str, heads: int, dim: int, rows: int, n: int, count: int) -> Race:
    """Scores of all keys and the choice, beside the products of the same numbers by torch."""
    kind = DTYPES[dtype]
    q, k = torch.randn(1, heads, rows, dim, dtype=kind), torch.randn(1, n, dim, dtype=kind)
    weights = torch.rand(1, heads, rows)
    flat, room = q[0].flatten(0, 1), torch.empty(heads * rows // 8, n, dtype=kind)

    def ours() -> list[Tensor]:
        return [fastattn.lightning_index(q, k, weights, min(count, n))]

    def products() -> list[Tensor]:
        for part in flat.split(len(room)):
            torch.mm(part, k[0].mT, out=room[: len(part)])
        return [room]

    name = f"indexer of {heads} heads on {n} keys, over its products"
    return Race(name, dtype, FORWARD, ours, products, "at most", 1.3, same=False)
