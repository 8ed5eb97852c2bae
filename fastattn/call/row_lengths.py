"""Sequences of a packed batch that use fewer rows than are stored for them (seqused_q).

Such a sequence is two: one of the rows that are used, with its keys, then one of the other rows,
which has no keys, so that its results are those of empty rows. Rows and keys stay where they are,
no backend knows of it, and gradients need no code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .need import need, need_a_tensor
from .sizes import agree
from .spec import MaskMod, Options, ScoreMod, Tensors, changed


def check_row_lengths(row_lengths: Any, t: Tensors) -> None:
    """Raise TypeError or ValueError unless these are numbers for each sequence of the call."""
    need_a_tensor("row_lengths", row_lengths, "a torch.Tensor or None")
    integers, dtypes = (torch.int32, torch.int64), "torch.int32 or torch.int64"
    need(row_lengths.dtype in integers, "row_lengths.dtype", row_lengths.dtype, dtypes)
    sequences = t.given("cu_q").shape[0] - 1
    if not agree(row_lengths.shape, (sequences,)):
        need(False, "row_lengths", f"shape {tuple(row_lengths.shape)}", f"(B,) = ({sequences},)")
    device = t.q.device
    need(row_lengths.device == device, "row_lengths.device", row_lengths.device, f"{device}")


def check_values(row_lengths: Tensor, t: Tensors) -> None:
    """Raise ValueError for a number that is out of range."""
    stored = t.given("cu_q").diff()
    for b in ((row_lengths < 0) | (row_lengths > stored)).nonzero()[:1, 0].tolist():
        expected = f"0 to {int(stored[b])}, the rows of sequence {b}"
        need(False, f"row_lengths[{b}]", int(row_lengths[b]), expected)


def with_row_lengths(row_lengths: Tensor, t: Tensors, o: Options) -> tuple[Tensors, Options]:
    """The call of twice as many sequences."""
    cu_q = t.given("cu_q")
    begin, stored = cu_q[:-1], cu_q.diff()
    used = row_lengths.to(cu_q.dtype)
    if used.device.type != "cpu":  # a CPU looks at the offsets that this makes
        used = torch.minimum(used.clamp(min=0), stored)
    found: dict[str, Any] = dict(cu_q=torch.cat((_in_turn(begin, begin + used), cu_q[-1:])))
    if t.cu_k is not None:
        found["cu_k"] = t.cu_k.repeat_interleave(2)[1:]
    if t.block_table is not None:
        found["block_table"] = t.block_table.repeat_interleave(2, 0)
    if t.key_lengths is not None:
        found["key_lengths"] = _in_turn(t.key_lengths, torch.zeros_like(t.key_lengths))
    # Those that may differ by sequence. A mask of one item is for all.
    if t.mask is not None and t.mask.ndim == 4 and t.mask.shape[0] != 1:
        found["mask"] = _each_twice(t.mask)
    if t.alibi_slopes is not None and t.alibi_slopes.ndim == 2:
        found["alibi_slopes"] = t.alibi_slopes.repeat_interleave(2, 0)
    return changed(t, **found), changed(o, at_item=2 * o.at_item)


def score_mod_of(score_mod: ScoreMod | None) -> ScoreMod | None:
    """The function of that call; likewise the next one."""
    if score_mod is None:
        return None
    return lambda s, b, h, i, j: score_mod(s, b // 2, h, i, j)


def mask_mod_of(mask_mod: MaskMod | None) -> MaskMod | None:
    return None if mask_mod is None else lambda b, h, i, j: mask_mod(b // 2, h, i, j)


def _in_turn(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack((x, y), 1).flatten()


def _each_twice(x: Tensor) -> Tensor:
    """Each item twice. Dimensions that were expanded are not stored."""
    size = x.shape
    for dim in range(1, x.ndim):
        if x.stride(dim) == 0:
            x = x.narrow(dim, 0, min(1, size[dim]))
    return x.repeat_interleave(2, 0).expand(2 * size[0], *size[1:])
