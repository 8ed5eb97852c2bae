"""Calls with little to compute: one to eight rows and keys beside torch's function; causal over
full at short lengths; a few rows on long keys, and their gradients (class tokens, latents)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torchs

import fastattn

from ..cases import DTYPES, FORWARD, Case
from .race import Race

CALLS = 20  # one sample is this many calls
# Rows and keys, and the least time of torch's over ours.
AIMS = {1: 0.8, 2: 0.8, 4: 1.0, 8: 1.0}
SHORT = (16, 32, 64, 128, 256, 512)
HEADS, DIM = 8, 64
OURS = {"attention": fastattn.attention}
OURS["scaled_dot_product_attention"] = fastattn.scaled_dot_product_attention

ROWS, LENGTHS, DECODED = (1, 4, 16), (4096, 8192, 16384), 128
GROUPS = {"MHA": (8, 8), "GQA": (32, 8)}  # (H, Hk): both read the same bytes
# (B, H, M, N) of a few rows with gradients, as in class tokens, pooling and latents.
TRAINED = (
    *((64, 8, 1, 197), (1, 12, 1, 196), (1, 12, 2, 196), (1, 12, 3, 196)),
    *((16, 8, 1, 1024), (1, 1, 3, 70_000), (1, 8, 3, 70_000)),
)


def decode(dtypes: Sequence[str], scale: float) -> Iterator[Case]:
    for dtype, (h, hk), n, m in itertools.product(dtypes, GROUPS.values(), LENGTHS, ROWS):
        yield Case("cpu", dtype, "full", 1, h, int(n * scale), DECODED, Hk=hk, M=m)


def trained(dtypes: Sequence[str], scale: float) -> Iterator[Case]:
    for dtype, (b, h, m, n) in itertools.product(dtypes, TRAINED):
        yield Case("cpu", dtype, "full", b, h, max(2, int(n * scale)), DIM, M=m)


def races(dtypes: Sequence[str], scale: float) -> Iterator[Race]:
    """Torch's function over each of ours, forward alone: without gradients, and for information of
    tensors that require them."""
    for dtype, (n, aim), grad in itertools.product(dtypes, AIMS.items(), (False, True)):
        given = _given(dtype, 1, n, grad)
        for causal, (name, function) in itertools.product((False, True), OURS.items()):
            other = _repeated(torchs, given, grad, is_causal=causal)
            word = "causal" if name == "attention" else "is_causal"
            ours = _repeated(function, given, grad, **{word: causal})
            what = f"{CALLS} calls of {name}, {n}x{n}{', causal' * causal}"
            what += ", with gradients" * grad
            yield Race(what, dtype, FORWARD, ours, other, aim=0.0 if grad else aim)


def causal(dtypes: Sequence[str], scale: float) -> Iterator[Race]:
    """A causal call over the full one, in proportion to its scores, and both beside torch's."""
    for dtype, length in itertools.product(dtypes, SHORT):
        n = max(2, int(length * scale))
        given = _given(dtype, 8, n, False)
        full, ours, other = (
            _repeated(function, given, False, times=1, **named)
            for function, named in (
                (fastattn.attention, {}),
                (fastattn.attention, {"causal": True}),
                (torchs, {"is_causal": True}),
            )
        )
        share, what = (n + 1) / (2 * n), f"causal over full, to visible scores, N = {n}"
        yield Race(what, dtype, FORWARD, ours, full, "at most", 1.5, share, same=False)
        yield Race(f"torch over causal, N = {n}", dtype, FORWARD, ours, other, aim=1.0)


def _given(dtype: str, batch: int, n: int, grad: bool) -> list[Tensor]:
    size: dict[str, Any] = dict(dtype=DTYPES[dtype], requires_grad=grad)
    return [torch.randn(batch, HEADS, n, DIM, **size) for _ in "qkv"]


def _repeated(
    function: Callable[..., Tensor],
    given: Sequence[Tensor],
    grad: bool,
    times: int = CALLS,
    **named: bool,
) -> Callable[[], list[Tensor]]:
    q, k, v = given

    def calls() -> list[Tensor]:
        with torch.set_grad_enabled(grad):
            for _ in range(times - 1):
                function(q, k, v, **named)
            return [function(q, k, v, **named)]

    return calls
