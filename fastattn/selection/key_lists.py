"""The keys that each row selects, as tables of pages: sorted lists without repetitions, cut where
the row may not look. They need O(M S) memory, as the indices do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.shared.value_checks import checks_values
from ..namespace import add_op_namespace_prefix
from .seen import check_lengths, seen_keys
from .vmap_rule import fold_into_items


@torch.library.custom_op(add_op_namespace_prefix("key_lists"), mutates_args=())
def key_lists(
    indices: Tensor,
    lengths: Tensor | None,
    keys: int,
    block: int,
    causal: str,
) -> tuple[Tensor, Tensor]:
    """The blocks of each row in ascending order, once each, and the number of keys in them.

    indices: (B,G,M,S), integers in [-1, ceil(keys / block)); -1 is no block.
    lengths: (B,), the keys of each item, or None for all. causal: "", "top_left" or "bottom_right".

    Returns the table (B,G,M,S'), int64, S' the smaller of S and all blocks, with zeros after a
    row's last block; and the number of keys (B,G,M), int64. Only a row's last block may have fewer
    than `block` of them.

    Raises ValueError for values out of range: always on a CPU, on a GPU if FASTATTN_CHECK=1; else
    these are clamped.
    """
    B, _, M, S = indices.shape
    blocks = -(-keys // block)
    check_lengths(lengths, keys, indices.device)
    if checks_values(indices.device):
        _check(indices, blocks, keys, block)
    seen = seen_keys(B, M, keys, lengths, causal, indices.device)[:, None, :]
    # `blocks` is no block and sorts last.
    lists = torch.where((indices < 0) | (indices > blocks), blocks, indices)
    lists = _sorted_once(lists, blocks)[..., : min(S, blocks)].to(torch.int64)
    inside = (seen[..., None] - lists * block).clamp(0, block)
    return lists.masked_fill(lists == blocks, 0), inside.masked_fill(lists == blocks, 0).sum(-1)


@key_lists.register_fake
def _(indices, lengths, keys, block, causal):
    B, G, M, S = indices.shape
    width = torch.sym_min(S, -(-keys // block))
    table = indices.new_empty((B, G, M, width), dtype=torch.int64)
    return table, indices.new_empty((B, G, M), dtype=torch.int64)


fold_into_items(key_lists)


def _sorted_once(x: Tensor, last: int) -> Tensor:
    """x with each row in ascending order; repetitions become `last`. Looking is cheaper than
    sorting on a CPU; on a GPU it would wait."""
    waits = x.device.type != "cpu"
    if waits or not _ascends(x, last):
        x = x.sort(-1).values
        again = torch.zeros_like(x, dtype=torch.bool)
        again[..., 1:] = (x[..., 1:] == x[..., :-1]) & (x[..., 1:] < last)
        if waits or again.any():
            x = x.masked_fill(again, last).sort(-1).values
    return x


def _ascends(x: Tensor, last: int) -> bool:
    first, second = x[..., :-1], x[..., 1:]
    return bool(((first < second) | (second == last)).all())


def _check(indices: Tensor, blocks: int, keys: int, block: int) -> None:
    if not indices.numel():
        return
    low, high = (int(x) for x in indices.aminmax())
    if low < -1 or high >= blocks:
        raise ValueError(
            f"indices: got {low if low < -1 else high}, expected values in [-1, {blocks}): -1 for "
            f"none, or one of the {blocks} blocks of {block} keys that {keys} keys make"
        )
