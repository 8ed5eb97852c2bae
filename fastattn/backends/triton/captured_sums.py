"""Sums of the gradients of captured numbers, to which a kernel adds by atomics in any order.

Floats have no sum that is independent of the order. Whole numbers have: each captured number has an
int64 for each 2^shift exponents of float32, to which `add_to_sums` of kernels/program_functions.py
adds the 24 bits of each term, shifted by at most 2^shift - 1. So a gradient is the exact sum of its
float32 terms, rounded once; it has the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import blocks, operand
from .runtime import kernels

EXPONENTS, DIGITS = 256, 24  # of float32
NOT_FINITE = 3  # counts of terms that are inf, -inf and NaN
SMALLEST = -150  # a term of exponent e is its digits times 2^(e - 150)
WORD = 63  # bits of an int64 without its sign
DOUBLE_BIAS, DOUBLE_DIGITS = 1023, 52


def gradient(job: Any, floats: Tensor, dq: Tensor | None) -> Tensor:
    """The gradient of captured numbers. The same pass computes dq, unless that is None. job: a Job;
    its module imports this one."""
    spec = job.spec
    if job.flags.scatter is None:  # no score depends on them
        if dq is not None:
            job.walk_keys(dq)
        return torch.zeros_like(floats)
    shift = shift_of(spec.B * spec.H * job.M * job.N)
    sums = new_sums(floats, shift)
    job.launch(
        kernels().backward.dq_kernel,
        "dq_captured",  # which is not tuned: another launch would add its terms again
        lambda c: blocks(job.M, c.BM) * spec.B * spec.H,
        job.inputs,
        (job.of_rows, operand(dq), sums),
        GIVEN=spec.weights,
        SUMS=False,
        SHIFT=shift,
    )
    return total(sums, shift, floats.dtype)


def shift_of(terms: int) -> int:
    """The largest shift with which no sum of so many terms overflows: 4 up to 2^24 terms, 3 up to
    2^32, 2 up to 2^36. At least 1, for 2^38 terms."""
    free = WORD - DIGITS - max(terms - 1, 1).bit_length()
    return max(1, min(4, (free + 1).bit_length() - 1))


def new_sums(floats: Tensor, shift: int) -> Tensor:
    """(numbers, exponents / 2^shift + 3) int64: no term yet."""
    columns = (EXPONENTS >> shift) + NOT_FINITE
    return floats.new_zeros((floats.numel(), columns), dtype=torch.int64)


def total(sums: Tensor, shift: int, dtype: torch.dtype) -> Tensor:
    """(numbers,): the sums of all terms, rounded to this dtype."""
    columns = EXPONENTS >> shift
    exponents = torch.arange(columns, device=sums.device) * 2**shift + SMALLEST
    units = (exponents + DOUBLE_BIAS << DOUBLE_DIGITS).view(torch.float64)
    totals = (sums[:, :columns] * units).sum(1)
    for count, value in zip(sums[:, columns:].unbind(1), (torch.inf, -torch.inf, torch.nan)):
        totals += torch.where(count > 0, value, 0.0)
    return totals.to(dtype)
