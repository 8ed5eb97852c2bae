"""Calls with little to compute: one to eight rows and keys beside torch's function, and every kind
of call; causal over full at short lengths; a few rows on long keys, and their gradients (class
tokens, latents)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torchs

import fastattn

from ..cases import DTYPES, FORWARD, TRAINING, Case
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
    """Torch's function over each of ours, of few rows and keys; then the kinds of calls."""
    for dtype, (n, aim) in itertools.product(dtypes, AIMS.items()):
        given = _given(dtype, 1, n, False)
        for causal, (name, function) in itertools.product((False, True), OURS.items()):
            other = _repeated(torchs, given, is_causal=causal)
            word = "causal" if name == "attention" else "is_causal"
            ours = _repeated(function, given, **{word: causal})
            what = f"{CALLS} calls of {name}, {n}x{n}{', causal' * causal}"
            yield Race(what, dtype, FORWARD, ours, other, aim=aim)
    for dtype in dtypes:
        yield from _kinds(dtype)
        ours, other = steps(dtype, 1, (HEADS, HEADS), DIM, 64, CALLS)
        yield Race(f"{CALLS} steps of a cache, truncate", dtype, FORWARD, ours, other, aim=1.0)


KINDS_OF = 4  # rows and keys
AIM_OF_FUNCTIONS = 0.33  # of a score_mod beside torch's function with a mask


def _kinds(dtype: str) -> Iterator[Race]:
    """Calls with masks, grouped heads, gradients and so on, each beside torch's nearest."""
    n, own, theirs = KINDS_OF, fastattn.attention, OURS["scaled_dot_product_attention"]
    q, k, v = given = _given(dtype, 1, n, False)
    grouped = [q, k[:, ::4].contiguous(), v[:, ::4].contiguous()]
    items, rows = [x[0] for x in given], [x[0].transpose(0, 1).contiguous() for x in given]
    shown, bias = torch.ones(n, n).tril().bool(), torch.randn(n, n).to(q.dtype)
    distance = 0.5 * (torch.arange(n)[:, None] - torch.arange(n)).to(q.dtype)
    offsets = torch.tensor([0, n])

    def packed(*x: Tensor) -> Tensor:
        q, k, v = x
        return fastattn.attention_packed(q, k, v, offsets, offsets, max_q=n, max_k=n)

    def relative(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + 0.5 * (i - j)

    by_distance = _repeated(own, given, score_mod=relative)
    calls = {  # ours, and the other's
        "a mask": (_repeated(own, given, mask=shown), _repeated(torchs, given, attn_mask=shown)),
        "a bias": (_repeated(own, given, mask=bias), _repeated(torchs, given, attn_mask=bias)),
        "torch's, a mask": _pair(theirs, given, attn_mask=shown),
        "torch's, grouped": _pair(theirs, grouped, enable_gqa=True),
        "torch's, 3-D": _pair(theirs, items),
        "the LSE": (_repeated(own, given, return_lse=True), _repeated(torchs, given)),
        "a score_mod": (by_distance, _repeated(torchs, given, attn_mask=distance)),
    }
    for what, (first, second) in calls.items():
        aim = AIM_OF_FUNCTIONS if what == "a score_mod" else 1.0
        yield Race(f"{CALLS} calls, {what}", dtype, FORWARD, first, second, aim=aim)
    less = {  # beside a call that computes other numbers
        "a window": (_repeated(own, given, window=(1, 0)), _repeated(torchs, given)),
        "packed, beside attention": (_repeated(packed, rows), _repeated(own, given)),
    }
    for what, (first, second) in less.items():
        yield Race(f"{CALLS} calls, {what}", dtype, FORWARD, first, second, aim=1.0, same=False)
    leaves = _given(dtype, 1, n, True)
    for name, function in OURS.items():
        ours, other = (_graded(f, leaves, q) for f in (function, torchs))
        yield Race(f"{CALLS} calls of {name}", dtype, TRAINING, ours, other, aim=1.0)


def _pair(
    function: Callable[..., Tensor], given: Sequence[Tensor], **named: Any
) -> tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]:
    return _repeated(function, given, **named), _repeated(torchs, given, **named)


def steps(
    dtype: str, batch: int, heads: tuple[int, int], dim: int, n: int, count: int
) -> tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]:
    """Steps of decoding behind n keys, beside two writes into slices and torch's function. After
    `count` of them both go back to n keys."""
    (h, hk), capacity = heads, max(1024, n + count)
    size: dict[str, Any] = dict(dtype=DTYPES[dtype])
    q, k, v = (torch.randn(batch, x, 1, dim, **size) for x in (h, hk, hk))
    cache = fastattn.KVCache(batch, hk, dim, capacity=capacity, **size)
    kept = [torch.zeros(batch, hk, capacity, dim, **size) for _ in "kv"]
    for x in kept:
        x[:, :, :n] = torch.randn(batch, hk, n, dim)
    cache.append(*(x[:, :, :n] for x in kept))

    def ours() -> list[Tensor]:
        out = q
        for _ in range(count):
            out = cache.step(q, k, v)
        cache.truncate(n)
        return [out]

    def other() -> list[Tensor]:
        out = q
        for at in range(n, n + count):
            for x, new in zip(kept, (k, v)):
                x[:, :, at : at + 1] = new
            keys, values = (x[:, :, : at + 1] for x in kept)
            out = torchs(q, keys, values, enable_gqa=h > hk)
        return [out]

    return ours, other


def causal(dtypes: Sequence[str], scale: float) -> Iterator[Race]:
    """A causal call over the full one, in proportion to its scores, and both beside torch's."""
    for dtype, length in itertools.product(dtypes, SHORT):
        n = max(2, int(length * scale))
        given = _given(dtype, 8, n, False)
        full, ours, other = (
            _repeated(function, given, times=1, **named)
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
    function: Callable[..., Any], given: Sequence[Tensor], times: int = CALLS, **named: Any
) -> Callable[[], list[Tensor]]:
    def calls() -> list[Tensor]:
        with torch.no_grad():
            for _ in range(times - 1):
                function(*given, **named)
            out = function(*given, **named)
        return [out[0] if isinstance(out, tuple) else out]

    return calls


def _graded(
    function: Callable[..., Tensor], leaves: Sequence[Tensor], dout: Tensor
) -> Callable[[], Any]:
    def calls() -> Any:
        for _ in range(CALLS - 1):
            torch.autograd.grad(function(*leaves), leaves, dout)
        return torch.autograd.grad(function(*leaves), leaves, dout)

    return calls
