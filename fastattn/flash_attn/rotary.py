"""flash-attn 2.8's `layers.rotary` and `ops.triton.rotary`: rotary embeddings of queries and keys.

They rotate pairs of columns by `fastattn.norm_rope`, in float32 (float64 for float64), and round
once. `apply_rotary_emb` documents the arguments that the functions share.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..call import need
from ..rotation.rotate import rotate
from .checks import need_integers, need_shape, within
from .sequences import Tokens

__all__ = [
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]

Table = tuple[Tensor, Tensor]  # the cosines and sines of each row, which broadcast to (..., R / 2)

_DENSE = ("batch", "seqlen", "heads", "head_dim")
_PACKED = ("total", "heads", "head_dim")


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each pair of columns by a quarter turn: (a, b) becomes (-b, a).

    Args:
        x: Queries or keys.
        interleaved: If True, a pair is columns 2i and 2i + 1, otherwise i and i + D / 2.

    Shape:
        x: (..., D), any dtype. D is even.
        out: (..., D).

    Returns:
        out.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.rotary import rotate_half
        >>> rotate_half(torch.tensor([1, 2, 3, 4]))
        tensor([-3, -4,  1,  2])
    """
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Rotate the first R columns of x, with one row of cos and sin for each position.

    Args:
        x: Queries or keys.
        cos, sin: The cosines and sines of the angles.
        interleaved: As in `apply_rotary_emb`.

    Shape:
        x: (B, N, H, D), any floating dtype.
        cos, sin: (N, R / 2) or (B, N, R / 2), R at most D.
        out: (B, N, H, D), x's dtype.

    Returns:
        out.

    Raises:
        ValueError: A tensor has another shape or dtype.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.rotary import apply_rotary_emb_torch
        >>> x, angle = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), torch.full((1, 1), torch.pi / 6)
        >>> apply_rotary_emb_torch(x, angle.cos(), angle.sin()).flatten()
        tensor([0.8660, 0.5000])
    """
    _need_rows(x, _DENSE)
    of_items = isinstance(cos, Tensor) and cos.ndim == 3
    axes = (len(x), x.shape[1]) if of_items else (x.shape[1],)
    _need_table(x, cos, sin, axes)
    return rotate(x, cos[..., None, :], sin[..., None, :], interleaved)


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Compute `apply_rotary_emb`, or its inverse.

    flash-attn's function of this name is its kernel, which has no gradients. This one has them.

    Args:
        x: Queries or keys.
        cos, sin, seqlen_offsets, cu_seqlens, max_seqlen: As in `apply_rotary_emb`.
        interleaved, inplace: As in `apply_rotary_emb`.
        conjugate: If True, rotate by the negative angles, which is also the gradient.

    Shape:
        x: (B, N, H, D), or (T, H, D) with cu_seqlens.
        cos, sin: (S, R / 2).
        seqlen_offsets: (B,), int32 or int64.
        cu_seqlens: (B + 1,), int32 or int64.
        out: As x.

    Returns:
        out.

    Raises:
        ValueError, TypeError: As `apply_rotary_emb`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.rotary import apply_rotary
        >>> x, angle = torch.randn(1, 5, 2, 8), torch.rand(5, 4)
        >>> y = apply_rotary(x, angle.cos(), angle.sin())
        >>> back = apply_rotary(y, angle.cos(), angle.sin(), conjugate=True)
        >>> torch.testing.assert_close(back, x)
    """
    axes = _DENSE if cu_seqlens is None else _PACKED
    table = _of_rows(x, axes, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    if inplace:
        return _rotate_in_place(x, [...], [table], interleaved, conjugate)
    return rotate(x, table[0], -table[1] if conjugate else table[1], interleaved)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first R columns of x in pairs, by the angles of its positions.

    Without inplace, cos and sin have gradients, too, which flash-attn drops.

    Args:
        x: Queries or keys.
        cos, sin: The cosines and sines of the angles of each position.
        interleaved: If True, a pair is columns 2i and 2i + 1 (GPT-J), otherwise i and i + R / 2
            (GPT-NeoX, Llama).
        inplace: If True, write the result into x. A leaf that requires grad and one of several
            views of a tensor (`unbind`, `split`) are written, too: only the result has the
            gradient then, as in flash-attn. Compiled code raises for such a view.
        seqlen_offsets: The position of the first row, or of the first row of each sequence.
        cu_seqlens: Offsets of packed sequences: sequence b has rows cu_seqlens[b] to
            cu_seqlens[b+1]. They begin at 0 and end at T.
        max_seqlen: The largest length of a packed sequence. Required with cu_seqlens.

    Shape:
        x: (B, N, H, D), or (T, H, D) with cu_seqlens; any floating dtype and any strides.
        cos, sin: (S, R / 2), R at most D. S is above every position.
        seqlen_offsets: (B,), int32 or int64.
        cu_seqlens: (B + 1,), int32 or int64.
        out: As x.

    Returns:
        out, which is x with inplace.

    Raises:
        ValueError: A shape or dtype does not fit, cos requires grad with inplace, or cos has too
            few positions. Positions in tensors are checked on a CPU, and clamped elsewhere.
        TypeError: An argument is not a tensor.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.rotary import apply_rotary_emb
        >>> angle = torch.arange(9)[:, None] * 1e4 ** -torch.linspace(0, 0.75, 4)
        >>> q, k = torch.randn(2, 1, 5, 1, 8)
        >>> def score(offset):
        ...     rotated = [apply_rotary_emb(x, angle.cos(), angle.sin(), seqlen_offsets=offset)
        ...                for x in (q, k)]
        ...     return rotated[0][0, :, 0] @ rotated[1][0, :, 0].mT
        >>> torch.testing.assert_close(score(0), score(4))
    """
    given = seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace
    return apply_rotary(x, cos, sin, *given)


apply_rotary_emb_func = apply_rotary_emb  # an older name, which models still import


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate the queries and keys of qkv in place.

    Args:
        qkv: Queries, then keys, then values.
        cos, sin: As in `apply_rotary_emb`.
        cos_k, sin_k: Those of the keys; None is cos and sin.
        interleaved, seqlen_offsets: As in `apply_rotary_emb`.
        num_heads_q: The number of heads of queries. Required if qkv has four dimensions.

    Shape:
        qkv: (B, N, 3, H, D), or (B, N, H + 2 Hk, D).
        cos, sin, cos_k, sin_k: (S, R / 2).
        seqlen_offsets: (B,), int32 or int64.

    Returns:
        qkv.

    Raises:
        ValueError, TypeError: As `apply_rotary_emb`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.rotary import apply_rotary_emb, apply_rotary_emb_qkv_
        >>> qkv, angle = torch.randn(1, 5, 3, 2, 8), torch.rand(5, 4)
        >>> q = apply_rotary_emb(qkv[:, :, 0], angle.cos(), angle.sin())
        >>> torch.equal(apply_rotary_emb_qkv_(qkv, angle.cos(), angle.sin())[:, :, 0], q)
        True
    """
    axes, first, both = ("batch", "seqlen", 3, "heads", "head_dim"), 1, 2
    if isinstance(qkv, Tensor) and qkv.ndim == 4:
        heads = qkv.shape[2]
        if num_heads_q is None or not 0 <= num_heads_q <= heads or (heads - num_heads_q) % 2:
            raise ValueError(
                f"num_heads_q: got {num_heads_q} beside {heads} heads in qkv, expected H, so that "
                "qkv has H + 2 Hk heads; or pass qkv of shape (B, N, 3, H, D)"
            )
        axes, first, both = _DENSE, num_heads_q, (heads + num_heads_q) // 2
    table = _of_rows(qkv, axes, cos, sin, seqlen_offsets)
    if cos_k is None and sin_k is None:
        return _rotate_in_place(qkv, [_part(0, both)], [table], interleaved)
    given = (cos if cos_k is None else cos_k), (sin if sin_k is None else sin_k)
    tables = [table, _of_rows(qkv, axes, *given, seqlen_offsets)]
    return _rotate_in_place(qkv, [_part(0, first), _part(first, both)], tables, interleaved)


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate the keys of kv in place.

    Args:
        kv: Keys, then values.
        cos, sin, interleaved, seqlen_offsets: As in `apply_rotary_emb`.

    Shape:
        kv: (B, N, 2, Hk, D).
        cos, sin: (S, R / 2).
        seqlen_offsets: (B,), int32 or int64.

    Returns:
        kv.

    Raises:
        ValueError, TypeError: As `apply_rotary_emb`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.rotary import apply_rotary_emb, apply_rotary_emb_kv_
        >>> kv, angle = torch.randn(1, 5, 2, 2, 8), torch.rand(5, 4)
        >>> k = apply_rotary_emb(kv[:, :, 0], angle.cos(), angle.sin())
        >>> torch.equal(apply_rotary_emb_kv_(kv, angle.cos(), angle.sin())[:, :, 0], k)
        True
    """
    axes = ("batch", "seqlen", 2, "heads", "head_dim")
    table = _of_rows(kv, axes, cos, sin, seqlen_offsets)
    return _rotate_in_place(kv, [_part(0, 1)], [table], interleaved)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of queries and keys, in place.

    Pair i of position p turns by p / base^(2i / dim). With scale_base, pairs are also scaled, by
    the inverse factors in keys (xPos, Sun et al. 2022). The angles are float32, as in flash-attn.

    The cosines and sines are kept for the next call, in the dtype of its input. Subclasses may
    replace `_compute_inv_freq` and `_update_cos_sin_cache`, as those of flash-attn's class do. No
    buffer is in the state dict.

    Args:
        dim: The number of columns that are rotated, the first ones. It must be even.
        base: The base of the angles.
        interleaved: As in `apply_rotary_emb`.
        scale_base: The base of xPos's scales; None is no scaling.
        device: The device of the buffers.

    Shape:
        qkv: (B, N, 3, H, D), (B, N, H + 2 Hk, D), or (B, N, H, D) with kv.
        kv: (B, N, 2, Hk, D).
        seqlen_offset: (B,), int32 or int64.

    Raises:
        ValueError: dim is odd, or not above 0.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.rotary import RotaryEmbedding
        >>> rotary = RotaryEmbedding(8)
        >>> q, kv = rotary(torch.randn(1, 5, 4, 16), torch.randn(1, 5, 2, 2, 16), seqlen_offset=3)
        >>> q.shape, kv.shape
        (torch.Size([1, 5, 4, 16]), torch.Size([1, 5, 2, 2, 16]))
    """

    inv_freq: Tensor
    scale: Tensor | None
    _cos_cached: Tensor | None
    _sin_cached: Tensor | None
    _cos_k_cached: Tensor | None
    _sin_k_cached: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dim % 2 or dim <= 0:
            raise ValueError(f"dim: got {dim}, expected an even number above 0")
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None if scale_base is None else self._compute_scale(device)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached = self._sin_cached = self._cos_k_cached = self._sin_k_cached = None

    def _pairs(self, device) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _compute_inv_freq(self, device=None) -> Tensor:
        return 1.0 / self.base ** (self._pairs(device) / self.dim)

    def _compute_scale(self, device=None) -> Tensor:
        return (self._pairs(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device=None, dtype=None) -> None:
        """Make the tables of cosines and sines, unless those of the last call serve."""
        cos = self._cos_cached
        if cos is not None and seqlen <= self._seq_len_cached:
            # Autograd cannot save tensors of inference mode.
            usable = torch.is_inference_mode_enabled() or not cos.is_inference()
            if usable and cos.device == device and cos.dtype == dtype:
                return
        self._seq_len_cached = seqlen
        # If model.bfloat16() has rounded the buffers, they are computed anew.
        is_exact = self.inv_freq.dtype == torch.float32
        inv_freq = self.inv_freq if is_exact else self._compute_inv_freq(device)
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        angle = position[:, None] * inv_freq.to(device)
        cos, sin = angle.cos(), angle.sin()
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        scale = self.scale if is_exact else self._compute_scale(device)
        power = (position - seqlen // 2) / self.scale_base
        scale = scale.to(device) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate queries and keys in place.

        Args:
            qkv: Queries, keys and values, or queries alone with kv.
            kv: Keys, then values.
            seqlen_offset: The position of the first row, or that of each sequence.
            max_seqlen: The number of positions of the tables. Required if seqlen_offset is a
                tensor, unless an earlier call has made the tables.
            num_heads_q: As in `apply_rotary_emb_qkv_`.

        Returns:
            qkv, or (q, kv) if kv is given.

        Raises:
            ValueError: As `apply_rotary_emb`, or max_seqlen is missing.
        """
        if max_seqlen is None and not isinstance(seqlen_offset, Tensor):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueError(
                "max_seqlen: got None beside a tensor seqlen_offset, expected a number above all "
                "positions, from which the tables of cosines and sines are made"
            )
        cos_k, sin_k = self._cos_k_cached, self._sin_k_cached  # None without scale_base
        if kv is None:
            given = self.interleaved, seqlen_offset, num_heads_q
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, *given)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        if cos_k is not None and sin_k is not None:
            cos, sin = cos_k, sin_k
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}"


# --------------------------------------------------------------------------- tables of rows


def _need_rows(x: Tensor, axes: tuple[int | str, ...]) -> None:
    name = {2: "kv", 3: "qkv"}.get(axes[2], "x")
    need_shape(name, x, axes)
    if not x.is_floating_point():
        raise ValueError(f"{name}.dtype: got {x.dtype}, expected a floating dtype")


def _need_table(x: Tensor, cos: Tensor, sin: Tensor, axes: tuple[int | str, ...]) -> None:
    """Raise unless cos and sin are floats (*axes, R / 2), with R up to the columns of x."""
    need_shape("cos", cos, (*axes, "R / 2"))
    need_shape("sin", sin, tuple(cos.shape))
    for name, table in (("cos", cos), ("sin", sin)):
        if not table.is_floating_point():
            raise ValueError(f"{name}.dtype: got {table.dtype}, expected a floating dtype")
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"cos: got {cos.shape[-1]} columns, expected R / 2, half the columns that are rotated, "
            f"with R up to {x.shape[-1]}, the head dim"
        )


def _of_rows(
    x: Tensor,
    axes: tuple[int | str, ...],
    cos: Tensor,
    sin: Tensor,
    offsets: int | Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Table:
    """The rows of cos and sin for x (B,N,...), or (T,...) with cu_seqlens. They broadcast to the
    first R / 2 columns of x."""
    _need_rows(x, axes)
    _need_table(x, cos, sin, ("positions",))
    if cu_seqlens is not None:
        at = _positions_of_packed(x, cu_seqlens, max_seqlen, offsets)
        at = within("seqlen_offsets", at, len(cos) - 1, "the positions of cos")
    elif isinstance(offsets, Tensor):
        need_integers("seqlen_offsets", offsets, (len(x),))
        at = offsets.long()[:, None] + torch.arange(x.shape[1], device=offsets.device)
        at = within("seqlen_offsets", at, len(cos) - 1, "the positions of cos")
    else:
        offsets = need.whole("seqlen_offsets", offsets, "an int, or a tensor (batch,)")
        at = slice(offsets, offsets + x.shape[1])
        if offsets < 0 or at.stop > len(cos):
            raise ValueError(
                f"seqlen_offsets: got {offsets} for {x.shape[1]} rows, expected positions 0 to "
                f"{len(cos) - 1}, those of cos"
            )
    rows = 2 if cu_seqlens is None else 1
    heads = (..., *[None] * (len(axes) - rows - 1), slice(None))
    return cos[at][heads], sin[at][heads]


def _positions_of_packed(
    x: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, offsets: int | Tensor
) -> Tensor:
    """The position (T,) of each row of packed sequences."""
    if max_seqlen is None:
        raise ValueError("max_seqlen: got None beside cu_seqlens, expected the largest length")
    tokens = Tokens.of("cu_seqlens", cu_seqlens, x)
    lengths = cu_seqlens.diff()
    within("max_seqlen", lengths, max_seqlen, "no sequence is longer than max_seqlen")
    if isinstance(offsets, Tensor):
        need_integers("seqlen_offsets", offsets, (len(lengths),))
        offsets = tokens.of_each(offsets)
    return tokens.step + offsets


# --------------------------------------------------------------------------- in place


def _part(start: int, stop: int) -> tuple[slice, slice, slice]:
    return slice(None), slice(None), slice(start, stop)


def _rotate_in_place(
    whole: Tensor, parts: list, tables: list[Table], interleaved: bool, conjugate: bool = False
) -> Tensor:
    """Rotate parts of a tensor, each by its table."""
    if torch.is_grad_enabled() and any(x.requires_grad for table in tables for x in table):
        raise ValueError(
            "cos: got a tensor that requires grad for a rotation in place, expected inplace=False, "
            "or cos and sin without gradient: detach them"
        )
    given = whole, parts, interleaved, conjugate, *(x for table in tables for x in table)
    if not (whole.requires_grad and torch.is_grad_enabled()):
        with torch.no_grad():
            _write(whole, parts, tables, interleaved, conjugate)
        return whole
    if whole.is_leaf:
        return _Unrecorded.apply(*given)
    written = _rotated(whole, parts, tables, interleaved, conjugate)
    try:
        for x, y in written:
            x.copy_(y)  # autograd records it
    except RuntimeError:  # it records no write to one of several views of a tensor
        return _Unrecorded.apply(*given)
    return whole


def _turns(
    whole: Tensor, parts: list, tables: list[Table], conjugate: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The columns of each part that are rotated, with their table."""
    for part, (cos, sin) in zip(parts, tables, strict=True):
        x = whole[part][..., : 2 * cos.shape[-1]]
        if x.ndim == 5 and x.stride(2) == x.shape[3] * x.stride(3):  # (B, N, 2, H, R): more heads
            x, cos, sin = x.flatten(2, 3), cos.squeeze(2), sin.squeeze(2)
        yield x, cos, -sin if conjugate else sin


def _rotated(
    whole: Tensor, parts: list, tables: list[Table], interleaved: bool, conjugate: bool
) -> list[tuple[Tensor, Tensor]]:
    """Each part, and what it becomes."""
    turns = _turns(whole, parts, tables, conjugate)
    return [(x, rotate(x, cos, sin, interleaved)) for x, cos, sin in turns]


def _write(whole: Tensor, parts: list, tables: list[Table], interleaved: bool, conjugate: bool):
    if torch.is_grad_enabled():  # autograd records copies
        for x, y in _rotated(whole, parts, tables, interleaved, conjugate):
            x.copy_(y)
        return
    for x, cos, sin in _turns(whole, parts, tables, conjugate):
        rotate(x, cos, sin, interleaved, out=x)


class _Unrecorded(torch.autograd.Function):
    """A rotation in place that autograd does not record: only the result has the gradient."""

    @staticmethod
    def forward(ctx, whole, parts, interleaved, conjugate, *given):
        ctx.save_for_backward(*given)
        ctx.parts, ctx.interleaved, ctx.conjugate = parts, interleaved, conjugate
        # .data: the write does not count as a change of the other views.
        _write(whole.data, parts, _paired(given), interleaved, conjugate)
        return whole

    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        tables = _paired(ctx.saved_tensors)
        _write(gradient, ctx.parts, tables, ctx.interleaved, not ctx.conjugate)
        return gradient, *[None] * (3 + len(ctx.saved_tensors))


def _paired(given) -> list[Table]:
    return list(zip(given[::2], given[1::2]))
