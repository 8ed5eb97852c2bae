"""Tangents of scores, and of products of rows.

x_t is the tangent of x, in the direction of the tangents of a call's tensors. For scores:

    s_t = scale (q_t.k + q.k_t) phi + mask_t,   phi = d logit / d (scale q.k)
    phi_t = -2 / softcap tanh phi scale (q_t.k + q.k_t)

With a score_mod, phi is its derivative and phi_t its second one times scale (q_t.k + q.k_t).

A tensor without a tangent has None, known at compile time: it costs no load and no product.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .score import EDGES, LOG2E, LOG2E_REST, curved_score, indices, probability, visible
from .tile import dot, fma, head_of, load


class Moving(NamedTuple):
    """Tangents, each in the form of its tensor, or None."""

    q: Any  # Operands
    k: Any
    v: Any
    mask: Any
    sinks: Any  # (H,) float32, contiguous
    dout: Any  # Operand
    nothing: Any = None  # as in Extras


@triton.jit
def rows_at(
    x, at, h, i0, rows, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BOUND: tl.constexpr
):
    """`load` of a head's rows by pointers; None if x is None."""
    if x is not None:
        return load(x, head_of(x, at, h), i0, rows, D, BM, BD, False, BOUND)


@triton.jit
def moved_product(a, a_t, b, b_t, F: tl.constexpr):
    """The tangent of a @ b^T: a_t @ b^T + a @ b_t^T; a tangent of None adds nothing."""
    product = tl.full([a.shape[0], b.shape[0]], 0, tl.float32)
    if a_t is not None:
        product = dot(a_t, tl.trans(b), product, F)
    if b_t is not None:
        product = dot(a, tl.trans(b_t), product, F)
    return product


@triton.jit
def moved_mask(mask_t, rows, keys, item, call, F: tl.constexpr, BOUND: tl.constexpr):
    """A tile of mask_t, read as `score` reads the mask: rows past the end read the last row."""
    at = mask_t.ptr + tl.cast(item.b, tl.int64) * mask_t.sb
    at += tl.cast(rows.h, tl.int64) * mask_t.sh
    if F.mask_rows:
        at += tl.minimum(rows.i, call.M - 1).to(tl.int64) * mask_t.sm
    at += keys.j.to(tl.int64) * mask_t.sd
    tangent = tl.load(at, mask=keys.j < call.N, other=0.0) if BOUND else tl.load(at)
    return tangent.to(tl.float32)


@triton.jit
def moved_scores(
    qk, qk_t, levels, rows, keys, item, call, extras, mask_t,
    F: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """P, s_t, phi and phi_t of a tile. levels (two) have the shape of rows.

    A hidden entry has P = 0, but its s_t may be any number or NaN: use s_t only where p > 0.
    """
    MASKED: tl.constexpr = PART == EDGES
    s, phi, curve = curved_score(qk, rows, keys, call, extras, F, PART, True)
    p = probability(s, levels, call, F)
    if MASKED:
        p = tl.where(visible(rows, keys, item, call, F), p, 0.0)
    s_t, phi_t = qk_t * (phi * call.reals.scale), 0.0
    if F.softcap:
        phi_t = curve * qk_t
    if F.score_mod is not None:
        b, h, i, j = indices(rows, keys, call, extras, F)
        bent = F.bend(qk * call.reals.scale, b, h, i, j, extras.captured)
        phi_t = bent * (call.reals.scale * qk_t)
    if mask_t is not None:
        s_t += moved_mask(mask_t, rows, keys, item, call, F, MASKED)
    return p, s_t, phi, phi_t


@triton.jit
def share_of(sink, levels, F: tl.constexpr):
    """The probability of a row's sink. levels as `levels_of` gives them."""
    level, rest = levels
    if F.scaled:
        return tl.exp2(fma(sink, LOG2E, -level) + (sink * LOG2E_REST - rest))
    else:
        return tl.exp2(((sink - level) - rest) * LOG2E)
