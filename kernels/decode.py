"""Decoding: few queries, many keys. Keys are split among programs (Dao et al., Flash-Decoding,
2023). The query heads that share a key head are rows of one tile, so that keys are read once.
"""

import triton
import triton.language as tl

from .forward import attend
from .score import SIZES, Blocks, call_of, extent, item_of, key_range, rows_of
from .softmax import LOWEST, add_sink, finish, rescale, store_normaliser
from .tile import Start, head_of, past, row_index, store


@triton.jit
def gather(x, at, h, i, real, D: tl.constexpr, BD: tl.constexpr):
    """Row i of head h at a Start for each i and h, as (BM, BD): 0 where not `real`."""
    d = tl.arange(0, BD)
    of_row = head_of(x, at, h) + i.to(tl.int64) * x.sm
    from_x = of_row[:, None] + d.to(tl.int64)[None, :] * x.sd
    return tl.load(from_x, mask=real[:, None] & (d < D)[None, :], other=0.0)


@triton.jit(do_not_specialize=SIZES)
def split_kernel(
    q, k, v, partial, partial_m, partial_l,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The softmax of each split, not yet normalised: acc (splits,B,H,M,Dv), m and l (splits,B,H,M).

    `combine_kernel` merges the splits and divides only then. Weights computed from the splits'
    rounded LSEs would carry their rounding errors.

    Row r of a tile is query r % M of the r // M-th head of the group.
    """
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    tiles, heads = tl.cdiv(call.group * call.M, T.BM), call.H // call.group
    pid = tl.program_id(0)
    tile, rest = pid % tiles, pid // tiles
    hk, rest = rest % heads, rest // heads
    b, split = rest % call.B, rest // call.B
    splits = tl.num_programs(0) // (tiles * heads * call.B)

    _, M = extent(extras.cu_q, b, call.M, F)
    of_group = call.group * M
    if F.packed and tile * T.BM >= of_group:
        return
    r = tile * T.BM + tl.arange(0, T.BM)
    real = r < of_group
    i, h = tl.where(real, r % M, M), hk * call.group + tl.where(real, r // M, 0)
    item = item_of(b, call, extras, F)
    rows = rows_of(i[:, None], h[:, None], item, call, extras, F)

    tile_q = (gather(q, item.q, h, i, real, T.D, T.BD), 0)
    if T.BX:
        tile_q = (tile_q[0], gather(past(q, T.D), item.q, h, i, real, T.DX, T.BX))

    every = key_range(0, M, item, call, T.BN)
    share = tl.cdiv(tl.cdiv(every.last - every.first, T.BN), splits) * T.BN
    lo = every.first + split * share
    hi = tl.minimum(lo + share, every.last)
    blocks = Blocks(
        lo,
        tl.minimum(tl.maximum(every.full, lo), hi),
        tl.minimum(tl.maximum(every.tail, lo), hi),
        hi,
        0,
    )
    acc, m, l = attend(tile_q, k, v, hk, blocks, rows, item, call, extras, F, T)

    of_split = Start(split * call.items + item.q.b, item.q.row)
    to = row_index(of_split, h, i, call.H, call.rows)
    dv = tl.arange(0, T.BDV)
    inside = real[:, None] & (dv < T.DV)[None, :]
    tl.store(partial + to[:, None] * T.DV + dv[None, :], acc, mask=inside)
    tl.store(partial_m + to, m, mask=real)
    tl.store(partial_l + to, l, mask=real)


@triton.jit(do_not_specialize=("splits", *SIZES))
def combine_kernel(
    partial, partial_m, partial_l, out, normaliser, splits,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """out (B,H,M,Dv) and the normaliser (2,B,H,M) from the results of `split_kernel`; one row for
    each program."""
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    pid = tl.program_id(0)
    i, bh = pid % call.rows, pid // call.rows
    b, h = bh // call.H, bh % call.H
    row = pid + tl.arange(0, 1)
    all_rows = tl.cast(call.items * call.H, tl.int64) * call.rows
    m = tl.full([1], float("-inf"), tl.float32)
    for split in range(splits):
        m = tl.maximum(m, tl.load(partial_m + split * all_rows + row))
    pivot = tl.maximum(m, LOWEST)
    d = tl.arange(0, T.BDV)[None, :]
    acc, l = tl.full([1, T.BDV], 0, tl.float32), tl.full([1], 0, tl.float32)
    for split in range(splits):
        at = split * all_rows + row
        weight = rescale(tl.load(partial_m + at), pivot, F)
        l += weight * tl.load(partial_l + at)
        part = tl.load(partial + at[:, None] * T.DV + d, mask=d < T.DV, other=0.0)
        acc += weight[:, None] * part
    if F.sinks:
        acc, m, l = add_sink(acc, m, l, extras.sinks, h, F)
    acc, lse, tail = finish(acc, m, l, F)
    if F.dropout:
        acc *= call.reals.factor
    store(out, Start(b, 0), h, i, call.rows, acc, T.DV, 1, T.BDV)
    store_normaliser(normaliser, row, row < all_rows, lse, tail, call)
