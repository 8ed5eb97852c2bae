"""Multi-head attention in the three forms that tutorials use (Vaswani et al. 2017, section
3.2.2): one packed projection, three projections with access to every step, or small projections
that all heads share. `fastattn.MultiheadAttention` has torch's form."""

from __future__ import annotations

import math

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
from .forms import KeyValueForward, TokensForward


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
        """Attend with q, k, v (B, H, N, D) and return the output before its heads are merged."""
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


class PackedSelfAttention(MultiHead, TokensForward):
    """Multi-head self-attention with one projection for q, k and v.

    The projection is split into heads. The merged outputs of the heads go through `out_proj`. The
    scale is 1 / sqrt(head_dim).

    Args:
        embed_dim: The number of columns of the input and the output.
        num_heads: The number of heads. It must divide embed_dim.
        dropout: The probability with which each weight is dropped in training.
        bias: If True, both projections have a bias.

    Shape:
        x: (B, N, E).
        mask: (N, N), (B, N, N) or (B, H, N, N), or what broadcasts to them; bool or any other
            dtype.
        out: (B, N, E).
        weights: (B, H, N, N).

    Raises:
        ValueError: num_heads does not divide embed_dim.

    Example:
        >>> import torch
        >>> from fastattn.nn import PackedSelfAttention
        >>> attention = PackedSelfAttention(64, num_heads=4)
        >>> out, weights = attention(torch.randn(2, 10, 64), need_weights=True)
        >>> out.shape, weights.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 4, 10, 10]))
    """

    qkv_proj: nn.Linear
    out_proj: nn.Linear

    def __init__(
        self, embed_dim: int, num_heads: int, *, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout)
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def _compute(
        self, x: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        heads = (split_heads(y, self.num_heads) for y in self.qkv_proj(x).chunk(3, dim=-1))
        out, weights = self._attend(*heads, mask=mask, need_weights=need_weights)
        return self.out_proj(merge_heads(out)), weights


class TracedAttention(MultiHead):
    """Multi-head attention that returns every intermediate tensor on request.

    q, k and v are projections of separate inputs. Head dims need not be powers of two: 40 works,
    too.

    Args:
        embed_dim: The number of columns of q, k, v and the output.
        num_heads: The number of heads. It must divide embed_dim.
        dropout: The probability with which each weight is dropped in training.
        bias: If True, the four projections have a bias.
        scale: The factor of q k^T; 1 / sqrt(embed_dim) by default, as in the tutorial. The paper's
            is 1 / sqrt(embed_dim / num_heads).

    Shape:
        q: (B, M, E).
        k: (B, N, E).
        v: (B, N, E).
        mask: (M, N), (B, M, N) or (B, H, M, N), or what broadcasts to them; bool or any other
            dtype.
        out: (B, M, E).

    Raises:
        ValueError: num_heads does not divide embed_dim.

    Example:
        >>> import torch
        >>> from fastattn.nn import TracedAttention
        >>> attention = TracedAttention(120, num_heads=3)
        >>> q, k = torch.randn(2, 5, 120), torch.randn(2, 7, 120)
        >>> trace = {}
        >>> attention(q, k, k, trace=trace).shape
        torch.Size([2, 5, 120])
        >>> trace["K_split"].shape, trace["attention"].shape
        (torch.Size([2, 3, 7, 40]), torch.Size([2, 3, 5, 7]))
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
        """Project q, k and v, attend with every head, and project the merged outputs.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            mask: 0 or False hides a key. A row with every key hidden has attention 0; in the
                tutorial, which fills scores with -1e9, its output is the mean of v.
            trace: A dict that receives the intermediate tensors: Q_feat (B, M, E), K_feat and
                V_feat (B, N, E); Q_split (B, H, M, D), K_split and V_split (B, H, N, D); scores and
                attention (B, H, M, N), before dropout; x_raw (B, H, M, D), x_rsh1 (B, M, H, D),
                x_rsh2 and x (B, M, E). Without a trace, no M x N tensor is stored.

        Returns:
            out.

        Raises:
            ValueError: The mask does not broadcast, or a float mask on a CPU contains -inf.
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


class SharedHeadAttention(MultiHead, KeyValueForward):
    """Multi-head attention with small projections that all heads share.

    The embedding is split into heads first. All heads share one head_dim x head_dim projection each
    for q, k and v. The scale is 1 / sqrt(embed_dim), as in the tutorial.

    Args:
        embed_dim: The number of columns of q, k, v and the output.
        num_heads: The number of heads. It must divide embed_dim.
        dropout: The probability with which each weight is dropped in training.

    Shape:
        q: (B, M, E).
        k: (B, N, E).
        v: (B, N, E).
        mask: (M, N), (B, M, N) or (B, H, M, N), or what broadcasts to them; bool or any other
            dtype.
        out: (B, M, E).
        weights: (B, H, M, N).

    Raises:
        ValueError: num_heads does not divide embed_dim.

    Example:
        >>> import torch
        >>> from fastattn.nn import SharedHeadAttention
        >>> attention = SharedHeadAttention(64, num_heads=4)
        >>> attention.q_proj.weight.shape
        torch.Size([16, 16])
        >>> x = torch.randn(2, 10, 64)
        >>> attention(x, x, x).shape
        torch.Size([2, 10, 64])
    """

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

    def _compute(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        heads = (proj(split_heads(x, self.num_heads)) for proj, x in zip(projections, (q, k, v)))
        out, weights = self._attend(*heads, mask=mask, need_weights=need_weights)
        return self.out_proj(merge_heads(out)), weights
