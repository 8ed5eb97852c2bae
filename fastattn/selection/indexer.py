"""DeepSeek-V3.2's lightning indexer: the keys with the highest scores of each row."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..backends.native import libraries
from ..backends.native.libraries import DTYPE, TENSOR, get_num_threads
from ..call.need import alignment, flag, whole
from ..call.spec import acc_dtype
from ..namespace import add_op_namespace_prefix
from .highest import highest
from .seen import (
    check_lengths,
    need_device,
    need_lengths,
    need_like,
    need_shape,
    need_tensor,
    seen_keys,
)
from .vmap_rule import fold_into_items

ROOM = 1 << 22  # products at a time
_REST = struct.Struct("=QQ9q")  # of FaIndexer, after its tensors


@overload
def lightning_index(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    count: int,
    *,
    causal: bool | Literal["top_left", "bottom_right"] = False,
    key_lengths: Tensor | None = None,
    return_scores: Literal[False] = False,
) -> Tensor: ...
@overload
def lightning_index(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    count: int,
    *,
    causal: bool | Literal["top_left", "bottom_right"] = False,
    key_lengths: Tensor | None = None,
    return_scores: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def lightning_index(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    count: int,
    *,
    causal: bool | Literal["top_left", "bottom_right"] = False,
    key_lengths: Tensor | None = None,
    return_scores: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def lightning_index(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    count: int,
    *,
    causal: bool | Literal["top_left", "bottom_right"] = False,
    key_lengths: Tensor | None = None,
    return_scores: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Choose the keys of each row with the highest scores of DeepSeek-V3.2's indexer.

    The score of row i and key j is sum_h weights[h, i] relu(q[h, i] . k[j]) (DeepSeek-V3.2-Exp
    report, equation 1). A scale of the products is a factor of the weights. Scores are computed for
    a few rows at a time and are not stored: memory is in proportion to M count, not M N. On a CPU
    one kernel computes and chooses, except in float64; elsewhere torch's operations do.

    The choice has no gradient. The scores of the chosen keys have: return_scores gives these, for
    the indexer's loss.

    Args:
        q: The indexer's queries.
        k: The indexer's keys, one for all heads.
        weights: The weight of each head and row.
        count: The number of keys to choose for each row.
        causal: As in `attention`: keys after a row are not chosen.
        key_lengths: As in `attention`: keys at or past it are not chosen.
        return_scores: If True, also return the scores of the chosen keys, with gradients for q, k
            and weights.

    Shape:
        q: (B, H, M, D), float32, float64, bfloat16 or float16.
        k: (B, N, D) or (B, 1, N, D), q's dtype and device.
        weights: (B, H, M), any floating dtype; computed in float32 (float64 for float64).
        count: 0 or more.
        key_lengths: (B,), int32 or int64.
        indices: (B, 1, M, count), int32.
        scores: (B, 1, M, count), float32 (float64 for float64).

    Returns:
        indices, for `attention_selected`: ascending, then -1 for each key that is missing; or
        (indices, scores), with -inf where an index is -1. Of equal scores the first keys are
        chosen. NaN counts as the lowest score.

    Raises:
        ValueError: An argument has a value, shape, dtype or device that breaks these rules.
        TypeError: An argument has a wrong type.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k, weights = torch.randn(1, 4, 64, 16), torch.randn(1, 64, 16), torch.rand(1, 4, 64)
        >>> chosen = fastattn.lightning_index(q, k, weights, 8, causal=True)
        >>> chosen.shape
        torch.Size([1, 1, 64, 8])
        >>> chosen[0, 0, 2]
        tensor([ 0,  1,  2, -1, -1, -1, -1, -1], dtype=torch.int32)
    """
    flag("return_scores", return_scores)
    if isinstance(k, Tensor) and k.ndim == 4 and k.shape[1] == 1:
        k = k.squeeze(1)
    align = _check(q, k, weights, count, causal, key_lengths)
    indices = _choose(q.detach(), k.detach(), weights.detach(), count, key_lengths, align)
    if not return_scores:
        return indices
    return indices, _scores(q, k, weights, indices[:, 0]).unsqueeze(1)


def _check(q: Any, k: Any, weights: Any, count: Any, causal: Any, key_lengths: Any) -> str:
    need_tensor("q", q, "B H M D")
    need_tensor("k", k, "B N D")
    need_tensor("weights", weights, "B H M")
    B, H, M, D = q.shape
    if q.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        expected = "float32, float64, bfloat16 or float16"
        raise ValueError(f"q.dtype: got {q.dtype}, expected {expected}")
    need_shape("k", k, (B, k.shape[1], D))
    need_like("k", k, q)
    need_shape("weights", weights, (B, H, M))
    need_device("weights", weights, q)
    if whole("count", count, "a whole number") < 0:
        raise ValueError(f"count: got {count}, expected 0 or more")
    need_lengths(key_lengths, B, q)
    return alignment(causal)


@torch.library.custom_op(add_op_namespace_prefix("lightning_index"), mutates_args=())
def _choose(
    q: Tensor, k: Tensor, weights: Tensor, count: int, lengths: Tensor | None, causal: str
) -> Tensor:
    B, _, M, _ = q.shape
    N = k.shape[1]
    check_lengths(lengths, N, q.device)
    on_cpu = q.device.type == "cpu" and libraries.cpu_unavailable() is None
    fits = q.shape[3] <= libraries.CPU_MAX_HEAD_DIM and q.numel() and N
    if on_cpu and fits and q.dtype != torch.float64:
        return _by_kernel(q, k, weights, count, lengths, causal)
    seen = seen_keys(B, M, N, lengths, causal, q.device)
    indices = torch.full((B, 1, M, count), -1, dtype=torch.int32, device=q.device)
    exact = acc_dtype(q.dtype)
    rows = max(1, ROOM // max(1, q.shape[1] * N))
    for b in range(B):
        for i in range(0, M, rows):
            here = slice(i, i + rows)
            products = torch.relu(q[b, :, here].to(exact) @ k[b].to(exact).mT)
            scores = (products * weights[b, :, here, None].to(exact)).sum(0)
            hidden = torch.arange(N, device=q.device) >= seen[b, here, None]
            indices[b, 0, here] = highest(
                _lowest_nan(scores).masked_fill(hidden, -torch.inf), count
            )
    return indices


@_choose.register_fake
def _(q, k, weights, count, lengths, causal):
    return q.new_empty((q.shape[0], 1, q.shape[2], count), dtype=torch.int32)


def _lowest_nan(scores: Tensor) -> Tensor:
    """NaN as the least finite number: such a key is chosen if no other is left."""
    least = torch.finfo(scores.dtype).min
    return scores.nan_to_num(nan=least, posinf=torch.inf, neginf=least)


def _by_kernel(
    q: Tensor, k: Tensor, weights: Tensor, count: int, lengths: Tensor | None, causal: str
) -> Tensor:
    (B, H, M, D), N = q.shape, k.shape[1]
    indices = torch.empty((B, 1, M, count), dtype=torch.int32)
    weights = weights.float()
    lengths = None if lengths is None else lengths.to(torch.int64).contiguous()
    tensors = q, k[:, None], weights[..., None]
    packed = b"".join(TENSOR.pack(x.data_ptr(), *x.stride(), DTYPE[x.dtype]) for x in tensors)
    at = 0 if lengths is None else lengths.data_ptr()
    sizes = B, H, M, N, D, count
    flags = bool(causal), causal == "bottom_right", get_num_threads()
    packed += _REST.pack(at, indices.data_ptr(), *sizes, *flags)
    if indices.numel() and libraries.cpu().index(packed) != libraries.OK:
        raise MemoryError("the CPU kernels could not allocate their scratch memory")
    return indices


# ------------------------------------------------- the scores of the chosen keys, with gradients


def _parts(q: Tensor, indices: Tensor) -> Iterator[tuple[int, slice]]:
    """Items and ranges of rows that have so few chosen keys that they can be gathered."""
    B, H, M, D = q.shape
    rows = max(1, ROOM // max(1, indices.shape[2] * (H + D)))
    return ((b, slice(i, i + rows)) for b in range(B) for i in range(0, M, rows))


def _products(q: Tensor, k: Tensor, indices: Tensor, b: int, here: slice) -> tuple[Tensor, ...]:
    """The queries (rows,H,D), the gathered keys (rows,count,D), their products (rows,H,count)."""
    exact = acc_dtype(q.dtype)
    rows = q[b, :, here].transpose(0, 1).to(exact)
    keys = k[b].to(exact)[indices[b, here].clamp(min=0).long()]
    return rows, keys, rows @ keys.mT


@torch.library.custom_op(add_op_namespace_prefix("lightning_scores"), mutates_args=())
def _scores(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """(B,M,count): the scores of these keys, -inf for -1."""
    exact = acc_dtype(q.dtype)
    scores = torch.full(indices.shape, -torch.inf, dtype=exact, device=q.device)
    if k.shape[1] == 0:
        return scores
    for b, here in _parts(q, indices):
        _, _, s = _products(q, k, indices, b, here)
        w = weights[b, :, here].to(exact).mT
        sums = (torch.relu(s) * w[..., None]).sum(1)
        scores[b, here] = sums.masked_fill(indices[b, here] < 0, -torch.inf)
    return scores


@_scores.register_fake
def _(q, k, weights, indices):
    return q.new_empty(indices.shape, dtype=acc_dtype(q.dtype))


@torch.library.custom_op(add_op_namespace_prefix("lightning_scores_backward"), mutates_args=())
def _scores_backward(
    grad: Tensor, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    exact = acc_dtype(q.dtype)
    dq, dk, dw = (torch.zeros_like(x, dtype=exact) for x in (q, k, weights))
    for b, here in _parts(q, indices) if k.shape[1] else ():
        rows, keys, s = _products(q, k, indices, b, here)
        g = grad[b, here].masked_fill(indices[b, here] < 0, 0)[:, None]
        w = weights[b, :, here].to(exact).mT[..., None]
        ds = g * w * (s > 0)
        dq[b, :, here] = (ds @ keys).transpose(0, 1)
        of_keys = (ds.mT @ rows).flatten(0, 1)
        dk[b].index_add_(0, indices[b, here].clamp(min=0).flatten(), of_keys)
        dw[b, :, here] = (g * torch.relu(s)).sum(2).mT
    return dq.to(q.dtype), dk.to(k.dtype), dw.to(weights.dtype)


@_scores_backward.register_fake
def _(grad, q, k, weights, indices):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(weights)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return *_scores_backward(grad, *ctx.saved_tensors), None


_scores.register_autograd(_backward, setup_context=_save)
for operator in (_choose, _scores, _scores_backward):
    fold_into_items(operator)
