"""Multi-head attention in the three forms that tutorials use (Vaswani et al. 2017, section
3.2.2): one packed projection, three projections with access to every step, or small projections
that all heads share. `fastattn.MultiheadAttention` has torch's form."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor, nn

from .core import (
    Causal,
    Leaf,
    attend,
    check_heads,
    masked_softmax,
    merge_heads,
    of_heads,
    split_heads,
)


class MultiHead(Leaf):
    """Base class: heads, dropout and scale of the attention between the projections."""

    num_heads: int
    dropout: float
    scale: float

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float, scale: float | None = None
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.num_heads, self.dropout = num_heads, dropout
        self.scale = 1 / math.sqrt(embed_dim // num_heads) if scale is None else scale

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: Causal = False,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with q, k, v (B, H, N, D); heads are not merged yet."""
        return attend(
            *(q, k, v),
            mask=of_heads(mask),
            causal=causal,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            need_weights=need_weights,
        )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, dropout={self.dropout}, scale={self.scale:.4g}"


class PackedSelfAttention(MultiHead):
    """q, k and v in one projection of the input, split into heads, then `out_proj`; the scale is
    1 / sqrt(head_dim)."""

    qkv_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(
        self, embed_dim: int, num_heads: int, *, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout)
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

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
        """x (B, N, E) to (B, N, E). mask: 0 or False hides; (N, N), (B, N, N) or (B, H, N, N), or
        what broadcasts to them. With need_weights, the second result is the weights (B, H, N, N)
        after dropout."""
        heads = (split_heads(y, self.num_heads) for y in self.qkv_proj(x).chunk(3, dim=-1))
        out, weights = self._attend(*heads, mask=mask, need_weights=need_weights)
        out = self.out_proj(merge_heads(out))
        return out if weights is None else (out, weights)


class TracedAttention(MultiHead):
    """Three projections of separate inputs, and every intermediate tensor on request.

    The scale is 1 / sqrt(embed_dim) unless given, as in the tutorial; the paper's is
    1 / sqrt(embed_dim / num_heads). Head dims need not be powers of two: 40 works, too.
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.1,
        bias: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, 1 / math.sqrt(embed_dim) if scale is None else scale
        )
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        trace: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """q (B, M, E), k and v (B, N, E) to (B, M, E); mask as in `PackedSelfAttention`, for
        (M, N).

        trace: a dict that receives Q_feat, K_feat, V_feat (B, N, E); Q_split, K_split, V_split
        (B, H, N, D); scores and attention (B, H, M, N), before dropout; x_raw (B, H, M, D), x_rsh1
        (B, M, H, D), x_rsh2 and x (B, M, E). Without a trace, no M x N tensor is stored. A row with
        every key hidden has attention 0; in the tutorial, which fills scores with -1e9, its output
        is the mean of v.
        """
        feats = self.q_proj(q), self.k_proj(k), self.v_proj(v)
        splits = tuple(split_heads(y, self.num_heads) for y in feats)
        raw, _ = self._attend(*splits, mask=mask)
        merged = merge_heads(raw)
        x = self.out_proj(merged)
        if trace is not None:
            mask, scores = of_heads(mask), splits[0] @ splits[1].mT * self.scale
            attention = masked_softmax(scores, mask)
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -torch.inf)
            trace.update(zip(("Q_feat", "K_feat", "V_feat"), feats, strict=True))
            trace.update(zip(("Q_split", "K_split", "V_split"), splits, strict=True))
            trace.update(scores=scores, attention=attention, x_raw=raw)
            trace.update(x_rsh1=raw.transpose(1, 2), x_rsh2=merged, x=x)
        return x


class SharedHeadAttention(MultiHead):
    """The embedding is split into heads first. All heads share one head_dim x head_dim projection
    each for q, k and v. The scale is 1 / sqrt(embed_dim), as in the tutorial."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout, 1 / math.sqrt(embed_dim))
        head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(head_dim, head_dim, bias=False)
        self.k_proj = nn.Linear(head_dim, head_dim, bias=False)
        self.v_proj = nn.Linear(head_dim, head_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    @overload
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        need_weights: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        need_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """q (B, M, E), k and v (B, N, E) to (B, M, E); mask and weights as in
        `PackedSelfAttention`, for (M, N)."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        heads = (proj(split_heads(x, self.num_heads)) for proj, x in zip(projections, (q, k, v)))
        out, weights = self._attend(*heads, mask=mask, need_weights=need_weights)
        out = self.out_proj(merge_heads(out))
        return out if weights is None else (out, weights)
