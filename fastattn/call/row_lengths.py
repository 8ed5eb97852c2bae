"""Sequences of a packed batch that use fewer rows than are stored for them (seqused_q).

Such a sequence is two: one of the rows that are used, with its keys, then one of the other rows,
which has no keys, so that its results are those of empty rows. Nothing is copied, no backend
knows of it, and gradients need no code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .need import need, need_a_tensor
from .sizes import agree
from .spec import Place


def with_row_lengths(
    row_lengths: Any,
    cu_q: Any,
    cu_k: Tensor | None,
    block_table: Tensor | None,
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor | None, Tensor | None, dict[str, Any]]:
    """cu_q, cu_k, block_table and arguments of the call of twice as many sequences.

    Raises TypeError and ValueError. On a GPU lengths out of range are clamped.
    """
    _check(row_lengths, cu_q)
    begin, end = cu_q[:-1], cu_q[1:]
    used = torch.minimum(row_lengths.to(cu_q.dtype).clamp(min=0), end - begin)
    cu_q = torch.cat((_in_turn(begin, begin + used), cu_q[-1:]))
    if isinstance(cu_k, Tensor):
        cu_k = cu_k.repeat_interleave(2)[1:]
    if isinstance(block_table, Tensor):
        block_table = block_table.repeat_interleave(2, 0)
    arguments = dict(arguments)
    lengths = arguments.get("key_lengths")
    if isinstance(lengths, Tensor):
        arguments["key_lengths"] = _in_turn(lengths, torch.zeros_like(lengths))
    for name, ndim in (("mask", 4), ("alibi_slopes", 2), ("causal", 1)):
        # those that may differ between sequences
        x = arguments.get(name)
        if isinstance(x, Tensor) and x.ndim == ndim and not (name == "mask" and x.shape[0] == 1):
            arguments[name] = x.repeat_interleave(2, 0)
    place = arguments.get("place")
    if isinstance(place, Place):
        arguments["place"] = place._replace(item=2 * place.item)
    score, mask = (arguments.get(name) for name in ("score_mod", "mask_mod"))
    if score is not None:
        arguments["score_mod"] = lambda s, b, h, i, j: score(s, b // 2, h, i, j)
    if mask is not None:
        arguments["mask_mod"] = lambda b, h, i, j: mask(b // 2, h, i, j)
    return cu_q, cu_k, block_table, arguments


def _in_turn(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack((x, y), 1).flatten()


def _check(row_lengths: Any, cu_q: Any) -> None:
    need_a_tensor("row_lengths", row_lengths, "a torch.Tensor or None")
    need_a_tensor("cu_q", cu_q)
    need(cu_q.ndim == 1, "cu_q", f"shape {tuple(cu_q.shape)}", "1 dimension (B + 1,)")
    integers = torch.int32, torch.int64
    dtypes = "torch.int32 or torch.int64"
    need(row_lengths.dtype in integers, "row_lengths.dtype", row_lengths.dtype, dtypes)
    sequences = cu_q.shape[0] - 1
    if not agree(row_lengths.shape, (sequences,)):
        need(False, "row_lengths", f"shape {tuple(row_lengths.shape)}", f"(B,) = ({sequences},)")
    need(row_lengths.device == cu_q.device, "row_lengths.device", row_lengths.device, "q's device")
    if row_lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return
    stored = cu_q.diff()
    wrong = ((row_lengths < 0) | (row_lengths > stored)).nonzero()
    if len(wrong):
        b = int(wrong[0])
        got, most = int(row_lengths[b]), int(stored[b])
        need(False, f"row_lengths[{b}]", got, f"0 to {most}, the rows of sequence {b}")
