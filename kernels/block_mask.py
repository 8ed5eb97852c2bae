"""Block masks of a dense mask and of a mask_mod, as in FlexAttention (Dong et al. 2024): which
blocks each tile visits. `block_mask_kernel` computes them before a pass, from the mask and by the
mask_mod of every pair; `of_part` reads them. Nothing of size M x N is stored.

A tile of rows, or of keys, has an ordered list of the blocks of which it sees anything. Blocks in
which something besides the mask (the band, a length) may hide come first and last. Among the others
is the longest run of blocks in which nothing is hidden: for it the mask is not read.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .score import (
    EDGES,
    SIZES,
    WHOLE,
    Blocks,
    Keys,
    call_of,
    indices,
    item_of,
    key_range,
    row_range,
    rows_of,
    visible,
)

HEADER = tl.constexpr(8)
LEAST = tl.constexpr(-3.3895313892515355e38)  # finfo.min of bfloat16; float32's is below
# If a row has a mask value above this, its keys with a mask of at most LEAST have probability 0,
# for any product q.k below 2^126.
FAR = tl.constexpr(-4.253529586511731e37)


class BlockMask(NamedTuple):
    """The lists of blocks of all tiles, and their strides."""

    ptr: Any  # (planes, tiles, size) int32, contiguous: HEADER numbers per tile, then its blocks
    size: Any
    sees: Any  # (planes, M) int8: rows with a mask value far above finfo.min; None for bool masks
    heads: Any  # planes of an item
    sb: Any  # planes from one item to the next, and from one head to the next
    sh: Any


@triton.jit
def added(rows, keys, call, extras, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """(BM, BN): what the mask adds to scores: -inf outside the mask and where a mask_mod hides, and
    1 for NaN, which hides nothing."""
    there = keys.j < call.N
    x = tl.where(tl.broadcast_to(there, [BM, BN]), 0.0, float("-inf"))
    if F.mask != "":
        at = rows.mask + keys.j.to(tl.int64) * extras.mask.sd
        if F.mask == "bool":
            x = tl.where(tl.load(at, mask=there, other=0) != 0, x, float("-inf"))
        else:
            mask = tl.load(at, mask=there, other=float("-inf")).to(tl.float32)
            x += tl.where(mask == mask, mask, 1.0)
    if F.mask_mod is not None:
        b, h, i, j = indices(rows, keys, call, extras, F)
        x = tl.where(F.mask_mod(b, h, i, j, extras.captured), x, float("-inf"))
    return x


@triton.jit
def noted(places, to, block, keep, before):
    """Store `block` at the end of the list at `to`. Return the list's new lengths: in all, before
    full and before tail (`places`). Without `keep` the next block overwrites this one."""
    n, full, tail = places
    tl.store(to + n, block)
    n += keep.to(tl.int32)
    return n, tl.where(before[0], n, full), tl.where(before[1], n, tail)


@triton.jit(do_not_specialize=SIZES)
def block_mask_kernel(
    block_mask,
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras,
    F: tl.constexpr, T: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Fill block_mask: the BlockMask of tiles of T.BM rows, or if KEYS, of T.BN keys.

    finfo.min also hides a key from a row that has a mask value far above it. This is known only
    after the row's last key, so the launch for rows builds two lists: in the first, finfo.min does
    not hide; in the second, at lists + steps, it does. It also stores `block_mask.sees`, which the
    launch for keys reads.
    """
    call = call_of(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F,
    )  # fmt: skip
    BOTH: tl.constexpr = F.mask == "add" and not KEYS
    STEP: tl.constexpr = T.BM if KEYS else T.BN
    if KEYS:
        tiles, steps = tl.cdiv(call.N, T.BN), tl.cdiv(call.M, T.BM)
    else:
        tiles, steps = tl.cdiv(call.M, T.BM), tl.cdiv(call.N, T.BN)
    pid = tl.program_id(0)
    plane, tile = pid // tiles, pid % tiles
    b, h = plane // block_mask.heads, plane % block_mask.heads
    item = item_of(b, call, extras, F)
    i0, j0 = tile * T.BM, tile * T.BN
    if KEYS:
        blocks = row_range(j0, T.BN, item, call, T.BM)
    else:
        blocks = key_range(i0, tl.minimum(i0 + T.BM, item.M), item, call, T.BN)
    header = block_mask.ptr + pid.to(tl.int64) * block_mask.size
    sees = plane.to(tl.int64) * call.M
    lists = header + HEADER
    none = tl.cast(0, tl.int32)
    on_list, on_high = (none, none, none), (none, none, none)
    begin, lo, hi = blocks.full, blocks.full, blocks.full  # start of the current run; the longest
    after, after_high = none, none  # list lengths after the longest run
    sight = tl.full([T.BM], float("-inf"), tl.float32)
    for at in tl.range(blocks.first, blocks.last, STEP, num_stages=2):
        block = at // STEP
        if KEYS:
            i0 = block * STEP
        else:
            j0 = block * STEP
        i = i0 + tl.arange(0, T.BM)
        # Rows past the end are as the last row: they show no more than it does.
        rows = rows_of(tl.minimum(i, call.M - 1)[:, None], h, item, call, extras, F)
        keys = Keys(j0, (j0 + tl.arange(0, T.BN))[None, :])
        x = added(rows, keys, call, extras, F, T.BM, T.BN)
        most, least = tl.max(x, 1), tl.min(x, 1)
        if BOTH:
            seen = most
            if F.left or F.right or F.lengths:
                near = visible(rows, keys, item, call, F)
                seen = tl.max(tl.where(near, x, float("-inf")), 1)
            sight = tl.maximum(sight, seen)
        if F.mask == "add" and KEYS:
            seen = tl.load(block_mask.sees + sees + tl.minimum(i, call.M - 1)) != 0
            most = tl.where((most <= LEAST) & seen, float("-inf"), most)
        most, least = tl.max(most), tl.min(least)
        inside = (at >= blocks.full) & (at < blocks.tail)
        before = at < blocks.full, at < blocks.tail
        on_list = noted(on_list, lists, block, most > float("-inf"), before)
        if BOTH:
            on_high = noted(on_high, lists + steps, block, most > LEAST, before)
        whole = inside & (most == 0) & (least == 0)
        begin = tl.where(whole, begin, at + STEP)
        longer = whole & (at + STEP - begin > hi - lo)
        lo, hi = tl.where(longer, begin, lo), tl.where(longer, at + STEP, hi)
        after = tl.where(longer, on_list[0], after)
        after_high = tl.where(longer, on_high[0], after_high)
    begins = none
    if BOTH:
        i = i0 + tl.arange(0, T.BM)
        seen = sight > FAR
        tl.store(block_mask.sees + sees + i, seen.to(tl.int8), mask=i < call.M)
        # A row with every key hidden by -inf does not need the keys at finfo.min either.
        needs = tl.where((sight > float("-inf")) & (sight <= FAR), 1.0, 0.0)
        if tl.max(needs) == 0.0:
            on_list, after, begins = on_high, after_high, steps
    n, full, tail = on_list
    tl.store(header, lo // STEP)
    tl.store(header + 1, hi // STEP)
    tl.store(header + 2, full)
    tl.store(header + 3, after - (hi - lo) // STEP)
    tl.store(header + 4, after)
    tl.store(header + 5, tail)
    tl.store(header + 6, n)
    tl.store(header + 7, begins + HEADER)


@triton.jit
def entry(block_mask, b, h, tile, tiles):
    """The address of a tile's HEADER."""
    plane = (b * block_mask.sb + h * block_mask.sh).to(tl.int64)
    return block_mask.ptr + (plane * tiles + tile) * block_mask.size


@triton.jit
def of_part(blocks, BLOCK: tl.constexpr, F: tl.constexpr, PART: tl.constexpr):
    """The Blocks of one PART: `blocks` itself, or, with a block mask, read from the `entry` that
    blocks points to. The entry is read here and not earlier, to save registers in other parts."""
    if not F.block_mask:
        return blocks
    elif PART == WHOLE:
        lo, hi = tl.load(blocks) * BLOCK, tl.load(blocks + 1) * BLOCK
        return Blocks(lo, lo, hi, hi, 0)
    else:
        listed = blocks + tl.load(blocks + 7)
        full, tail = tl.load(blocks + 2) * BLOCK, tl.load(blocks + 5) * BLOCK
        if PART == EDGES:
            return Blocks(0, full, tail, tl.load(blocks + 6) * BLOCK, listed)
        else:
            begin, end = tl.load(blocks + 3) * BLOCK, tl.load(blocks + 4) * BLOCK
            return Blocks(full, begin, end, tail, listed)
