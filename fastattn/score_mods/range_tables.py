"""The least and the largest element of ranges of a table."""

from __future__ import annotations

import torch
from torch import Tensor

Range = tuple[Tensor, Tensor]  # first and last index, int64


def extremes(table: Tensor, ranges: list[Range]) -> Range:
    """The least and the largest element of table[range, range, ...], for each block, of the
    smallest shape.

    table: of at least one element in each dimension.
    ranges: one for each dimension; shapes broadcast to [blocks of rows, blocks of keys].

    A negative index counts from the end; an index beyond the table is clamped. One dimension with
    ranges is exact, two are exact where one range is of the rows and one of the keys of a block.
    Others give the extremes of the whole.
    """
    ranges = [_inside(x, size) for x, size in zip(ranges, table.shape)]
    left: list[Range] = []
    for lo, hi in ranges:
        if lo.numel() == hi.numel() == 1 and bool((lo == hi).all()):
            table = table.select(len(left), int(lo))
        else:
            left.append((lo, hi))
    if not left:
        return table, table
    if len(left) == 1:
        lo, hi = torch.broadcast_tensors(*left[0])
        return _along_last(table, table, lo, hi)
    if len(left) == 2:
        (a, _), (b, _) = left
        if _one_column(b) and _one_row(a):
            table, left = table.T, left[::-1]
            (a, _), (b, _) = left
        if _one_column(a) and _one_row(b):
            return _outer(table, left[0], left[1])
    return table.amin(), table.amax()


def _inside(x: Range, size: int) -> Range:
    lo, hi = x
    wraps = (lo < 0) & (hi >= 0)
    lo, hi = (torch.where(y < 0, y + size, y).clamp(0, size - 1) for y in (lo, hi))
    return torch.where(wraps, 0, lo), torch.where(wraps, size - 1, hi)


def _one_column(x: Tensor) -> bool:
    return x.dim() == 2 and x.shape[1] == 1


def _one_row(x: Tensor) -> bool:
    return x.dim() == 2 and x.shape[0] == 1


def _outer(table: Tensor, rows: Range, keys: Range) -> Range:
    """Of a table [rows, keys]: first along the rows, for each of its columns, then along."""
    low, high = _along_last(table.T, table.T, rows[0][:, 0], rows[1][:, 0])
    return _along_last(low.T, high.T, keys[0][0], keys[1][0])


def _along_last(low: Tensor, high: Tensor, lo: Tensor, hi: Tensor) -> Range:
    """The least of low and the largest of high [..., N] in ranges lo to hi of the last dimension.

    Two overlapping ranges of 2**k elements cover a range; their extremes are made by doubling.
    """
    level = torch.log2((hi - lo + 1).to(torch.float64)).floor().to(torch.int64)
    shape = *low.shape[:-1], *lo.shape
    least, most = low.new_empty(shape), high.new_empty(shape)
    wanted = set(torch.unique(level).tolist())
    for k in range(max(wanted, default=-1) + 1):
        if k in wanted:
            here = level == k
            first, second = lo[here], hi[here] - (1 << k) + 1
            least[..., here] = torch.minimum(low[..., first], low[..., second])
            most[..., here] = torch.maximum(high[..., first], high[..., second])
        step = 1 << k
        if low.shape[-1] > step:
            low = torch.minimum(low[..., :-step], low[..., step:])
            high = torch.maximum(high[..., :-step], high[..., step:])
    return least, most
