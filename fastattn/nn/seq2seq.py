"""Attention of a recurrent decoder over the states of its encoder."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, nn

from .core import Leaf, attend, masked_softmax


class LuongAttention(Leaf):
    """Dot-product ("global, dot") attention and the attentional state (Luong et al. 2015,
    equations 5 to 8): score s.h, context a = sum of weights times h, then tanh(W_c [a; s] + b_c).
    Scores and context run fused."""

    combine: nn.Linear

    def __init__(self, state_dim: int, out_dim: int | None = None, bias: bool = True) -> None:
        super().__init__()
        out_dim = state_dim if out_dim is None else out_dim
        self.combine = nn.Linear(2 * state_dim, out_dim, bias=bias)

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
        """state (B, M, E): M decoder states, or (B, E): one. memory (B, N, E): encoder states.

        mask: (B, N), or three dimensions that broadcast to (B, M, N); 0 or False hides an encoder
        state.
        Returns (B, M, out_dim), with need_weights also (B, M, N); without M if state is (B, E).
        """
        state, mask, one = _prepare(state, memory, mask)
        context, weights = attend(
            *(state, memory, memory),
            mask=mask,
            scale=1.0,
            need_weights=need_weights,
        )
        out = torch.tanh(self.combine(torch.cat([context, state], dim=-1)))
        return _results(out, weights, one)


class BahdanauAttention(Leaf):
    """Additive attention (Bahdanau et al. 2015, section A.1.2): score v.tanh(W s + U h).

    Its scores are not products of queries and keys, so this is plain torch, not fused: it stores a
    (B, M, N, hidden_dim) tensor for the backward pass.
    """

    state_proj: nn.Linear
    memory_proj: nn.Linear
    score: nn.Linear

    def __init__(self, state_dim: int, memory_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.state_proj = nn.Linear(state_dim, hidden_dim, bias=False)
        self.memory_proj = nn.Linear(memory_dim, hidden_dim)
        self.score = nn.Linear(hidden_dim, 1, bias=False)

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
        """state (B, M, state_dim) or (B, state_dim), memory (B, N, memory_dim); mask and weights as
        in `LuongAttention`. Returns the context (B, M, memory_dim), 0 if all states are hidden."""
        state, mask, one = _prepare(state, memory, mask)
        hidden = torch.tanh(self.state_proj(state)[:, :, None] + self.memory_proj(memory)[:, None])
        weights = masked_softmax(self.score(hidden).squeeze(-1), mask)
        return _results(weights @ memory, weights if need_weights else None, one)


def _prepare(
    state: Tensor, memory: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, bool]:
    """state (B, M, E), mask (B or 1, M or 1, N or 1), and whether state came as (B, E)."""
    one = state.ndim == 2
    state = state.unsqueeze(1) if one else state
    if not state.ndim == memory.ndim == 3 or state.shape[0] != memory.shape[0]:
        raise ValueError(
            f"state, memory: got shapes {tuple(state.shape)} and {tuple(memory.shape)}, expected "
            "(B, M, E) or (B, E), and (B, N, E)"
        )
    if mask is None:
        return state, None, one
    wide = mask.unsqueeze(1) if mask.ndim == 2 else mask
    shape = (memory.shape[0], state.shape[1], memory.shape[1])
    if wide.ndim != 3 or any(n not in (1, size) for n, size in zip(wide.shape, shape, strict=True)):
        raise ValueError(
            f"mask: got shape {tuple(mask.shape)}, expected {shape[::2]} or three dimensions that "
            f"broadcast to {shape}"
        )
    return state, wide, one


def _results(out: Tensor, weights: Tensor | None, one: bool) -> Tensor | tuple[Tensor, Tensor]:
    out = out.squeeze(1) if one else out
    if weights is None:
        return out
    return out, weights.squeeze(1) if one else weights
