"""Attention weights, from q, k and the normaliser of a forward pass."""

import triton
import triton.language as tl

from .score import (
    EDGES,
    SIZES,
    Keys,
    call_of,
    drawn,
    item_of,
    kept,
    levels_of,
    probability,
    reaches,
    rows_of,
    score,
    visible,
)
from .tile import Start, by_rows, head_of, narrow, take


@triton.jit(do_not_specialize=SIZES)
def weights_kernel(
    q, k, normaliser, weights,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr, AVERAGE: tl.constexpr,
):  # fmt: skip
    """P after dropout, (B,H,M,N), or averaged over heads, (B,1,M,N): one program for each tile.

    The average is summed in registers, head by head, without a (B,H,M,N) buffer.
    """
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(call.M, T.BM), tl.cdiv(call.N, T.BN)
    pid = tl.program_id(0)
    n, rest = pid % tiles_n, pid // tiles_n
    m, rest = rest % tiles_m, rest // tiles_m
    heads = 1 if AVERAGE else call.H
    b, first = rest // heads, rest % heads
    i0, j0 = m * T.BM, n * T.BN
    total = tl.full([T.BM, T.BN], 0, tl.float32)
    for x in range(call.H if AVERAGE else 1):
        total = add_head(total, q, k, normaliser, b, first + x, i0, j0, call, extras, F, T)
    if F.dropout:
        total *= call.reals.factor
    total = narrow(total * call.reals.share, weights.ptr.dtype.element_ty)
    i, j = (i0 + tl.arange(0, T.BM))[:, None], (j0 + tl.arange(0, T.BN))[None, :]
    to = head_of(weights, Start(b, 0), first) + i.to(tl.int64) * weights.sm
    to += j.to(tl.int64) * weights.sd
    tl.store(to, total, mask=(i < call.M) & (j < call.N))


@triton.jit
def add_head(
    total, q, k, normaliser, b, h, i0, j0, call, extras, F: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """total + P of one tile of one head; total itself if no row of the tile sees its keys."""
    item = item_of(b, call, extras, F)
    if reaches(i0, j0, item, call, T.BM, T.BN):
        i = i0 + tl.arange(0, T.BM)
        keys = Keys(j0, (j0 + tl.arange(0, T.BN))[None, :])
        rows = rows_of(i[:, None], h, item, call, extras, F)
        tile_q = take(q, item.q, h, i0, item.M, T.D, T.BM, T.BD, F.tma)
        tile_k = take(k, item.k, h // call.group, j0, item.length, T.D, T.BN, T.BD, F.tma)
        s, _ = score(by_rows(tile_q, tile_k, F), rows, keys, call, extras, F, EDGES)
        level, rest = levels_of(normaliser, item.q, h, i, call, F)
        p = probability(s, (level[:, None], rest[:, None]), call, F)
        p = tl.where(visible(rows, keys, item, call, F), p, 0.0)
        if F.dropout:
            draw = drawn(h, b, call, extras, F)
            p = tl.where(kept(rows.i, draw, j0, call, extras, F, T.BM, T.BN), p, 0.0)
        total += p
    return total
