"""torch's BlockMask, of flex_attention, as a mask_mod."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.sizes import agree, broadcasts, known
from ..call.spec import MaskMod

HIDDEN, PARTIAL, WHOLE = 0, 1, 2
NO_BLOCKS = 1 << 30  # torch's block size for "no block mask": one block that holds any sequence


def need_block_mask(block_mask: Any) -> None:
    """Raise TypeError for what is no block mask, such as a tensor."""
    if isinstance(block_mask, Tensor) or not hasattr(block_mask, "BLOCK_SIZE"):
        raise TypeError(
            f"block_mask: got {type(block_mask).__name__}, expected the BlockMask that "
            "torch.nn.attention.flex_attention.create_block_mask makes, or None: a bool mask is "
            "mask_mod=lambda b, h, i, j: mask[i, j], or attention(q, k, v, mask=mask)"
        )


def check(block_mask: Any, query: Tensor, key: Tensor) -> None:
    """Apply torch's rules on the lengths and the device of a block mask, with its messages."""
    rows, keys = query.shape[-2], key.shape[-2]
    shape, sizes = tuple(block_mask.shape), tuple(block_mask.BLOCK_SIZE)
    if sizes != (NO_BLOCKS, NO_BLOCKS) and not agree(shape[-2:], (rows, keys)):
        smaller = rows > shape[-2] or keys > shape[-1]
        advice = "create a new one" + (
            "" if smaller else ", or use block_mask._adjust(q_len, kv_len)"
        )
        raise ValueError(
            f"block_mask was created for block_mask.shape={shape} but got q_len={rows} and "
            f"kv_len={keys}: {advice}"
        )
    if block_mask.kv_num_blocks.device != query.device:
        raise RuntimeError(
            "Expect q/k/v and block_mask to be on the same device but got "
            f"{query.device} and {block_mask.kv_num_blocks.device}."
        )
    for name, at, size in (("batch", 0, query.shape[0]), ("head", 1, query.shape[1])):
        if not broadcasts(shape[at], size):
            raise ValueError(
                f"block_mask: got a {name} dimension of {shape[at]}, expected 1 or {size}"
            )


def mask_mod_of(block_mask: Any) -> MaskMod | None:
    """The function that is true where a block mask shows a key; None if it shows all.

    Its lists decide: in listed full blocks every key is visible, in other listed blocks those for
    which its mask_mod is true, in blocks that are not listed none.
    """
    states, of_pair = block_states(block_mask), block_mask.mask_mod
    rows, keys = block_mask.BLOCK_SIZE
    # Reading the lists of a GPU would wait for it, and breaks a graph.
    if states.device.type == "cpu" and not torch.compiler.is_compiling():
        if bool((states == WHOLE).all()):
            return None
        if bool((states == PARTIAL).all()):
            return of_pair

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        item, head = (0 if known(n == 1) else x for x, n in zip((b, h), states.shape))
        state = states[item, head, i // rows, j // keys]
        return (state == WHOLE) | ((state == PARTIAL) & of_pair(b, h, i, j))

    return visible


def both(first: MaskMod | None, second: MaskMod | None) -> MaskMod | None:
    """The mask_mod that is true where both are."""
    if first is None or second is None:
        return first or second
    return lambda b, h, i, j: first(b, h, i, j) & second(b, h, i, j)


@torch.no_grad()
def block_states(block_mask: Any) -> Tensor:
    """(B, H, blocks of rows, blocks of keys) int8: HIDDEN, PARTIAL or WHOLE. B or H may be 1."""
    states = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, PARTIAL)
    if block_mask.full_kv_num_blocks is not None:
        whole = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, WHOLE)
        states = torch.maximum(states, whole)
    return states


def _listed(counts: Tensor, indices: Tensor, state: int) -> Tensor:
    """The state in the blocks that are listed: the first `counts` of `indices` in each row."""
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=indices.device) < counts[..., None]
    # Entries past the count go to a column that is dropped.
    places = torch.where(listed, indices, columns).long()
    states = torch.zeros(
        (*indices.shape[:-1], columns + 1), dtype=torch.int8, device=indices.device
    )
    return states.scatter_(-1, places, state)[..., :-1]
