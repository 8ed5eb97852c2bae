"""The online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022, algorithm 1)."""

import triton
import triton.language as tl

from .score import LN2, LOG2E, LOG2E_REST, exponential
from .tile import Start, fma, row_index

# The least level, in place of -inf, for rows that have seen no key yet: -inf - (-inf) would be NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def update(s, m, l, call, F: tl.constexpr):
    """p, the new running maximum m and sum l, and the multiplier of earlier sums.

    m is a level in the unit of `exponential`. It is rounded when it is set and not changed after
    that, so where the maximum stays the multiplier is exactly 1.
    """
    top = tl.max(s, 1)
    if F.scaled:
        top *= call.reals.unit
    m_new = tl.maximum(m, top)
    pivot = tl.maximum(m_new, LOWEST)
    p = exponential(s, pivot[:, None], call, F)
    alpha = rescale(m, pivot, F)
    return p, m_new, l * alpha + tl.sum(p, 1), alpha


@triton.jit
def rescale(m, pivot, F: tl.constexpr):
    """The multiplier that converts sums relative to the level m to the level pivot."""
    step = m - pivot
    return tl.exp2(step if F.scaled else step * LOG2E)


@triton.jit
def add_sink(acc, m, l, sinks, h, F: tl.constexpr):
    """Add a sink to the sums: one more logit in the denominator, without a value row."""
    sink = tl.load(sinks + h)
    top = tl.maximum(m, sink * LOG2E if F.scaled else sink)
    pivot = tl.maximum(top, LOWEST)
    decay = rescale(m, pivot, F)
    # Not by `exponential`: if F.scaled it multiplies scores by the unit, but a sink is a logit.
    share = tl.exp2(fma(sink, LOG2E, -pivot) if F.scaled else (sink - pivot) * LOG2E)
    return acc * decay[:, None], top, l * decay + share


@triton.jit
def finish(acc, m, l, F: tl.constexpr):
    """The output, the natural LSE, and the LSE's rounding error (tail); 0, -inf and 0 for an empty
    row."""
    empty = l == 0
    log2_l = tl.log2(tl.where(empty, 1.0, l))
    log_l = log2_l * LN2
    if F.scaled:
        # tail: the level minus the rounded LSE. lse is an explicit FMA, so that the compiler cannot
        # round it in another way.
        lse = fma(m, LN2, log_l)
        tail = (fma(-lse, LOG2E, m) - lse * LOG2E_REST + log2_l) * LN2
    else:
        lse = m + log_l
        tail = (m - lse) + log_l
    tail = tl.where(tl.abs(lse) < float("inf"), tail, 0.0)
    acc /= tl.where(empty, 1.0, l)[:, None]
    return acc, tl.where(empty, float("-inf"), lse), tl.where(empty, 0.0, tail)


@triton.jit
def store_normaliser(normaliser, row, inside, lse, tail, call):
    """Store lse and tail to rows of a contiguous (2, B, H, M) tensor."""
    tl.store(normaliser + row, lse, mask=inside)
    to_tail = row_index(Start(call.items, 0), 0, 0, call.H, call.rows)
    tl.store(normaliser + to_tail + row, tail, mask=inside)
