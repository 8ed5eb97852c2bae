"""Rows in eight bits: a row (one token's head vector) is int8 or float8 numbers times a scale.
`int4` has rows in four bits.

Quantisation is symmetric, with one float32 scale per row. The scale maps the row's largest absolute
value to the largest number of the storage dtype. The value of a row is its numbers times its scale,
computed in float32 (float64 for float64) and rounded to the dtype that attention computes in.
Kernels read that value, so results have the bits of a call on rows stored in that dtype. Where the
CPU decodes a few rows on vectors it does not round the value: it multiplies sums of numbers by the
scale, which is faster and errs less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .int4 import INT4, dequantised_int4
from .spec import acc_dtype

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
STORAGE = tuple(LARGEST)
NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2"}
MOST = torch.finfo(torch.float32).max


def quantised(x: Tensor, storage: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows x (..., D) as numbers of `storage`, to nearest even, and their scales (...) in float32.

    A row of zeros gets scale 0. So does a row too small for any scale; it becomes zeros. A row with
    a NaN, or with a value that is infinite in float32, gets scale NaN and becomes NaN.
    """
    largest = LARGEST[storage]
    x = x.to(acc_dtype(x.dtype))
    most = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    scale = (most / largest).float().clamp(max=MOST / largest * (1 - 2**-23))  # a product is finite
    scale = scale.masked_fill(~(most <= MOST), torch.nan)
    counts = (scale > 0)[..., None]
    numbers = torch.where(counts, x / scale[..., None], 0).clamp(-largest, largest)
    return (numbers.round() if storage == torch.int8 else numbers).to(storage), scale


def dequantised(x: Any, scale: Tensor | None, dtype: torch.dtype) -> Any:
    """The values of rows x (..., D) with scales (...), in `dtype`; of rows in four bits, in
    acc_dtype(dtype). x itself if it is neither, or None."""
    if x is not None and x.dtype == INT4:
        return dequantised_int4(x, acc_dtype(dtype))
    if scale is None:
        return x
    return (x.to(acc_dtype(dtype)) * scale[..., None]).to(dtype)
