"""flash-attn 2.8's functions, with its names, argument order and defaults.

The last row is aligned with the last key: row i of M is at position i' = i + N - M among N keys.
Arguments that all functions share:

dropout_p: of the probabilities. Draws are fastattn's, not flash-attn's.
softmax_scale: of q k^T; None is 1 / sqrt(D).
causal: row i sees keys to i'. Rows with i' < 0 are empty: output 0, LSE -inf.
window_size: (left, right), row i sees keys from i' - left to i' + right; below 0 is no limit.
softcap: replaces a score s by softcap tanh(s / softcap); 0.0 is off.
alibi_slopes: (H,) or (B,H); subtracts slope |i' - j|.
deterministic: accepted; results are always deterministic.
return_attn_probs: return (out, softmax_lse, S_dmask). softmax_lse is the natural log of the
    denominator, float32 (float64 for float64), with a gradient. S_dmask is None without dropout;
    with dropout it is the probabilities (B,H,M,N) before dropout, negative where dropped.
s_aux: (H,), keyword only, not in flash-attn: one more logit in each row's denominator; has a
    gradient.

Tensors are float32, float64, bfloat16 or float16, on any device, with any strides, and with D up
to the limits of `fastattn.attention`. Hk divides H, and v may have another head dim. Errors are
those of `fastattn.attention`: a ValueError or TypeError that names the argument.
"""

from __future__ import annotations

from torch import Tensor

from .caching import Cache, attend
from .checks import in_their_names, need_integers, need_shape
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
    """q (B,M,H,D), k (B,N,Hk,D), v (B,N,Hk,Dv): out (B,M,H,Dv), and if asked the LSE (B,H,M) and
    S_dmask. The module's docstring explains the other arguments."""
    arguments = arguments_of(
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
    )
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
    """`flash_attn_func` with kv (B,N,2,Hk,D)."""
    need_shape("kv", kv, ("batch", "seqlen", 2, "heads", "head_dim"))
    k, v = kv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
    )


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
    """`flash_attn_func` with qkv (B,M,3,H,D)."""
    need_shape("qkv", qkv, ("batch", "seqlen", 3, "heads", "head_dim"))
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
    )


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
    """q (T,H,D), k (S,Hk,D), v (S,Hk,Dv), sequence after sequence. Sequences of q end at
    cu_seqlens_q[1:], those of k and v at cu_seqlens_k[1:]; both are (B+1,) int32 or int64 and begin
    with 0. Returns out (T,H,Dv), and if asked the LSE (H,T) and S_dmask
    (B,H,max_seqlen_q,max_seqlen_k).

    block_table (B,pages) int32 or int64: k is (blocks,page,Hk,D), v (blocks,page,Hk,Dv), with any
    page size, and key j of sequence b is in block block_table[b, j // page]. Entries past a
    sequence's keys are never read; other entries out of range raise on a CPU and are clamped
    elsewhere. With a block_table there are no gradients, as in flash-attn.
    """
    arguments = arguments_of(
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
    )
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        need_integers(name, x, ("batch + 1",))
    where = cu_seqlens_k if block_table is None else (block_table, cu_seqlens_k.diff())
    max_q, max_k = (
        int(x.item()) if isinstance(x, Tensor) else x for x in (max_seqlen_q, max_seqlen_k)
    )
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
    """`flash_attn_varlen_func` with kv (S,2,Hk,D)."""
    need_shape("kv", kv, ("total", 2, "heads", "head_dim"))
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
    )


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
    """`flash_attn_varlen_func` with qkv (T,3,H,D)."""
    need_shape("qkv", qkv, ("total", 3, "heads", "head_dim"))
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        s_aux=s_aux,
    )


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
    """Attend q (B,M,H,D) to a cache: k_cache (items,capacity,Hk,D), v_cache (items,capacity,Hk,Dv),
    or with block_table (B,pages) both (blocks,page,Hk,...), of any page size. Returns out
    (B,M,H,Dv), and if asked the LSE (B,H,M). No gradients, as in flash-attn.

    cache_seqlens: the number of keys in each item, an int or (B,) int32 or int64; None: the full
        capacity. Keys past it are not read.
    k, v: (B,n,Hk,D) and (B,n,Hk,Dv), written into the cache in place from cache_seqlens on, before
        attention runs.
    rotary_cos, rotary_sin: (positions, R/2), rotate the first R columns of q and k; they need k.
        Row j of k is at cache_seqlens + j. Row i of q is at cache_seqlens + i if causal or
        windowed, else at cache_seqlens. rotary_interleaved pairs column 2c with 2c + 1, otherwise
        c pairs with c + R/2.
    cache_batch_idx: (B,), the cache item of each item of q; not with block_table.
    cache_leftpad: (B,), where each item's keys begin; not with block_table, as in flash-attn.
    num_splits: accepted and ignored; fastattn chooses how to split keys.

    Lengths, entries and positions out of range raise ValueError on a CPU, before anything is
    written, and are clamped elsewhere. The module's docstring explains the other arguments.
    """
    arguments = arguments_of(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        s_aux=s_aux,
    )
    need_shape("q", q, ("batch", "seqlen", "heads", "head_dim"))
    cache = Cache.of(k_cache, v_cache, len(q), block_table, cache_batch_idx, cache_leftpad)
    rotation = rotary_cos, rotary_sin, rotary_interleaved
    out, lse = attend(q, k, v, cache, cache_seqlens, rotation, arguments)
    return (out, lse) if return_softmax_lse else out
