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
    """Select rows of the first dimension.

    Args:
        input: A tensor.
        indices: The rows to select.

    Shape:
        input: (N, ...), any dtype.
        indices: (n,), int32 or int64.
        out: (n, ...).

    Returns:
        out.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.bert_padding import index_first_axis
        >>> index_first_axis(torch.tensor([5, 6, 7]), torch.tensor([2, 0]))
        tensor([7, 5])
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Write rows into a tensor of zeros.

    Args:
        values: The rows.
        indices: Where each row is written.
        first_axis_dim: The number of rows of the result.

    Shape:
        values: (n, ...), any dtype.
        indices: (n,), integers.
        out: (first_axis_dim, ...).

    Returns:
        out, which is 0 at all other rows.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.bert_padding import index_put_first_axis
        >>> index_put_first_axis(torch.tensor([7, 5]), torch.tensor([2, 0]), 4)
        tensor([5, 0, 7, 0])
    """
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Select rows as `index_first_axis` does, and also return the input.

    Args:
        input: A tensor.
        indices: The rows to select.

    Shape:
        input: (N, ...), any dtype.
        indices: (n,), int32 or int64.
        out: (n, ...).

    Returns:
        (out, input).

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.bert_padding import index_first_axis_residual
        >>> index_first_axis_residual(torch.tensor([5, 6, 7]), torch.tensor([2, 0]))
        (tensor([7, 5]), tensor([5, 6, 7]))
    """
    return index_first_axis(input, indices), input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch one after the other.

    Args:
        hidden_states: The padded batch.
        attention_mask: 1 or True at tokens.
        unused_mask: 1 at slots that are packed but do not count as tokens.

    Shape:
        hidden_states: (B, N, ...), any dtype.
        attention_mask: (B, N), bool or int.
        unused_mask: (B, N).
        tokens: (T, ...), T tokens and unused slots.
        indices: (T,), int64.
        cu_seqlens: (B + 1,), int32.
        used: (B,), int32.

    Returns:
        (tokens, indices, cu_seqlens, longest, used): indices are those in the flattened batch,
        longest is the largest length, an int, and used is the number of tokens of each sequence.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.bert_padding import unpad_input
        >>> x, mask = torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask)
        >>> tokens, indices, cu_seqlens, longest
        (tensor([5, 6, 7]), tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32), 2)
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
    """Pack the tokens of a padded batch with several sequences in each item.

    Args:
        hidden_states: The padded batch.
        attention_mask_in_length: The numbers above 0 in an item's row are the lengths of its
            sequences: [2, 3, 0, 0, 0, 0] is two sequences, then padding.

    Shape:
        hidden_states: (B, N, ...), any dtype.
        attention_mask_in_length: (B, N), int.
        tokens: (T, ...).
        indices: (T,), int64.
        cu_seqlens: (sequences + 1,), int32.

    Returns:
        (tokens, indices, cu_seqlens, longest), as those of `unpad_input`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.bert_padding import unpad_input_for_concatenated_sequences
        >>> x, lengths = torch.tensor([[4, 5, 6, 7, 8, 0]]), torch.tensor([[2, 3, 0, 0, 0, 0]])
        >>> unpad_input_for_concatenated_sequences(x, lengths)[::2]
        (tensor([4, 5, 6, 7, 8]), tensor([0, 2, 5], dtype=torch.int32))
    """
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
    """Pad a packed batch, the inverse of `unpad_input`.

    Args:
        hidden_states: The tokens.
        indices: The indices of the tokens in the flattened batch.
        batch: The number of items.
        seqlen: The length of a padded item.

    Shape:
        hidden_states: (T, ...), any dtype.
        indices: (T,), integers.
        out: (batch, seqlen, ...).

    Returns:
        out, which is 0 at all other slots.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.bert_padding import pad_input
        >>> pad_input(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 3]), batch=2, seqlen=3)
        tensor([[5, 6, 0],
                [7, 0, 0]])
    """
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))
