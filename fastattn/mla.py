"""Multi-head latent attention: one latent vector of each token gives the keys and values of all
heads (DeepSeek-V2, arXiv 2405.04434, section 2.1).

With c the latent vector of a token, r its rotated key, and (q, p) a head's query without and with
positions, a score is scale (q W_k c + p r), and the output is W_v (P c). The same function in two
ways:

    prefill   keys (W_k c, r) and values W_v c of each head: narrow heads, for many rows
    decode    queries (W_k^T q, p) against keys (c, r), and W_v after the sum: only the latent
              vectors are read, once for all heads, for few rows on many keys

`KVCache(batch, 1, L + R, latent=L, ...)` keeps (c, r), L + R numbers for each token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .api import attention
from .call.int4 import columns
from .kv_cache.cache import KVCache

__all__ = ["Weights", "decode", "join", "keys", "prefill", "split"]


class Weights(NamedTuple):
    """State the two parts of a `kv_b_proj`, for H heads and latent vectors of L numbers.

    Args:
        k: W_k, from a latent vector to the keys without positions.
        v: W_v, from a latent vector to the values.

    Shape:
        k: (H, Dn, L).
        v: (H, Dv, L).

    Example:
        >>> import torch
        >>> import fastattn.mla
        >>> weights = fastattn.mla.split(torch.randn(4 * (16 + 8), 32), 4, 16)
        >>> weights.v.shape
        torch.Size([4, 8, 32])
    """

    k: Tensor
    v: Tensor


def split(weight: Tensor, heads: int, head_dim: int) -> Weights:
    """Return the two parts of a `kv_b_proj`'s weight, as views of it.

    Args:
        weight: The weight of the layer without a bias that makes keys and values of each head, keys
            first.
        heads: H, the number of query heads.
        head_dim: Dn, the size of a key without positions.

    Shape:
        weight: (H (Dn + Dv), L).

    Returns:
        The parts, for `decode` and `prefill`.

    Raises:
        ValueError: The weight has no such rows.

    Example:
        >>> import torch
        >>> import fastattn.mla
        >>> layer = torch.nn.Linear(512, 16 * (128 + 96), bias=False)
        >>> weights = fastattn.mla.split(layer.weight, 16, 128)
        >>> weights.k.shape, weights.v.shape
        (torch.Size([16, 128, 512]), torch.Size([16, 96, 512]))
        >>> torch.equal(fastattn.mla.join(weights), layer.weight)
        True
    """
    rows = weight.shape[0] if weight.ndim == 2 else -1
    if heads < 1 or rows < heads * head_dim or rows % heads:
        raise ValueError(
            f"weight: got {tuple(weight.shape)}, expected (H (Dn + Dv), L) with H = {heads} and "
            f"Dn = {head_dim}"
        )
    each = weight.unflatten(0, (heads, rows // heads))
    return Weights(each[:, :head_dim], each[:, head_dim:])


def join(weights: Weights) -> Tensor:
    """Return the weight of which these are the parts: the inverse of `split`.

    Args:
        weights: Of `split`.

    Shape:
        weights: (H, Dn, L) and (H, Dv, L).

    Returns:
        The weight, (H (Dn + Dv), L).

    Example:
        >>> import torch
        >>> import fastattn.mla
        >>> weight = torch.randn(4 * (16 + 8), 32)
        >>> torch.equal(fastattn.mla.join(fastattn.mla.split(weight, 4, 16)), weight)
        True
    """
    return torch.cat(weights, 1).flatten(0, 1)


def keys(latent: Tensor, rotated: Tensor) -> Tensor:
    """Return latent vectors and rotated keys side by side.

    `decode`, `prefill` and `KVCache.append` of a cache with latent take them so.

    Args:
        latent: The latent vectors of the tokens, normalised.
        rotated: The part of the keys with positions, which all heads share.

    Shape:
        latent: (B, 1, N, L).
        rotated: (B, 1, N, R), latent's dtype.

    Returns:
        The keys, (B, 1, N, L + R).

    Example:
        >>> import torch
        >>> import fastattn.mla
        >>> fastattn.mla.keys(torch.randn(1, 1, 7, 512), torch.randn(1, 1, 7, 64)).shape
        torch.Size([1, 1, 7, 576])
    """
    return torch.cat((latent, rotated), -1)


def decode(
    q: Tensor,
    q_rotated: Tensor,
    keys: Tensor | KVCache,
    weights: Weights,
    *,
    scale: float | None = None,
    **arguments: Any,
) -> Any:
    """Compute latent attention with absorbed weights: `prefill` without keys of heads.

    The weights are applied to queries and to outputs, so that all heads read the same keys, those
    of the latent vectors. It takes 2 (L + R + L) operations for a score of a head where `prefill`
    takes 2 (Dn + R + Dv), and no expansion of the keys: few rows on many keys are faster. Kernels
    of CPUs have such head dims, up to 1024; on a GPU Triton's have D to 576 and Dv to 512 without
    gradients.

    Args:
        q: Queries without positions.
        q_rotated: Queries with positions.
        keys: Latent vectors and rotated keys (see `keys`), or a cache of them, which is causal by
            default and has no gradient.
        weights: Of `split`.
        scale: The factor of the scores. Default: 1 / sqrt(Dn + R), as in `prefill`.
        **arguments: Those of `fastattn.attention`, or of `KVCache.attention` for a cache.

    Shape:
        q: (B, H, M, Dn).
        q_rotated: (B, H, M, R).
        keys: (B, 1, N, L + R), q's dtype.
        out: (B, H, M, Dv).
        lse: (B, H, M), with return_lse.

    Returns:
        out, or (out, lse) with return_lse. Its error is that of q's dtype, with two more roundings
        to it: of the absorbed queries, and of the outputs before W_v.

    Raises:
        ValueError: Shapes do not fit.

    Example:
        >>> import torch
        >>> import fastattn.mla
        >>> weights = fastattn.mla.split(torch.randn(4 * (16 + 8), 32) / 6, 4, 16)
        >>> latent, rotated = torch.randn(1, 1, 50, 32), torch.randn(1, 1, 50, 8)
        >>> both = fastattn.mla.keys(latent, rotated)
        >>> q, p = torch.randn(1, 4, 50, 16), torch.randn(1, 4, 50, 8)
        >>> whole = fastattn.mla.prefill(q, p, both, weights, causal=True)
        >>> cache = fastattn.KVCache(1, 1, 40, latent=32, capacity=64)
        >>> cache.append(both)
        >>> last = fastattn.mla.decode(q[:, :, -1:], p[:, :, -1:], cache, weights)
        >>> torch.testing.assert_close(last, whole[:, :, -1:], rtol=1e-4, atol=1e-4)
    """
    latent = _checked(q, q_rotated, keys, weights)
    queries = absorbed(q, q_rotated, weights)
    scale = _scale(q, q_rotated) if scale is None else scale
    if isinstance(keys, KVCache):
        results = keys.attention(queries, scale=scale, **arguments)
    else:
        results = attention(queries, keys, keys[..., :latent], scale=scale, **arguments)
    out, *lse = results if isinstance(results, tuple) else (results,)
    out = outputs(out, weights)
    return (out, *lse) if lse else out


def prefill(
    q: Tensor,
    q_rotated: Tensor,
    keys: Tensor,
    weights: Weights,
    *,
    scale: float | None = None,
    **arguments: Any,
) -> Any:
    """Compute latent attention with the keys and values of each head, which it makes.

    It is the same function as `decode`, and faster where rows are many.

    Args:
        q: Queries without positions.
        q_rotated: Queries with positions.
        keys: Latent vectors and rotated keys (see `keys`).
        weights: Of `split`.
        scale: The factor of the scores. Default: 1 / sqrt(Dn + R).
        **arguments: Those of `fastattn.attention`.

    Shape:
        q: (B, H, M, Dn).
        q_rotated: (B, H, M, R).
        keys: (B, 1, N, L + R), q's dtype.
        out: (B, H, M, Dv).
        lse: (B, H, M), with return_lse.

    Returns:
        out, or (out, lse) with return_lse.

    Raises:
        TypeError: keys is a cache.
        ValueError: Shapes do not fit.

    Example:
        >>> import torch
        >>> import fastattn.mla
        >>> weights = fastattn.mla.split(torch.randn(4 * (16 + 8), 32), 4, 16)
        >>> both = fastattn.mla.keys(torch.randn(1, 1, 50, 32), torch.randn(1, 1, 50, 8))
        >>> q, p = torch.randn(1, 4, 50, 16), torch.randn(1, 4, 50, 8)
        >>> fastattn.mla.prefill(q, p, both, weights, causal=True).shape
        torch.Size([1, 4, 50, 8])
    """
    if isinstance(keys, KVCache):
        raise TypeError(
            "keys: got a KVCache, expected a tensor: give a prompt's keys, or use decode"
        )
    latent = _checked(q, q_rotated, keys, weights)
    vectors, rotated = keys[..., :latent], keys[..., latent:]
    k = vectors @ weights.k.to(keys.dtype).mT
    k = torch.cat((k, rotated.expand(*k.shape[:-1], -1)), -1)
    v = vectors @ weights.v.to(keys.dtype).mT
    scale = _scale(q, q_rotated) if scale is None else scale
    return attention(torch.cat((q, q_rotated), -1), k, v, scale=scale, **arguments)


def absorbed(q: Tensor, q_rotated: Tensor, weights: Weights) -> Tensor:
    """Queries (B, H, M, L + R) against keys that are latent vectors."""
    return torch.cat((q @ weights.k.to(q.dtype), q_rotated), -1)


def outputs(out: Tensor, weights: Weights) -> Tensor:
    """Outputs (B, H, M, Dv) of sums of latent vectors (B, H, M, L)."""
    return out @ weights.v.to(out.dtype).mT


def _scale(q: Tensor, q_rotated: Tensor) -> float:
    return (q.shape[-1] + q_rotated.shape[-1]) ** -0.5


def _checked(q: Tensor, q_rotated: Tensor, keys: Tensor | KVCache, weights: Weights) -> int:
    """L, the size of a latent vector, after a look at the shapes."""
    heads, head_dim, latent = weights.k.shape
    for name, x, dim in (("q", q, head_dim), ("q_rotated", q_rotated, None)):
        if x.ndim != 4 or x.shape[1] != heads or dim not in (None, x.shape[3]):
            expected = f"(B, H, M, {dim or 'R'}) with H = {heads}, as the weights have"
            raise ValueError(f"{name}: got {tuple(x.shape)}, expected {expected}")
    if q_rotated.shape[:3] != q.shape[:3]:
        got, expected = tuple(q_rotated.shape), (*q.shape[:3], "R")
        raise ValueError(f"q_rotated: got {got}, expected {expected}, as q has")
    wide = latent + q_rotated.shape[3]
    if isinstance(keys, KVCache):
        sizes = keys.k_pages.shape[2], columns(keys.k_pages), columns(keys.v_pages)
        if sizes != (1, wide, latent):
            raise ValueError(
                f"keys: got {keys}, expected KVCache(batch, 1, {wide}, latent={latent}, ...)"
            )
    elif keys.ndim != 4 or keys.shape[1] != 1 or keys.shape[3] != wide:
        raise ValueError(
            f"keys: got {tuple(keys.shape)}, expected (B, 1, N, L + R) with L = {latent} and "
            f"R = {q_rotated.shape[3]}"
        )
    return latent
