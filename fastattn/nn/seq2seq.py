"""Attention of a recurrent decoder over the states of its encoder."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, nn

from ..call.sizes import broadcasts, holds
from .core import Leaf, attend, masked_softmax


class _RecurrentAttention(Leaf):
    """`forward` of both modules, with its types."""

    @overload
    def forward(
        self,
        state: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        need_weights: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        state: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        *,
        need_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self,
        state: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def forward(
        self,
        state: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend decoder states to encoder states.

        Args:
            state: Decoder states.
            memory: Encoder states.
            mask: 0 or False hides an encoder state.
            need_weights: If True, also return the weights.

        Returns:
            The result for each decoder state, or (result, weights) with need_weights.

        Raises:
            ValueError: A tensor does not have the shape that the class states, or a float mask on a
                CPU contains -inf.
        """
        one = state.ndim == 2
        state = state.unsqueeze(1) if one else state
        mask = _checked_mask(state, memory, mask)
        out, weights = self._compute(state, memory, mask, need_weights)
        if one:
            out, weights = out.squeeze(1), None if weights is None else weights.squeeze(1)
        return out if weights is None else (out, weights)

    def _compute(
        self, state: Tensor, memory: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(result, weights) for states (B, M, E) and a mask of three dimensions; the weights are
        None without need_weights."""
        raise NotImplementedError


class LuongAttention(_RecurrentAttention):
    """Dot-product attention of a recurrent decoder, with the attentional state.

    This is "global, dot" attention (Luong et al. 2015, equations 5 to 8): the score is s.h, the
    context a is the sum of weights times h, and the output is tanh(W_c [a; s] + b_c). Scores and
    context run fused.

    Args:
        state_dim: The number of columns E of the decoder's and the encoder's states.
        out_dim: The number of columns of the output; state_dim by default.
        bias: If True, the output has the bias b_c.

    Shape:
        state: (B, M, E): M decoder states, or (B, E): one.
        memory: (B, N, E): encoder states.
        mask: (B, N), or three dimensions that broadcast to (B, M, N); bool or any other dtype.
        out: (B, M, out_dim), or (B, out_dim) if state is (B, E).
        weights: (B, M, N), or (B, N) if state is (B, E).

    Example:
        >>> import torch
        >>> from fastattn.nn import LuongAttention
        >>> attention = LuongAttention(16, out_dim=8)
        >>> state, memory = torch.randn(2, 16), torch.randn(2, 5, 16)
        >>> out, weights = attention(state, memory, need_weights=True)
        >>> out.shape, weights.shape
        (torch.Size([2, 8]), torch.Size([2, 5]))
    """

    combine: nn.Linear

    def __init__(self, state_dim: int, out_dim: int | None = None, bias: bool = True) -> None:
        super().__init__()
        out_dim = state_dim if out_dim is None else out_dim
        self.combine = nn.Linear(2 * state_dim, out_dim, bias=bias)

    def _compute(
        self, state: Tensor, memory: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        context, weights = attend(
            *(state, memory, memory), mask=mask, scale=1.0, need_weights=need_weights
        )
        return torch.tanh(self.combine(torch.cat([context, state], dim=-1))), weights


class BahdanauAttention(_RecurrentAttention):
    """Additive attention of a recurrent decoder.

    The score is v.tanh(W s + U h) (Bahdanau et al. 2015, section A.1.2). It is not a product of
    query and key, so this is plain torch, not fused: it stores a (B, M, N, hidden_dim) tensor for
    the backward pass. The context is 0 if all encoder states are hidden.

    Args:
        state_dim: The number of columns of the decoder's states.
        memory_dim: The number of columns of the encoder's states.
        hidden_dim: The number of columns of W s and U h.

    Shape:
        state: (B, M, state_dim): M decoder states, or (B, state_dim): one.
        memory: (B, N, memory_dim): encoder states.
        mask: (B, N), or three dimensions that broadcast to (B, M, N); bool or any other dtype.
        context: (B, M, memory_dim), or (B, memory_dim) for one state.
        weights: (B, M, N), or (B, N) for one state.

    Example:
        >>> import torch
        >>> from fastattn.nn import BahdanauAttention
        >>> attention = BahdanauAttention(16, 12, hidden_dim=8)
        >>> state, memory = torch.randn(2, 16), torch.randn(2, 5, 12)
        >>> context, weights = attention(state, memory, need_weights=True)
        >>> context.shape, weights.shape
        (torch.Size([2, 12]), torch.Size([2, 5]))
    """

    state_proj: nn.Linear
    memory_proj: nn.Linear
    score: nn.Linear

    def __init__(self, state_dim: int, memory_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.state_proj = nn.Linear(state_dim, hidden_dim, bias=False)
        self.memory_proj = nn.Linear(memory_dim, hidden_dim)
        self.score = nn.Linear(hidden_dim, 1, bias=False)

    def _compute(
        self, state: Tensor, memory: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        hidden = torch.tanh(self.state_proj(state)[:, :, None] + self.memory_proj(memory)[:, None])
        weights = masked_softmax(self.score(hidden).squeeze(-1), mask)
        return weights @ memory, weights if need_weights else None


def _checked_mask(state: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask as (B or 1, M or 1, N or 1). Raises for tensors of other shapes."""
    if not (state.ndim == memory.ndim == 3 and holds(state.shape[0] == memory.shape[0])):
        raise ValueError(
            f"state, memory: got shapes {tuple(state.shape)} and {tuple(memory.shape)}, expected "
            "(B, M, E) or (B, E), and (B, N, E)"
        )
    if mask is None:
        return None
    wide = mask.unsqueeze(1) if mask.ndim == 2 else mask
    shape = (memory.shape[0], state.shape[1], memory.shape[1])
    if wide.ndim != 3 or not all(map(broadcasts, wide.shape, shape)):
        raise ValueError(
            f"mask: got shape {tuple(mask.shape)}, expected {shape[::2]} or three dimensions that "
            f"broadcast to {shape}"
        )
    return wide
