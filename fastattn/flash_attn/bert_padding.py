"""flash-attn 2.8's `bert_padding`: pack padded batches and pad packed ones, with gradients."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` (n,) of input (N, ...): (n, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with values (n, ...) at rows `indices` (n,), and 0 elsewhere."""
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and the input itself."""
    return index_first_axis(input, indices), input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch one after the other.

    hidden_states is (B, N, ...). attention_mask (B, N), bool or int, is 1 at tokens; unused_mask
    (B, N) is 1 at slots that are packed but do not count as tokens.

    Returns the T tokens and unused slots (T, ...), their indices (T,) in the flattened batch,
    cu_seqlens (B+1,) int32, the longest length, and each sequence's count of tokens, (B,) int32.
    """
    used = attention_mask.sum(-1, dtype=torch.int32)
    if unused_mask is not None:
        attention_mask = attention_mask + unused_mask
    indices = attention_mask.flatten().nonzero().flatten()
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    return *_packed(hidden_states, indices, lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` for a batch with several sequences in each item. The numbers above 0 in an
    item's row of attention_mask_in_length (B, N) are their lengths: [2, 3, 0, 0, 0, 0] is two
    sequences, then padding. Returns the first four results of `unpad_input`."""
    lengths = attention_mask_in_length
    j = torch.arange(lengths.shape[-1], device=lengths.device)
    indices = (j < lengths.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    lengths = lengths.flatten()
    return _packed(hidden_states, indices, lengths[lengths.nonzero().flatten()])


def _packed(hidden_states: Tensor, indices: Tensor, lengths: Tensor):
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (batch, seqlen, ...) with the tokens (T, ...) at `indices`
    (T,) of the flattened batch, and 0 elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))
