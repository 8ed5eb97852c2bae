"""Token positions: sinusoidal encodings, rotary embeddings of queries and keys, ALiBi slopes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..call.sizes import holds
from ..rotation.rotate import rotate
from .core import Leaf


class SinusoidalPositionalEncoding(Leaf):
    """Sinusoidal position encodings, which are added to the tokens.

    The source is section 3.5 of Vaswani et al. 2017. Column 2i gets sin(pos / 10000^(2i/E)) and
    column 2i + 1 the cosine. Dropout follows. E may be odd: the last column is then a sine.

    Args:
        embed_dim: The number of columns E.
        max_len: The number of positions. Positions from max_len on raise.
        dropout: The probability with which each element of the sum is dropped in training.
        batch_first: If True, x is (B, N, E), otherwise (N, B, E).

    Shape:
        x: (B, N, E) or (N, E), or (N, B, E) without batch_first; any floating dtype.
        out: As x.

    Example:
        >>> import torch
        >>> from fastattn.nn import SinusoidalPositionalEncoding
        >>> encoding = SinusoidalPositionalEncoding(4, dropout=0.0)
        >>> encoding(torch.zeros(2, 4))
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])
    """

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
        """Add the encodings of the positions to x, then apply dropout.

        Args:
            x: Tokens.
            offset: The position of the first token.

        Returns:
            out.

        Raises:
            ValueError: x has another shape or dtype, or a position is not below max_len.
        """
        fits = x.ndim in (2, 3) and holds(x.shape[-1] == self.embed_dim)
        if not fits or not x.is_floating_point():
            raise ValueError(
                f"x: got {x.dtype} of shape {tuple(x.shape)}, expected floats of 2 or 3 "
                f"dimensions, the last embed_dim = {self.embed_dim}"
            )
        at = 0 if x.ndim == 3 and not self.batch_first else -2
        length, longest = x.shape[at], self.max_len
        if offset < 0 or not holds(offset + length <= longest):
            raise ValueError(
                f"x: got positions {offset} to {offset + length - 1}, expected 0 to {longest - 1}; "
                "make the module with a larger max_len"
            )
        positions = torch.arange(offset, offset + length, device=x.device)
        pe = self._encode(positions).to(x.dtype)
        return self.dropout(x + (pe[:, None] if at == 0 else pe))

    def _encode(self, positions: Tensor) -> Tensor:
        """Return the encodings (N, E) in float64.

        They are computed in every call, which costs less than their addition to a batch. A buffer
        would be rounded by model.bfloat16() and left empty by model.to_empty().
        """
        column = torch.arange(self.embed_dim, device=positions.device)
        exponent = (column // 2 * 2).to(torch.float64) / self.embed_dim
        angle = positions.to(torch.float64)[:, None] * 1e4**-exponent
        return torch.where(column % 2 == 0, angle.sin(), angle.cos())

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, max_len={self.max_len}, batch_first={self.batch_first}"


class RotaryEmbedding(Leaf):
    """Rotary position embedding (RoPE) of queries and keys.

    The source is equation 34 of Su et al. 2021. The module rotates pairs of columns by an angle
    that grows with the position, so that q.k depends on positions only through their difference.
    Pair i turns by pos / base^(2i/D). A pair is columns i and i + D/2 (half-split, as in Llama and
    NeoX) or, if interleaved, columns 2i and 2i + 1 (as in the paper and GPT-J). With rotary_dim, D
    is rotary_dim in these formulas.

    Args:
        head_dim: The number of columns of x.
        rotary_dim: The number of columns that are rotated, the first ones; all by default. It must
            be even. The other columns stay unchanged.
        base: The base of the angles.
        interleaved: If True, adjacent columns are a pair.

    Shape:
        x: (..., N, head_dim), such as (B, H, N, D).
        positions: Broadcasts to the shape of x without its last dimension: (N,), or (B, 1, N) if
            batch items differ. Any dtype.
        out: As x.

    Raises:
        ValueError: rotary_dim is odd, or not between 2 and head_dim.

    Example:
        >>> import torch
        >>> from fastattn.nn import RotaryEmbedding
        >>> rotary = RotaryEmbedding(8)
        >>> q, k = torch.randn(2, 1, 8)
        >>> score = rotary(q, offset=5) @ rotary(k, offset=3).mT
        >>> torch.testing.assert_close(score, rotary(q, offset=2) @ rotary(k).mT)
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
        """Rotate the columns of x by the angles of its positions.

        Args:
            x: Queries or keys.
            positions: The position of each row. None: row n is at position offset + n.
            offset: The position of the first row; only without positions.

        Returns:
            out.

        Raises:
            ValueError: x does not have head_dim columns, or both positions and offset are given.
        """
        if not holds(x.shape[-1] == self.head_dim):
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
    """Return the slopes that `fastattn.attention` takes as alibi_slopes.

    They are those of ALiBi (Press et al. 2022, section 3): 2^(-8/H), 2^(-16/H), ... if H is a power
    of two. For other numbers of heads, the first slopes are those of the next smaller power P, and
    the rest are every second slope of 2 P heads.

    Args:
        num_heads: The number of heads H.

    Shape:
        slopes: (num_heads,), float32.

    Returns:
        slopes.

    Raises:
        ValueError: num_heads is below 1.

    Example:
        >>> from fastattn.nn import alibi_slopes
        >>> alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    if num_heads < 1:
        raise ValueError(f"num_heads: got {num_heads}, expected at least 1")
    power = 2 ** (num_heads.bit_length() - 1)

    def geometric(n: int) -> Tensor:
        return 2.0 ** (-8.0 / n * torch.arange(1, n + 1, dtype=torch.float64))

    more = geometric(2 * power)[0::2][: num_heads - power]
    return torch.cat([geometric(power), more]).float()
