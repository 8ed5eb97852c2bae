"""Token positions: sinusoidal encodings, rotary embeddings of queries and keys, ALiBi slopes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .core import Leaf


class SinusoidalPositionalEncoding(Leaf):
    """Adds sin(pos / 10000^(2i/E)) to column 2i and the cosine to column 2i + 1 (Vaswani et al.
    2017, section 3.5), then applies dropout. E may be odd: the last column is then a sine."""

    embed_dim: int
    max_len: int
    batch_first: bool
    dropout: nn.Dropout

    def __init__(
        self,
        embed_dim: int,
        max_len: int = 5000,
        dropout: float = 0.1,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        self.embed_dim, self.max_len, self.batch_first = embed_dim, max_len, batch_first
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """x is (B, N, E) or (N, E), or (N, B, E) without batch_first; its first token is at
        position `offset`. Raises ValueError past max_len."""
        if x.ndim not in (2, 3) or x.shape[-1] != self.embed_dim or not x.is_floating_point():
            raise ValueError(
                f"x: got {x.dtype} of shape {tuple(x.shape)}, expected floats of 2 or 3 "
                f"dimensions, the last embed_dim = {self.embed_dim}"
            )
        at = 0 if x.ndim == 3 and not self.batch_first else -2
        length, longest = x.shape[at], self.max_len
        if offset < 0 or offset + length > longest:
            raise ValueError(
                f"x: got positions {offset} to {offset + length - 1}, expected 0 to {longest - 1}; "
                "make the module with a larger max_len"
            )
        positions = torch.arange(offset, offset + length, device=x.device)
        pe = self._encode(positions).to(x.dtype)
        return self.dropout(x + (pe[:, None] if at == 0 else pe))

    def _encode(self, positions: Tensor) -> Tensor:
        """(N, E) in float64. Computed in every call, which costs less than its addition to a batch:
        a buffer would be rounded by model.bfloat16() and left empty by model.to_empty()."""
        column = torch.arange(self.embed_dim, device=positions.device)
        exponent = (column // 2 * 2).to(torch.float64) / self.embed_dim
        angle = positions.to(torch.float64)[:, None] * 1e4**-exponent
        return torch.where(column % 2 == 0, angle.sin(), angle.cos())

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, max_len={self.max_len}, batch_first={self.batch_first}"


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R columns of x (..., D) pair by pair, by cos and sin (..., R/2): a pair is
    columns i and i + R/2 or, interleaved, 2i and 2i + 1. Computed in float32 or float64."""
    columns = 2 * cos.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(wide), sin.to(wide)
    turned, rest = x[..., :columns].to(wide), x[..., columns:]
    if interleaved:
        a, b = turned.view(*turned.shape[:-1], -1, 2).unbind(-1)
    else:
        a, b = turned.chunk(2, dim=-1)
    rotated = (a * cos - b * sin, a * sin + b * cos)
    y = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([y.to(x.dtype), rest], dim=-1)


class RotaryEmbedding(Leaf):
    """Rotates pairs of columns of queries and keys by an angle that grows with the position, so
    that q.k depends on positions by their difference alone (RoPE, Su et al. 2021, equation 34).

    Pair i turns by pos / base^(2i/D). A pair is columns i and i + D/2 (half-split, as in Llama and
    NeoX) or, interleaved, columns 2i and 2i + 1 (as in the paper and GPT-J). The first rotary_dim
    columns are rotated, all by default; the others stay unchanged.
    """

    head_dim: int
    rotary_dim: int
    base: float
    interleaved: bool

    def __init__(
        self,
        head_dim: int,
        *,
        rotary_dim: int | None = None,
        base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        turned = head_dim if rotary_dim is None else rotary_dim
        if turned % 2 or not 0 < turned <= head_dim:
            raise ValueError(
                f"rotary_dim: got {turned}, expected an even number up to head_dim = {head_dim}"
            )
        self.head_dim, self.rotary_dim = head_dim, turned
        self.base, self.interleaved = base, interleaved

    def forward(self, x: Tensor, positions: Tensor | None = None, offset: int = 0) -> Tensor:
        """x is (..., N, head_dim), such as (B, H, N, D). Row n is at position offset + n, or at
        positions[n]. positions broadcasts to x without its last dimension: (B, 1, N) if batch items
        differ."""
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"x: got {x.shape[-1]} columns, expected head_dim = {self.head_dim}")
        if positions is not None and offset:
            raise ValueError(f"offset: got {offset} beside positions, expected one of the two")
        if positions is None:
            positions = torch.arange(offset, offset + x.shape[-2], device=x.device)
        # In float64: a float32 angle at position 100,000 would be off by a hundredth. Not a buffer,
        # which model.bfloat16() would round.
        pair = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=x.device)
        angle = positions.to(torch.float64)[..., None] * self.base ** (-pair / self.rotary_dim)
        return rotate(x, angle.cos(), angle.sin(), self.interleaved)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, rotary_dim={self.rotary_dim}, interleaved={self.interleaved}"


def alibi_slopes(num_heads: int) -> Tensor:
    """(num_heads,) float32: the slopes that `fastattn.attention` takes as `alibi_slopes` (ALiBi,
    Press et al. 2022, section 3): 2^(-8/H), 2^(-16/H), ... if H is a power of two. Other numbers
    take the slopes of the next smaller power P, then every second slope of 2 P heads."""
    if num_heads < 1:
        raise ValueError(f"num_heads: got {num_heads}, expected at least 1")
    power = 2 ** (num_heads.bit_length() - 1)

    def geometric(n: int) -> Tensor:
        return 2.0 ** (-8.0 / n * torch.arange(1, n + 1, dtype=torch.float64))

    more = geometric(2 * power)[0::2][: num_heads - power]
    return torch.cat([geometric(power), more]).float()
