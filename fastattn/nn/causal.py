"""Causal self-attention of a language model: one head, heads split from wide projections, or a
stack of single heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..call.sizes import holds
from .core import attend, check_heads, merge_heads, split_heads
from .forms import TokensForward


class CausalSelfAttention(TokensForward):
    """Causal self-attention with one or more heads: token i attends to tokens 0 to i.

    The projections to d_out columns are split into heads. Outputs of several heads are concatenated
    and go through `out_proj`; a single head has no `out_proj`. A mask hides further keys.

    Args:
        d_in: The number of columns of the input.
        d_out: The number of columns of q, k, v and the output, over all heads.
        context_length: The length of the longest sequence that is accepted; longer ones raise, and
            None accepts any. There is no mask buffer.
        dropout: The probability with which each weight is dropped in training.
        num_heads: The number of heads. It must divide d_out.
        qkv_bias: If True, the projections of q, k and v have a bias.

    Shape:
        x: (..., N, d_in).
        mask: Broadcasts to (..., N, N), the same for all heads, or has one more dimension, (..., H,
            N, N). bool or any other dtype.
        out: (..., N, d_out).
        weights: (..., H, N, N), or (..., N, N) with one head.

    Raises:
        ValueError: num_heads does not divide d_out.

    Example:
        >>> import torch
        >>> from fastattn.nn import CausalSelfAttention
        >>> attention = CausalSelfAttention(16, 32, context_length=10, num_heads=4)
        >>> x = torch.randn(2, 6, 16)
        >>> out = attention(x)
        >>> out.shape
        torch.Size([2, 6, 32])
        >>> torch.testing.assert_close(attention(x[:, :3]), out[:, :3])
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

    def _compute(
        self, x: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        longest = self.context_length
        if longest is not None and not holds(x.shape[-2] <= longest):
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
        return out, weights

    def _split(self, x: Tensor) -> Tensor:
        return x if self.num_heads == 1 else split_heads(x, self.num_heads)

    def extra_repr(self) -> str:
        return (
            f"context_length={self.context_length}, dropout={self.dropout}, "
            f"num_heads={self.num_heads}"
        )


class ConcatenatedHeads(TokensForward):
    """A stack of separate single-head `CausalSelfAttention` modules with concatenated outputs.

    Args:
        d_in: The number of columns of the input.
        d_out: The number of columns of each head.
        context_length, dropout: As in `CausalSelfAttention`.
        num_heads: The number of heads.
        qkv_bias: As in `CausalSelfAttention`.

    Shape:
        x: (..., N, d_in).
        mask: Broadcasts to (..., N, N); bool or any other dtype.
        out: (..., N, num_heads * d_out).
        weights: (..., H, N, N).

    Example:
        >>> import torch
        >>> from fastattn.nn import ConcatenatedHeads
        >>> attention = ConcatenatedHeads(16, 8, num_heads=3)
        >>> out, weights = attention(torch.randn(2, 6, 16), need_weights=True)
        >>> out.shape, weights.shape
        (torch.Size([2, 6, 24]), torch.Size([2, 3, 6, 6]))
    """

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

    def _compute(
        self, x: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        if not need_weights:
            return torch.cat([head(x, mask) for head in self.heads], dim=-1), None
        outs, weights = zip(*(head(x, mask, need_weights=True) for head in self.heads), strict=True)
        return torch.cat(outs, dim=-1), torch.stack(weights, dim=-3)
