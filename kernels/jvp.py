"""Forward mode: the tangents of the output and of the LSE, given both.

    lse_t = sum_j P s_t,   out_t = sum_j P Z ((s_t - lse_t) v + v_t),   Z: dropout's multiplier

One program for each tile of query rows, as in forward. P comes from forward's normaliser, so no
online softmax is needed.
"""

import triton
import triton.language as tl

from .score import (
    EDGES,
    SIZES,
    Keys,
    block_at,
    call_of,
    drawn,
    in_order,
    item_of,
    kept,
    key_range,
    levels_of,
    rows_of,
    span,
    tile_of_program,
)
from .tangent import moved_product, moved_scores, rows_at, share_of
from .tile import by_rows, dot, narrow, row_index, store


@triton.jit
def along_keys(
    acc, moved, tile_q, tile_qt, levels, k, v, u, hk, blocks, rows, item, call, extras,
    F: tl.constexpr, T: tl.constexpr, SCORES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """acc += P Z s_t V + P Z V_t and moved += sum P s_t, over one PART of the keys."""
    MASKED: tl.constexpr = PART == EDGES
    draw = drawn(rows.h, item.b, call, extras, F)
    lo, hi = span(blocks, PART)
    for x in tl.range(lo, hi, T.BN):
        j0 = block_at(x, blocks, T.BN, F, PART)
        keys = Keys(j0, (j0 + tl.arange(0, T.BN))[None, :])
        tile_k = rows_at(k, item.k, hk, j0, item.length, T.D, T.BN, T.BD, MASKED)
        tile_kt = rows_at(u.k, item.k, hk, j0, item.length, T.D, T.BN, T.BD, MASKED)
        qk = by_rows(tile_q, tile_k, F)
        qk_t = moved_product(tile_q, tile_qt, tile_k, tile_kt, F)
        p, s_t, _, _ = moved_scores(
            qk, qk_t, levels, rows, keys, item, call, extras, u.mask, F, PART
        )
        p_t = tl.where(p > 0, p * s_t, 0.0)
        if SCORES:
            moved += tl.sum(p_t, 1)
        if F.dropout:
            keep = kept(rows.i, draw, j0, call, extras, F, T.BM, T.BN)
            p, p_t = tl.where(keep, p, 0.0), tl.where(keep, p_t, 0.0)
        if SCORES:
            tile_v = rows_at(v, item.k, hk, j0, item.length, T.DV, T.BN, T.BDV, MASKED)
            acc = dot(narrow(p_t, tile_v.dtype), tile_v, acc, F)
        if u.v is not None:
            tile_vt = rows_at(u.v, item.k, hk, j0, item.length, T.DV, T.BN, T.BDV, MASKED)
            acc = dot(narrow(p, tile_vt.dtype), tile_vt, acc, F)
    return acc, moved


@triton.jit(do_not_specialize=SIZES)
def jvp_kernel(
    q, k, v, u, out, normaliser, out_t, lse_t,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """out_t (B,H,M,Dv), and lse_t (B,H,M) float32, 0 for an empty row."""
    SCORES: tl.constexpr = u.q is not None or u.k is not None or u.mask is not None
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    tile, b, h = tile_of_program(call.M, T.BM, call.H, call.together, F.right)
    i0 = tile * T.BM
    item = item_of(b, call, extras, F)
    if F.packed and i0 >= item.M:
        return
    i = i0 + tl.arange(0, T.BM)
    rows = rows_of(i[:, None], h, item, call, extras, F)
    tile_q = rows_at(q, item.q, h, i0, item.M, T.D, T.BM, T.BD, True)
    tile_qt = rows_at(u.q, item.q, h, i0, item.M, T.D, T.BM, T.BD, True)
    # Rows past the end use the last row's: those of the last sequence could be out of bounds.
    level, rest = levels_of(normaliser, item.q, h, tl.minimum(i, item.M - 1), call, F)
    acc = tl.full([T.BM, T.BDV], 0, tl.float32)
    moved = tl.full([T.BM], 0, tl.float32)
    blocks = key_range(i0, tl.minimum(i0 + T.BM, item.M), item, call, T.BN)
    if F.in_order:
        blocks = in_order(blocks)
    for part in tl.static_range(2):
        acc, moved = along_keys(
            acc, moved, tile_q, tile_qt, (level[:, None], rest[:, None]), k, v, u, h // call.group,
            blocks, rows, item, call, extras, F, T, SCORES, part,
        )  # fmt: skip
    if F.dropout:
        acc *= call.reals.factor
    if u.sinks is not None:
        share = share_of(tl.load(extras.sinks + h), (level, rest), F)
        moved += tl.where(share > 0, share * tl.load(u.sinks + h), 0.0)
    if SCORES or u.sinks is not None:
        tile_o = rows_at(out, item.q, h, i0, item.M, T.DV, T.BM, T.BDV, True)
        acc -= moved[:, None] * tile_o.to(tl.float32)
    store(out_t, item.q, h, i0, item.M, acc, T.DV, T.BM, T.BDV)
    tl.store(lse_t + row_index(item.q, h, i, call.H, call.rows), moved, mask=i < item.M)
