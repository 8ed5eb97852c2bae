"""Attention with one head: without parameters, and with the three projections."""

from __future__ import annotations

from torch import Tensor, nn

from .core import attend
from .forms import KeyValueForward, TokensForward


class ScaledDotProductAttention(KeyValueForward):
    """Scaled dot-product attention without parameters: softmax(q k^T scale) v.

    This is equation 1 of Vaswani et al. 2017. A row with every key hidden has output 0; if hidden
    scores were filled with -1e9, it would be the mean of v.

    Args:
        scale: The factor of q k^T; 1 / sqrt(D) by default. 1.0 gives plain dot-product attention.
        causal: If True, row i attends to keys 0 to i.
        dropout: The probability with which each weight is dropped in training.

    Shape:
        q: (..., M, D), float32, float64, bfloat16 or float16.
        k: (..., N, D), same dtype. M and N may differ.
        v: (..., N, Dv), same dtype. D and Dv may differ.
        mask: Broadcasts to (..., M, N); bool or any other dtype.
        out: (..., M, Dv).
        weights: (..., M, N).

    Example:
        >>> import torch
        >>> from fastattn.nn import ScaledDotProductAttention
        >>> attention = ScaledDotProductAttention()
        >>> q, k, v = torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 3)
        >>> out, weights = attention(q, k, v, need_weights=True)
        >>> out.shape, weights.shape
        (torch.Size([5, 3]), torch.Size([5, 7]))
        >>> torch.testing.assert_close(weights, torch.softmax(q @ k.mT / 8**0.5, -1))
    """

    scale: float | None
    causal: bool
    dropout: float

    def __init__(
        self, *, scale: float | None = None, causal: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.scale, self.causal, self.dropout = scale, causal, dropout

    def _compute(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        return attend(
            *(q, k, v),
            mask=mask,
            causal=self.causal,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            need_weights=need_weights,
        )

    def extra_repr(self) -> str:
        return f"scale={self.scale}, causal={self.causal}, dropout={self.dropout}"


class SelfAttention(TokensForward):
    """Self-attention with one head: x W_q attends to x W_k and x W_v.

    Args:
        d_in: The number of columns of the input.
        d_out: The number of columns of q, k, v and the output; d_in by default.
        qkv_bias: If True, the three projections have a bias.
        scale, causal, dropout: As in `ScaledDotProductAttention`.

    Shape:
        x: (..., N, d_in).
        mask: Broadcasts to (..., N, N); bool or any other dtype.
        out: (..., N, d_out).
        weights: (..., N, N).

    Example:
        >>> import torch
        >>> from fastattn.nn import SelfAttention
        >>> attention = SelfAttention(8, 4, causal=True)
        >>> out, weights = attention(torch.randn(2, 3, 8), need_weights=True)
        >>> out.shape
        torch.Size([2, 3, 4])
        >>> bool((weights.triu(1) == 0).all())
        True
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    attention: ScaledDotProductAttention

    def __init__(
        self,
        d_in: int,
        d_out: int | None = None,
        *,
        qkv_bias: bool = True,
        scale: float | None = None,
        causal: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        d_out = d_in if d_out is None else d_out
        self.q_proj = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.k_proj = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.v_proj = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.attention = ScaledDotProductAttention(scale=scale, causal=causal, dropout=dropout)

    def _compute(
        self, x: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        found = self.attention(q, k, v, mask, need_weights)
        return found if isinstance(found, tuple) else (found, None)
