"""Backward in passes that recompute P. Each owns its outputs: no atomics, a fixed order of sums.

    dS = P (dP - delta),  dP = dO V^T,  delta = rowsum(dO O) - dLSE     (Dao 2023, algorithm 2)

`dq_kernel` owns rows, `dkv_kernel` owns keys and loops over all query heads that share them, and
`dmask_kernel` owns elements of the mask. The gradients of captured tensors are the exception:
`dq_kernel` adds to them by atomics on whole numbers, in any order, with the same bits
(program_functions.py). The backward pass of the weights uses the same kernels (GIVEN): then `dout`
is dP itself, (B, H, M, N), v is not needed, and delta is a sum over keys.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .block_mask import entry, of_part
from .score import (
    EDGES,
    SIZES,
    Keys,
    block_at,
    call_of,
    drawn,
    indices,
    item_of,
    kept,
    key_range,
    levels_of,
    pitch_of,
    probability,
    reaches,
    row_range,
    rows_of,
    score,
    span,
    statistics,
    tile_of_program,
    visible,
)
from .tile import Start, by_rows, dot, head_of, load, narrow, row_index, source, store, take


@triton.jit
def gradients(
    qk, dp, keep, levels, delta, rows, keys, item, call, extras,
    F: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """P with dropped entries 0 (not yet multiplied by the dropout factor, which might overflow in
    16 bits), dS, and the gradient of scale q.k. levels (two) and delta have the shape of rows."""
    MASKED: tl.constexpr = PART == EDGES
    s, derivative = score(qk, rows, keys, call, extras, F, PART)
    p = probability(s, levels, call, F)
    if MASKED:  # select explicitly: in a lane past the end, 0 * inf would be NaN
        seen = visible(rows, keys, item, call, F)
        p = tl.where(seen, p, 0.0)
    dropped = p
    if F.dropout:
        dropped = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * call.reals.factor, 0.0)
    ds = p * (dp - delta)
    dqk = ds * derivative
    if F.score_mod is not None:  # a score of -inf may have no derivative
        dqk = tl.where(ds == 0, 0.0, dqk)
    if MASKED:
        ds, dqk = tl.where(seen, ds, 0.0), tl.where(seen, dqk, 0.0)
    return dropped, ds, dqk


@triton.jit
def given(dweights, item, h, i, j, call):
    """Load the dP of a tile, which is an input if GIVEN."""
    offset = i.to(tl.int64) * dweights.sm + j.to(tl.int64) * dweights.sd
    inside = (i < call.M) & (j < call.N)
    dp = tl.load(head_of(dweights, item.q, h) + offset, mask=inside, other=0.0)
    return dp.to(tl.float32) * call.reals.share


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    out, dout, dlse, normaliser, of_rows,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """of_rows: level, rest and delta = rowsum(dO O) - dLSE, (3,B,H,pitch) float32."""
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    pitch = pitch_of(call, F)
    tile, b, h = tile_of_program(pitch, T.BM, call.H, 1, False)
    i0 = tile * T.BM
    i = i0 + tl.arange(0, T.BM)
    start = Start(b, 0)
    total = tl.full([T.BM], 0, tl.float32)
    if out is not None:
        tile_o = take(out, start, h, i0, call.rows, T.DV, T.BM, T.BDV, F.tma)
        tile_do = take(dout, start, h, i0, call.rows, T.DV, T.BM, T.BDV, F.tma)
        total += tl.sum(tile_o.to(tl.float32) * tile_do.to(tl.float32), 1)
    if dlse is not None:
        from_lse = head_of(dlse, start, h) + i.to(tl.int64) * dlse.sm
        total -= tl.load(from_lse, mask=i < call.rows, other=0.0)
    level, rest = levels_of(normaliser, start, h, i, call, F)
    at = row_index(start, h, i, call.H, pitch)
    plane = row_index(Start(call.items, 0), 0, 0, call.H, pitch)
    tl.store(of_rows + at, level)
    tl.store(of_rows + plane + at, rest)
    tl.store(of_rows + 2 * plane + at, total)


# ---------------------------------------------------------------------------------- rows: dq, delta


@triton.jit
def over_keys(
    acc, tile_q, tile_do, levels, delta, k, v, dout, sources, captured_sums, blocks, rows, item,
    call, extras,
    F: tl.constexpr, T: tl.constexpr, GIVEN: tl.constexpr, SUMS: tl.constexpr, DQ: tl.constexpr,
    SHIFT: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """If DQ, acc += dS K over one PART of the keys; or, if SUMS, acc += P dP, elementwise by block.
    Adds to captured_sums, unless that is None."""
    PART: tl.constexpr = 2 - TURN if F.block_mask else TURN
    MASKED: tl.constexpr = PART == EDGES
    blocks = of_part(blocks, T.BN, F, PART)
    k_from, v_from = sources
    draw = drawn(rows.h, item.b, call, extras, F)
    lo, hi = span(blocks, PART)
    for x in tl.range(lo, hi, T.BN):
        j0 = block_at(x, blocks, T.BN, F, PART)
        keys = Keys(j0, (j0 + tl.arange(0, T.BN))[None, :])
        tile_k = load(k, k_from, j0, item.length, T.D, T.BN, T.BD, F.tma, MASKED)
        qk = by_rows(tile_q, tile_k, F)
        if GIVEN:
            dp = given(dout, item, rows.h, rows.i, keys.j, call)
        else:
            tile_v = load(v, v_from, j0, item.length, T.DV, T.BN, T.BDV, F.tma, MASKED)
            dp = by_rows(tile_do, tile_v, F)
        keep = None
        if F.dropout:
            keep = kept(rows.i, draw, j0, call, extras, F, T.BM, T.BN)
        _, ds, dqk = gradients(qk, dp, keep, levels, delta, rows, keys, item, call, extras, F, PART)
        if SUMS:  # delta is 0 here, so dS is P dP
            acc += ds
        elif DQ:
            acc = dot(narrow(dqk, tile_k.dtype), tile_k, acc, F)
        if captured_sums is not None:
            b, h, i, j = indices(rows, keys, call, extras, F)
            s = qk * call.reals.scale
            F.scatter(s, b, h, i, j, extras.captured, ds, captured_sums, SHIFT)
    return acc


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    q, k, v, dout, of_rows, dq, captured_sums,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr, GIVEN: tl.constexpr, SUMS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """dq (B,H,M,D); or, if SUMS, delta (B,H,M) for GIVEN, the backward pass of the weights.

    captured_sums: the gradients of captured numbers, as `program_functions.add_to_sums` has them.
    An output that is None is not computed.
    """
    DQ: tl.constexpr = dq is not None
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    tile, b, h = tile_of_program(call.M, T.BM, call.H, call.together, F.right)
    i0 = tile * T.BM
    hk = h // call.group
    item = item_of(b, call, extras, F)
    if F.packed and i0 >= item.M:
        return
    i = i0 + tl.arange(0, T.BM)
    rows = rows_of(i[:, None], h, item, call, extras, F)
    tile_q = take(q, item.q, h, i0, item.M, T.D, T.BM, T.BD, F.tma)
    k_from = source(k, item.k, hk, item.length, T.D, T.BN, T.BD, F.tma)
    tile_do, v_from = tile_q, k_from
    if not GIVEN:
        tile_do = take(dout, item.q, h, i0, item.M, T.DV, T.BM, T.BDV, F.tma)
        v_from = source(v, item.k, hk, item.length, T.DV, T.BN, T.BDV, F.tma)
    level, rest, row_delta = statistics(of_rows, item.q, h, i, call, F)
    if SUMS:
        # Sum across lanes only once, at the end. In the loop the compiler could fuse each lane's
        # own product with the first addition, and lanes would store differing sums to one word.
        acc = tl.full([T.BM, T.BN], 0, tl.float32)
        row_delta *= 0
    else:
        acc = tl.full([T.BM, T.BD if DQ else 1], 0, tl.float32)
    blocks = key_range(i0, tl.minimum(i0 + T.BM, item.M), item, call, T.BN)
    if F.block_mask:
        blocks = entry(extras.block_mask, b, h, tile, tl.cdiv(call.M, T.BM))
    for x in tl.static_range(3 if F.block_mask else 2):
        acc = over_keys(
            acc, tile_q, tile_do, (level[:, None], rest[:, None]), row_delta[:, None], k, v, dout,
            (k_from, v_from), captured_sums, blocks, rows, item, call, extras, F, T, GIVEN, SUMS,
            DQ, SHIFT, x,
        )  # fmt: skip
    if SUMS:
        to = of_rows + row_index(Start(2 * call.B + b, 0), h, i, call.H, pitch_of(call, F))
        tl.store(to, tl.sum(acc, 1), mask=i < call.M)
    elif DQ:
        store(dq, item.q, h, i0, item.M, acc * call.reals.scale, T.D, T.BM, T.BD)


# ------------------------------------------------------------------------------------ keys: dk, dv


@triton.jit
def over_rows(
    dk, dv, tile_k, tile_v, q, dout, of_rows, sources, h, blocks, j0, item, call, extras,
    F: tl.constexpr, T: tl.constexpr, GIVEN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """If DK, dk += dS^T Q, and if DV, dv += P^T dO, over one PART of the rows of head h.

    Scores are computed transposed, (BN, BM), so that the products read P and dS from registers.
    """
    PART: tl.constexpr = 2 - TURN if F.block_mask else TURN
    MASKED: tl.constexpr = PART == EDGES
    blocks = of_part(blocks, T.BM, F, PART)
    q_from, do_from = sources
    keys = Keys(j0, (j0 + tl.arange(0, T.BN))[:, None])
    draw = drawn(h, item.b, call, extras, F)
    lo, hi = span(blocks, PART)
    for x in tl.range(lo, hi, T.BM):
        i0 = block_at(x, blocks, T.BM, F, PART)
        i = i0 + tl.arange(0, T.BM)
        rows = rows_of(i[None, :], h, item, call, extras, F)
        tile_q = load(q, q_from, i0, item.M, T.D, T.BM, T.BD, F.tma, MASKED)
        qk = by_rows(tile_k, tile_q, F)
        dp = qk  # defined for the compiler: unused without DK
        if GIVEN:
            dp = given(dout, item, h, rows.i, keys.j, call)
        else:
            tile_do = load(dout, do_from, i0, item.M, T.DV, T.BM, T.BDV, F.tma, MASKED)
            if DK:
                dp = by_rows(tile_v, tile_do, F)
        level, rest, row_delta = statistics(of_rows, item.q, h, i, call, F)
        keep = None
        if F.dropout:
            keep = tl.trans(kept(i[:, None], draw, j0, call, extras, F, T.BM, T.BN))
        p, _, dqk = gradients(
            qk, dp, keep, (level[None, :], rest[None, :]), row_delta[None, :], rows, keys, item,
            call, extras, F, PART,
        )  # fmt: skip
        if DV:
            dv = dot(narrow(p, tile_do.dtype), tile_do, dv, F)
        if DK:
            dk = dot(narrow(dqk, tile_q.dtype), tile_q, dk, F)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def dkv_kernel(
    q, k, v, dout, of_rows, dk, dv,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """dk (B,Hk,N,D) and dv (B,Hk,N,Dv), each summed over the query heads of its key head.

    An output that is None is not computed.
    """
    DK: tl.constexpr = dk is not None
    DV: tl.constexpr = dv is not None
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    # In causal calls the first keys have the most rows: ascending order is longest first.
    tile, b, hk = tile_of_program(call.N, T.BN, call.H // call.group, call.together, False)
    j0 = tile * T.BN
    item = item_of(b, call, extras, F)
    if F.packed and j0 >= item.N:
        return
    tile_k = take(k, item.k, hk, j0, item.length, T.D, T.BN, T.BD, F.tma)
    tile_v = tile_k
    if DK and not GIVEN:
        tile_v = take(v, item.k, hk, j0, item.length, T.DV, T.BN, T.BDV, F.tma)
    acc_k = tl.full([T.BN, T.BD if DK else 1], 0, tl.float32)
    acc_v = tl.full([T.BN, T.BDV if DV else 1], 0, tl.float32)
    blocks = row_range(j0, T.BN, item, call, T.BM)
    groups = call.group if F.gqa else 1
    for g in range(groups):
        h = hk * groups + g
        q_from = source(q, item.q, h, item.M, T.D, T.BM, T.BD, F.tma)
        do_from = q_from
        if not GIVEN:
            do_from = source(dout, item.q, h, item.M, T.DV, T.BM, T.BDV, F.tma)
        of_head = blocks
        if F.block_mask:
            of_head = entry(extras.block_mask, b, h, tile, tl.cdiv(call.N, T.BN))
        for x in tl.static_range(3 if F.block_mask else 2):
            acc_k, acc_v = over_rows(
                acc_k, acc_v, tile_k, tile_v, q, dout, of_rows, (q_from, do_from), h,
                of_head, j0, item, call, extras, F, T, GIVEN, DK, DV, x,
            )  # fmt: skip
    if DK:
        store(dk, item.k, hk, j0, item.N, acc_k * call.reals.scale, T.D, T.BN, T.BD)
    if DV:
        if F.dropout:
            acc_v *= call.reals.factor
        store(dv, item.k, hk, j0, item.N, acc_v, T.DV, T.BN, T.BDV)


# -------------------------------------------------------------------------------------- the mask


class Part(NamedTuple):
    """The tiles of scores that one program sums for the gradient of a mask."""

    b: Any  # the first tile: item, head, tile of rows, tile of keys
    h: Any
    m: Any
    n: Any
    sum_h: Any  # how many heads, tiles of rows and tiles of keys it sums over
    sum_m: Any
    sum_n: Any
    first: Any  # its range of these tiles: [first, past)
    past: Any
    split: Any
    own_b: Any  # sizes of the mask's item and head dimensions
    own_h: Any


@triton.jit
def part_of_mask(call, T: tl.constexpr, SUMMED: tl.constexpr):
    """This program's Part. It owns one index of each dimension that is not SUMMED, and sums over
    the others."""
    tiles_m, tiles_n = tl.cdiv(call.M, T.BM), tl.cdiv(call.N, T.BN)
    own_b, sum_b = (1, call.B) if SUMMED[0] else (call.B, 1)
    own_h, sum_h = (1, call.H) if SUMMED[1] else (call.H, 1)
    own_m, sum_m = (1, tiles_m) if SUMMED[2] else (tiles_m, 1)
    own_n, sum_n = (1, tiles_n) if SUMMED[3] else (tiles_n, 1)
    rest = tl.program_id(0)
    n, rest = rest % own_n, rest // own_n
    m, rest = rest % own_m, rest // own_m
    h, rest = rest % own_h, rest // own_h
    b, split = rest % own_b, rest // own_b
    work = tl.cast(sum_b, tl.int64) * sum_h * sum_m * sum_n
    splits = tl.num_programs(0) // (own_b * own_h * own_m * own_n)
    share = tl.cdiv(work, splits)
    first, past = split * share, tl.minimum((split + 1) * share, work)
    return Part(b, h, m, n, sum_h, sum_m, sum_n, first, past, split, own_b, own_h)


@triton.jit
def tile_of_part(w, part, T: tl.constexpr):
    """Item, head, first row and first key of the part's w-th tile."""
    n, others = w % part.sum_n, w // part.sum_n
    m, others = others % part.sum_m, others // part.sum_m
    b, h = part.b + others // part.sum_h, part.h + others % part.sum_h
    i0, j0 = (part.m + m) * T.BM, (part.n + n) * T.BN
    return b.to(tl.int32), h.to(tl.int32), i0.to(tl.int32), j0.to(tl.int32)


@triton.jit
def store_part(partial, acc, part, call, T: tl.constexpr, SUMMED: tl.constexpr):
    if SUMMED[2]:
        acc = tl.sum(acc, 0, keep_dims=True)
    if SUMMED[3]:
        acc = tl.sum(acc, 1, keep_dims=True)
    ROWS: tl.constexpr = 1 if SUMMED[2] else T.BM
    KEYS: tl.constexpr = 1 if SUMMED[3] else T.BN
    i, j = part.m * T.BM + tl.arange(0, ROWS), part.n * T.BN + tl.arange(0, KEYS)
    n_rows, n_keys = (1 if SUMMED[2] else call.M), (1 if SUMMED[3] else call.N)
    plane = (part.split * part.own_b + part.b).to(tl.int64) * part.own_h + part.h
    to = partial + (plane * n_rows + i)[:, None] * n_keys + j[None, :]
    tl.store(to, acc, mask=(i < n_rows)[:, None] & (j < n_keys)[None, :])


@triton.jit(do_not_specialize=SIZES)
def dmask_kernel(
    q, k, v, dout, of_rows, partial,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr, GIVEN: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """dS summed over the dimensions along which the mask is broadcast: SUMMED has four flags.

    partial is (splits, ...the mask's four dimensions), float32. The tiles of one element are
    divided among `splits` programs; the sum of partial over splits is dmask.
    """
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    part = part_of_mask(call, T, SUMMED)
    acc = tl.full([T.BM, T.BN], 0, tl.float32)
    for w in range(part.first, part.past):
        b, h, i0, j0 = tile_of_part(w, part, T)
        acc = add_to_mask(
            acc, q, k, v, dout, of_rows, b, h, i0, j0, call, extras, F, T, GIVEN
        )  # fmt: skip
    store_part(partial, acc, part, call, T, SUMMED)


@triton.jit
def add_to_mask(
    acc, q, k, v, dout, of_rows, b, h, i0, j0, call, extras,
    F: tl.constexpr, T: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """acc + dS of one tile; acc itself if no row of the tile sees any of its keys."""
    item = item_of(b, call, extras, F)
    seen = reaches(i0, j0, item, call, T.BM, T.BN)
    if F.packed:  # rows past item.M belong to the next sequence
        seen &= i0 < item.M
    if seen:
        i = i0 + tl.arange(0, T.BM)
        keys = Keys(j0, (j0 + tl.arange(0, T.BN))[None, :])
        rows = rows_of(i[:, None], h, item, call, extras, F)
        hk = h // call.group
        tile_q = take(q, item.q, h, i0, item.M, T.D, T.BM, T.BD, F.tma)
        tile_k = take(k, item.k, hk, j0, item.length, T.D, T.BN, T.BD, F.tma)
        qk = by_rows(tile_q, tile_k, F)
        if GIVEN:
            dp = given(dout, item, h, rows.i, keys.j, call)
        else:
            tile_do = take(dout, item.q, h, i0, item.M, T.DV, T.BM, T.BDV, F.tma)
            tile_v = take(v, item.k, hk, j0, item.length, T.DV, T.BN, T.BDV, F.tma)
            dp = by_rows(tile_do, tile_v, F)
        keep = None
        if F.dropout:
            keep = kept(rows.i, drawn(h, b, call, extras, F), j0, call, extras, F, T.BM, T.BN)
        level, rest, row_delta = statistics(of_rows, item.q, h, i, call, F)
        levels = (level[:, None], rest[:, None])
        _, ds, _ = gradients(
            qk, dp, keep, levels, row_delta[:, None], rows, keys, item, call, extras, F, EDGES
        )
        acc += ds
    return acc
