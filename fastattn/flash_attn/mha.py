"""flash-attn 2.8's `modules.mha`: modules of multi-head attention, which load its checkpoints.

The names of parameters, buffers and attributes are flash-attn's. Where its modules raise an
AssertionError, these raise a ValueError. `FlashSelfAttention` and `FlashCrossAttention` also run on
CPUs, in float32 and float64.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..api import attention
from ..nn.positions import alibi_slopes as tensor_of_slopes
from .checks import in_their_names, need_shape
from .flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .rotary import RotaryEmbedding

__all__ = [
    "MHA",
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "SelfAttention",
    "get_alibi_slopes",
]


def get_alibi_slopes(nheads: int) -> list[float]:
    """Return the slopes of ALiBi.

    Args:
        nheads: The number of heads.

    Returns:
        The slopes of `fastattn.nn.alibi_slopes`, as a list.

    Raises:
        ValueError: nheads is below 1.

    Example:
        >>> from fastattn.flash_attn.mha import get_alibi_slopes
        >>> get_alibi_slopes(4)
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    return tensor_of_slopes(nheads).tolist()


class FlashSelfAttention(nn.Module):
    """Attention of stacked queries, keys and values, of equal lengths or packed.

    Args:
        causal: As in `flash_attn_func`.
        softmax_scale: As in `flash_attn_func`.
        attention_dropout: The probability with which a weight is dropped in training.
        window_size: As in `flash_attn_func`.
        alibi_slopes: As in `flash_attn_func`; a buffer, which is not in the state dict.
        deterministic: As in `flash_attn_func`.

    Shape:
        qkv: (B, N, 3, H, D), or (T, 3, H, D) with cu_seqlens.
        cu_seqlens: (B + 1,), int32 or int64.
        alibi_slopes: (H,) or (B, H).
        out: (B, N, H, D), or (T, H, D) with cu_seqlens.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.mha import FlashSelfAttention
        >>> FlashSelfAttention(causal=True)(torch.randn(2, 5, 3, 4, 8)).shape
        torch.Size([2, 5, 4, 8])
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale = causal, softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.window_size, self.deterministic = window_size, deterministic
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Compute the attention.

        Args:
            qkv: Queries, then keys, then values.
            causal: Replaces the module's, unless None.
            cu_seqlens: Offsets of packed sequences.
            max_seqlen: The largest length. Required with cu_seqlens.

        Returns:
            out.

        Raises:
            ValueError: max_seqlen is missing, or as `flash_attn_func`.
        """
        arguments = _arguments(self, causal)
        if cu_seqlens is None:
            return cast(Tensor, flash_attn_qkvpacked_func(qkv, **arguments))
        longest = _needed("max_seqlen", max_seqlen)
        return cast(Tensor, flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, longest, **arguments))


class FlashCrossAttention(nn.Module):
    """Attention of queries to stacked keys and values, of equal lengths or packed.

    Args:
        causal: As in `flash_attn_func`.
        softmax_scale: As in `flash_attn_func`.
        attention_dropout: The probability with which a weight is dropped in training.
        alibi_slopes: As in `flash_attn_func`; a buffer, which is not in the state dict.
        window_size: As in `flash_attn_func`.
        deterministic: As in `flash_attn_func`.

    Shape:
        q: (B, M, H, D), or (T, H, D) with cu_seqlens.
        kv: (B, N, 2, Hk, D), or (S, 2, Hk, D) with cu_seqlens.
        cu_seqlens, cu_seqlens_k: (B + 1,), int32 or int64.
        alibi_slopes: (H,) or (B, H).
        out: As q.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.mha import FlashCrossAttention
        >>> FlashCrossAttention()(torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 2, 8)).shape
        torch.Size([2, 5, 4, 8])
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale = causal, softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.window_size, self.deterministic = window_size, deterministic
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """Compute the attention.

        Args:
            q: Queries.
            kv: Keys, then values.
            causal: Replaces the module's, unless None.
            cu_seqlens: Offsets of packed sequences of queries.
            max_seqlen: The largest length of queries. Required with cu_seqlens.
            cu_seqlens_k: Offsets of packed sequences of keys. Required with cu_seqlens.
            max_seqlen_k: The largest length of keys. Required with cu_seqlens.

        Returns:
            out.

        Raises:
            ValueError: An argument beside cu_seqlens is missing, or as `flash_attn_func`.
        """
        arguments = _arguments(self, causal)
        if cu_seqlens is None:
            return cast(Tensor, flash_attn_kvpacked_func(q, kv, **arguments))
        cu_k = _needed("cu_seqlens_k", cu_seqlens_k)
        longest = _needed("max_seqlen", max_seqlen), _needed("max_seqlen_k", max_seqlen_k)
        where = cu_seqlens, cu_k, *longest
        return cast(Tensor, flash_attn_varlen_kvpacked_func(q, kv, *where, **arguments))


class SelfAttention(nn.Module):
    """Attention of stacked queries, keys and values, with a mask of padding.

    A row without a visible key is 0. flash-attn adds -10000 to hidden scores instead, which gives
    such a row weights as if nothing were hidden.

    Args:
        causal: If True, row i attends to keys 0 to i.
        softmax_scale: As in `flash_attn_func`.
        attention_dropout: The probability with which a weight is dropped in training.

    Shape:
        qkv: (B, N, 3, H, D).
        key_padding_mask: (B, N), bool.
        out: (B, N, H, D).

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.mha import SelfAttention
        >>> mask = torch.tensor([[True, True, False]])
        >>> SelfAttention()(torch.randn(1, 3, 3, 4, 8), key_padding_mask=mask).shape
        torch.Size([1, 3, 4, 8])
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale = causal, softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def forward(
        self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the attention.

        Args:
            qkv: Queries, then keys, then values.
            causal: Replaces the module's, unless None.
            key_padding_mask: True at keys that count.

        Returns:
            out.

        Raises:
            ValueError: A tensor has another shape or dtype.
        """
        need_shape("qkv", qkv, ("batch", "seqlen", 3, "heads", "head_dim"))
        causal = self.causal if causal is None else causal
        return _attend(self, *qkv.unbind(2), key_padding_mask, "top_left" if causal else False)


class CrossAttention(nn.Module):
    """Attention of queries to stacked keys and values, with a mask of padding.

    A row without a visible key is 0, as in `SelfAttention`.

    Args:
        causal: If True, the last row is aligned with the last key that counts: row i of M attends
            to keys 0 to i + n - M, with n keys that count. The padding is to the right then.
        softmax_scale: As in `flash_attn_func`.
        attention_dropout: The probability with which a weight is dropped in training.

    Shape:
        q: (B, M, H, D).
        kv: (B, N, 2, Hk, D). Hk divides H.
        key_padding_mask: (B, N), bool.
        out: (B, M, H, D).

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.mha import CrossAttention
        >>> CrossAttention()(torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 2, 8)).shape
        torch.Size([2, 5, 4, 8])
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale = causal, softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention.

        Args:
            q: Queries.
            kv: Keys, then values.
            causal: Replaces the module's, unless None.
            key_padding_mask: True at keys that count.

        Returns:
            out.

        Raises:
            ValueError: A tensor has another shape or dtype.
        """
        need_shape("q", q, ("batch", "seqlen", "heads", "head_dim"))
        need_shape("kv", kv, ("batch", "seqlen", 2, "heads", "head_dim"))
        causal = self.causal if causal is None else causal
        keys = kv.unbind(2)
        return _attend(self, q, *keys, key_padding_mask, "bottom_right" if causal else False)


class MHA(nn.Module):
    """Multi-head attention: projections, rotary embedding, attention, a cache of keys and values.

    Parameters are `Wqkv` (`Wq` and `Wkv` with cross_attn) and `out_proj`. The modules `inner_attn`
    and `inner_cross_attn` compute the attention, the second one if there are fewer heads of keys,
    another source of keys or a cache.

    Args:
        embed_dim: The number of columns E.
        num_heads: The number of heads H, which divides E.
        num_heads_kv: The number of heads of keys, which divides H; None is H.
        cross_attn: If True, keys and values are projected from x_kv.
        qkv_proj_bias, out_proj_bias: If True, the projections have a bias.
        dropout: The probability with which a weight is dropped in training.
        softmax_scale, causal: As in `flash_attn_func`.
        layer_idx: The layer's key in the dict of caches. Required for generation.
        dwconv: Not implemented: True raises.
        rotary_emb_dim: The number of columns of a head that are rotated; 0 is no rotation.
        rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved: Those of `RotaryEmbedding`.
        use_alibi: If True, add ALiBi's biases. Requires use_flash_attn.
        window_size: As in `flash_attn_func`. Requires use_flash_attn.
        fused_bias_fc: No effect, as in flash-attn 2.8.
        use_flash_attn: If True, the inner modules are `FlashSelfAttention` and
            `FlashCrossAttention`, which take cu_seqlens, otherwise `SelfAttention` and
            `CrossAttention`, which take key_padding_mask.
        return_residual: If True, return x beside the output.
        checkpointing: If True, the backward pass computes the attention again.
        device, dtype: Those of the parameters.

    Shape:
        x: (B, N, E), or (T, E) with cu_seqlens.
        x_kv: (B, S, E).
        key_padding_mask: (B, S), bool.
        cu_seqlens: (B + 1,), int32 or int64.
        out: As x.

    Raises:
        ValueError: Two arguments do not fit each other.
        NotImplementedError: dwconv is True.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.mha import MHA
        >>> layer = MHA(32, 4, num_heads_kv=2, rotary_emb_dim=8, causal=True, use_flash_attn=True)
        >>> layer(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if dwconv:
            raise NotImplementedError("dwconv: got True, expected False: it is not implemented")
        if embed_dim % num_heads:
            raise ValueError(f"num_heads: got {num_heads}, expected a divisor of {embed_dim}")
        if num_heads % num_heads_kv:
            raise ValueError(f"num_heads_kv: got {num_heads_kv}, expected a divisor of {num_heads}")
        if rotary_emb_dim > 0 and cross_attn:
            raise ValueError(f"rotary_emb_dim: got {rotary_emb_dim} with cross_attn, expected 0")
        has_window = tuple(window_size) != (-1, -1)
        if not use_flash_attn and (use_alibi or has_window):
            name = "window_size" if has_window else "use_alibi"
            raise ValueError(f"{name}: got it without use_flash_attn, expected use_flash_attn=True")
        self.embed_dim, self.num_heads, self.num_heads_kv = embed_dim, num_heads, num_heads_kv
        self.head_dim = embed_dim // num_heads
        self.cross_attn, self.causal, self.layer_idx = cross_attn, causal, layer_idx
        self.dwconv, self.rotary_emb_dim, self.use_flash_attn = (
            dwconv,
            rotary_emb_dim,
            use_flash_attn,
        )
        self.return_residual, self.checkpointing = return_residual, checkpointing
        if rotary_emb_dim > 0:
            sizes: dict[str, Any] = dict(
                base=rotary_emb_base, scale_base=rotary_emb_scale_base, device=device
            )
            interleaved = rotary_emb_interleaved
            self.rotary_emb = RotaryEmbedding(rotary_emb_dim, interleaved=interleaved, **sizes)
        kind = dict(device=device, dtype=dtype)
        of_keys = 2 * num_heads_kv * self.head_dim
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **kind)
            self.Wkv = nn.Linear(embed_dim, of_keys, bias=qkv_proj_bias, **kind)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + of_keys, bias=qkv_proj_bias, **kind)
        given: dict[str, Any] = dict(
            causal=causal, softmax_scale=softmax_scale, attention_dropout=dropout
        )
        if use_flash_attn:
            slopes = tensor_of_slopes(num_heads).to(device) if use_alibi else None
            given |= dict(alibi_slopes=slopes, window_size=window_size)
            self.inner_attn = FlashSelfAttention(**given)
            self.inner_cross_attn = FlashCrossAttention(**given)
        else:
            self.inner_attn, self.inner_cross_attn = SelfAttention(**given), CrossAttention(**given)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **kind)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a cache for keys and values, which is not initialized.

        Args:
            batch_size: The number of sequences B.
            max_seqlen: The capacity of a sequence.
            dtype: The dtype; None is that of the parameters.

        Shape:
            cache: (B, max_seqlen, 2, Hk, D).

        Returns:
            cache.

        Example:
            >>> from fastattn.flash_attn.mha import MHA
            >>> MHA(32, 4, num_heads_kv=2).allocate_inference_cache(1, 16).shape
            torch.Size([1, 16, 2, 2, 8])
        """
        weight = self.out_proj.weight
        sizes = batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim
        return weight.new_empty(sizes, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset=None,
        inference_params=None,
        **kwargs,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the attention.

        Args:
            x: Tokens.
            x_kv: The tokens of the keys, with cross_attn; None is x.
            key_padding_mask: True at keys that count. Not with use_flash_attn.
            cu_seqlens: Offsets of packed sequences. Requires use_flash_attn, without rotation.
            max_seqlen: The largest length. Required with cu_seqlens.
            mixer_subset: The rows of x, an index, that become queries, with cross_attn.
            inference_params: The caches of a generation, an object with flash-attn's attributes:
                key_value_memory_dict, max_seqlen, max_batch_size, seqlen_offset,
                batch_size_offset, lengths_per_sample.
            **kwargs: More arguments of the inner module's forward, such as causal.

        Returns:
            out, or (out, x) with return_residual.

        Raises:
            ValueError: Two arguments do not fit each other.
        """
        self._check(x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params)
        if inference_params is not None and kwargs:
            got, expected = ", ".join(kwargs), "no arguments of the inner module"
            raise ValueError(f"kwargs: got {got} beside inference_params, expected {expected}")
        if self.use_flash_attn:
            kwargs = dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen) | kwargs
        else:
            kwargs = dict(key_padding_mask=key_padding_mask) | kwargs
        out = self.out_proj(self._context(x, x_kv, mixer_subset, inference_params, kwargs))
        return (out, x) if self.return_residual else out

    def _context(self, x, x_kv, mixer_subset, inference_params, kwargs) -> Tensor:
        """The attention's output before the last projection, (..., E)."""
        heads = -1, self.head_dim
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset]).unflatten(-1, heads)
            kv = self.Wkv(x if x_kv is None else x_kv).unflatten(-1, heads)
        else:
            qkv = self.Wqkv(x).unflatten(-1, heads)
            if self.rotary_emb_dim > 0:
                qkv = self._rotated(qkv, inference_params)
            q, kv = qkv.split([self.num_heads, 2 * self.num_heads_kv], dim=-2)
        kv = kv.unflatten(-2, (2, self.num_heads_kv))
        if inference_params is not None:
            return self._update_kvcache_attention(q, kv, inference_params).flatten(-2)
        grouped = self.num_heads_kv != self.num_heads
        has_padding = kwargs.get("key_padding_mask") is not None
        if self.cross_attn or (grouped and not has_padding):
            return self._run(self.inner_cross_attn, q, kv, **kwargs).flatten(-2)
        if grouped:
            # The rows are padded, too: the module for other keys would align the last row, which
            # is padding, with the last key that counts.
            kv = kv.repeat_interleave(self.num_heads // self.num_heads_kv, dim=-2)
            qkv = torch.cat([q.unsqueeze(-3), kv], dim=-3)
        else:
            qkv = qkv.unflatten(-2, (3, self.num_heads))
        return self._run(self.inner_attn, qkv, **kwargs).flatten(-2)

    def _check(
        self, x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params
    ):
        """Raise if two arguments of `forward` do not fit each other."""
        is_packed, has_cache = cu_seqlens is not None, inference_params is not None
        has_padding = key_padding_mask is not None
        if is_packed:
            _needed("max_seqlen", max_seqlen)
        for name, is_wrong, beside in (
            ("x_kv", x_kv is not None and not self.cross_attn, "without cross_attn"),
            (
                "mixer_subset",
                mixer_subset is not None and not self.cross_attn,
                "without cross_attn",
            ),
            ("cu_seqlens", is_packed and not self.use_flash_attn, "without use_flash_attn"),
            ("cu_seqlens", is_packed and self.rotary_emb_dim > 0, "with rotary_emb_dim"),
            ("cu_seqlens", is_packed and has_padding, "beside key_padding_mask"),
            ("cu_seqlens", is_packed and has_cache, "beside inference_params"),
            ("key_padding_mask", has_padding and self.use_flash_attn, "with use_flash_attn"),
            ("key_padding_mask", has_padding and has_cache, "beside inference_params"),
            ("layer_idx", has_cache and self.layer_idx is None, "beside inference_params"),
        ):
            if is_wrong:
                got, expected = ("None", "an int") if name == "layer_idx" else ("it", "None")
                raise ValueError(f"{name}: got {got} {beside}, expected {expected}")

    def _rotated(self, qkv: Tensor, inference_params) -> Tensor:
        offset, longest = 0, None
        if inference_params is not None:
            offset = _lengths(inference_params, len(qkv))
            longest = inference_params.max_seqlen
        given = dict(seqlen_offset=offset, max_seqlen=longest, num_heads_q=self.num_heads)
        return self.rotary_emb(qkv, **given)

    def _run(self, inner: nn.Module, *tensors: Tensor, **kwargs) -> Tensor:
        if not self.checkpointing:
            return inner(*tensors, **kwargs)
        return checkpoint(inner, *tensors, use_reentrant=False, **kwargs)

    def _own_cache(self, kv: Tensor, inference_params) -> Tensor:
        """The items of the layer's cache that belong to the batch of kv."""
        cache = inference_params.key_value_memory_dict.get(self.layer_idx)
        if cache is None:
            raise ValueError(
                f"seqlen_offset: got {inference_params.seqlen_offset} without a cache of layer "
                f"{self.layer_idx}, expected 0 in the first call"
            )
        end = inference_params.batch_size_offset + len(kv)
        if end > len(cache):
            raise ValueError(
                f"max_batch_size: got {len(cache)} in inference_params, expected at least {end}, "
                "batch_size_offset and the sequences of x"
            )
        return cache[inference_params.batch_size_offset : end]

    def _update_kv_cache(self, kv: Tensor, inference_params) -> Tensor:
        """Write kv (B,N,2,Hk,D) into the layer's cache; return all keys and values so far."""
        caches = inference_params.key_value_memory_dict
        offset, lengths = inference_params.seqlen_offset, _lengths(inference_params, len(kv))
        if isinstance(lengths, Tensor) and bool((lengths != offset).any()):
            raise ValueError(
                f"lengths_per_sample: got {lengths.tolist()}, expected {offset}, the "
                "seqlen_offset, for all: use_flash_attn=True has steps of sequences that differ"
            )
        if self.layer_idx not in caches:
            if offset:
                self._own_cache(kv, inference_params)  # raises
            sizes = inference_params.max_batch_size, inference_params.max_seqlen
            caches[self.layer_idx] = kv.new_empty(*sizes, *kv.shape[2:])
        cache = self._own_cache(kv, inference_params)
        end = inference_params.seqlen_offset + kv.shape[1]
        if end > cache.shape[1]:
            raise ValueError(
                f"max_seqlen: got {cache.shape[1]} in inference_params, expected at least {end}, "
                "the number of tokens so far"
            )
        cache[:, end - kv.shape[1] : end] = kv
        return cache[:, :end]

    def _update_kvcache_attention(self, q: Tensor, kv: Tensor, inference_params) -> Tensor:
        """Append kv (B,N,2,Hk,D) to the cache; attend to all of it."""
        inner: Any = self.inner_cross_attn
        if inference_params.seqlen_offset == 0 or not self.use_flash_attn:
            return inner(q, self._update_kv_cache(kv, inference_params))
        cache = self._own_cache(kv, inference_params)
        return cast(
            Tensor,
            flash_attn_with_kvcache(
                q,
                *cache.unbind(2),
                *kv.unbind(2),
                cache_seqlens=_lengths(inference_params, len(q)),
                softmax_scale=inner.softmax_scale,
                causal=inner.causal,
                window_size=inner.window_size,
                alibi_slopes=None if inner.alibi_slopes is None else inner.alibi_slopes.float(),
            ),
        )


def _lengths(inference_params, batch: int) -> int | Tensor:
    """The number of cached tokens of each sequence. There may be lengths of a larger batch."""
    lengths = inference_params.lengths_per_sample
    return inference_params.seqlen_offset if lengths is None else lengths[:batch]


def _arguments(
    module: FlashSelfAttention | FlashCrossAttention, causal: bool | None
) -> dict[str, Any]:
    """The arguments of flash-attn's functions that a module has."""
    slopes = module.alibi_slopes
    return dict(
        dropout_p=module.drop.p if module.training else 0.0,
        softmax_scale=module.softmax_scale,
        causal=module.causal if causal is None else causal,
        window_size=module.window_size,
        alibi_slopes=None if slopes is None else slopes.float(),
        deterministic=module.deterministic,
    )


def _needed(name: str, x: Any) -> Any:
    """x, an argument that a packed batch requires; raise if it is None."""
    if x is None:
        expected = "offsets" if name.startswith("cu") else "the largest length"
        raise ValueError(f"{name}: got None beside cu_seqlens, expected {expected}")
    return x


def _attend(
    module: SelfAttention | CrossAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    causal,
) -> Tensor:
    """Attend q (B,M,H,D) to the keys (B,N,Hk,D) that count: out (B,M,H,Dv)."""
    arguments: dict[str, Any] = dict(
        causal=causal,
        scale=module.softmax_scale,
        dropout_p=module.drop.p if module.training else 0.0,
    )
    if key_padding_mask is not None:
        need_shape("key_padding_mask", key_padding_mask, k.shape[:2])
        if key_padding_mask.dtype != torch.bool:
            raise ValueError(f"key_padding_mask: got {key_padding_mask.dtype}, expected torch.bool")
        arguments |= dict(mask=key_padding_mask[:, None, None])
        if causal == "bottom_right":
            arguments |= dict(key_lengths=key_padding_mask.sum(-1))
    with in_their_names():
        out = attention(*(x.transpose(1, 2) for x in (q, k, v)), **arguments)
    return out.transpose(1, 2)
