"""The tangent of backward, given tangents of a call's tensors, dout and dlse; no atomics either.

    dS_t = P ((s_t - lse_t) (Z dP - delta) + Z dP_t - delta_t)
    d(q.k)_t = dS_t phi + dS phi_t
    dq_t = scale sum_j (d(q.k)_t k + d(q.k) k_t),  dk_t likewise
    dv_t = sum_i Z (P_t dO + P dO_t)

with P_t = P (s_t - lse_t), and delta_t = rowsum(dO O_t + dO_t O) - dLSE_t. `rates_kernel` computes
lse_t and delta_t, which these kernels read beside backward's statistics. Then one kernel owns rows
(dq), one owns keys (dk, dv), and one owns elements of the mask.
"""

import triton
import triton.language as tl

from .backward import part_of_mask, store_part, tile_of_part
from .score import (
    EDGES,
    SIZES,
    Keys,
    block_at,
    call_of,
    drawn,
    item_of,
    kept,
    key_range,
    pitch_of,
    reaches,
    row_range,
    rows_of,
    span,
    statistics,
    tile_of_program,
)
from .tangent import moved_product, moved_scores, rows_at
from .tile import Start, by_rows, dot, head_of, narrow, row_index, store


@triton.jit(do_not_specialize=SIZES)
def rates_kernel(
    out, out_t, dout, dout_t, lse_t, dlse_t, rates,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """rates: lse_t and delta_t, (2,B,H,pitch) float32, laid out as `delta_kernel`'s statistics."""
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    pitch = pitch_of(call, F)
    tile, b, h = tile_of_program(pitch, T.BM, call.H, 1, False)
    i0 = tile * T.BM
    i = i0 + tl.arange(0, T.BM)
    start, inside = Start(b, 0), i < call.rows
    tile_do = rows_at(dout, start, h, i0, call.rows, T.DV, T.BM, T.BDV, True)
    tile_ot = rows_at(out_t, start, h, i0, call.rows, T.DV, T.BM, T.BDV, True)
    total = tl.sum(tile_do.to(tl.float32) * tile_ot.to(tl.float32), 1)
    if dout_t is not None:
        tile_dot = rows_at(dout_t, start, h, i0, call.rows, T.DV, T.BM, T.BDV, True)
        tile_o = rows_at(out, start, h, i0, call.rows, T.DV, T.BM, T.BDV, True)
        total += tl.sum(tile_dot.to(tl.float32) * tile_o.to(tl.float32), 1)
    if dlse_t is not None:
        at = head_of(dlse_t, start, h) + i.to(tl.int64) * dlse_t.sm
        total -= tl.load(at, mask=inside, other=0.0)
    rate = tl.load(head_of(lse_t, start, h) + i.to(tl.int64) * lse_t.sm, mask=inside, other=0.0)
    at = row_index(start, h, i, call.H, pitch)
    plane = row_index(Start(call.items, 0), 0, 0, call.H, pitch)
    tl.store(rates + at, rate)
    tl.store(rates + plane + at, total)


@triton.jit
def row_rates(rates, at, h, i, call, F: tl.constexpr):
    """Load lse_t and delta_t of rows i, without bounds."""
    pitch = pitch_of(call, F)
    row = rates + row_index(at, h, i, call.H, pitch)
    plane = row_index(Start(call.items, 0), 0, 0, call.H, pitch)
    return tl.load(row), tl.load(row + plane)


@triton.jit
def gradients_t(
    qk, qk_t, dp, dp_t, keep, levels, delta, lse_t, delta_t, rows, keys, item, call, extras, mask_t,
    F: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """P with dropped entries 0 and its tangent (not yet multiplied by the dropout factor), d(q.k),
    d(q.k)_t and dS_t. levels (two), delta, lse_t and delta_t have the shape of rows."""
    p, s_t, phi, phi_t = moved_scores(
        qk, qk_t, levels, rows, keys, item, call, extras, mask_t, F, PART
    )
    live, rate, dropped = p > 0, s_t - lse_t, p
    if F.dropout:
        dropped = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * call.reals.factor, 0.0)
        dp_t = tl.where(keep, dp_t * call.reals.factor, 0.0)
    ds = p * (dp - delta)
    ds_t = ds * rate + p * (dp_t - delta_t)
    dqk, dqk_t = ds * phi, ds_t * phi
    if F.softcap or F.score_mod is not None:
        dqk_t += ds * phi_t
    dropped_t = tl.where(live, dropped * rate, 0.0)
    dqk, dqk_t = tl.where(live, dqk, 0.0), tl.where(live, dqk_t, 0.0)
    return dropped, dropped_t, dqk, dqk_t, tl.where(live, ds_t, 0.0)


# ----------------------------------------------------------------------------------- rows: dq


@triton.jit
def over_keys(
    acc, tile_q, tile_qt, tile_do, tile_dot, levels, delta, lse_t, delta_t, k, v, u, hk, blocks,
    rows, item, call, extras, F: tl.constexpr, T: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """acc += d(q.k)_t K + d(q.k) K_t over one PART of the keys."""
    MASKED: tl.constexpr = PART == EDGES
    draw = drawn(rows.h, item.b, call, extras, F)
    lo, hi = span(blocks, PART)
    for x in tl.range(lo, hi, T.BN):
        j0 = block_at(x, blocks, T.BN, F, PART)
        keys = Keys(j0, (j0 + tl.arange(0, T.BN))[None, :])
        tile_k = rows_at(k, item.k, hk, j0, item.length, T.D, T.BN, T.BD, MASKED)
        tile_v = rows_at(v, item.k, hk, j0, item.length, T.DV, T.BN, T.BDV, MASKED)
        tile_kt = rows_at(u.k, item.k, hk, j0, item.length, T.D, T.BN, T.BD, MASKED)
        tile_vt = rows_at(u.v, item.k, hk, j0, item.length, T.DV, T.BN, T.BDV, MASKED)
        qk, qk_t = by_rows(tile_q, tile_k, F), moved_product(tile_q, tile_qt, tile_k, tile_kt, F)
        dp = by_rows(tile_do, tile_v, F)
        dp_t = moved_product(tile_do, tile_dot, tile_v, tile_vt, F)
        keep = None
        if F.dropout:
            keep = kept(rows.i, draw, j0, call, extras, F, T.BM, T.BN)
        _, _, dqk, dqk_t, _ = gradients_t(
            qk, qk_t, dp, dp_t, keep, levels, delta, lse_t, delta_t, rows, keys, item, call,
            extras, u.mask, F, PART,
        )  # fmt: skip
        acc = dot(narrow(dqk_t, tile_k.dtype), tile_k, acc, F)
        if u.k is not None:
            acc = dot(narrow(dqk, tile_k.dtype), tile_kt, acc, F)
    return acc


@triton.jit(do_not_specialize=SIZES)
def dq_t_kernel(
    q, k, v, dout, u, of_rows, rates, dq_t,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """dq_t (B,H,M,D)."""
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
    tile_do = rows_at(dout, item.q, h, i0, item.M, T.DV, T.BM, T.BDV, True)
    tile_qt = rows_at(u.q, item.q, h, i0, item.M, T.D, T.BM, T.BD, True)
    tile_dot = rows_at(u.dout, item.q, h, i0, item.M, T.DV, T.BM, T.BDV, True)
    level, rest, delta = statistics(of_rows, item.q, h, i, call, F)
    lse_t, delta_t = row_rates(rates, item.q, h, i, call, F)
    acc = tl.full([T.BM, T.BD], 0, tl.float32)
    blocks = key_range(i0, tl.minimum(i0 + T.BM, item.M), item, call, T.BN)
    for part in tl.static_range(2):
        acc = over_keys(
            acc, tile_q, tile_qt, tile_do, tile_dot, (level[:, None], rest[:, None]),
            delta[:, None], lse_t[:, None], delta_t[:, None], k, v, u, h // call.group, blocks,
            rows, item, call, extras, F, T, part,
        )  # fmt: skip
    store(dq_t, item.q, h, i0, item.M, acc * call.reals.scale, T.D, T.BM, T.BD)


# ------------------------------------------------------------------------------- keys: dk, dv


@triton.jit
def over_rows(
    dk_t, dv_t, tile_k, tile_kt, tile_v, tile_vt, q, dout, u, of_rows, rates, h, blocks, j0, item,
    call, extras,
    F: tl.constexpr, T: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """If DK, dk_t += d(q.k)_t^T Q + d(q.k)^T Q_t, and if DV, dv_t += P_t^T dO + P^T dO_t, over one
    PART of the rows of head h. Tiles of scores are transposed, (BN, BM), as in backward."""
    MASKED: tl.constexpr = PART == EDGES
    keys = Keys(j0, (j0 + tl.arange(0, T.BN))[:, None])
    draw = drawn(h, item.b, call, extras, F)
    lo, hi = span(blocks, PART)
    for x in tl.range(lo, hi, T.BM):
        i0 = block_at(x, blocks, T.BM, F, PART)
        i = i0 + tl.arange(0, T.BM)
        rows = rows_of(i[None, :], h, item, call, extras, F)
        tile_q = rows_at(q, item.q, h, i0, item.M, T.D, T.BM, T.BD, MASKED)
        tile_do = rows_at(dout, item.q, h, i0, item.M, T.DV, T.BM, T.BDV, MASKED)
        tile_qt = rows_at(u.q, item.q, h, i0, item.M, T.D, T.BM, T.BD, MASKED)
        tile_dot = rows_at(u.dout, item.q, h, i0, item.M, T.DV, T.BM, T.BDV, MASKED)
        qk, qk_t = by_rows(tile_k, tile_q, F), moved_product(tile_k, tile_kt, tile_q, tile_qt, F)
        dp, dp_t = qk, qk_t  # defined for the compiler: unused without DK
        if DK:
            dp = by_rows(tile_v, tile_do, F)
            dp_t = moved_product(tile_v, tile_vt, tile_do, tile_dot, F)
        level, rest, delta = statistics(of_rows, item.q, h, i, call, F)
        lse_t, delta_t = row_rates(rates, item.q, h, i, call, F)
        keep = None
        if F.dropout:
            keep = tl.trans(kept(i[:, None], draw, j0, call, extras, F, T.BM, T.BN))
        p, p_t, dqk, dqk_t, _ = gradients_t(
            qk, qk_t, dp, dp_t, keep, (level[None, :], rest[None, :]), delta[None, :],
            lse_t[None, :], delta_t[None, :], rows, keys, item, call, extras, u.mask, F, PART,
        )  # fmt: skip
        if DV:
            dv_t = dot(narrow(p_t, tile_do.dtype), tile_do, dv_t, F)
            if u.dout is not None:
                dv_t = dot(narrow(p, tile_do.dtype), tile_dot, dv_t, F)
        if DK:
            dk_t = dot(narrow(dqk_t, tile_q.dtype), tile_q, dk_t, F)
            if u.q is not None:
                dk_t = dot(narrow(dqk, tile_q.dtype), tile_qt, dk_t, F)
    return dk_t, dv_t


@triton.jit(do_not_specialize=SIZES)
def dkv_t_kernel(
    q, k, v, dout, u, of_rows, rates, dk_t, dv_t,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """dk_t (B,Hk,N,D) and dv_t (B,Hk,N,Dv), summed over the query heads of a key head. An output
    that is None is not computed."""
    DK: tl.constexpr = dk_t is not None
    DV: tl.constexpr = dv_t is not None
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    tile, b, hk = tile_of_program(call.N, T.BN, call.H // call.group, call.together, False)
    j0 = tile * T.BN
    item = item_of(b, call, extras, F)
    if F.packed and j0 >= item.N:
        return
    tile_k = rows_at(k, item.k, hk, j0, item.length, T.D, T.BN, T.BD, True)
    tile_kt = rows_at(u.k, item.k, hk, j0, item.length, T.D, T.BN, T.BD, True)
    tile_v = tile_k  # defined for the compiler: unused without DK
    tile_vt = None
    if DK:
        tile_v = rows_at(v, item.k, hk, j0, item.length, T.DV, T.BN, T.BDV, True)
        tile_vt = rows_at(u.v, item.k, hk, j0, item.length, T.DV, T.BN, T.BDV, True)
    acc_k = tl.full([T.BN, T.BD if DK else 1], 0, tl.float32)
    acc_v = tl.full([T.BN, T.BDV if DV else 1], 0, tl.float32)
    blocks = row_range(j0, T.BN, item, call, T.BM)
    groups = call.group if F.gqa else 1
    for g in range(groups):
        for part in tl.static_range(2):
            acc_k, acc_v = over_rows(
                acc_k, acc_v, tile_k, tile_kt, tile_v, tile_vt, q, dout, u, of_rows, rates,
                hk * groups + g, blocks, j0, item, call, extras, F, T, DK, DV, part,
            )  # fmt: skip
    if DK:
        store(dk_t, item.k, hk, j0, item.N, acc_k * call.reals.scale, T.D, T.BN, T.BD)
    if DV:
        if F.dropout:
            acc_v *= call.reals.factor
        store(dv_t, item.k, hk, j0, item.N, acc_v, T.DV, T.BN, T.BDV)


# ----------------------------------------------------------------------------------- the mask


@triton.jit(do_not_specialize=SIZES)
def dmask_t_kernel(
    q, k, v, dout, u, of_rows, rates, partial,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """dS_t, summed as `dmask_kernel` sums dS."""
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    part = part_of_mask(call, T, SUMMED)
    acc = tl.full([T.BM, T.BN], 0, tl.float32)
    for w in range(part.first, part.past):
        b, h, i0, j0 = tile_of_part(w, part, T)
        acc = add_to_mask(acc, q, k, v, dout, u, of_rows, rates, b, h, i0, j0, call, extras, F, T)
    store_part(partial, acc, part, call, T, SUMMED)


@triton.jit
def add_to_mask(
    acc, q, k, v, dout, u, of_rows, rates, b, h, i0, j0, call, extras,
    F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """acc + dS_t of one tile; acc itself if no row of the tile sees any of its keys."""
    item = item_of(b, call, extras, F)
    seen = reaches(i0, j0, item, call, T.BM, T.BN)
    if F.packed:  # rows past item.M belong to the next sequence
        seen &= i0 < item.M
    if seen:
        i = i0 + tl.arange(0, T.BM)
        keys = Keys(j0, (j0 + tl.arange(0, T.BN))[None, :])
        rows = rows_of(i[:, None], h, item, call, extras, F)
        hk = h // call.group
        tile_q = rows_at(q, item.q, h, i0, item.M, T.D, T.BM, T.BD, True)
        tile_do = rows_at(dout, item.q, h, i0, item.M, T.DV, T.BM, T.BDV, True)
        tile_k = rows_at(k, item.k, hk, j0, item.length, T.D, T.BN, T.BD, True)
        tile_v = rows_at(v, item.k, hk, j0, item.length, T.DV, T.BN, T.BDV, True)
        tile_qt = rows_at(u.q, item.q, h, i0, item.M, T.D, T.BM, T.BD, True)
        tile_dot = rows_at(u.dout, item.q, h, i0, item.M, T.DV, T.BM, T.BDV, True)
        tile_kt = rows_at(u.k, item.k, hk, j0, item.length, T.D, T.BN, T.BD, True)
        tile_vt = rows_at(u.v, item.k, hk, j0, item.length, T.DV, T.BN, T.BDV, True)
        qk, qk_t = by_rows(tile_q, tile_k, F), moved_product(tile_q, tile_qt, tile_k, tile_kt, F)
        dp = by_rows(tile_do, tile_v, F)
        dp_t = moved_product(tile_do, tile_dot, tile_v, tile_vt, F)
        keep = None
        if F.dropout:
            keep = kept(rows.i, drawn(h, b, call, extras, F), j0, call, extras, F, T.BM, T.BN)
        level, rest, delta = statistics(of_rows, item.q, h, i, call, F)
        lse_t, delta_t = row_rates(rates, item.q, h, i, call, F)
        _, _, _, _, ds_t = gradients_t(
            qk, qk_t, dp, dp_t, keep, (level[:, None], rest[:, None]), delta[:, None],
            lse_t[:, None], delta_t[:, None], rows, keys, item, call, extras, u.mask, F, EDGES,
        )  # fmt: skip
        acc += ds_t
    return acc
