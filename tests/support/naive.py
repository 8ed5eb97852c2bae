"""A second attention, more naive than the oracle, by which the oracle itself is judged.

`keep` is Philox in numpy integers. `baseline` is torch in the inputs' own dtype throughout: every
intermediate is rounded to it, as in an implementation without a fused kernel, so its error is the
yardstick for a kernel's. Nothing here shares code with `fastattn.reference`.
"""

import math

import numpy as np
import torch

MUL = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)


def philox(counter, key):
    """Philox-4x32-10 of four counter words (arrays or ints) and two key words."""
    c = [np.asarray(x, dtype=np.uint64) for x in counter]
    k = [int(x) for x in key]
    for _ in range(10):
        a, b = c[0] * np.uint64(MUL[0]), c[2] * np.uint64(MUL[1])
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            b & LOW,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            a & LOW,
        ]
        k = [(x + w) & 0xFFFFFFFF for x, w in zip(k, WEYL, strict=True)]
    return c


def keep(seed, p, shape, place=None):
    """(B,H,M,N) bool: which probabilities dropout keeps."""
    if p >= 1:
        return torch.zeros(shape, dtype=torch.bool)
    b, h, i, j = np.indices(shape, dtype=np.uint64)
    if place:
        i, j, h, b = (x + np.uint64(first) for x, first in zip((i, j, h, b), place))
    seed = int(seed) % 2**64
    words = np.stack(philox((j >> np.uint64(2), i, h, b), (seed % 2**32, seed >> 32)))
    word = np.take_along_axis(words, (j & np.uint64(3)).astype(np.int64)[None], axis=0)[0]
    return torch.from_numpy(word >= np.uint64(math.floor(p * 2**32)))


def stands(i, length, m, causal, place):
    """The key position at which query row i is aligned."""
    from_the_end = causal == "bottom_right" or (place and place.bottom_right)
    return i + length - m if from_the_end else i


def larger(place, m, n):
    """For a call that is a part of a larger one: the index of its first row and key in that, and
    the larger call's number of rows and keys."""
    if not place:
        return 0, 0, m, n
    rows = place.row + m if place.rows is None else place.rows
    return place.row, place.key, rows, place.key + n if place.keys is None else place.keys


def edges(causal, window):
    left, right = window or (None, None)
    left = math.inf if left is None else left
    right = math.inf if right is None else right
    return left, min(right, 0) if causal else right


def visible(q, k, causal, window, key_lengths, place=None):
    """(B,1,M,N) bool and the distance |i' - j|, by the band and the lengths."""
    batch, m, n = q.shape[0], q.shape[2], k.shape[2]
    row, key, rows, keys = larger(place, m, n)
    lengths = [keys] * batch if key_lengths is None else key_lengths.tolist()
    lengths = torch.tensor(lengths, device=q.device).view(-1, 1, 1, 1)
    i = row + torch.arange(m, device=q.device).view(1, 1, -1, 1)
    j = key + torch.arange(n, device=q.device).view(1, 1, 1, -1)
    ahead = j - stands(i, lengths, rows, causal, place)
    left, right = edges(causal, window)
    return (ahead >= -left) & (ahead <= right) & (j < lengths), ahead.abs()


def baseline(
    q,
    k,
    v,
    *,
    mask=None,
    causal=False,
    window=None,
    key_lengths=None,
    alibi_slopes=None,
    softcap=None,
    sinks=None,
    dropout_p=0.0,
    seed=0,
    scale=None,
    place=None,
    return_lse=False,
    return_weights=False,
):
    """Unfused attention in torch: M x N matrices in q's dtype. Or its probabilities only."""
    dtype, group = q.dtype, q.shape[1] // max(k.shape[1], 1)
    seen, distance = visible(q, k, causal, window, key_lengths, place)
    if key_lengths is not None:  # memory past the end may hold NaN
        first = place.key if place else 0
        past = first + torch.arange(k.shape[2], device=k.device) >= key_lengths.view(-1, 1, 1)
        k, v = (x.masked_fill(past.unsqueeze(-1), 0) for x in (k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        slopes = torch.broadcast_to(alibi_slopes, s.shape[:2])[:, :, None, None]
        s = s - slopes.to(dtype) * distance.to(dtype)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        s = s + mask.to(dtype)
    s = s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.to(dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat([s, column], -1)
    # Rows of -inf only: softmax over zeros, then masked, keeps NaN out of the gradients.
    empty = (s == -math.inf).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0)
    p = torch.softmax(s, -1).masked_fill(empty, 0)[..., : k.shape[2]]
    if dropout_p:
        kept = keep(seed, dropout_p, p.shape, place).to(p.device)
        p = (p / (1 - dropout_p) if dropout_p < 1 else p).masked_fill(~kept, 0)
    if return_weights:
        return p
    out = p @ v
    if not return_lse:
        return out
    # The LSE of 16-bit inputs has dtype float32 by contract; s itself is no more accurate.
    wide = s if dtype == torch.float64 else s.float()
    return out, torch.logsumexp(wide, -1).masked_fill(empty.squeeze(-1), -math.inf)
