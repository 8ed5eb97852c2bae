"""flash-attn 2.8's functions, with its names, argument order and defaults.

The last row is aligned with the last key: row i of M is at position i' = i + N - M among N keys.
`flash_attn_func` documents the arguments that the functions share.

Tensors are float32, float64, bfloat16 or float16, on any device, with any strides, and with D up
to the limits of `fastattn.attention`. Hk divides H, and v may have another head dim. Errors are
those of `fastattn.attention`: a ValueError or TypeError that names the argument.
"""

from __future__ import annotations

from torch import Tensor

from ..call.need import need_constant
from .caching import Cache, attend_to_cache
from .checks import in_their_names, need_integers, need_shape, whole_or_none
from .translation import Results, arguments_of, dense, packed

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | Results:
    """Compute attention of sequences of equal lengths.

    The last row is aligned with the last key: row i of M is at position i' = i + N - M among N
    keys.

    Args:
        q: Queries.
        k: Keys.
        v: Values. They may have another head dim than q and k.
        dropout_p: Drop each probability with this probability. Draws are fastattn's, not
            flash-attn's.
        softmax_scale: The factor of q k^T; None is 1 / sqrt(D).
        causal: If True, row i attends to keys 0 to i'. Rows with i' < 0 are empty: their output is
            0, their LSE -inf.
        window_size: (left, right): row i attends to keys from i' - left to i' + right. A number
            below 0 is no limit.
        softcap: Replace a score s by softcap tanh(s / softcap). 0.0 is off.
        alibi_slopes: Subtract slope |i' - j| from the score of row i and key j.
        deterministic: If True, gradients have the same bits in every run. If False,
            torch.are_deterministic_algorithms_enabled() decides.
        return_attn_probs: If True, also return softmax_lse and S_dmask.
        s_aux: One more logit in each row's denominator, for each head. It has a gradient.
            flash-attn does not have this argument.

    Shape:
        q: (B, M, H, D), float32, float64, bfloat16 or float16.
        k: (B, N, Hk, D), same dtype and device. Hk divides H.
        v: (B, N, Hk, Dv), same dtype and device.
        alibi_slopes: (H,) or (B, H).
        s_aux: (H,).
        out: (B, M, H, Dv), q's dtype.
        softmax_lse: (B, H, M), float32 (float64 for float64).
        S_dmask: (B, H, M, N), q's dtype.

    Returns:
        out, or (out, softmax_lse, S_dmask) with return_attn_probs. softmax_lse is the natural log
        of the softmax denominator, with a gradient. S_dmask is None without dropout. With dropout
        it is the probabilities before dropout, negative where they were dropped.

    Raises:
        ValueError: As `fastattn.attention`; the text has flash-attn's name of the argument.
        TypeError, NotImplementedError: As `fastattn.attention`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(1, 5, 4, 8), torch.randn(1, 7, 2, 8), torch.randn(1, 7, 2, 8)
        >>> out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 5, 4, 8]), torch.Size([1, 4, 5]))
    """
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux
    arguments = arguments_of(*scores, dropout_p, deterministic)
    with in_their_names():
        results = dense(q, k, v, arguments, return_attn_probs)
    return results if return_attn_probs else results[0]


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | Results:
    """Compute `flash_attn_func` with keys and values in one tensor.

    Args:
        q: Queries.
        kv: Keys, then values.
        dropout_p, softmax_scale, causal, window_size, softcap: As in `flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs, s_aux: As in `flash_attn_func`.

    Shape:
        q: (B, M, H, D).
        kv: (B, N, 2, Hk, D), q's dtype and device.
        alibi_slopes: (H,) or (B, H).
        s_aux: (H,).
        out: (B, M, H, D).

    Returns:
        As `flash_attn_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: As `flash_attn_func`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn import flash_attn_func, flash_attn_kvpacked_func
        >>> q, kv = torch.randn(1, 5, 4, 8), torch.randn(1, 7, 2, 4, 8)
        >>> out = flash_attn_kvpacked_func(q, kv)
        >>> torch.testing.assert_close(out, flash_attn_func(q, kv[:, :, 0], kv[:, :, 1]))
    """
    need_shape("kv", kv, ("batch", "seqlen", 2, "heads", "head_dim"))
    k, v = kv.unbind(2)
    scores = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    flags = deterministic, return_attn_probs
    return flash_attn_func(q, k, v, *scores, *flags, s_aux=s_aux)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | Results:
    """Compute `flash_attn_func` with queries, keys and values in one tensor.

    Args:
        qkv: Queries, then keys, then values.
        dropout_p, softmax_scale, causal, window_size, softcap: As in `flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs, s_aux: As in `flash_attn_func`.

    Shape:
        qkv: (B, M, 3, H, D), float32, float64, bfloat16 or float16.
        alibi_slopes: (H,) or (B, H).
        s_aux: (H,).
        out: (B, M, H, D).

    Returns:
        As `flash_attn_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: As `flash_attn_func`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn import flash_attn_func, flash_attn_qkvpacked_func
        >>> qkv = torch.randn(1, 5, 3, 4, 8)
        >>> out = flash_attn_qkvpacked_func(qkv)
        >>> torch.testing.assert_close(out, flash_attn_func(*qkv.unbind(2)))
    """
    need_shape("qkv", qkv, ("batch", "seqlen", 3, "heads", "head_dim"))
    q, k, v = qkv.unbind(2)
    scores = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    flags = deterministic, return_attn_probs
    return flash_attn_func(q, k, v, *scores, *flags, s_aux=s_aux)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | Results:
    """Compute attention of sequences of different lengths, stored without padding.

    The sequences lie one after the other. Those of q end at cu_seqlens_q[1:], those of k and v at
    cu_seqlens_k[1:]. In each sequence the last row is aligned with the last key.

    Args:
        q: Queries of all sequences.
        k: Keys of all sequences, or pages of keys with block_table.
        v: Values, laid out as k.
        cu_seqlens_q: Offsets of the sequences of q. They begin with 0.
        cu_seqlens_k: Offsets of the sequences of k and v. They begin with 0.
        max_seqlen_q: The largest number of rows of a sequence.
        max_seqlen_k: The largest number of keys of a sequence.
        dropout_p, softmax_scale, causal, window_size, softcap: As in `flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs: As in `flash_attn_func`.
        block_table: The pages of each sequence: key j of sequence b is in page block_table[b, j //
            page]. Pages may have any size. Entries past a sequence's keys are never read; other
            entries out of range raise on a CPU and are clamped elsewhere. Gradients are summed over
            the sequences that share a page; flash-attn has none.
        s_aux: As in `flash_attn_func`.

    Shape:
        q: (T, H, D), float32, float64, bfloat16 or float16.
        k: (S, Hk, D), or (blocks, page, Hk, D) with block_table; q's dtype and device.
        v: (S, Hk, Dv), or (blocks, page, Hk, Dv).
        cu_seqlens_q: (B + 1,), int32 or int64.
        cu_seqlens_k: (B + 1,), int32 or int64.
        alibi_slopes: (H,) or (B, H).
        block_table: (B, pages), int32 or int64.
        s_aux: (H,).
        out: (T, H, Dv), q's dtype.
        softmax_lse: (H, T), float32 (float64 for float64).
        S_dmask: (B, H, max_seqlen_q, max_seqlen_k), q's dtype.

    Returns:
        out, or (out, softmax_lse, S_dmask) with return_attn_probs, as `flash_attn_func`.

    Raises:
        ValueError: As `flash_attn_func`, and for offsets or table entries out of range.
        TypeError, NotImplementedError: As `flash_attn_func`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn import flash_attn_func, flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 7, 4, 8)  # sequences of 3, 0 and 4 tokens
        >>> cu = torch.tensor([0, 3, 3, 7])
        >>> out = flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, causal=True)
        >>> first = flash_attn_func(q[None, :3], k[None, :3], v[None, :3], causal=True)
        >>> torch.testing.assert_close(out[:3], first[0])
    """
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux
    arguments = arguments_of(*scores, dropout_p, deterministic)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        need_integers(name, x, ("batch + 1",))
    where = cu_seqlens_k if block_table is None else (block_table, cu_seqlens_k.diff())
    max_q, max_k = whole_or_none(max_seqlen_q), whole_or_none(max_seqlen_k)
    with in_their_names(key_lengths="cu_seqlens_k"):
        results = packed(q, k, v, cu_seqlens_q, where, max_q, max_k, arguments, return_attn_probs)
    return results if return_attn_probs else results[0]


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | Results:
    """Compute `flash_attn_varlen_func` with keys and values in one tensor.

    Args:
        q: Queries of all sequences.
        kv: Keys, then values.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: As in `flash_attn_varlen_func`.
        dropout_p, softmax_scale, causal, window_size, softcap: As in `flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs, s_aux: As in `flash_attn_func`.

    Shape:
        q: (T, H, D).
        kv: (S, 2, Hk, D), q's dtype and device.
        cu_seqlens_q: (B + 1,), int32 or int64.
        cu_seqlens_k: (B + 1,), int32 or int64.
        alibi_slopes: (H,) or (B, H).
        s_aux: (H,).
        out: (T, H, D).

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: As `flash_attn_varlen_func`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func
        >>> q, kv, cu = torch.randn(7, 4, 8), torch.randn(7, 2, 2, 8), torch.tensor([0, 3, 7])
        >>> out = flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 4, 4)
        >>> expected = flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], cu, cu, 4, 4)
        >>> torch.testing.assert_close(out, expected)
    """
    need_shape("kv", kv, ("total", 2, "heads", "head_dim"))
    k, v = kv.unbind(1)
    scores = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    where = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    flags = deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, *where, *scores, *flags, s_aux=s_aux)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | Results:
    """Compute `flash_attn_varlen_func` with queries, keys and values in one tensor.

    Args:
        qkv: Queries, then keys, then values.
        cu_seqlens: Offsets of the sequences of qkv. They begin with 0.
        max_seqlen: The largest length of a sequence.
        dropout_p, softmax_scale, causal, window_size, softcap: As in `flash_attn_func`.
        alibi_slopes, deterministic, return_attn_probs, s_aux: As in `flash_attn_func`.

    Shape:
        qkv: (T, 3, H, D), float32, float64, bfloat16 or float16.
        cu_seqlens: (B + 1,), int32 or int64.
        alibi_slopes: (H,) or (B, H).
        s_aux: (H,).
        out: (T, H, D).

    Returns:
        As `flash_attn_varlen_func`.

    Raises:
        ValueError, TypeError, NotImplementedError: As `flash_attn_varlen_func`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn import flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func
        >>> qkv, cu = torch.randn(7, 3, 4, 8), torch.tensor([0, 3, 7])
        >>> out = flash_attn_varlen_qkvpacked_func(qkv, cu, 4)
        >>> expected = flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 4, 4)
        >>> torch.testing.assert_close(out, expected)
    """
    need_shape("qkv", qkv, ("total", 3, "heads", "head_dim"))
    q, k, v = qkv.unbind(1)
    scores = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    where = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    flags = deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, *where, *scores, *flags, s_aux=s_aux)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append keys and values to a cache, rotate them and q if requested, and attend q to the cache.

    There are no gradients, as in flash-attn; a tensor that requires grad raises outside
    torch.no_grad(). Rows without a key are 0, as flash-attn documents. Lengths, table entries and
    positions out of range raise ValueError on a CPU before anything is written, and are clamped
    elsewhere.

    Args:
        q: Queries.
        k_cache: The cached keys.
        v_cache: The cached values.
        k: New keys, written into k_cache in place from cache_seqlens on, before attention runs.
        v: New values, written into v_cache likewise.
        rotary_cos: Cosines that rotate the first R columns of q and k; they need k. Row j of k is
            at position cache_seqlens + j. Row i of q is at cache_seqlens + i if causal or windowed,
            else at cache_seqlens.
        rotary_sin: Sines.
        cache_seqlens: The number of keys of each item before this call. Later keys are not read.
            None is the full capacity.
        cache_batch_idx: The cache item, or with block_table its row, of each item of q.
        cache_leftpad: Where each item's keys begin.
        block_table: The pages of each sequence, as in `flash_attn_varlen_func`.
        softmax_scale, causal, window_size, softcap: As in `flash_attn_func`.
        rotary_interleaved: If True, column 2c is paired with 2c + 1, otherwise c with c + R/2.
        alibi_slopes: As in `flash_attn_func`.
        num_splits: Accepted and ignored: fastattn chooses how to split keys.
        return_softmax_lse: If True, also return softmax_lse.
        s_aux: As in `flash_attn_func`.

    Shape:
        q: (B, M, H, D), float32, float64, bfloat16 or float16.
        k_cache: (items, capacity, Hk, D), or (blocks, page, Hk, D) with block_table, of any page
            size; q's dtype and device.
        v_cache: (items, capacity, Hk, Dv), or (blocks, page, Hk, Dv).
        k: (B, n, Hk, D).
        v: (B, n, Hk, Dv).
        rotary_cos: (positions, R / 2).
        rotary_sin: (positions, R / 2).
        cache_seqlens: An int, or (B,), int32 or int64.
        cache_batch_idx: (B,), int32 or int64.
        cache_leftpad: (B,), int32 or int64.
        block_table: (B, pages), or (items, pages) with cache_batch_idx, int32 or int64.
        alibi_slopes: (H,) or (B, H).
        s_aux: (H,).
        out: (B, M, H, Dv), q's dtype.
        softmax_lse: (B, H, M), float32 (float64 for float64).

    Returns:
        out, or (out, softmax_lse) with return_softmax_lse.

    Raises:
        ValueError: As `flash_attn_func`; also for two sequences that would write to one row (only a
            CPU checks this), for arguments that exclude each other, and for one that requires grad.
        TypeError, NotImplementedError: As `flash_attn_func`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn import flash_attn_func, flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 1, 10, 4, 8)
        >>> q, k, v = torch.randn(3, 1, 6, 4, 8)
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=0, causal=True)
        >>> torch.testing.assert_close(out, flash_attn_func(q, k, v, causal=True))
        >>> bool((k_cache[:, :6] == k).all())
        True
    """
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux
    arguments = arguments_of(*scores)
    why = "flash_attn_with_kvcache has no gradients"
    need_constant(why, q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, s_aux=s_aux)
    need_shape("q", q, ("batch", "seqlen", "heads", "head_dim"))
    cache = Cache.of(k_cache, v_cache, len(q), block_table, cache_batch_idx, cache_leftpad)
    rotation = rotary_cos, rotary_sin, rotary_interleaved
    out, lse = attend_to_cache(q, k, v, cache, cache_seqlens, rotation, arguments)
    return (out, lse) if return_softmax_lse else out
