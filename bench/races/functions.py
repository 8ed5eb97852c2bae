"""score_mod and mask_mod: calls with a function beside the same call without, beside torch's with a
ready dense mask.

Calls of ours use what is kept of the functions, as from the second call on; a dense mask exists
before the clock starts. The peer `flex` of a sweep is torch's compiled flex_attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torchs

import fastattn

from ..cases import BOTH, DTYPES, FORWARD, TRAINING
from .race import Race

N, HEADS, DIM = 2048, 4, 64
AIM = {"float32": 1.25, "bfloat16": 1.4}  # most of a call without a function, forward
TRAINED = 1.2  # the same of a training step
Function = Callable[..., Any]


def scores(n: int, learned: bool = False) -> dict[str, Function]:
    """score_mods of n tokens. learned: those that a model trains."""
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(HEADS, 2 * n, generator=draw).requires_grad_(learned)
    slopes = torch.rand(HEADS, generator=draw).requires_grad_(learned)
    found: dict[str, Function] = {
        "a table by i - j": lambda s, b, h, i, j: s + table[h, i - j + n],
        "slopes": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
    }
    if not learned:
        # Small: torch's mask of bfloat16 rounds a bias of 100 by a quarter.
        found["a relative bias"] = lambda s, b, h, i, j: s + (i - j) * 0.002
        found["a softcap"] = lambda s, b, h, i, j: 20 * torch.tanh(s / 20)
    return found


def masks(n: int) -> dict[str, Function]:
    documents = torch.arange(n) // (n // 7)
    return {
        "causal": lambda b, h, i, j: i >= j,
        "documents, causal": lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j),
        "sinks and a window": lambda b, h, i, j: (i >= j) & ((i - j < n // 8) | (j < 4)),
        "a prefix": lambda b, h, i, j: (j < n // 3) | (i >= j),
    }


def races(dtypes: Sequence[str] = BOTH, scale: float = 1.0) -> Iterator[Race]:
    """`scale` multiplies the length."""
    n = int(N * scale)
    for dtype in dtypes:
        given = [torch.randn(1, HEADS, n, DIM, dtype=DTYPES[dtype]) for _ in range(3)]
        for name, function in scores(n).items():
            yield over_plain(f"{name} over none", dtype, FORWARD, given, function, aim=AIM[dtype])
            yield over_plain(f"{name} over none", dtype, TRAINING, given, function, aim=TRAINED)
            yield beside_a_mask(name, dtype, given, function)
        for name, function in scores(n, learned=True).items():
            what = f"{name}, learned, over none"
            yield over_plain(what, dtype, TRAINING, given, function, aim=1.25)
        for name, function in masks(n).items():
            share = float(shown_by(function, n).float().mean())
            for what in (FORWARD, TRAINING):
                title = f"{name} over none, to visible pairs"
                mask: Any = dict(mask_mod=function)
                yield over_plain(title, dtype, what, given, aim=1.15, share=share, **mask)
            yield beside_a_mask(name, dtype, given, mask_mod=function)


def call(given: Sequence[Tensor], score: Function | None, mask: Function | None) -> Tensor:
    q, k, v = given
    return fastattn.flex_attention(q, k, v, score, mask_mod=mask)


def over_plain(
    name: str,
    dtype: str,
    what: str,
    given: Sequence[Tensor],
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
    aim: float = 1.0,
    share: float = 1.0,
) -> Race:
    """A call with a function over the same call without."""
    leaves = [x.clone().requires_grad_(what == TRAINING) for x in given]
    dout = torch.ones_like(given[0])

    def run(*functions: Function | None) -> list[Tensor]:
        score, mask = functions
        out = call(leaves, score, mask)
        if what == FORWARD:
            return [out]
        out.backward(dout)  # to captured tensors, too
        return [out]

    with_function = functools.partial(run, score_mod, mask_mod)
    plain = functools.partial(run, None, None)
    return Race(name, dtype, what, with_function, plain, "at most", aim, share, same=False)


def beside_a_mask(
    name: str,
    dtype: str,
    given: Sequence[Tensor],
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
) -> Race:
    """torch's function with a dense mask over ours with a function."""
    n = given[0].shape[2]
    if mask_mod is not None:
        mask = shown_by(mask_mod, n)
    else:
        assert score_mod is not None
        mask = score_mod(torch.zeros(n, n), *_indices(n)).to(given[0].dtype)
    capped = score_mod is not None and name == "a softcap"  # no mask is a cap: only time counts

    def ours() -> list[Any]:
        return [call(given, score_mod, mask_mod)]

    def other() -> list[Tensor]:
        return [torchs(*given, attn_mask=mask)]

    title = f"torch with a dense mask over {name}"
    return Race(title, dtype, FORWARD, ours, other, aim=1.0, same=not capped)


def shown_by(mask_mod: Function, n: int) -> Tensor:
    """(n, n) bool: what a mask_mod shows."""
    return mask_mod(*_indices(n)).expand(1, 1, n, n)[0, 0].contiguous()


def _indices(n: int) -> tuple[Tensor, ...]:
    at = torch.arange(n)
    none = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    return none, torch.arange(HEADS).view(-1, 1, 1), at[:, None], at
