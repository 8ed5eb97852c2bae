"""Load and store tiles, and wrap the three operations that Triton's interpreter gets wrong.

Other kernel files use tensors in the form of an `Operand`: a pointer and four strides.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
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
    row: Any  # 0, except in a packed batch, where sequences are rows of one item


class Pages(NamedTuple):
    """The table of paged keys and values: page p is item p of an Operand."""

    table: Any  # (B, blocks) int32 or int64, contiguous: the pages of each sequence, in order
    blocks: Any
    steps: Any  # steps of F.step keys in a page
    count: Any  # number of pages
    room: Any  # most keys that a sequence can have


@triton.jit
def dot(a, b, acc, F: tl.constexpr):
    """acc + a @ b, accumulated in float32; a and b have the same dtype, and None is no acc.

    The interpreter multiplies the bits of bfloat16 operands as integers (Triton 3.6 to 3.9). It
    gets float32 operands instead, in which the products are exact.
    """
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if F.precision == "tf32x3":
        return three_products(in_two(a), in_two(b), acc)
    elif F.precision == "bf16x6":
        return six_products(in_three(a), in_three(b), acc)
    else:
        return tl.dot(a, b, acc, input_precision=F.precision)


@triton.jit
def by_rows(a, b, F: tl.constexpr):
    """a @ b^T in float32: the product of each row of a with each row of b."""
    return dot(a, tl.trans(b), None, F)


# Products of float32 on tensor cores: each number is a sum of parts, and their products are added.
# - First parts are cut off, not rounded, so that of the largest number is finite. The others have
#   its sign. Of a NaN without a bit in the upper part of its mantissa, infinity is left.
# - The rest of an infinity is NaN, and so are the small products of its row or column. They are
#   left out there: the product of first parts is IEEE's, infinity or NaN.
# - Tensor cores cut off their sums, which over many tiles adds up: `acc` is added outside of them.
# - The last parts of numbers below about 1e-32 are subnormal, and lose bits.


@triton.jit
def in_two(x):
    """x, of which products in tf32 read the upper 19 bits, and the rest of x rounded to as many: in
    all x, within 2^-22."""
    high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    rest = (x - high).to(tl.int32, bitcast=True) + 4096
    if INTERPRETED:  # it multiplies all bits
        return high, (rest & -8192).to(tl.float32, bitcast=True)
    return x, rest.to(tl.float32, bitcast=True)


@triton.jit
def three_products(a, b, acc):
    """acc + a @ b of `in_two`, within about 2^-21 of |a| @ |b|. The product of both rests is left
    out."""
    small = tl.dot(a[1], b[0], input_precision="tf32")
    small = tl.dot(a[0], b[1], small, input_precision="tf32")
    return added(acc, tl.dot(a[0], b[0], without_nan(small), input_precision="tf32"))


@triton.jit
def in_three(x):
    """Three bfloat16 that add up to x."""
    first, rest = upper_half(x)
    second, rest = upper_half(rest)
    third, _ = upper_half(rest)
    return first, second, third


@triton.jit
def upper_half(x):
    """The upper half of a float32's bits, which is a bfloat16, and what is left of the float32. The
    interpreter gets it as float32, for `dot`'s reason."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits & -65536).to(tl.float32, bitcast=True)
    if INTERPRETED:
        return high, x - high
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - high


@triton.jit
def six_products(a, b, acc):
    """acc + a @ b of `in_three`, within about 2^-23 of |a| @ |b|. The three smallest of the nine
    products are left out."""
    small = tl.dot(a[2], b[0])
    small = tl.dot(a[1], b[1], small)
    small = tl.dot(a[0], b[2], small)
    small = tl.dot(a[1], b[0], small)
    small = tl.dot(a[0], b[1], small)
    return added(acc, tl.dot(a[0], b[0], without_nan(small)))


@triton.jit
def without_nan(x):
    """x, with a number for NaN. For PTX the larger of NaN and a number is the number; for the
    interpreter of Triton 3.6 it is NaN."""
    if INTERPRETED:
        return tl.where(x == x, x, 0.0)
    return tl.maximum(x, LOWEST)


@triton.jit
def added(acc, x):
    if acc is None:
        return x
    else:
        return acc + x


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round float32 to `dtype`. The interpreter would truncate to bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        to_even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, to_even.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def fma(x, y, z):
    """x y + z in float32, rounded once. The interpreter would round the product too."""
    if INTERPRETED:  # y may be a 64-bit constant, which the compiler would round to float32
        y = tl.cast(y, tl.float32)
        return (x.to(tl.float64) * y + z).to(tl.float32)
    return tl.fma(x, y, z)


@triton.jit
def reciprocal(x):
    """1 / x of a float32, within a unit in the last place; 0 if the result is subnormal."""
    if INTERPRETED:
        return 1 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def head_of(x, at, h):
    """The address of head h at a Start. Offsets are 64 bits wide from here on."""
    head = x.ptr + tl.cast(at.b, tl.int64) * x.sb + tl.cast(h, tl.int64) * x.sh
    return head + tl.cast(at.row, tl.int64) * x.sm


@triton.jit
def past(x, columns: tl.constexpr):
    """The Operand of what lies past the first columns."""
    return Operand(x.ptr + tl.full([], columns, tl.int64) * x.sd, x.sb, x.sh, x.sm, x.sd)


@triton.jit
def source(x, at, h, rows, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr):
    """The source for `load` of the first `rows` rows of a head: a pointer or a descriptor.

    A descriptor is made here and not on the host, because only the device knows `rows`. Rows past a
    key length are then zeros, whatever is in memory there (NaN, the next sequence).
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
    """Rows [i0, i0 + BM) as (BM, BD), 0 outside the tensor. BOUND: some rows may be past `rows`."""
    if TMA:
        return src.load([i0, 0])
    else:
        i, d = tl.arange(0, BM), tl.arange(0, BD)
        at = src + (tl.cast(i0, tl.int64) + i)[:, None] * x.sm + d.to(tl.int64)[None, :] * x.sd
        return fetch(at, i0 + i < rows, d, D, BD, BOUND)


@triton.jit
def fetch(at, inside, d, D: tl.constexpr, BD: tl.constexpr, BOUND: tl.constexpr):
    """Load columns d of rows: 0 in columns past D and, if BOUND, in rows not `inside`."""
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
    """`load` of a tile that is read only once; it makes its own source."""
    return load(x, source(x, at, h, rows, D, BM, BD, TMA), i0, rows, D, BM, BD, TMA, True)


@triton.jit
def look_up(j0, b, rows, pages, F: tl.constexpr, BN: tl.constexpr, BOUND: tl.constexpr):
    """The pages of keys [j0, j0 + BN) of sequence b, and the keys' rows in them: of the first key
    only, if all keys are in one page, else of each key. (0, 0) if keys are not paged.

    Pages out of range are clamped, for the reason in `score.extent`.
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
    """`load` of keys or values, from the pages and rows that `look_up` found."""
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
    """The address from which `load_scales` reads the scales of a head."""
    if F.kept != "":
        return head_of(x, at, h)
    else:
        return 0


@triton.jit
def load_scales(x, src, j0, rows, found, F: tl.constexpr, BN: tl.constexpr):
    """(BN,): scales of rows of keys or values, from the pages and rows that `look_up` found."""
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
    """Dequantize 8-bit rows: numbers times scales in float32, rounded to `dtype`.

    float8 comes as its bits, because some GPUs cannot convert it. Shifted, they are the bits of a
    float16: the value itself for e5m2, the value times 2^-8 for e4m3.
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
    """Write (BM, BD) `values` to those of rows [i0, i0 + BM) that exist."""
    i, d = tl.arange(0, BM), tl.arange(0, BD)
    to = head_of(x, at, h) + (tl.cast(i0, tl.int64) + i)[:, None] * x.sm
    inside = (i0 + i < rows)[:, None] & (d < D)[None, :]
    values = narrow(values, x.ptr.dtype.element_ty)
    tl.store(to + d.to(tl.int64)[None, :] * x.sd, values, mask=inside)


@triton.jit
def row_index(at, h, i, H, M):
    """The offset of row i of head h at a Start in a contiguous (B, H, M) tensor."""
    return (tl.cast(at.b, tl.int64) * H + h) * M + at.row + i
