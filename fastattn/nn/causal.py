"""Causal self-attention of a language model: one head, heads split from wide projections, or a
stack of single heads."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, nn

from .core import Leaf, attend, check_heads, merge_heads, split_heads


class CausalSelfAttention(Leaf):
    """Token i attends to tokens 0 to i, over num_heads heads split from projections to d_out.

    Outputs of several heads are concatenated and go through `out_proj`; a single head has no
    `out_proj`. dropout acts on the weights in training. There is no mask buffer: context_length is
    only the longest sequence that is accepted (None: any).
    """

    context_length: int | None
    dropout: float
    num_heads: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear | nn.Identity

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int | None = None,
        dropout: float = 0.0,
        num_heads: int = 1,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        check_heads(d_out, num_heads)
        self.context_length, self.dropout, self.num_heads = context_length, dropout, num_heads
        self.q_proj = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.k_proj = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.v_proj = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out) if num_heads > 1 else nn.Identity()

    @overload
    def forward(
        self, x: Tensor, mask: Tensor | None = None, need_weights: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, need_weights: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self, x: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def forward(
        self, x: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (..., N, d_in) to (..., N, d_out).

        mask hides keys in addition to the causal mask: bool or any dtype, 0 hides. It broadcasts to
        (..., N, N), the same for all heads, or has one more dimension, (..., H, N, N). With
        need_weights the second result is the weights after dropout, (..., H, N, N), or (..., N, N)
        with one head. Raises ValueError past context_length.
        """
        if self.context_length is not None and x.shape[-2] > self.context_length:
            raise ValueError(
                f"x: got {x.shape[-2]} tokens, expected at most context_length = "
                f"{self.context_length}; make the module with a longer one"
            )
        if mask is not None and self.num_heads > 1 and 3 <= mask.ndim <= x.ndim:
            mask = mask.unsqueeze(-3)
        elif mask is not None and self.num_heads == 1 and mask.ndim > max(x.ndim, 2):
            mask = mask.squeeze(-3)
        q, k, v = (self._split(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out, weights = attend(
            *(q, k, v),
            mask=mask,
            causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            need_weights=need_weights,
        )
        out = self.out_proj(out if self.num_heads == 1 else merge_heads(out))
        return out if weights is None else (out, weights)

    def _split(self, x: Tensor) -> Tensor:
        return x if self.num_heads == 1 else split_heads(x, self.num_heads)

    def extra_repr(self) -> str:
        return (
            f"context_length={self.context_length}, dropout={self.dropout}, "
            f"num_heads={self.num_heads}"
        )


class ConcatenatedHeads(Leaf):
    """num_heads separate single-head `CausalSelfAttention` modules of d_out columns each, with
    concatenated outputs: (..., N, d_in) to (..., N, num_heads * d_out)."""

    heads: nn.ModuleList

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int | None = None,
        dropout: float = 0.0,
        num_heads: int = 2,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            CausalSelfAttention(d_in, d_out, context_length, dropout, qkv_bias=qkv_bias)
            for _ in range(num_heads)
        )

    @overload
    def forward(
        self, x: Tensor, mask: Tensor | None = None, need_weights: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, need_weights: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self, x: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def forward(
        self, x: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """With need_weights, the second result is the weights (..., H, N, N). Every head uses
        mask."""
        if not need_weights:
            return torch.cat([head(x, mask) for head in self.heads], dim=-1)
        outs, weights = zip(*(head(x, mask, need_weights=True) for head in self.heads), strict=True)
        return torch.cat(outs, dim=-1), torch.stack(weights, dim=-3)
