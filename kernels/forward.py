"""Forward: one program for each tile of query rows (Dao 2023, algorithm 1)."""

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
    in_order,
    item_of,
    kept,
    key_range,
    rows_of,
    score,
    span,
    tile_of_program,
    visible,
)
from .softmax import add_sink, finish, store_normaliser, update
from .tile import (
    by_rows,
    dot,
    load_keys,
    load_scales,
    look_up,
    narrow,
    past,
    row_index,
    scales_from,
    source,
    store,
    take,
    widened,
)


@triton.jit
def products(
    tile_q, k, k_from, by, j0, length, found, F: tl.constexpr, T: tl.constexpr, MASKED: tl.constexpr
):
    """q.k of a tile of rows and a tile of keys, (BM,BN), and the first D columns of the keys.

    Columns past D are a second product: 576 are 512 and 64, not 1024.
    """
    tile_k = load_keys(k, k_from[0], j0, length, found, F, T.D, T.BN, T.BD, MASKED)
    if F.kept != "":
        tile_k = widened(tile_k, by, tile_q[0].dtype, F.kept)
    qk = by_rows(tile_q[0], tile_k, F)
    if T.BX:
        more = load_keys(past(k, T.D), k_from[1], j0, length, found, F, T.DX, T.BN, T.BX, MASKED)
        if F.kept != "":
            more = widened(more, by, tile_q[0].dtype, F.kept)
        qk = dot(tile_q[1], tl.trans(more), qk, F)
    return qk, tile_k


@triton.jit
def accumulate(
    state, tile_q, k, v, sources, blocks, rows, item, call, extras,
    F: tl.constexpr, T: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Update the state (acc, m, l) with one PART of the keys."""
    PART: tl.constexpr = 2 - TURN if F.block_mask else TURN
    MASKED: tl.constexpr = PART == EDGES
    blocks = of_part(blocks, T.BN, F, PART)
    acc, m, l = state
    k_from, v_from, k_by, v_by = sources
    draw = drawn(rows.h, item.b, call, extras, F)
    lo, hi = span(blocks, PART)
    for x in tl.range(lo, hi, T.BN):
        j0 = block_at(x, blocks, T.BN, F, PART)
        keys = Keys(j0, (j0 + tl.arange(0, T.BN))[None, :])
        found = look_up(j0, item.b, item.length, extras.pages, F, T.BN, MASKED)
        by = 0
        if F.kept != "":
            by = load_scales(extras.k_scale, k_by, j0, item.length, found, F, T.BN)
        qk, tile_k = products(tile_q, k, k_from, by, j0, item.length, found, F, T, MASKED)
        s, _ = score(qk, rows, keys, call, extras, F, PART)
        if MASKED:
            s = tl.where(visible(rows, keys, item, call, F), s, float("-inf"))
        p, m, l, alpha = update(s, m, l, call, F)
        if F.dropout:
            keep = kept(rows.i, draw, j0, call, extras, F, T.BM, T.BN)
            p = tl.where(keep, p, 0.0)
        if F.latent:
            tile_v = tile_k
        else:
            tile_v = load_keys(v, v_from, j0, item.length, found, F, T.DV, T.BN, T.BDV, MASKED)
        if F.kept != "":
            by = load_scales(extras.v_scale, v_by, j0, item.length, found, F, T.BN)
            tile_v = widened(tile_v, by, tile_q[0].dtype, F.kept)
        acc = dot(narrow(p, tile_v.dtype), tile_v, acc * alpha[:, None], F)
    return acc, m, l


@triton.jit
def attend(tile_q, k, v, hk, blocks, rows, item, call, extras, F: tl.constexpr, T: tl.constexpr):
    """acc, m and l of a tile of rows over `blocks`: from `key_range`, or a block mask's entry.

    tile_q: the first D columns of the rows, and those past them, or 0.
    """
    more = 0
    if T.BX:
        more = source(past(k, T.D), item.k, hk, item.length, T.DX, T.BN, T.BX, F.tma)
    sources = (
        (source(k, item.k, hk, item.length, T.D, T.BN, T.BD, F.tma), more),
        source(v, item.k, hk, item.length, T.DV, T.BN, T.BDV, F.tma),
        scales_from(extras.k_scale, item.k, hk, F),
        scales_from(extras.v_scale, item.k, hk, F),
    )
    acc = tl.full([T.BM, T.BDV], 0, tl.float32)
    state = (acc, tl.full([T.BM], float("-inf"), tl.float32), tl.full([T.BM], 0, tl.float32))
    for x in tl.static_range(3 if F.block_mask else 2):
        state = accumulate(state, tile_q, k, v, sources, blocks, rows, item, call, extras, F, T, x)
    return state


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, out, normaliser,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """out (B,H,M,Dv) and the normaliser (2,B,H,M), float32."""
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
    tile_q = (take(q, item.q, h, i0, item.M, T.D, T.BM, T.BD, F.tma), 0)
    if T.BX:
        more = take(past(q, T.D), item.q, h, i0, item.M, T.DX, T.BM, T.BX, F.tma)
        tile_q = (tile_q[0], more)
    blocks = key_range(i0, tl.minimum(i0 + T.BM, item.M), item, call, T.BN)
    if F.in_order:
        blocks = in_order(blocks)
    if F.block_mask:
        blocks = entry(extras.block_mask, b, h, tile, tl.cdiv(call.M, T.BM))
    acc, m, l = attend(tile_q, k, v, hk, blocks, rows, item, call, extras, F, T)
    if F.sinks:
        acc, m, l = add_sink(acc, m, l, extras.sinks, h, F)
    acc, lse, tail = finish(acc, m, l, F)
    if F.dropout:
        acc *= call.reals.factor
    store(out, item.q, h, i0, item.M, acc, T.DV, T.BM, T.BDV)
    row = row_index(item.q, h, i, call.H, call.rows)
    store_normaliser(normaliser, row, i < item.M, lse, tail, call)
