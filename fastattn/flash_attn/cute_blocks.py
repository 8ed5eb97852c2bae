"""FlashAttention-4's block_sparse_tensors, lists of blocks of keys, as a mask_mod."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..call.spec import MaskMod
from ..dropin.flex_blocks import mask_mod_of
from .checks import need_integers, within
from .sequences import Count, Functions, Tokens

BLOCKS = "block_sparse_tensors"


class BlockSparseTensorsTorch(NamedTuple):
    """The blocks of keys that each block of rows sees; those that no list has are hidden.

    Args:
        mask_block_cnt: The number of blocks in which mask_mod decides on each key.
        mask_block_idx: Which blocks these are, the first ones of each list.
        full_block_cnt: The number of blocks of which every key is seen.
        full_block_idx: Which blocks these are.
        cu_total_m_blocks: With packed rows, where the blocks of rows of each sequence begin. The
            lists of such a block then have an entry for each block of its sequence's keys, and lie
            one after the other.
        cu_block_idx_offsets: With packed rows, where the lists of each sequence begin. Required if
            the numbers of keys are given.
        block_size: Rows and keys of a block. Required.
        dq_write_order, dq_write_order_full, spt: They have no effect.

    Shape:
        mask_block_cnt: (B, H, blocks of rows), int32 or int64. B and H may be 1. Of packed rows
            (H, blocks of rows of all sequences).
        mask_block_idx: (B, H, blocks of rows, n), or (H, n).
        full_block_cnt: As mask_block_cnt.
        full_block_idx: As mask_block_idx.
        cu_total_m_blocks, cu_block_idx_offsets: (B + 1,), int32 or int64.
        dq_write_order, dq_write_order_full: Any.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.cute import BlockSparseTensorsTorch, flash_attn_func
        >>> count = torch.ones(1, 1, 2, dtype=torch.int32)
        >>> own = torch.arange(2, dtype=torch.int32).view(1, 1, 2, 1)
        >>> blocks = BlockSparseTensorsTorch(count, own, block_size=(4, 4))
        >>> q, k, v = torch.randn(3, 1, 8, 2, 16)
        >>> out, _ = flash_attn_func(q, k, v, block_sparse_tensors=blocks)
        >>> first, _ = flash_attn_func(q[:, :4], k[:, :4], v[:, :4])
        >>> torch.testing.assert_close(out[:, :4], first)
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


class _Listed(NamedTuple):
    """Blocks with the names that those of torch's BlockMask have."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    mask_mod: MaskMod


def with_blocks(
    functions: Functions,
    blocks: BlockSparseTensorsTorch,
    q: Tensor,
    longest: int,
    cu_seqlens_q: Tensor | None = None,
    keys_differ: bool = False,
) -> Functions:
    """The functions of which a mask_mod is true in these blocks alone.

    longest: at least the number of keys of each sequence; keys_differ: these may be different.
    """
    first, size = blocks.cu_total_m_blocks, blocks.block_size
    if not isinstance(size, tuple) or [type(x) for x in size] != [int] * 2 or min(size) < 1:
        raise ValueError(
            f"{BLOCKS}.block_size: got {size!r}, expected (rows, keys) of a block: "
            "FlashAttention-4's default depends on the GPU"
        )
    for kind in ("full_block_idx", "mask_block_idx"):
        count = getattr(blocks, kind.replace("idx", "cnt"))
        if (count is None) != (getattr(blocks, kind) is None):
            expected = f"expected it with {kind.replace('idx', 'cnt')}, got one of them"
            raise ValueError(f"{BLOCKS}.{kind}: {expected}")
    if blocks.mask_block_cnt is None:
        raise ValueError(f"{BLOCKS}.mask_block_cnt: got None, expected a tensor")
    if (first is None) != (cu_seqlens_q is None):
        got = "None" if first is None else "a tensor"
        raise ValueError(
            f"{BLOCKS}.cu_total_m_blocks: got {got}, expected offsets of the blocks of rows with "
            "cu_seqlens_q, and else None"
        )
    if first is not None and blocks.cu_block_idx_offsets is None and keys_differ:
        raise ValueError(
            f"{BLOCKS}.cu_block_idx_offsets: got None with cu_seqlens_k or seqused_k, expected "
            "where the lists of each sequence begin"
        )
    columns, of_pairs = max(1, -(-longest // size[1])), functions.mask_mod
    padded = _padded_lists(blocks, q, columns) if first is None else []

    def mask_mod(rows: Count, keys: Count) -> MaskMod:
        own = of_pairs(rows, keys) if of_pairs else _every_pair
        if first is None:  # None of `mask_mod_of`: whole blocks alone, where `own` does not count
            return mask_mod_of(_Listed(*padded, size, own)) or _every_pair  # ty: ignore
        assert isinstance(rows, Tensor) and isinstance(keys, Tensor)
        lists = _packed_lists(blocks, q.shape[-2], rows, keys, columns)

        def at_block(b: Any, h: Any, i: Any, j: Any) -> Any:
            return own(b, h, i - first[b] * size[0], j)

        seen = mask_mod_of(_Listed(*lists, size, at_block)) or _every_pair  # ty: ignore
        return lambda b, h, i, j: seen(b, h, i + first[b] * size[0], j)

    return functions._replace(mask_mod=mask_mod)


def _every_pair(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j >= 0


def _padded_lists(blocks: BlockSparseTensorsTorch, q: Tensor, columns: int) -> list[Tensor | None]:
    """The numbers (B,H,m) and lists (B,H,m,columns) of blocks in part and of whole ones, of q
    (B,M,H,D)."""
    assert blocks.block_size is not None
    m, found = -(-q.shape[1] // blocks.block_size[0]), []
    for kind in ("mask", "full"):
        count, index = (getattr(blocks, f"{kind}_block_{x}") for x in ("cnt", "idx"))
        if count is None:
            found += [None, None]
            continue
        need_integers(f"{BLOCKS}.{kind}_block_cnt", count, ("batch", "heads", "row blocks"))
        need_integers(f"{BLOCKS}.{kind}_block_idx", index, (*count.shape, "blocks"))
        B, H = q.shape[0], q.shape[2]
        _need_broadcast(f"{BLOCKS}.{kind}_block_cnt", count, ((1, B), (1, H), (m,)))
        found += _checked(kind, count, index, min(index.shape[-1], columns), columns)
    return found


def _packed_lists(
    blocks: BlockSparseTensorsTorch, H: int, rows: Tensor, keys: Tensor, columns: int
) -> list[Tensor | None]:
    """As `_padded_lists`, (1,H,m) and (1,H,m,columns), of the blocks of rows of all sequences.
    Sequence b has rows[b] rows and keys[b] keys."""
    first, begin = blocks.cu_total_m_blocks, blocks.cu_block_idx_offsets
    size, found, name = blocks.block_size, [], f"{BLOCKS}.cu_total_m_blocks"
    assert first is not None and size is not None
    for kind in ("mask", "full"):
        count, index = (getattr(blocks, f"{kind}_block_{x}") for x in ("cnt", "idx"))
        if count is None:
            found += [None, None]
            continue
        need_integers(f"{BLOCKS}.{kind}_block_cnt", count, ("heads", "row blocks"))
        need_integers(f"{BLOCKS}.{kind}_block_idx", index, (count.shape[0], "blocks"))
        _need_broadcast(f"{BLOCKS}.{kind}_block_cnt", count, ((1, H), (count.shape[1],)))
        tokens = Tokens.of(name, first, count.mT, len(rows))
        within(name, -(-rows // size[0]), first.diff(), "the blocks of rows of a sequence")
        of_each = -(-keys // size[1])  # the entries of a row's list
        lists, name = first[:-1] * of_each, f"{BLOCKS}.cu_block_idx_offsets"
        if begin is not None:
            need_integers(name, begin, (len(rows) + 1,))
            lists = within(name, begin[:-1], index.shape[1], f"{kind}_block_idx's entries")
        ends = lists + first.diff() * of_each
        within(name, ends, index.shape[1], f"{kind}_block_idx's entries")
        at = (lists[tokens.item] + tokens.step * of_each[tokens.item])[:, None]
        at = (at + torch.arange(columns, device=index.device)).clamp(0, index.shape[1])
        index = F.pad(index, (0, 1))[:, at]
        found += _checked(kind, count[None], index[None], of_each[tokens.item], columns)
    return found


def _need_broadcast(name: str, x: Tensor, sizes: tuple[tuple[int, ...], ...]) -> None:
    """Raise unless each size of x is among those given for it."""
    if any(n not in of for n, of in zip(x.shape, sizes, strict=True)):
        expected = ", ".join(" or ".join(map(str, dict.fromkeys(of))) for of in sizes)
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected ({expected})")


def _checked(
    kind: str, count: Tensor, index: Tensor, most: int | Tensor, columns: int
) -> list[Tensor]:
    """Numbers up to `most`, and lists of as many of `columns` blocks."""
    count = within(f"{BLOCKS}.{kind}_block_cnt", count, most)
    counted = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    index = within(f"{BLOCKS}.{kind}_block_idx", torch.where(counted, index, 0), columns - 1)
    return [count, F.pad(index, (0, columns - index.shape[-1]))]  # what is past them does not count
