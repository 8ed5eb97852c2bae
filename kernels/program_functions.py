"""Operators of score_mods and mask_mods that Triton's language lacks, or computes with other bits
than torch. The source that fastattn/backends/triton/program_source.py writes calls them.

Some call CUDA's libdevice, because Triton's own functions are less exact. Triton's interpreter has
no libdevice: it runs Triton's own functions, with numpy.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .score import LN2, LOG2E, LOG2E_REST
from .score import tanh as scaled_tanh
from .tile import INTERPRETED, fma

TWO_LOG2E = tl.constexpr(2.8853900817779268)


@triton.jit
def product(x, y):
    """x y of float32, rounded: never fused with an addition, so that it has torch's bits."""
    if INTERPRETED:
        return x * y
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def exp(x):
    """e^x by 2^y, with the rounding error of y = x log2(e), which grows with x."""
    y = x * LOG2E
    error = fma(x, LOG2E, -y) + x * LOG2E_REST
    estimate = tl.exp2(y)
    return tl.where(tl.abs(y) < 200, estimate + estimate * (error * LN2), estimate)


@triton.jit
def log(x):
    return tl.log(x) if INTERPRETED else libdevice.log(x)


@triton.jit
def log2(x):
    return tl.log2(x) if INTERPRETED else libdevice.log2(x)


@triton.jit
def log1p(x):
    """log(1 + x). In the interpreter log(w) x / (w - 1), of w = 1 + x, rounded: w - 1 is exact."""
    if INTERPRETED:
        w = 1 + x
        rounded_x = w - 1
        scaled = tl.log(w) * tl.div_rn(x, tl.where(rounded_x == 0, 1.0, rounded_x))
        return tl.where(rounded_x == 0, x, tl.where(w == float("inf"), w, scaled))
    return libdevice.log1p(x)


@triton.jit
def sin(x):
    return tl.sin(x) if INTERPRETED else libdevice.sin(x)


@triton.jit
def cos(x):
    return tl.cos(x) if INTERPRETED else libdevice.cos(x)


@triton.jit
def erf(x):
    return tl.erf(x) if INTERPRETED else libdevice.erf(x)


@triton.jit
def rsqrt(x):
    return tl.div_rn(tl.zeros_like(x) + 1, tl.sqrt_rn(x))


@triton.jit
def tanh(x):
    return scaled_tanh(x * TWO_LOG2E)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), by e^-|x|, which never overflows."""
    small = exp(-tl.abs(x))
    rest = tl.div_rn(small * 0 + 1, 1 + small)
    return tl.where(x < 0, small * rest, rest)


@triton.jit
def power(x, y):
    """x^y as C's pow."""
    if INTERPRETED:
        wide = tl.exp2(y.to(tl.float64) * tl.log2(tl.abs(x).to(tl.float64))).to(tl.float32)
        whole = tl.floor(y) == y
        odd = whole & (tl.floor(y * 0.5) * 2 != y)
        wide = tl.where((x.to(tl.int32, bitcast=True) < 0) & odd, -wide, wide)  # -0 too
        wide = tl.where((x < 0) & (x != float("-inf")) & ~whole, float("nan"), wide)
        one = (y == 0) | (x == 1) | ((x == -1) & (tl.abs(y) == float("inf")))
        return tl.where(one, 1.0, wide)
    return libdevice.pow(x, y)


@triton.jit
def truncated(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def rounded(x):
    """To the nearest whole number, to the even one of two. A sum with 2^23 rounds so."""
    far = tl.where(x < 0, -8388608.0, 8388608.0)  # 2^23: above it each float32 is whole
    return tl.where(tl.abs(x) < 8388608.0, (x + far) - far, x)


@triton.jit
def as_int(x):
    """The whole number of a float32 as an int32: at most 2^30 either way, and 0 for a NaN."""
    inside = tl.minimum(tl.maximum(x, -1073741824.0), 1073741824.0)
    return tl.where(x == x, inside, 0.0).to(tl.int32)


@triton.jit
def sign_of_float(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def sign_of_int(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def is_rounded_up(rest, y):
    """True where a quotient that is rounded towards 0, with this rest by y, is not its floor."""
    return (rest != 0) & ((rest < 0) != (y < 0))


@triton.jit
def rest_of(x, y):
    """x - trunc(x / y) y of float32, exact."""
    return x % y if INTERPRETED else libdevice.fmod(x, y)


@triton.jit
def remainder_of_float(x, y):
    """x - floor(x / y) y, with the sign of y."""
    rest = rest_of(x, y)
    return tl.where(is_rounded_up(rest, y), rest + y, rest)


@triton.jit
def floor_div_of_float(x, y):
    """floor(x / y) as torch computes it, from the remainder."""
    rest = rest_of(x, y)
    ratio = tl.div_rn(x, y)
    quotient = tl.div_rn(x - rest, y)
    quotient -= is_rounded_up(rest, y).to(tl.float32)
    whole = tl.floor(quotient)
    whole += (quotient - whole > 0.5).to(tl.float32)
    whole = tl.where(quotient == 0, ratio * 0, whole)
    return tl.where(y == 0, ratio, whole)


@triton.jit
def floor_div_of_int(x, y):
    """floor(x / y); 0 where y is 0. Triton's // rounds towards 0."""
    by = tl.where(y == 0, 1, y)
    quotient = x // by
    down = is_rounded_up(x - quotient * by, by)
    return tl.where(y == 0, 0, quotient - down.to(x.dtype))


@triton.jit
def remainder_of_int(x, y):
    """x - floor(x / y) y; 0 where y is 0."""
    return tl.where(y == 0, 0, x - floor_div_of_int(x, y) * y)


@triton.jit
def shift_amount(n):
    """n as one of the amounts by which an int64 can be shifted."""
    return tl.minimum(tl.maximum(n, 0), 63)


@triton.jit
def in_range(index, count):
    """The index itself, or another one that a tensor of `count` elements has."""
    last = tl.cast(count - 1, index.dtype)
    if INTERPRETED:
        return tl.minimum(tl.maximum(index, 0), last)
    # As unsigned numbers, those below 0 are the largest: one comparison is enough.
    unsigned: tl.constexpr = tl.uint32 if index.dtype == tl.int32 else tl.uint64
    return tl.minimum(index.to(unsigned), last.to(unsigned))


@triton.jit
def element(captured, count, index):
    """An element of a flat captured tensor, float32 or int64, at an index `in_range`.

    Not by `tl.load`: in a loop Triton would copy such elements to shared memory one by one, for
    each stage of its pipeline.
    """
    at = captured + in_range(index, count)
    if INTERPRETED:
        return tl.load(at)
    if captured.dtype.element_ty == tl.float32:
        return tl.inline_asm_elementwise(
            "ld.global.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], tl.float32, True, 1
        )
    else:
        return tl.inline_asm_elementwise(
            "ld.global.b64 $0, [$1];", "=l,l", [at.to(tl.int64)], tl.int64, True, 1
        )


@triton.jit
def term_of(ds, slope):
    """The gradient that a pair with dS gives to a captured number: dS times the slope of its score
    by the number. It is 0 at a hidden pair, even if the slope is not finite there."""
    return tl.where(ds == 0, 0.0, product(ds, slope))


EXPONENTS = tl.constexpr(256)  # of float32; the last is that of infinities and NaN
NOT_FINITE = tl.constexpr(3)  # counts of inf, -inf and NaN


@triton.jit
def add_to_sums(sums, count, index, term, SHIFT: tl.constexpr):
    """Add terms to the sums of captured numbers at these indices: exactly, in any order.

    Each number has an int64 for each 2^SHIFT exponents of float32: the sum of the 24 bits of terms,
    shifted by where their exponent lies in that range. Counts of infinite terms and of NaN follow.
    Sums of whole numbers have no rounding, so no order of atomics changes a bit; the host adds the
    int64s up (fastattn/backends/triton/captured_sums.py).
    """
    BUCKETS: tl.constexpr = EXPONENTS >> SHIFT
    term += tl.zeros_like(index).to(tl.float32)
    if index.shape[0] == 1:  # one number for the column, or for the tile: one atomic
        term = tl.sum(term, 0, keep_dims=True)
    if index.shape[1] == 1:
        term = tl.sum(term, 1, keep_dims=True)
    at = in_range(index, count).to(tl.int64)
    bits = term.to(tl.int32, bitcast=True)
    exponent, fraction = (bits >> 23) & 255, bits & 0x7FFFFF
    # Subnormal numbers have the exponent 0, the unit of the exponent 1, and no leading bit.
    digits = tl.where(exponent == 0, fraction << 1, fraction | 0x800000).to(tl.int64)
    amount = digits << (exponent & ((1 << SHIFT) - 1)).to(tl.int64)
    amount = tl.where(bits < 0, -amount, amount)
    which = tl.where(fraction != 0, 2, tl.where(bits < 0, 1, 0))
    finite = exponent < EXPONENTS - 1
    bucket = tl.where(finite, exponent >> SHIFT, BUCKETS + which)
    to = sums + at * (BUCKETS + NOT_FINITE) + bucket
    tl.atomic_add(to, tl.where(finite, amount, 1), mask=term != 0, sem="relaxed")
