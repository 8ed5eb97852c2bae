"""The score pipeline: all features of the Triton kernels are implemented here.

Forward, backward, decode and weights call the same functions, so a feature is written once:

    where   `key_range` and `row_range` skip blocks; `visible` is exact
    what    `score`: scale, score_mod, softcap, ALiBi, mask, mask_mod, in this order
    after   `kept`: dropout's draws

If nothing but ALiBi is added to the logits (`F.scaled`), a score is q.k, or with softcap its tanh,
and ALiBi's slopes are in the same unit. `exponential` multiplies it by `reals.unit`, scale or
softcap times log2(e), in a fused multiply-add to get to base 2. Otherwise a score is the logit, and
differences are taken before the conversion to base 2: a mask of finfo.min times log2(e) would
overflow.

Rows and keys are passed in shapes that broadcast to the tile, (BM, 1) and (1, BN), or (1, BM) and
(BN, 1) if the tile is transposed: the functions here work for both.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tile import Start, fma, reciprocal, row_index

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.92596298909109e-08)  # log2(e) minus its float32 value
LN2 = tl.constexpr(0.6931471805599453)


class Flags(NamedTuple):
    """The features of a call, known at compile time: unused ones cost nothing."""

    scaled: bool  # a logit is a score times a positive factor: reals.unit / log2(e)
    left: bool = False  # rows have a first key
    right: bool = False  # rows have a last key
    bottom_right: bool = False
    place: bool = False  # the call is a part of a larger one
    packed: bool = False  # items are sequences of different lengths, one after the other
    step: int = 0  # of paged keys: largest power of two that divides a page, at most 256; else 0
    lengths: bool = False
    aligned: bool = False  # 16 divides N
    gqa: bool = False  # several query heads share a key head
    mask: str = ""  # or "bool" or "add"
    mask_rows: bool = False  # the mask differs between the rows of a tile
    block_mask: bool = False  # the mask has a BlockMask
    alibi: bool = False
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    fours: bool = True  # the keys of one draw of four words are 4 j to 4 j + 3
    precision: str = "ieee"  # of float32 products; or "tf32", or in parts: "tf32x3", "bf16x6"
    tma: bool = False  # q, k, v and dout are read through tensor descriptors
    kept: str = ""  # 8-bit format of keys and values: "int8", "e4m3fn" or "e5m2"
    latent: bool = False  # v is the first BDV columns of k
    in_order: bool = False  # keys in memory order, independent of the rows that share a tile
    # Functions made of the call's programs (program_source.py), or None. A score_mod contains the
    # softcap that follows it.
    score_mod: Any = None  # (s, b, h, i, j, captured) -> s and its derivative
    bend: Any = None  # the same arguments -> the second derivative
    mask_mod: Any = None  # (b, h, i, j, captured) -> whether the pair is seen
    outside: Any = None  # (b, h, i, j, captured) -> whether an index is out of range: ModText
    scatter: Any = None  # (s, b, h, i, j, captured, ds, sums, SHIFT): adds to captured gradients


class Tile(NamedTuple):
    """Compile-time sizes: the tile, and the head dims without and with padding."""

    BM: int
    BN: int
    D: int
    DV: int
    BD: int  # powers of two, 16 at least
    BDV: int
    DX: int = 0  # where q.k takes two products: columns of the second, past the first D
    BX: int = 0


# The integers of a call. Triton compiles kernels for special values of integers (1, multiples of
# 16), and only single parameters can be exempt. In a tuple, a growing cache would recompile.
SIZES = ("B", "H", "group", "M", "N", "left", "right", "threshold", "together")
SIZES += ("at_row", "at_key", "at_head", "at_item", "rows_after", "keys_after")


class Reals(NamedTuple):
    scale: Any
    unit: Any  # logit / score, times log2(e)
    per_unit: Any  # score / logit
    softcap: Any
    per_softcap: Any  # scale / softcap, times 2 log2(e) for `tanh`
    factor: Any  # dropout's multiplier of kept probabilities
    share: Any  # weight of a head if weights are averaged over heads


class Call(NamedTuple):
    """The scalars of a call."""

    B: Any
    H: Any
    group: Any  # query heads to a key head
    M: Any  # rows and keys; in a packed batch, those of the longest sequence
    N: Any
    left: Any
    right: Any
    threshold: Any  # a draw is dropped below it: 32 bits, read as signed
    together: Any  # how many heads run at a time
    at_row: Any  # index of the first row, key, head and item in the larger call
    at_key: Any
    at_head: Any
    at_item: Any
    rows_after: Any  # rows and keys that the larger call has after this one's
    keys_after: Any
    reals: Any  # Reals
    items: Any  # items and rows of the tensors: B and M, or for a packed batch 1 and its total rows
    rows: Any


@triton.jit
def call_of(
    B, H, group, M, N, left, right, threshold, together,
    at_row, at_key, at_head, at_item, rows_after, keys_after, reals, extras, F: tl.constexpr,
):  # fmt: skip
    if F.aligned:
        N = N // 16 * 16  # tells the compiler: it reads rows of a mask 16 bytes at a time
    items, rows = B, M
    if F.packed:
        items, rows = 1, extras.cu_q.total
    return Call(
        B, H, group, M, N, left, right, threshold, together,
        at_row, at_key, at_head, at_item, rows_after, keys_after, reals, items, rows,
    )  # fmt: skip


class Offsets(NamedTuple):
    """Where the sequences of a packed batch begin."""

    ptr: Any  # (B+1,) int32 or int64; the last is the total
    total: Any  # the total, known to the host


class Extras(NamedTuple):
    """The optional tensors of a call, or None."""

    mask: Any  # Operand
    lengths: Any  # (B,) int64
    slopes: Any  # Operand, float32
    sinks: Any  # (H,) float32, contiguous
    seed: Any  # one int64
    cu_q: Any = None  # Offsets, of rows and of keys
    cu_k: Any = None
    pages: Any = None  # Pages, instead of cu_k
    k_scale: Any = None  # Operands (B,Hk,N): the multiplier of each row of k and v
    v_scale: Any = None
    block_mask: Any = None  # BlockMask, if F.block_mask
    # Dropout draws repeat after this many items and heads. Not in SIZES: kernels are compiled for
    # special values, but these do not grow.
    dropout_batch_period: Any = None
    dropout_head_period: Any = None
    captured: Any = None  # Captured, of a score_mod and a mask_mod
    nothing: Any = None  # Triton 3.6 loses nested constants of a tuple without one of its own


class Captured(NamedTuple):
    """The numbers that a score_mod and a mask_mod capture, each kind in one flat tensor or None."""

    floats: Any  # (n_floats,) float32
    ints: Any  # (n_ints,) int64
    n_floats: Any
    n_ints: Any
    nothing: Any = None  # as in Extras


class Item(NamedTuple):
    """An item of the batch."""

    b: Any
    M: Any  # the numbers of its rows and keys
    N: Any
    q: Any  # Starts of its rows and keys
    k: Any
    length: Any  # how many of the keys exist
    diagonal: Any  # row i is at position i + diagonal


class Blocks(NamedTuple):
    """The blocks that a tile visits: `in_blocks`."""

    first: Any
    full: Any
    tail: Any
    last: Any
    listed: Any  # the list of blocks that the bounds index; 0 if the bounds are positions


class Rows(NamedTuple):
    """The rows of a tile, and values that depend only on them."""

    i: Any
    at: Any  # i' = i + diagonal
    b: Any  # their item
    h: Any  # their heads: one, or in decode one for each row
    slope: Any
    mask: Any  # the first element of each row of the mask


class Keys(NamedTuple):
    """The keys of a tile: the first index, and all indices."""

    first: Any
    j: Any


@triton.jit
def extent(cu, b, most, F: tl.constexpr):
    """The Start of an item's rows, or of its keys, and their number.

    Offsets are clamped, so that wrong ones cannot cause reads out of bounds. The host does not
    check offsets on a GPU, because that would synchronize.
    """
    if F.packed:
        first = tl.minimum(tl.maximum(tl.load(cu.ptr + b), 0), cu.total)
        end = tl.minimum(tl.maximum(tl.load(cu.ptr + b + 1), first), cu.total)
        return Start(0, first), tl.minimum(end - first, most).to(tl.int32)
    else:
        return Start(b, 0), most


@triton.jit
def item_of(b, call, extras, F: tl.constexpr):
    q, M = extent(extras.cu_q, b, call.M, F)
    if F.step > 0:
        k, N = Start(0, 0), tl.minimum(call.N, extras.pages.room)
    else:
        k, N = extent(extras.cu_k, b, call.N, F)
    whole = N  # keys of the larger call, if there is one
    if F.place:
        whole += call.at_key + call.keys_after
    if F.lengths:
        whole = tl.minimum(tl.maximum(tl.load(extras.lengths + b), 0), whole).to(tl.int32)
    length, diagonal = whole, 0
    if F.bottom_right:
        diagonal = whole - M
    if F.place:
        length = tl.minimum(tl.maximum(whole - call.at_key, 0), N)
        diagonal -= call.at_key
        diagonal += -call.rows_after if F.bottom_right else call.at_row
    return Item(b, M, N, q, k, length, diagonal)


@triton.jit
def rows_of(i, h, item, call, extras, F: tl.constexpr):
    """Rows i of heads h, both in the shape that broadcasts to the tile."""
    b = tl.cast(item.b, tl.int64)
    h64 = tl.cast(h, tl.int64)
    slope = 0.0
    if F.alibi:
        slope = tl.load(extras.slopes.ptr + b * extras.slopes.sb + h64 * extras.slopes.sh)
        slope *= call.reals.per_unit
    mask = 0
    if F.mask != "":
        mask = extras.mask.ptr + b * extras.mask.sb + h64 * extras.mask.sh
        if F.mask_rows:
            # Rows past the end read the last row's mask, so that loads need no bounds.
            mask += tl.minimum(i, call.M - 1).to(tl.int64) * extras.mask.sm
    return Rows(i, i + item.diagonal, item.b, h, slope, mask)


# ------------------------------------------------------------------------------------------- where


@triton.jit
def tile_of_program(n, BLOCK: tl.constexpr, heads, together, DESCENDING: tl.constexpr):
    """The tile, batch item and head of this program in a one-dimensional grid.

    `together` heads run at a time, so that their keys fit in the cache. Their tiles start from the
    last (DESCENDING) or from the first, so that the longest start first.
    """
    tiles = tl.cdiv(n, BLOCK)
    pid = tl.program_id(0)
    every_head = tl.num_programs(0) // tiles
    first = pid // (tiles * together) * together
    width = tl.minimum(every_head - first, together)
    rest = pid - first * tiles
    tile, bh = rest // width, first + rest % width
    if DESCENDING:
        tile = tiles - 1 - tile
    return tile, bh // heads, bh % heads


@triton.jit
def some(a0, a1, back, ahead, end):
    """The part of [0, end) in [a - back, a + ahead] for at least one a in [a0, a1)."""
    lo = tl.maximum(a0 - back, 0)
    return lo, tl.maximum(tl.minimum(a1 + ahead, end), lo)


@triton.jit
def every(a0, a1, back, ahead, end):
    """The part of [0, end) in [a - back, a + ahead] for every a in [a0, a1)."""
    lo = tl.maximum(a1 - 1 - back, 0)
    return lo, tl.maximum(tl.minimum(a0 + ahead + 1, end), lo)


@triton.jit
def in_blocks(some_lo, some_hi, every_lo, every_hi, BLOCK: tl.constexpr):
    """Round the bounds to blocks: [first, full) and [tail, last) need `visible`, [full, tail) does
    not.

    Only `last` may be inside a block. A pass has a loop for each PART, over its `span`.
    """
    empty = some_lo >= some_hi
    first = tl.where(empty, some_hi, some_lo // BLOCK * BLOCK)
    full = tl.minimum((every_lo + BLOCK - 1) // BLOCK * BLOCK, some_hi)
    full = tl.maximum(full, first)
    tail = tl.maximum(tl.minimum(every_hi, some_hi) // BLOCK * BLOCK, full)
    return Blocks(first, full, tail, some_hi, 0)


# The parts of a pass. WHOLE: blocks in which only a mask without a BlockMask may hide keys. EDGES:
# blocks in which the band or a length may hide keys. READ: with a block mask, the other blocks with
# a mask to read. With a block mask the parts run in reverse: the last loop, over WHOLE, then needs
# no registers for the mask.
WHOLE, EDGES, READ = (tl.constexpr(x) for x in range(3))


@triton.jit
def span(blocks, PART: tl.constexpr):
    """Loop bounds for a PART: [full, tail) for WHOLE, otherwise the blocks before and after it,
    with the gap closed."""
    if PART == WHOLE:
        return blocks.full, blocks.tail
    else:
        return blocks.first, blocks.full + (blocks.last - blocks.tail)


@triton.jit
def block_at(x, blocks, BLOCK: tl.constexpr, F: tl.constexpr, PART: tl.constexpr):
    """The first row or key of the block at position x of a loop over a `span`."""
    if PART != WHOLE:  # skip the gap
        x += tl.where(x >= blocks.full, blocks.tail - blocks.full, 0)
    block = x // BLOCK
    if F.block_mask and PART != WHOLE:
        block = tl.load(blocks.listed + block)
    return block * BLOCK  # equals x without a list, which the compiler cannot tell


@triton.jit
def key_range(i0, i1, item, call, BN: tl.constexpr):
    """The blocks of keys that rows [i0, i1) see: `in_blocks`."""
    a0, a1 = i0 + item.diagonal, i1 + item.diagonal
    lo, hi = some(a0, a1, call.left, call.right, item.length)
    every_lo, every_hi = every(a0, a1, call.left, call.right, item.length)
    return in_blocks(lo, hi, every_lo, every_hi, BN)


@triton.jit
def in_order(blocks):
    """The same blocks in one loop, in order: keys that all rows see do not come first."""
    return Blocks(blocks.first, blocks.first, blocks.first, blocks.last, 0)


@triton.jit
def reaches(i0, j0, item, call, BM: tl.constexpr, BN: tl.constexpr):
    """Does any of rows [i0, i0 + BM) see any of keys [j0, j0 + BN)?"""
    a0, a1 = i0 + item.diagonal, tl.minimum(i0 + BM, item.M) + item.diagonal
    lo, hi = some(a0, a1, call.left, call.right, item.length)
    return (j0 < hi) & (j0 + BN > lo)


@triton.jit
def row_range(j0, BN: tl.constexpr, item, call, BM: tl.constexpr):
    """The blocks of rows that see keys [j0, j0 + BN): `in_blocks`, with the edges swapped."""
    j1 = tl.minimum(j0 + BN, item.length)
    a0, a1 = j0 - item.diagonal, j1 - item.diagonal
    lo, hi = some(a0, a1, call.right, call.left, item.M)
    every_lo, every_hi = every(a0, a1, call.right, call.left, item.M)
    if j0 >= item.length:
        hi = lo  # no such keys
    if j0 + BN > item.length:
        every_lo, every_hi = lo, lo  # no row sees all of them
    return in_blocks(lo, hi, every_lo, every_hi, BM)


@triton.jit
def visible(rows, keys, item, call, F: tl.constexpr):
    """Which entries of a tile have an existing row and key inside the band."""
    j = keys.j
    keep = (j < item.length) & (rows.i < item.M)
    if F.left:
        keep &= j >= rows.at - call.left
    if F.right:
        keep &= j <= rows.at + call.right
    return keep


# -------------------------------------------------------------------------------------------- what


@triton.jit
def tanh(y):
    """tanh(y / (2 log2 e)), accurate to a few units in the last place, also for small y, where
    1 - 2 / (2^y + 1) cancels."""
    z = y * y
    # An odd polynomial with the coefficients of the least error, 1.1e-7, on the range of its use.
    near = y * (0.34657359 + z * (-0.013875471 + z * (6.6402894e-4 - z * 2.8791055e-5)))
    far = 1 - 2 * reciprocal(1 + tl.exp2(y))
    return tl.where(z < 1.3, near, far)


@triton.jit
def score(qk, rows, keys, call, extras, F: tl.constexpr, PART: tl.constexpr):
    """Scores of a tile, and the derivative d logit / d (scale q.k). In EDGES some keys may not
    exist."""
    s, derivative, _ = curved_score(qk, rows, keys, call, extras, F, PART, False)
    return s, derivative


@triton.jit
def curved_score(
    qk, rows, keys, call, extras, F: tl.constexpr, PART: tl.constexpr, CURVED: tl.constexpr
):
    """`score`, and if CURVED the derivative of its derivative by q.k, from what is no program."""
    s, derivative, curve = qk, 1.0, 0.0
    if F.softcap:
        s = tanh(qk * call.reals.per_softcap)
        derivative = 1 - s * s
        if CURVED:
            curve = -(call.reals.per_softcap / LOG2E) * s * derivative
    if not F.scaled:
        s *= call.reals.softcap if F.softcap else call.reals.scale
    if F.score_mod is not None:
        b, h, i, j = indices(rows, keys, call, extras, F)
        s, derivative = F.score_mod(s, b, h, i, j, extras.captured)
    if F.alibi:
        # Relative to the tile's first key: exact in float32 for rows and keys near each other.
        at, j = (rows.at - keys.first).to(tl.float32), (keys.j - keys.first).to(tl.float32)
        s -= rows.slope * tl.abs(at - j)
    if not (F.block_mask and PART == WHOLE):
        if F.mask != "":
            at = rows.mask + keys.j.to(tl.int64) * extras.mask.sd
            mask = tl.load(at, mask=keys.j < call.N, other=0) if PART == EDGES else tl.load(at)
            if F.mask == "bool":
                s, derivative = hidden(s, derivative, mask != 0, F)
            else:
                s += mask.to(tl.float32)
        if F.mask_mod is not None:
            b, h, i, j = indices(rows, keys, call, extras, F)
            seen = F.mask_mod(b, h, i, j, extras.captured)
            s, derivative = hidden(s, derivative, seen, F)
    return s, derivative, curve


@triton.jit
def hidden(s, derivative, seen, F: tl.constexpr):
    """-inf for scores that are not `seen`, 0 for their derivative: select, as both may be NaN."""
    if F.softcap or F.score_mod is not None:
        derivative = tl.where(seen, derivative, 0.0)
    return tl.where(seen, s, float("-inf")), derivative


@triton.jit
def indices(rows, keys, call, extras, F: tl.constexpr):
    """b, h, i and j as a score_mod has them: those of the larger call."""
    h, b = drawn(rows.h, rows.b, call, extras, F)
    i, j = rows.i, keys.j
    if F.place:
        i, j = i + call.at_row, j + call.at_key
    return b, h, i, j


@triton.jit
def exponential(s, level, call, F: tl.constexpr):
    """exp(logit - level); level is in base 2 if `F.scaled`, else natural."""
    if F.scaled:
        return tl.exp2(fma(s, call.reals.unit, -level))
    else:
        return tl.exp2((s - level) * LOG2E)


@triton.jit
def probability(s, levels, call, F: tl.constexpr):
    """exp(logit - normaliser); `levels` is the row's normaliser in the form of `levels_of`."""
    level, rest = levels
    if F.scaled:
        return tl.exp2(fma(s, call.reals.unit, -level) - rest)
    else:
        return tl.exp2(((s - level) - rest) * LOG2E)


@triton.jit
def levels_of(normaliser, at, h, i, call, F: tl.constexpr):
    """What `probability` subtracts from the scores of rows i: a level, and its rounding error.

    An empty row, or one past the end, has +inf and 0, so its P is 0. `normaliser` is contiguous
    (2, B, H, M): the LSE, and its rounding error.
    """
    row, inside = row_index(at, h, i, call.H, call.rows), i < call.rows
    to_tail = row_index(Start(call.items, 0), 0, 0, call.H, call.rows)
    level = tl.load(normaliser + row, mask=inside, other=float("inf"))
    rest = tl.load(normaliser + to_tail + row, mask=inside, other=0.0)
    level = tl.where(level == float("-inf"), float("inf"), level)
    if F.scaled:
        lse = level
        level = lse * LOG2E
        rest = fma(lse, LOG2E, -level) + (lse * LOG2E_REST + rest * LOG2E)
        rest = tl.where(level == float("inf"), 0.0, rest)
    return level, rest


PITCH = tl.constexpr(128)  # no tile has more rows


@triton.jit
def pitch_of(call, F: tl.constexpr):
    """Rows of a head in `statistics`, padded so that no tile reads past them. In a packed batch a
    tile may begin at any row."""
    tiles = tl.cdiv(call.rows, PITCH)
    if F.packed:
        tiles += 1
    return tiles * PITCH


@triton.jit
def statistics(of_rows, at, h, i, call, F: tl.constexpr):
    """Load level, rest and delta of rows i, without bounds, from the (3, B, H, pitch) tensor that
    `delta_kernel` stores for all passes of backward."""
    pitch = pitch_of(call, F)
    row = of_rows + row_index(at, h, i, call.H, pitch)
    plane = row_index(Start(call.items, 0), 0, 0, call.H, pitch)
    return tl.load(row), tl.load(row + plane), tl.load(row + 2 * plane)


# ------------------------------------------------------------------------------- after the softmax


@triton.jit
def drawn(h, b, call, extras, F: tl.constexpr):
    """The head and item indices in the larger call, for dropout's counters and for programs.
    Computed once for all tiles of a pass, because it divides. h: one, or (BM, 1)."""
    if extras.dropout_head_period is not None:
        h %= extras.dropout_head_period
    if extras.dropout_batch_period is not None:
        b %= extras.dropout_batch_period
    if F.place:
        h, b = h + call.at_head, b + call.at_item
    return h, b


@triton.jit
def kept(i, draw, j0, call, extras, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """(BM, BN): which probabilities dropout keeps. i: (BM, 1); draw: as `drawn` gives it; 4 divides
    j0.

    Philox-4x32-10 (Salmon et al., SC'11): key = the seed, low word first; counter = (j >> 2, i, h,
    b). Key j takes word j & 3, so one draw serves four neighbouring keys. In a part of a larger
    call, b, h, i and j are the indices in the larger call.
    """
    h, b = draw
    if F.place:
        i, j0 = i + call.at_row, j0 + call.at_key
    if F.fours:
        four = tl.broadcast_to((j0 // 4 + tl.arange(0, BN // 4))[None, :], [BM, BN // 4])
        w0, w1, w2, w3 = draws(four, i, h, b, extras)
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BM, BN])  # in order of j
    else:
        j = tl.broadcast_to((j0 + tl.arange(0, BN))[None, :], [BM, BN])
        w0, w1, w2, w3 = draws(j // 4, i, h, b, extras)
        low, high = tl.where(j % 2 == 0, w0, w1), tl.where(j % 2 == 0, w2, w3)
        word = tl.where(j % 4 < 2, low, high)
    return word >= tl.cast(call.threshold, tl.uint32)


@triton.jit
def draws(four, i, h, b, extras):
    """Four random words for each counter of a tile."""
    seed, zero = tl.load(extras.seed), tl.zeros_like(four).to(tl.uint32)
    return philox(
        four.to(tl.uint32),
        zero + i.to(tl.uint32),
        zero + tl.cast(h, tl.uint32),
        zero + tl.cast(b, tl.uint32),
        (seed & 0xFFFFFFFF).to(tl.uint32),
        ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four words from a counter and a key. Triton's philox computes each product twice, for its
    low and its high half."""
    for _ in tl.static_range(10):
        a, b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = b.to(tl.uint32), a.to(tl.uint32)
        k0, k1 = (k0 + 0x9E3779B9).to(tl.uint32), (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3
