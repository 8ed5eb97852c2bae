"""norm_rope: beside the same formulas by torch's operations, as models call them and compiled, and
beside copies of q and k.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import fastattn

from ..cases import BOTH, DTYPES, FORWARD, TRAINING
from .race import Race


class Shape(NamedTuple):
    heads: int
    key_heads: int
    D: int
    rows: int


SHAPES = (Shape(16, 8, 128, 1024), Shape(16, 8, 128, 4096), Shape(8, 2, 64, 1024))


def eager(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> list[Tensor]:
    """As Qwen3 computes them: the norm in float32, the rotation in the dtype of q and k."""
    found = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        normed = weight * normed.to(x.dtype)
        a, b = normed.chunk(2, dim=-1)
        found.append(normed * cos + torch.cat((-b, a), -1) * sin)
    return found


def races(dtypes: Sequence[str] = BOTH, scale: float = 1.0) -> Iterator[Race]:
    """`scale` multiplies the rows, for tests."""
    compiled = torch.compile(eager, dynamic=False) if scale == 1 else eager
    for dtype in dtypes:
        for shape in SHAPES:
            rows = max(1, int(shape.rows * scale))
            torch.compiler.reset()  # or it would stop to compile after a few shapes
            yield from of_shape(dtype, shape._replace(rows=rows), compiled)


def of_shape(dtype: str, shape: Shape, compiled: Callable[..., Sequence[Tensor]]) -> Iterator[Race]:
    kind, (H, Hk, D, rows) = DTYPES[dtype], shape
    # As projections leave them: the heads of a row beside each other.
    q, k, dq, dk = (torch.randn(1, rows, h, D, dtype=kind).transpose(1, 2) for h in (H, Hk, H, Hk))
    weights = [(torch.rand(D) + 0.5).to(kind).requires_grad_() for _ in range(2)]
    leaves = [x.requires_grad_() for x in (q, k)] + weights
    angle = torch.arange(rows)[:, None] * 1e6 ** (-torch.arange(D // 2) / (D // 2))
    cos, sin = angle.cos(), angle.sin()
    tables = [torch.cat([x, x], -1).to(kind) for x in (cos, sin)]
    outs = torch.empty_like(q.detach()), torch.empty_like(k.detach())

    def ours(out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        given = q, k, cos, sin
        return fastattn.norm_rope(*given, q_weight=weights[0], k_weight=weights[1], out=out)

    def forward(call: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
        return torch.no_grad()(call)

    def both(call: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
        return lambda: torch.autograd.grad(tuple(call()), leaves, (dq, dk))

    def copies() -> list[Tensor]:
        return [y.copy_(x) for x, y in zip((q, k), outs)]

    name = f"{H}/{Hk}/{D}, {rows} rows"
    others = (("eager", eager, 5.0), ("compiled", compiled, 2.0))
    for text, other, aim in others:
        by_torch = functools.partial(other, *leaves, *tables)
        yield Race(f"{text}, {name}", dtype, FORWARD, forward(ours), forward(by_torch), aim=aim)
        yield Race(f"{text}, {name}", dtype, TRAINING, both(ours), both(by_torch), aim=aim)
    if dtype == "float32":
        within = forward(lambda: ours(outs))
        copied = forward(copies)
        yield Race(f"copies, {name}", dtype, FORWARD, within, copied, aim=0.8, same=False)
