"""Attention with one head: without parameters, and with the three projections."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor, nn

from .core import Leaf, attend


class ScaledDotProductAttention(Leaf):
    """softmax(q k^T scale) v without parameters (Vaswani et al. 2017, equation 1).

    scale is 1 / sqrt(D) by default; 1.0 gives the plain dot-product attention. dropout acts on the
    weights in training. With causal, row i sees keys 0 to i.
    """

    scale: float | None
    causal: bool
    dropout: float

    def __init__(
        self, *, scale: float | None = None, causal: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.scale, self.causal, self.dropout = scale, causal, dropout

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
        """q (..., M, D), k (..., N, D), v (..., N, Dv); M and N may differ, and D and Dv.

        mask: bool or any dtype, broadcast to (..., M, N); 0 hides a key. A row with every key
        hidden gives 0; filling scores with -1e9 would give the mean of v.
        Returns (..., M, Dv), with need_weights also the weights (..., M, N) after dropout.
        """
        out, weights = attend(
            *(q, k, v),
            mask=mask,
            causal=self.causal,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            need_weights=need_weights,
        )
        return out if weights is None else (out, weights)

    def extra_repr(self) -> str:
        return f"scale={self.scale}, causal={self.causal}, dropout={self.dropout}"


class SelfAttention(Leaf):
    """One head over one sequence: x W_q attends to x W_k and x W_v, all of d_out columns."""

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
        """x (..., N, d_in) to (..., N, d_out), with need_weights also (..., N, N); mask as in
        `ScaledDotProductAttention`."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.attention(q, k, v, mask, need_weights)
