"""Tiles in and out of memory, and the three operations that the interpreter gets wrong.

Everything above this file speaks of tensors as an `Operand`: a pointer and four strides.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Operand(NamedTuple):
    """A (B, heads, rows, columns) tensor: its first element, and its strides in elements."""

    ptr: Any
    sb: Any
    sh: Any
    sm: Any
    sd: Any


class Start(NamedTuple):
    """Where an item of the batch begins in an Operand."""

    b: Any
    row: Any  # 0, but of a packed batch, whose sequences are rows of one item


class Pages(NamedTuple):
    """Where keys and values in pages are: page p is item p of an Operand."""

    table: Any  # (B, blocks) int32 or int64, contiguous: the pages of each sequence, in their order
    blocks: Any
    steps: Any  # of a page, of F.step keys each
    count: Any  # pages that there are
    room: Any  # keys that a sequence may have


@triton.jit
def dot(a, b, acc, F: tl.constexpr):
    """acc + a @ b, accumulated in float32; a and b of one dtype.

    The interpreter multiplies bfloat16 operands as the integers that hold their bits (Triton 3.6
    to 3.9); in float32 their products are exact.
    """
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=F.precision)


@triton.jit
def by_rows(a, b, F: tl.constexpr):
    """a @ b^T in float32: the product of each row of a with each row of b."""
    return dot(a, tl.trans(b), tl.full([a.shape[0], b.shape[0]], 0, tl.float32), F)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 rounded to `dtype`. The interpreter would cut bfloat16 off, not round it."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        to_even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, to_even.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def fma(x, y, z):
    """x y + z, rounded once, in float32. The interpreter would round the product too."""
    if INTERPRETED:  # y may be a constant of 64 bits, which the compiler would round
        y = tl.cast(y, tl.float32)
        return (x.to(tl.float64) * y + z).to(tl.float32)
    return tl.fma(x, y, z)


@triton.jit
def reciprocal(x):
    """1 / x of a float32, to a unit in the last place; 0 where that is subnormal."""
    if INTERPRETED:
        return 1 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def head_of(x, at, h):
    """The first element of head h from a Start on. Offsets are 64 bits wide from here on."""
    head = x.ptr + tl.cast(at.b, tl.int64) * x.sb + tl.cast(h, tl.int64) * x.sh
    return head + tl.cast(at.row, tl.int64) * x.sm


@triton.jit
def source(x, at, h, rows, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr):
    """What `load` reads the first `rows` rows of a head from: a pointer, or a descriptor.

    A descriptor is made here, from the device's own `rows`, and not on the host: rows past a key
    length then come out of the hardware as zeros, whatever lies there (NaN, the next sequence).
    """
    if TMA:
        return tl.make_tensor_descriptor(
            head_of(x, at, h), [tl.maximum(rows, 1), D], [x.sm, 1], [BM, BD]
        )
    else:  # needed: Triton compiles what follows a return, too
        return head_of(x, at, h)


@triton.jit
def load(
    x, src, i0, rows, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    TMA: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Rows [i0, i0 + BM) as (BM, BD), 0 outside the tensor. BOUND: some may be past `rows`."""
    if TMA:
        return src.load([i0, 0])
    else:
        i, d = tl.arange(0, BM), tl.arange(0, BD)
        at = src + (tl.cast(i0, tl.int64) + i)[:, None] * x.sm + d.to(tl.int64)[None, :] * x.sd
        return fetch(at, i0 + i < rows, d, D, BD, BOUND)


@triton.jit
def fetch(at, inside, d, D: tl.constexpr, BD: tl.constexpr, BOUND: tl.constexpr):
    """What lies at columns d of rows, 0 in those past D and, if BOUND, in rows not `inside`."""
    if BOUND and D < BD:
        return tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    elif BOUND:
        return tl.load(at, mask=inside[:, None], other=0.0)
    elif D < BD:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def take(
    x, at, h, i0, rows, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr
):
    """`load` of a tile that is read once, and so has a source of its own."""
    return load(x, source(x, at, h, rows, D, BM, BD, TMA), i0, rows, D, BM, BD, TMA, True)


@triton.jit
def look_up(j0, b, rows, pages, F: tl.constexpr, BN: tl.constexpr, BOUND: tl.constexpr):
    """The pages of keys [j0, j0 + BN) of sequence b, and their rows there: of the first, if all lie
    in one page, else of each. 0 of keys that are not in pages.

    Pages that there are not are clamped, for the reason that offsets are.
    """
    if F.step == 0:
        return 0, 0
    else:
        j, seen = j0, j0 < rows
        if F.step % BN != 0:
            j += tl.arange(0, BN)
            seen = j < rows
        block = j // F.step // pages.steps
        at = pages.table + tl.cast(b, tl.int64) * pages.blocks + block
        page = tl.load(at, mask=seen, other=0) if BOUND else tl.load(at)
        page = tl.minimum(tl.maximum(page, 0), pages.count - 1)
        return page.to(tl.int64), j - block * (F.step * pages.steps)


@triton.jit
def load_keys(
    x, src, j0, rows, found, F: tl.constexpr,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """`load` of keys or values, where `look_up` found them."""
    page, row = found
    if F.step == 0:
        return load(x, src, j0, rows, D, BN, BD, F.tma, BOUND)
    elif F.step % BN == 0:
        return load(x, src + page * x.sb, row, rows - j0 + row, D, BN, BD, False, BOUND)
    else:
        d = tl.arange(0, BD)
        at = src + page * x.sb + row.to(tl.int64) * x.sm
        at = at[:, None] + d.to(tl.int64)[None, :] * x.sd
        return fetch(at, j0 + tl.arange(0, BN) < rows, d, D, BD, BOUND)


@triton.jit
def scales_from(x, at, h, F: tl.constexpr):
    """What `load_scales` reads a head's from."""
    if F.kept != "":
        return head_of(x, at, h)
    else:
        return 0


@triton.jit
def load_scales(x, src, j0, rows, found, F: tl.constexpr, BN: tl.constexpr):
    """(BN,): what rows of keys or values are multiplied by, where `look_up` found them."""
    page, row = found
    n = tl.arange(0, BN)
    if F.step == 0:
        row = j0 + n
    elif F.step % BN == 0:
        row += n
    at = src + page * x.sb + row.to(tl.int64) * x.sm
    return tl.load(at, mask=j0 + n < rows, other=0.0)


@triton.jit
def widened(tile, scales, dtype: tl.constexpr, KEPT: tl.constexpr):
    """What rows of eight bits stand for: numbers times scales in float32, rounded to `dtype`.

    float8 comes as its bits, because some chips cannot convert it: they are those of a float16 once
    shifted, of e5m2 itself, of e4m3 times 2^-8.
    """
    if KEPT == "int8":
        x = tile.to(tl.float32)
    else:
        bits = tile.to(tl.int32) & 0xFF
        half = bits << 8 if KEPT == "e5m2" else (bits & 0x80) << 8 | (bits & 0x7F) << 7
        x = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        if KEPT == "e4m3fn":
            x = tl.where((bits & 0x7F) == 0x7F, float("nan"), x * 256.0)
    return narrow(x * scales[:, None], dtype)


@triton.jit
def store(x, at, h, i0, rows, values, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """Write (BM, BD) `values` to rows [i0, i0 + BM), as far as there are such rows."""
    i, d = tl.arange(0, BM), tl.arange(0, BD)
    to = head_of(x, at, h) + (tl.cast(i0, tl.int64) + i)[:, None] * x.sm
    inside = (i0 + i < rows)[:, None] & (d < D)[None, :]
    values = narrow(values, x.ptr.dtype.element_ty)
    tl.store(to + d.to(tl.int64)[None, :] * x.sd, values, mask=inside)


@triton.jit
def row_index(at, h, i, H, M):
    """Where row i of head h from a Start on lies in a contiguous (B, H, M) tensor."""
    return (tl.cast(at.b, tl.int64) * H + h) * M + at.row + i
