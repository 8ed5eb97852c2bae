"""Rows in four bits: a row (one token's head vector) of D numbers is D / 32 blocks of 20 bytes.

A block is 32 columns: 16 bytes of numbers, the scale, and the minimum, both in bfloat16 (little
endian). Byte i of the numbers has column i in its low four bits, and column i + 16 in its high four
bits. The value of a number n, 0 to 15, is n * scale + minimum in float32 (float64 for float64). The
product is exact there, so one rounding (fma) and two have the same bits, if the product is finite.

Where the CPU decodes a few rows on vectors, it multiplies sums of n by the scale and does not round
values. On x86-64 it also rounds q of 16 bits, to multiples of a 32767th of its row's largest
number: scores are products of integers then. That changes a score by a 65534th of this number times
the sum of a key's n * scale, at most, which is far less than the error of four bits.

Each row has scales of its own. So a row is written once, in place, when its token comes, and pages
of rows are shared and copied as any others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

INT4: torch.dtype = torch.uint8  # of tensors with rows of blocks
BLOCK, BLOCK_BYTES = 32, 20
NUMBERS = BLOCK // 2  # the bytes of a block that have the numbers
MOST, FLOAT32 = (torch.finfo(dtype).max for dtype in (torch.bfloat16, torch.float32))


def row_bytes(columns: int) -> int:
    """The bytes of a row of that many numbers, a multiple of 32."""
    return columns // BLOCK * BLOCK_BYTES


def columns(x: Tensor) -> int:
    """The numbers in a row of x (..., D), in four bits or in any other dtype."""
    return x.shape[-1] // BLOCK_BYTES * BLOCK if x.dtype == INT4 else x.shape[-1]


def quantised_int4(x: Tensor) -> Tensor:
    """Rows x (..., D) as blocks (..., D / 32 * 20) of bytes; D is a multiple of 32.

    The minimum of a block is its smallest number, rounded down to bfloat16; it is never -0. The
    scale is a 15th of the distance from there to its largest number, rounded up. Numbers are
    rounded to nearest even. A block of equal numbers that bfloat16 has gets scale 0 and is exact. A
    block becomes NaN, its scale and its minimum, if it has a NaN, an infinity or a number out of
    bfloat16's range, or if its numbers are further apart than the largest of float32.
    """
    x = x if x.dtype == torch.float64 else x.float()
    x = x.unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    smallest, largest = x.aminmax(dim=-1)
    minimum = _rounded(smallest + 0.0, -math.inf)
    scale = _rounded((largest - minimum) / 15, math.inf)
    spans = (minimum.float() + 15 * scale.float() <= FLOAT32) & (largest <= MOST)
    scale, minimum = (torch.where(spans, x, torch.nan) for x in (scale, minimum))
    steps = (x - minimum[..., None]).div_(scale[..., None])
    n = steps.round_().clamp_(0, 15).nan_to_num_(0.0)  # NaN: of scale 0 or NaN
    low, high = n.to(torch.uint8).split(NUMBERS, -1)
    factors = torch.stack((scale, minimum), -1).view(torch.uint8)
    return torch.cat((low.add(high, alpha=16), factors), -1).flatten(-2)


def dequantised_int4(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values (..., D) of rows of blocks (..., D / 32 * 20), in float32 or float64."""
    x = x.unflatten(-1, (x.shape[-1] // BLOCK_BYTES, BLOCK_BYTES))
    numbers, factors = x.split((NUMBERS, BLOCK_BYTES - NUMBERS), -1)
    factors = factors.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    scale, minimum = factors.to(dtype).split(1, -1)
    n = torch.cat((numbers & 15, numbers >> 4), -1)
    return (n.to(dtype) * scale + minimum).flatten(-2)


def _rounded(x: Tensor, towards: float) -> Tensor:
    """x in bfloat16, rounded towards that infinity."""
    y = x.to(torch.bfloat16)
    past = y > x if towards < 0 else y < x
    return torch.where(past, torch.nextafter(y, torch.full_like(y, towards)), y)
