"""Calls that a seed draws, beside torch's function: dtypes, masks, D from 8 to 256, few rows, cross
attention, grouped heads; forward, and with backward.

What is slower than torch is timed again without what Python does, which names the cause.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torchs

import fastattn
from fastattn import api
from fastattn.backends.native import marshalling
from fastattn.dispatch import operation

from ..cases import FORWARD, TRAINING
from ..measure.records import Record
from .race import Race

DTYPES = {x: getattr(torch, x) for x in ("float32", "bfloat16", "float16", "float64")}
DIMS = (8, 16, 20, 32, 40, 48, 64, 72, 80, 96, 100, 112, 128, 160, 192, 256)
MASKS = ("none", "causal", "bool", "bias", "padding")
ROWS = ("square", "square", "few", "cross")
MOST = 2e9  # operations of a forward pass
LEAST, WORST = 0.97, 0.9  # of torch's time over ours


class Drawn(NamedTuple):
    dtype: str
    what: str
    mask: str
    B: int
    H: int
    Hk: int
    M: int
    N: int
    D: int
    Dv: int

    def __str__(self) -> str:
        heads = f"H{self.H}" if self.H == self.Hk else f"H{self.H}:{self.Hk}"
        dims = f"D{self.D}" if self.D == self.Dv else f"D{self.D}:{self.Dv}"
        return f"B{self.B} {heads} M{self.M} N{self.N} {dims} {self.mask}"


def draw(chance: random.Random, dtypes: Sequence[str]) -> Drawn:
    while True:
        rows, n = chance.choice(ROWS), round(2 ** chance.uniform(1, 12))
        m = dict(square=n, few=chance.randrange(1, 17), cross=round(2 ** chance.uniform(1, 11)))[
            rows
        ]
        mask = chance.choice(MASKS if m == n else [x for x in MASKS if x != "causal"])
        d = chance.choice(DIMS)
        dv = d if chance.random() < 0.85 else chance.choice(DIMS)
        h = chance.choice((1, 2, 4, 6, 8, 12, 16))
        hk = chance.choice([x for x in (h, h, 1, h // 2, h // 4) if x and h % x == 0])
        what = chance.choice((FORWARD, FORWARD, TRAINING))
        drawn = Drawn(
            chance.choice(dtypes), what, mask, chance.choice((1, 1, 2, 4)), h, hk, m, n, d, dv
        )
        if 2 * drawn.B * h * m * n * (d + dv) < MOST:
            return drawn


def races(dtypes: Sequence[str], cells: int, seed: int) -> Iterator[Race]:
    chance = random.Random(seed)
    for number in range(cells):
        yield race(draw(chance, dtypes), number)


def race(x: Drawn, number: int) -> Race:
    made = torch.Generator().manual_seed(number)
    dtype, graded = DTYPES[x.dtype], x.what == TRAINING
    sizes = (x.H, x.M, x.D), (x.Hk, x.N, x.D), (x.Hk, x.N, x.Dv), (x.H, x.M, x.Dv)
    q, k, v, dout = (
        torch.randn(x.B, n, h, d, generator=made).to(dtype).transpose(1, 2) for h, n, d in sizes
    )
    leaves = [y.detach().requires_grad_(graded) for y in (q, k, v)]
    mask = _mask(x, made, dtype)
    given: dict[str, Any] = {"mask": mask}
    if x.mask == "causal":
        given = {"causal": True}
    theirs: dict[str, Any] = dict(
        attn_mask=mask, is_causal=x.mask == "causal", enable_gqa=x.H != x.Hk
    )

    def ours() -> Tensor:
        q, k, v = leaves
        return fastattn.attention(q, k, v, **given)

    def other() -> Tensor:
        q, k, v = leaves
        return torchs(q, k, v, **theirs)

    first, second = (_trained(f, leaves, dout) if graded else _listed(f) for f in (ours, other))
    inner = _kernels(leaves, dout, given, graded)
    return Race(str(x), x.dtype, x.what, first, second, aim=LEAST, inner=inner)


def _mask(x: Drawn, made: torch.Generator, dtype: torch.dtype) -> Tensor | None:
    if x.mask == "bool":
        shown = torch.rand(x.M, x.N, generator=made) < 0.8
        shown[:, 0] = True
        return shown
    if x.mask == "bias":
        return torch.randn(1, x.H, x.M, x.N, generator=made).to(dtype)
    if x.mask == "padding":
        lengths = torch.randint(1, x.N + 1, (x.B,), generator=made)
        return (torch.arange(x.N) < lengths[:, None])[:, None, None]
    return None


def _listed(function: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
    return lambda: [function()]


def _trained(
    function: Callable[[], Tensor], leaves: Sequence[Tensor], dout: Tensor
) -> Callable[[], Sequence[Tensor]]:
    return lambda: torch.autograd.grad(function(), leaves, dout)


def _kernels(
    leaves: Sequence[Tensor], dout: Tensor, given: dict[str, Any], graded: bool
) -> Callable[[], Any]:
    """The same passes, as the backend runs them."""
    q, k, v = leaves
    t, o = api.prepare(q, k, v, given)
    spec, backend = operation.plan(t, o, marshalling.kind(t))

    def passes() -> Any:
        outs = backend.forward(spec, t)
        return backend.backward(spec, t, outs, (dout, None), "qkv") if graded else outs

    return passes


def summary(rows: Sequence[Record]) -> Iterator[str]:
    """The distribution of the ratios, and the slower rows with their causes."""
    timed = [x for x in rows if x["status"] == "ok"]
    kinds = sorted({(x["dtype"], x["pass"]) for x in timed})
    yield ""
    for kind in [*kinds, None]:
        found = sorted(
            x["ratio"]["median"] for x in timed if kind is None or (x["dtype"], x["pass"]) == kind
        )
        if not found:
            continue
        under = [sum(x < limit for x in found) for limit in (1, LEAST, WORST)]
        name = "all" if kind is None else " ".join(kind)
        yield (
            f"{name}: {len(found)} calls, least {found[0]:.2f}, median "
            f"{statistics.median(found):.2f}, most {found[-1]:.1f}; {under[0]} under 1, "
            f"{under[1]} under {LEAST}, {under[2]} under {WORST}"
        )
    for x in sorted(timed, key=lambda x: x["ratio"]["median"]):
        if x["ratio"]["median"] < 1:
            within = x["within"]
            cause = "what Python does" if within >= 1 else "the kernels"
            yield (
                f"{x['ratio']['median']:.2f} {x['what']}, {x['dtype']} {x['pass']}: {cause} "
                f"({within:.2f} without Python)"
            )
