"""The online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022, algorithm 1)."""

import triton
import triton.language as tl

from .score import LN2, LOG2E, exponential


@triton.jit
def update(s, m, l, call, F: tl.constexpr):
    """p, the new running maximum m and sum l, and what sums made before are multiplied by.

    m is a level, as `exponential` has it. Rounded once and compared with itself from then on, it
    rescales by exactly 1 where it stays.
    """
    top = tl.max(s, 1)
    if F.plain:
        top *= call.reals.unit
    m_new = tl.maximum(m, top)
    # A row that has seen nothing yet stays 0: -inf - (-inf) would be NaN.
    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = exponential(s, pivot[:, None], call, F)
    alpha = rescale(m, pivot, F)
    return p, m_new, l * alpha + tl.sum(p, 1), alpha


@triton.jit
def rescale(m, pivot, F: tl.constexpr):
    """What takes sums relative to the level m to the level pivot."""
    step = m - pivot
    return tl.exp2(step if F.plain else step * LOG2E)


@triton.jit
def finish(acc, m, l, F: tl.constexpr):
    """The output and its natural LSE; an empty row's are 0 and -inf."""
    empty = l == 0
    l = tl.where(empty, 1.0, l)
    lse = tl.log2(l) * LN2
    lse += m * LN2 if F.plain else m
    return acc / l[:, None], tl.where(empty, float("-inf"), lse)


@triton.jit
def add_sink(acc, lse, sinks, h):
    """A sink is one more logit in the denominator, with no value of its own."""
    sink = tl.load(sinks + h)
    m = tl.maximum(lse, sink)
    m = tl.where(m == float("-inf"), 0.0, m)
    share = tl.exp2((lse - m) * LOG2E)
    total = share + tl.exp2((sink - m) * LOG2E)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    return acc * (share / total)[:, None], tl.where(empty, float("-inf"), m + tl.log2(total) * LN2)
