"""The oracle: attention as the mathematics states it, one line for each feature.

It computes in the dtype of its inputs and upcasts nothing. So in float64 it is the exact result
that every fused backend is compared with, and in bfloat16 a baseline of the same dtype. Memory is
O(M N). Read this file to learn what the operation means.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack  # torch depends on it

from .call.signatures import refuse_unknown, with_arguments
from .call.spec import EVERYTHING, MaskArguments, Place

WEYL = 0x9E3779B9, 0xBB67AE85  # Philox-4x32: each round adds these to the key
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WORD = 0xFFFFFFFF

Causal = bool | Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None] | None


class Arguments(MaskArguments, total=False, closed=True):
    """The arguments of `attention` other than q, k, v and the return_ flags."""

    causal: bool | Literal["top_left", "bottom_right"]
    key_lengths: Tensor | None
    again: tuple[int, int]
    score_mod: Callable[[Tensor], Tensor] | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_weights: Literal[False] = False,
    return_normaliser: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_weights: Literal[False] = False,
    return_normaliser: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_weights: Literal[True],
    return_normaliser: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_weights: Literal[True],
    return_normaliser: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    return_normaliser: bool = False,
    **arguments: Unpack[Arguments],
) -> Tensor | tuple[Tensor, ...]: ...
@functools.partial(with_arguments, kind=Arguments, again=(0, 0), score_mod=None)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    place: Place | None = None,
    again: tuple[int, int] = (0, 0),
    return_lse: bool = False,
    return_weights: bool = False,
    return_normaliser: bool = False,
    **of_scores: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Compute softmax(score(q k^T)) v as the mathematics states it, in O(M N) memory.

    The arguments up to place mean the same as in `fastattn.attention`. The result is computed in
    the dtype of the inputs.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        {sentences}
        again: For dropout: the numbers of items and of heads after which the draws repeat; 0 is
            never.
        score_mod: A function of all scores (B, H, M, N), applied after the scale.
        return_lse: If True, also return the LSE.
        return_weights: If True, also return the probabilities after dropout.
        return_normaliser: If True, also return the LSE and its rounding error.

    Shape:
        q: (B, H, M, D).
        k: (B, Hk, N, D). Hk divides H.
        v: (B, Hk, N, Dv).
        {shapes}
        out: (B, H, M, Dv), q's dtype.
        lse: (B, H, M), float32 (float64 for float64).
        weights: (B, H, M, N), q's dtype.
        normaliser: (2, B, H, M), the dtype of lse.

    Returns:
        out, or a tuple of out and those of lse, weights and normaliser that the flags ask for, in
        this order.

    Raises:
        ValueError: causal or window has an unknown value, or place.bottom_right is True beside
            causal="top_left".

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k, v = torch.randn(3, 1, 2, 10, 16, dtype=torch.float64)
        >>> exact = fastattn.reference.attention(q, k, v, causal=True, softcap=5.0)
        >>> fused = fastattn.attention(q, k, v, causal=True, softcap=5.0)
        >>> torch.testing.assert_close(fused, exact)
    """
    refuse_unknown("attention", of_scores, Arguments)
    # GQA: neighbouring query heads share a head of k and v.
    v = v.repeat_interleave(q.shape[1] // max(v.shape[1], 1), dim=1)
    place = located(place, q, k)
    if (key_lengths := of_scores.get("key_lengths")) is not None:
        v = v.masked_fill(~within(key_lengths, v.shape[2], place)[:, None, :, None], 0)
    with torch.autocast(q.device.type, enabled=False):
        s = scores(q, k, place=place, **of_scores)
        p, normaliser = softmax(s, sinks)
        p = dropout(p, dropout_p, seed, place, again)
        out = p @ v
    wanted = (normaliser[0], return_lse), (p, return_weights), (normaliser, return_normaliser)
    extras = [x for x, asked in wanted if asked]
    return (out, *extras) if extras else out


def located(place: Place | None, q: Tensor, k: Tensor) -> Place:
    """Return `place` with its defaults filled in.

    By default, this call's last row and key are those of the larger call.
    """
    place = place or EVERYTHING
    rows = place.row + q.shape[2] if place.rows is None else place.rows
    keys = place.key + k.shape[2] if place.keys is None else place.keys
    return place._replace(rows=rows, keys=keys)


def scores(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None = None,
    causal: Causal = False,
    window: Window = None,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    place: Place | None = None,
    score_mod: Callable[[Tensor], Tensor] | None = None,
    **of_products: Any,
) -> Tensor:
    """Compute the scores (B,H,M,N): -inf where a query may not attend to a key."""
    (B, H, M, _), N = q.shape, k.shape[2]
    place = located(place, q, k)
    k = k.repeat_interleave(H // max(k.shape[1], 1), dim=1)
    j = place.key + torch.arange(N, device=q.device)
    i = positions(M, causal, key_lengths, place, q.device)
    keep = band(i, j, causal, window)
    if key_lengths is not None:
        inside = within(key_lengths, N, place)
        keep = keep & inside[:, None, None]
        k = k.masked_fill(~inside[:, None, :, None], 0)  # padding may hold NaN
    s = q @ k.transpose(-1, -2) * factor(q, **of_products)  # exporters do not support k.mT
    if score_mod is not None:
        s = score_mod(s)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s).expand(B, H)[..., None, None] * (i - j).abs()
    if mask is not None and mask.dtype == torch.bool:
        keep = keep & mask
    elif mask is not None:
        s = s + mask.to(s)
    return s.masked_fill(~keep, -torch.inf)


def factor(q: Tensor, *, scale: float | None = None, **others: Any) -> Any:
    """The factor of q k^T: `scale`, by default 1 / sqrt(D), or 1 if D is 0."""
    D = q.shape[3]
    return (1 / math.sqrt(D) if D else 1.0) if scale is None else scale


def derivative(q: Tensor, k: Tensor, *, softcap: float | None, **others: Any) -> Tensor | float:
    """The derivative of a score by q.k: (B,H,M,N), or one number for all. k has H heads."""
    by = factor(q, **others)
    if softcap is not None:
        return by * (1 - torch.tanh(q @ k.mT * (by / softcap)) ** 2)
    return by


def derivative_tangent(
    q: Tensor, k: Tensor, products_t: Tensor, *, softcap: float | None, **others: Any
) -> Tensor | float:
    """The tangent of `derivative` if the products q.k have the tangent `products_t`: the second
    derivative of a score by q.k, times `products_t`."""
    if softcap is None:
        return 0.0
    by = factor(q, **others)
    bent = torch.tanh(q @ k.mT * (by / softcap))
    return -2 * by * by / softcap * bent * (1 - bent**2) * products_t


def within(key_lengths: Tensor, N: int, place: Place) -> Tensor:
    """(B,N) bool: True if key j is below the key length of item b."""
    return place.key + torch.arange(N, device=key_lengths.device) < key_lengths[:, None]


def positions(
    M: int,
    causal: Causal,
    key_lengths: Tensor | None,
    place: Any,  # a Place that `located` returned
    device: torch.device,
) -> Tensor:
    """i' (B|1,1,M,1): the position of each query row on the axis of keys."""
    i = place.row + torch.arange(M, device=device)[:, None]
    if place.bottom_right and causal in (True, "top_left"):
        raise ValueError('place.bottom_right: got True, expected False beside causal="top_left"')
    if not place.bottom_right and causal != "bottom_right":
        return i[None, None]
    ends = key_lengths
    ends = torch.full((1,), place.keys, device=device) if ends is None else ends.long()
    return i + (ends - place.rows)[:, None, None, None]


def band(i: Tensor, j: Tensor, causal: Causal, window: Window) -> Tensor:
    """True where key j is inside the window of row i. Causal is a window with right edge 0."""
    if causal not in (False, True, "top_left", "bottom_right"):
        raise ValueError(f'causal: got {causal!r}, expected a bool, "top_left" or "bottom_right"')
    left, right = (None, None) if window is None else window
    for edge in (left, right):
        if edge is not None and edge < 0:
            raise ValueError(f"window: got {window}, expected edges of 0 or more, or None")
    left, right = (None if x is None or x >= 1 << 40 else x for x in (left, right))  # no overflow
    keep = torch.ones_like(i - j, dtype=torch.bool)
    if causal:
        keep = keep & (j <= i)
    if left is not None:
        keep = keep & (j >= i - left)
    if right is not None:
        keep = keep & (j <= i + right)
    return keep


def softmax(s: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Probabilities (B,H,M,N), and the log of the denominator as two numbers, (2,B,H,M) in float32
    at least: the LSE and its rounding error. Their sum is m + log(total). Where m is large, one
    float32 cannot hold both m and log(total).

    A sink is one more logit in the denominator; no sink is a sink of -inf. The denominator of a row
    without keys is 0. It is replaced before the division and the logarithm, not after, because the
    gradient of the branch not taken would be NaN.
    """
    B, H, M, _ = s.shape
    sink = s.new_full((), -torch.inf) if sinks is None else sinks.to(s)[:, None, None]
    logits = torch.cat([s, sink.expand(B, H, M, 1)], dim=-1)
    m = logits.detach().amax(-1, keepdim=True)
    m = torch.where(m == -torch.inf, 0.0, m)  # or -inf - (-inf) = NaN
    e = torch.exp(logits - m)
    total = e.sum(-1, keepdim=True)
    safe = torch.where(total == 0, 1.0, total)
    wide = torch.float64 if s.dtype == torch.float64 else torch.float32
    m, log = m.to(wide), torch.log(safe).to(wide)
    lse = torch.where(total == 0, -torch.inf, m + log)
    tail = torch.where(lse.isfinite(), (m - lse) + log, 0.0).detach()
    return e[..., :-1] / safe, torch.stack([lse, tail]).squeeze(-1)


def dropout(
    p: Tensor,
    dropout_p: float,
    seed: int | Tensor | None,
    place: Place = EVERYTHING,
    again: tuple[int, int] = (0, 0),
) -> Tensor:
    """Drop the probabilities p (B,H,M,N) that `keep_mask` does not keep, and scale the others.

    The factor is 1 / (1 - dropout_p). A seed of None draws one from torch's generator.
    """
    if dropout_p == 0:
        return p
    if seed is None:
        seed = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), device=p.device)
    kept = keep_mask(p.shape, dropout_p, int(seed), p.device, place, again)
    return torch.where(kept, p, 0.0) / (1 - dropout_p if dropout_p < 1 else 1.0)


def keep_mask(
    shape: tuple[int, ...],
    dropout_p: float,
    seed: int,
    device: torch.device | str = "cpu",
    place: Place = EVERYTHING,
    again: tuple[int, int] = (0, 0),
) -> Tensor:
    """(B,H,M,N) bool: element (b,h,i,j) is kept iff its Philox word is >= floor(p 2^32).

    Four neighbouring keys share one block: counter (j >> 2, i, h, b), word j & 3. If the call is a
    part of a larger one, b, h, i and j are indices in the larger call. again: the numbers of items
    and of heads after which the draws repeat; 0 is never.
    """
    B, H, M, N = shape

    def along(first, n, dim, period=0):
        x = torch.arange(n, device=device)
        x = first + (x % period if period else x)
        return x.view([-1 if d == dim else 1 for d in range(4)])

    block, skipped = divmod(place.key, 4)
    j, i = along(block, -(-(skipped + N) // 4), 3), along(place.row, M, 2)
    counter = j, i, along(place.head, H, 1, again[1]), along(place.item, B, 0, again[0])
    words = torch.stack(torch.broadcast_tensors(*philox(counter, seed)), dim=-1)
    return words.flatten(-2)[..., skipped : skipped + N] >= math.floor(dropout_p * 2**32)


def philox(counter: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    """Philox-4x32-10 (Salmon et al., 2011). Words are int64 tensors holding 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(10):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # overflows, but all 64 bits are right
        c0, c1, c2, c3 = (b >> 32 & WORD) ^ c1 ^ k0, b & WORD, (a >> 32 & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def weights(s: Tensor, normaliser: Tensor) -> Tensor:
    """Probabilities before dropout, from scores and a normaliser (2,B,H,M) found earlier."""
    lse, tail = normaliser.to(s)[..., None]
    # An empty row gives 0. s and lse may both be large, so their difference is computed first.
    return torch.exp((s - torch.where(lse == -torch.inf, torch.inf, lse)) - tail)


# ------------------------------------------------------------------ what stands before attention


def norm_rope(
    q: Tensor,
    k: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    norm: Literal["rms", "layer"] | None = None,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    deinterleave: bool = False,
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    rope_first: bool = False,
    cu_q: Tensor | None = None,
) -> Any:
    """`fastattn.norm_rope`, with the same arguments but `out`, in the dtype of its inputs."""
    found = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if x is None:
            continue
        rows = x if cu_q is None else x.transpose(0, 1)
        if cos is not None and sin is not None and rotary_dim is not None:
            cos, sin = cos[..., : rotary_dim // 2], sin[..., : rotary_dim // 2]
        tables = tables_of_rows(cos, sin, rows.shape[-2], cu_q)
        own = norm or (None if weight is None else "rms")
        rules = eps, weight_offset, interleaved, deinterleave, rotary_start, rope_first
        y = norm_and_rotate(rows, *tables, weight, own, *rules)
        found.append(y if cu_q is None else y.transpose(0, 1))
    return found[0] if k is None else tuple(found)


def tables_of_rows(
    cos: Tensor | None, sin: Tensor | None, rows: int, cu: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The tables of each row, for all heads of an item: (M,R/2), or (B,1,M,R/2). In a packed batch
    row i of a sequence has row i of the tables."""
    if cos is None or sin is None:
        return None, None
    if cu is not None:
        at = torch.arange(rows, device=cos.device)
        at = at - cu[torch.searchsorted(cu, at, right=True) - 1]
        cos, sin = cos[..., at, :], sin[..., at, :]
    return (cos, sin) if cos.ndim == 2 else (cos[:, None], sin[:, None])


def norm_and_rotate(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    weight: Tensor | None,
    norm: Literal["rms", "layer"] | None,
    eps: float,
    weight_offset: float,
    interleaved: bool,
    deinterleave: bool,
    rotary_start: int,
    rope_first: bool,
) -> Tensor:
    """The norm of each row, and the rotation of its pairs of columns."""
    if rope_first and cos is not None and sin is not None:
        x = rotate(x, cos, sin, interleaved, deinterleave, rotary_start)
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    if norm is not None:
        x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        if weight is not None:
            x = x * (weight + weight_offset)
    if not rope_first and cos is not None and sin is not None:
        x = rotate(x, cos, sin, interleaved, deinterleave, rotary_start)
    return x


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, deinterleave: bool, start: int
) -> Tensor:
    """Each pair (a, b) of columns from `start` on becomes (a cos - b sin, b cos + a sin)."""
    end = start + 2 * cos.shape[-1]
    y = turn_pairs(x[..., start:end], cos, sin, interleaved, interleaved and not deinterleave)
    return torch.cat([x[..., :start], y, x[..., end:]], -1)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, beside: bool, beside_after: bool) -> Tensor:
    """`rotate` of all columns. beside, beside_after: a pair lies side by side in x, and in the
    result; otherwise half of the columns apart."""
    a, b = x.unflatten(-1, (x.shape[-1] // 2, 2)).unbind(-1) if beside else x.chunk(2, dim=-1)
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if beside_after else torch.cat(pair, -1)
