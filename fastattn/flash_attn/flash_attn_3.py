"""FlashAttention-3's functions (`flash_attn_interface`), with its names, argument order and
defaults.

They are those of `fastattn.flash_attn` with more arguments. `flash_attn_func` documents the ones
that the functions share. Tensors are float32, float64, bfloat16 or float16, on any device, with
any strides; or q, k and v are float8_e4m3fn: then results are in bfloat16 and have no gradient.
Arguments that tune FlashAttention's kernels are accepted, and a warning says once that they have no
effect.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.need import need_constant
from ..merging import merge
from .caching import Cache, attend_to_cache
from .checks import in_their_names, need_shape
from .sequences import Functions, attend, need_offsets, say_once
from .translation import arguments_of

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Outputs = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Outputs:
    """Compute attention of sequences of equal lengths, as FlashAttention-3.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        softmax_scale: The factor of scores; None is 1 / sqrt(D), with qv 1 / sqrt(D + Dv).
        causal: As in `fastattn.flash_attn.flash_attn_func`.
        qv: More queries, of the values: scores are q k^T + qv v^T.
        q_descale: Factors of q and qv, for each item and key head.
        k_descale: Factors of k.
        v_descale: Factors of v.
        window_size: As in `fastattn.flash_attn.flash_attn_func`.
        attention_chunk: If above 0, rows and keys are in chunks of so many, and a row sees the keys
            of its own chunk alone. Row i is in that of i' = i + N - M.
        softcap: As in `fastattn.flash_attn.flash_attn_func`.
        num_splits, pack_gqa: They have no effect.
        deterministic: As in `fastattn.flash_attn.flash_attn_func`.
        sm_margin: It has no effect.
        return_attn_probs: If True, also return softmax_lse.
        s_aux: One more logit in each row's denominator, for each head. FlashAttention-3 does not
            have this argument.

    Shape:
        q: (B, M, H, D).
        k: (B, N, Hk, D), q's dtype and device. Hk divides H.
        v: (B, N, Hk, Dv), q's dtype and device.
        qv: (B, M, H, Dv), q's dtype.
        q_descale, k_descale, v_descale: (B, Hk), float32.
        s_aux: (H,).
        out: (B, M, H, Dv), q's dtype; bfloat16 for float8.
        softmax_lse: (B, H, M), float32 (float64 for float64).

    Returns:
        out, or (out, softmax_lse) with return_attn_probs.

    Raises:
        ValueError: As `fastattn.attention`; the text has FlashAttention's name of the argument.
        TypeError, NotImplementedError: As `fastattn.attention`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.flash_attn_3 import flash_attn_func
        >>> q, k, v = torch.randn(3, 1, 8, 4, 16)
        >>> out, lse = flash_attn_func(q, k, v, attention_chunk=4, return_attn_probs=True)
        >>> first = flash_attn_func(q[:, :4], k[:, :4], v[:, :4])
        >>> torch.testing.assert_close(out[:, :4], first)
    """
    say_once(num_splits=_other(num_splits, 1), pack_gqa=pack_gqa, sm_margin=_other(sm_margin, 0))
    arguments = arguments_of(
        softmax_scale, causal, window_size, softcap, None, s_aux, deterministic=deterministic
    )
    scales = q_descale, k_descale, v_descale
    out, lse = attend(q, k, v, arguments, Functions(_chunk(attention_chunk)), scales, qv=qv)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Outputs:
    """Compute `flash_attn_func` with queries, keys and values in one tensor.

    Args:
        qkv: Queries, then keys, then values.
        softmax_scale, causal, q_descale, k_descale, v_descale: As in `flash_attn_func`.
        window_size, attention_chunk, softcap, deterministic: As in `flash_attn_func`.
        num_heads_q: The number of query heads of a qkv of 4 dimensions.
        sm_margin, return_attn_probs, s_aux: As in `flash_attn_func`.

    Shape:
        qkv: (B, M, 3, H, D), or (B, M, H + 2 Hk, D) with num_heads_q.
        q_descale, k_descale, v_descale: (B, Hk), float32.
        s_aux: (H,).
        out: (B, M, H, D).

    Returns:
        As `flash_attn_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: As `flash_attn_func`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.flash_attn_3 import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(1, 5, 8, 16), num_heads_q=4).shape
        torch.Size([1, 5, 4, 16])
    """
    if num_heads_q is None:
        need_shape("qkv", qkv, ("batch", "seqlen", 3, "heads", "head_dim"))
        q, k, v = qkv.unbind(2)
    else:
        need_shape("qkv", qkv, ("batch", "seqlen", "heads", "head_dim"))
        others = qkv.shape[2] - num_heads_q
        if num_heads_q < 1 or others < 2 or others % 2:
            expected = f"a number that leaves two equal parts of {qkv.shape[2]} heads, k's and v's"
            raise ValueError(f"num_heads_q: got {num_heads_q}, expected {expected}")
        q, k, v = qkv.split((num_heads_q, others // 2, others // 2), 2)
    scales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    more = dict(deterministic=deterministic, sm_margin=sm_margin, s_aux=s_aux)
    shown = dict(window_size=window_size, attention_chunk=attention_chunk, softcap=softcap)
    given = shown | scales | more | dict(return_attn_probs=return_attn_probs)
    return flash_attn_func(q, k, v, softmax_scale, causal, **given)  # ty: ignore


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Outputs:
    """Compute attention of sequences of different lengths, stored without padding.

    Args:
        q: Queries of all sequences.
        k: Keys of all sequences.
        v: Values, laid out as k.
        cu_seqlens_q: Offsets of the sequences of q. They begin with 0.
        cu_seqlens_k: Offsets of the sequences of k and v.
        max_seqlen_q: The largest number of rows of a sequence.
        max_seqlen_k: The largest number of keys of a sequence.
        seqused_q: The number of rows of each sequence that are used, the first ones. The others are
            rows without keys. FlashAttention-3 does not write these.
        seqused_k: The number of keys of each sequence that are used.
        softmax_scale, causal, qv, q_descale, k_descale, v_descale: As in `flash_attn_func`.
        window_size, attention_chunk, softcap, num_splits, pack_gqa: As in `flash_attn_func`.
        deterministic, sm_margin, return_attn_probs, s_aux: As in `flash_attn_func`.

    Shape:
        q: (T, H, D).
        k: (S, Hk, D).
        v: (S, Hk, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32 or int64.
        seqused_q, seqused_k: (B,), int32 or int64.
        qv: (T, H, Dv).
        q_descale, k_descale, v_descale: (B, Hk), float32.
        s_aux: (H,).
        out: (T, H, Dv).
        softmax_lse: (H, T).

    Returns:
        As `flash_attn_func`.

    Raises:
        ValueError: As `flash_attn_func`, and for offsets or lengths out of range.
        TypeError, NotImplementedError: As `flash_attn_func`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.flash_attn_3 import flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 7, 4, 8)  # sequences of 3 and 4 tokens
        >>> cu, used = torch.tensor([0, 3, 7]), torch.tensor([2, 4])
        >>> out = flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, seqused_q=used)
        >>> bool((out[2] == 0).all())
        True
    """
    say_once(num_splits=_other(num_splits, 1), pack_gqa=pack_gqa, sm_margin=_other(sm_margin, 0))
    arguments = arguments_of(
        softmax_scale, causal, window_size, softcap, None, s_aux, deterministic=deterministic
    )
    functions, scales = Functions(_chunk(attention_chunk)), (q_descale, k_descale, v_descale)
    need_offsets("cu_seqlens_q", cu_seqlens_q)
    need_offsets("cu_seqlens_k", cu_seqlens_k)
    out, lse = attend(
        q,
        k,
        v,
        arguments,
        functions,
        scales,
        qv=qv,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Outputs:
    """Append keys and values to a cache, rotate them and q if requested, and attend q to the cache.

    As `fastattn.flash_attn.flash_attn_with_kvcache`, with more arguments, any of them together.

    Args:
        q: Queries, of equal lengths, or packed with cu_seqlens_q.
        k_cache: The cached keys.
        v_cache: The cached values.
        k: New keys, written into k_cache in place from cache_seqlens on, before attention runs.
        v: New values, written into v_cache likewise.
        qv: More queries, of the values, as in `flash_attn_func`.
        rotary_cos: Cosines that rotate the first R columns of q and k; they need k. Row j of k is
            at position rotary_seqlens + j. Row i of q is at rotary_seqlens + i if the call is
            causal, windowed or in chunks, else at rotary_seqlens.
        rotary_sin: Sines.
        cache_seqlens: The number of keys of each sequence before this call. None is the capacity.
        cache_batch_idx: The item of the cache, or the row of page_table, of each sequence.
        cache_leftpad: Where each sequence's keys begin.
        page_table: The pages of each sequence.
        cu_seqlens_q: Offsets of the sequences of q, if these are packed.
        cu_seqlens_k_new: Offsets of the sequences of k and v, if these are packed.
        max_seqlen_q: The largest number of rows of a sequence, with cu_seqlens_q.
        rotary_seqlens: The first position of each sequence; None is cache_seqlens.
        q_descale, k_descale, v_descale, softmax_scale: As in `flash_attn_func`.
        causal, window_size, attention_chunk, softcap: As in `flash_attn_func`.
        rotary_interleaved: If True, column 2c is paired with 2c + 1, otherwise c with c + R/2.
        scheduler_metadata, num_splits, pack_gqa, sm_margin: They have no effect.
        return_softmax_lse: If True, also return softmax_lse.
        s_aux: As in `flash_attn_func`.

    Shape:
        q: (B, M, H, D), or (T, H, D) with cu_seqlens_q.
        k_cache: (items, capacity, Hk, D), or (blocks, page, Hk, D) with page_table.
        v_cache: (items, capacity, Hk, Dv), or (blocks, page, Hk, Dv).
        k: (B, n, Hk, D), or (n of all sequences, Hk, D) with cu_seqlens_k_new.
        v: (B, n, Hk, Dv), or (n of all sequences, Hk, Dv).
        qv: (B, M, H, Dv) or (T, H, Dv).
        rotary_cos, rotary_sin: (positions, R / 2).
        cache_seqlens: An int, or (B,), int32 or int64.
        cache_batch_idx, cache_leftpad, rotary_seqlens: (B,), int32 or int64.
        page_table: (B, pages), or (items, pages) with cache_batch_idx, int32 or int64.
        cu_seqlens_q, cu_seqlens_k_new: (B + 1,), int32 or int64.
        q_descale, k_descale, v_descale: (B, Hk), float32.
        scheduler_metadata: Any.
        s_aux: (H,).
        out: (B, M, H, Dv) or (T, H, Dv), q's dtype; bfloat16 for float8.
        softmax_lse: (B, H, M) or (H, T).

    Returns:
        out, or (out, softmax_lse) with return_softmax_lse.

    Raises:
        ValueError, TypeError, NotImplementedError: As
            `fastattn.flash_attn.flash_attn_with_kvcache`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.flash_attn_3 import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 10, 4, 8)
        >>> q, k, v = torch.randn(3, 5, 4, 8)  # sequences of 2 and 3 new tokens
        >>> cu = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> new = dict(cu_seqlens_q=cu, cu_seqlens_k_new=cu, max_seqlen_q=3, cache_seqlens=0)
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, causal=True, **new).shape
        torch.Size([5, 4, 8])
        >>> bool((k_cache[1, :3] == k[2:]).all())
        True
    """
    tuned = dict(num_splits=_other(num_splits, 0), sm_margin=_other(sm_margin, 0))
    say_once(**tuned, pack_gqa=pack_gqa, scheduler_metadata=scheduler_metadata)
    arguments = arguments_of(softmax_scale, causal, window_size, softcap, None, s_aux)
    why = "flash_attn_with_kvcache has no gradients"
    need_constant(why, q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, qv=qv, s_aux=s_aux)
    axes = ("batch", "seqlen") if cu_seqlens_q is None else ("total",)
    need_shape("q", q, (*axes, "heads", "head_dim"))
    if cu_seqlens_q is not None:
        need_offsets("cu_seqlens_q", cu_seqlens_q)
    batch = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    functions = Functions(_chunk(attention_chunk))
    with in_their_names(block_table="page_table"):
        cache = Cache.of(k_cache, v_cache, batch, page_table, cache_batch_idx, cache_leftpad)
        out, lse = attend_to_cache(
            q,
            k,
            v,
            cache,
            cache_seqlens,
            (rotary_cos, rotary_sin, rotary_interleaved),
            arguments,
            functions,
            (q_descale, k_descale, v_descale),
            qv=qv,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k_new=cu_seqlens_k_new,
            max_seqlen_q=max_seqlen_q,
            rotary_seqlens=rotary_seqlens,
        )
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine attention over parts of the keys, as `fastattn.merge`.

    Args:
        out_partial: The outputs of all parts.
        lse_partial: Their LSEs.
        out: Where to write the result; None makes a tensor.
        out_dtype: The result's dtype, if out is None. None is that of out_partial.

    Shape:
        out_partial: (parts, B, M, H, Dv), or (parts, T, H, Dv).
        lse_partial: (parts, B, M, H), or (parts, T, H), float32 (float64 for float64).
        out: (B, M, H, Dv), or (T, H, Dv).
        lse: (B, M, H), or (T, H).

    Returns:
        (out, lse).

    Raises:
        ValueError: Shapes or dtypes differ.
        TypeError: An argument is no tensor.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.flash_attn_3 import flash_attn_combine
        >>> out, lse = flash_attn_combine(torch.randn(3, 1, 5, 4, 8), torch.randn(3, 1, 5, 4))
        >>> out.shape, lse.shape
        (torch.Size([1, 5, 4, 8]), torch.Size([1, 5, 4]))
    """
    if not isinstance(out_partial, Tensor) or out_partial.ndim not in (4, 5):
        got = getattr(out_partial, "shape", out_partial)
        expected = "(parts, batch, seqlen, heads, head_dim) or (parts, total, heads, head_dim)"
        raise ValueError(f"out_partial: got {got}, expected {expected}")
    need_shape("lse_partial", lse_partial, tuple(out_partial.shape[:-1]))
    wide = out_partial.to(lse_partial.dtype)
    merged, lse = merge([*zip(wide, lse_partial)])
    if out is None:
        return merged.to(out_dtype or out_partial.dtype), lse
    need_shape("out", out, tuple(merged.shape))
    return out.copy_(merged), lse


def get_scheduler_metadata(*arguments: object, **given: object) -> None:
    """Return None, which `flash_attn_with_kvcache` takes: fastattn's kernels need no plan.

    Args:
        *arguments: Those of FlashAttention-3. They are not read.
        **given: The same by name.

    Example:
        >>> from fastattn.flash_attn.flash_attn_3 import get_scheduler_metadata
        >>> print(get_scheduler_metadata(1, 1, 128, 8, 8, 64, cache_seqlens=None))
        None
    """


def _other(x: object, default: object) -> object | None:
    """x, or None if it is the default."""
    return None if x == default else x


def _chunk(attention_chunk: int) -> int:
    if type(attention_chunk) is not int or attention_chunk < 0:
        raise ValueError(
            f"attention_chunk: got {attention_chunk!r}, expected an int: 0 for none, or a size"
        )
    return attention_chunk
