"""FlashAttention-4's functions (`flash_attn.cute`), with its names, argument order and defaults.

`flash_attn_func` documents the arguments that the functions share. Tensors are float32, float64,
bfloat16 or float16, on any device, with any strides. Arguments that tune FlashAttention's kernels
are accepted, and a warning says once that they have no effect.

A score_mod or mask_mod is a Python function of numbers, as of `fastattn.attention`, with
FlashAttention-4's arguments. One that is written in CuTe's language calls that language's
operations, which there are none of here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api import prepare_packed
from ..call.quantisation import STORAGE
from ..call.qv import joined
from ..call.spec import MaskMod, ScoreMod
from ..selection.attend import attention_selected
from .checks import in_their_names, need_integers, need_shape, whole_or_none
from .cute_blocks import BlockSparseTensorsTorch, with_blocks
from .flash_attn_3 import flash_attn_combine as combine_of_3
from .flash_attn_3 import get_scheduler_metadata
from .sequences import (
    Count,
    Functions,
    Keys,
    Rows,
    Tokens,
    attend,
    each,
    need_queries,
    say_once,
)
from .translation import Arguments, arguments_of

__all__ = [
    "BlockSparseTensorsTorch",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
]

OF_SHARED_KEYS = 512  # columns of keys that are the values, which FlashAttention-4 takes for qv's
NO_WINDOW = (-1, -1)  # of FlashAttention-2 and -3
Window = tuple[int | None, int | None]
Outputs = tuple[Tensor, Tensor | None]


class SeqlenInfo(NamedTuple):
    """What FlashAttention-4's functions may ask of a row's sequence."""

    seqlen_q: Any
    seqlen_k: Any
    offset_q: Any
    offset_k: Any


def flash_attn_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    aux_scalars: Sequence[Any] | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    block_sparse_tensors_bwd: BlockSparseTensorsTorch | None = None,
    return_lse: bool = False,
) -> Outputs:
    """Compute attention of sequences of equal lengths, as FlashAttention-4.

    Row i of M is at position i' = i + N - M among N keys.

    Args:
        q: Queries. None with k None: scores are those of qv alone.
        k: Keys.
        v: Values.
        qv: More queries, of the values: scores are q k^T + qv v^T.
        gather_kv_indices: The keys of each row, in any order; one that is listed twice counts once.
            Numbers below 0, or past the last key, are none.
        softmax_scale: The factor of scores; None is 1 / sqrt(D), with qv 1 / sqrt(D + Dv).
        causal: If True, row i attends to keys 0 to i'.
        window_size: (left, right): row i attends to keys from i' - left to i' + right. None is no
            limit. Numbers may be below 0, but not both edges such that no key is between;
            (-1, -1) is no window.
        learnable_sink: One more logit in each row's denominator, for each head, with a gradient.
        softcap: Replace a score s by softcap tanh(s / softcap). 0.0 is off. Not with score_mod.
        num_splits, pack_gqa: They have no effect.
        deterministic: As in `fastattn.flash_attn.flash_attn_func`.
        score_mod: (score, b, h, q_idx=, kv_idx=, seqlen_info=, aux_tensors=) to the score.
            seqlen_info has seqlen_q, seqlen_k, offset_q and offset_k. Its gradient is derived.
        score_mod_bwd: It has no effect: the gradient of score_mod is derived.
        mask_mod: (b, h, q_idx, kv_idx, seqlen_info, aux_tensors) to whether the key is seen. Not
            with causal or a window, which FlashAttention-4 would ignore.
        aux_tensors: What score_mod and mask_mod get.
        aux_scalars: If not None, what they get as another argument.
        block_sparse_tensors: The blocks of keys that each block of rows sees.
        block_sparse_tensors_bwd: It has no effect: gradients are those of what forward shows.
        return_lse: If True, also return the LSE.

    Shape:
        q: (B, M, H, D).
        k: (B, N, Hk, D), q's dtype and device. Hk divides H.
        v: (B, N, Hk, Dv), q's dtype and device.
        qv: (B, M, H, Dv), q's dtype.
        gather_kv_indices: (B, M, n), int32 or int64.
        learnable_sink: (H,).
        out: (B, M, H, Dv), q's dtype.
        lse: (B, H, M), or (B, M, H) with qv, or if k is v with 512 columns; float32 (float64 for
            float64).

    Returns:
        (out, lse). lse is None without return_lse, unless a tensor requires grad.

    Raises:
        ValueError: As `fastattn.attention`, with FlashAttention's names; or arguments that exclude
            each other.
        TypeError, NotImplementedError: As `fastattn.attention`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.cute import flash_attn_func
        >>> q, k, v = torch.randn(3, 1, 8, 4, 16)
        >>> bias = torch.randn(4)
        >>> def score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        ...     return score + aux_tensors[0][h] * (q_idx - kv_idx)
        >>> out, lse = flash_attn_func(q, k, v, score_mod=score_mod, aux_tensors=[bias])
        >>> out.shape
        torch.Size([1, 8, 4, 16])
    """
    _say(num_splits, pack_gqa, score_mod_bwd, block_sparse_tensors_bwd)
    seqlen = seqlens_of(None, None)
    mods = _Mods(score_mod, mask_mod, aux_tensors, aux_scalars, seqlen)
    arguments, functions = _translated(
        softmax_scale, causal, window_size, learnable_sink, softcap, deterministic, mods
    )
    latent = qv is not None or (k is v and v.shape[-1] == OF_SHARED_KEYS)
    q, k, qv = _with_queries(q, k, v, qv)
    if block_sparse_tensors is not None:
        need_shape("q", q, ("batch", "seqlen", "heads", "head_dim"))
        functions = with_blocks(functions, block_sparse_tensors, q, k.shape[1])
    if gather_kv_indices is not None:
        _need_alone(functions, arguments)
        out, lse = _gathered(q, k, v, qv, gather_kv_indices, arguments)
    else:
        out, lse = attend(q, k, v, arguments, functions, qv=qv)
    return_lse = return_lse or _need_grad(q, k, v, qv, learnable_sink)
    return _results(out, lse, latent, return_lse)


def flash_attn_varlen_func(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: BlockSparseTensorsTorch | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    aux_scalars: Sequence[Any] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> Outputs:
    """Compute attention of sequences of different lengths: packed, padded, or with keys in pages.

    Args:
        q: Queries: packed with cu_seqlens_q, else padded.
        k: Keys: packed with cu_seqlens_k, in pages with page_table, else padded.
        v: Values, laid out as k.
        qv: As in `flash_attn_func`.
        cu_seqlens_q: Offsets of the sequences of q.
        cu_seqlens_k: Offsets of the sequences of k and v.
        max_seqlen_q: The largest number of rows of a sequence.
        max_seqlen_k: The largest number of keys of a sequence.
        min_seqlen_k: It has no effect.
        seqused_q: The number of rows of each sequence that are used. The others are empty rows.
        seqused_k: The number of keys of each sequence that are used.
        gather_kv_indices: As in `flash_attn_func`; with page_table, where a page is at most once in
            a sequence's table.
        page_table: The pages of each sequence. Without seqused_k all of their keys are used.
        softmax_scale, causal, window_size, learnable_sink, softcap: As in `flash_attn_func`.
        num_splits, pack_gqa, deterministic: As in `flash_attn_func`.
        score_mod, score_mod_bwd, mask_mod: As in `flash_attn_func`.
        block_sparse_tensors: As in `flash_attn_func`; with cu_seqlens_q those of packed rows.
        aux_tensors, aux_scalars, return_lse: As in `flash_attn_func`.
        scheduler_metadata, seqlen_k_per_split, disable_scheduler_metadata: They have no effect.

    Shape:
        q: (T, H, D) or (B, M, H, D).
        k: (S, Hk, D), (B, N, Hk, D) or (P, page, Hk, D).
        v: (S, Hk, Dv), (B, N, Hk, Dv) or (P, page, Hk, Dv).
        qv: (T, H, Dv) or (B, M, H, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32 or int64.
        seqused_q, seqused_k: (B,), int32 or int64.
        gather_kv_indices: (T, n) or (B, M, n); places in the row's sequence.
        page_table: (B, pages), int32 or int64.
        learnable_sink: (H,).
        out: (T, H, Dv) or (B, M, H, Dv).
        lse: (H, T) or (B, H, M); with qv (T, H) or (B, M, H).

    Returns:
        As `flash_attn_func`.

    Raises:
        ValueError: As `flash_attn_func`, and for offsets, lengths or pages out of range.
        TypeError, NotImplementedError: As `flash_attn_func`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.cute import flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 7, 4, 8)
        >>> cu = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> out, _ = flash_attn_varlen_func(q, k, v, None, cu, cu, causal=True)
        >>> out.shape
        torch.Size([7, 4, 8])
    """
    _say(num_splits, pack_gqa, score_mod_bwd, None)
    say_once(scheduler_metadata=scheduler_metadata, seqlen_k_per_split=seqlen_k_per_split)
    seqlen = seqlens_of(cu_seqlens_q, cu_seqlens_k)
    mods = _Mods(score_mod, mask_mod, aux_tensors, aux_scalars, seqlen)
    arguments, functions = _translated(
        softmax_scale, causal, window_size, learnable_sink, softcap, deterministic, mods
    )
    latent = qv is not None or (k is v and v.shape[-1] == OF_SHARED_KEYS)
    q, k, qv = _with_queries(q, k, v, qv)
    where: dict[str, Any] = dict(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        page_table=page_table,
    )
    if block_sparse_tensors is not None:
        need_queries(q, qv, cu_seqlens_q)
        longest = k.shape[1] if k.ndim > 3 else whole_or_none(max_seqlen_k) or len(k)
        if page_table is not None:
            longest *= page_table.shape[-1]
        differ = cu_seqlens_k is not None or seqused_k is not None
        given = q, longest, cu_seqlens_q, differ
        functions = with_blocks(functions, block_sparse_tensors, *given)
    if gather_kv_indices is not None:
        _need_alone(functions, arguments)
        out, lse = _gathered(q, k, v, qv, gather_kv_indices, arguments, **where)
    else:
        out, lse = attend(q, k, v, arguments, functions, qv=qv, **where)
    return_lse = return_lse or _need_grad(q, k, v, qv, learnable_sink)
    return _results(out, lse, latent, return_lse)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> Outputs:
    """Combine attention over parts of the keys, as `fastattn.merge`.

    Args:
        out_partial, lse_partial, out, out_dtype: As in
            `fastattn.flash_attn.flash_attn_3.flash_attn_combine`.
        cu_seqlens, seqused, virtual_batch_idx: They have no effect: all rows are combined.
        return_lse: If True, also return the LSE.

    Shape:
        out_partial: (parts, B, M, H, Dv), or (parts, T, H, Dv).
        lse_partial: (parts, B, M, H), or (parts, T, H), float32 (float64 for float64).
        out: (B, M, H, Dv), or (T, H, Dv).
        cu_seqlens: (B + 1,).
        seqused: (B,).
        virtual_batch_idx: (B,).
        lse: (B, M, H), or (T, H).

    Returns:
        (out, lse). lse is None without return_lse.

    Raises:
        ValueError: Shapes or dtypes differ.
        TypeError: An argument is no tensor.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.cute import flash_attn_combine
        >>> out, lse = flash_attn_combine(torch.randn(3, 5, 4, 8), torch.randn(3, 5, 4))
        >>> out.shape, lse.shape
        (torch.Size([5, 4, 8]), torch.Size([5, 4]))
    """
    merged, lse = combine_of_3(out_partial, lse_partial, out, out_dtype)
    return merged, lse if return_lse else None


def _say(num_splits: int, pack_gqa: bool | None, score_mod_bwd: Any, blocks_bwd: Any) -> None:
    say_once(num_splits=None if num_splits == 1 else num_splits, pack_gqa=pack_gqa)
    say_once(score_mod_bwd=score_mod_bwd, block_sparse_tensors_bwd=blocks_bwd)


def _need_grad(*given: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in given)


def _results(out: Tensor, lse: Tensor, latent: bool, return_lse: bool) -> Outputs:
    if not return_lse:
        return out, None
    return out, lse.transpose(-1, -2) if latent else lse


def _with_queries(
    q: Tensor | None, k: Tensor | None, v: Tensor, qv: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, k and qv; of qv alone, as the queries of keys that are the values."""
    if q is not None and k is not None:
        return q, k, qv
    if q is not None or k is not None or qv is None:
        names = [name for name, x in (("q", q), ("k", k), ("qv", qv)) if x is None]
        raise ValueError(f"{names[0]}: got None, expected q and k, or qv and v alone")
    return qv, v, None


def _translated(
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    learnable_sink: Tensor | None,
    softcap: float,
    deterministic: bool,
    mods: _Mods,
) -> tuple[Arguments, Functions]:
    window = _window(window_size, causal)
    below = window is not None and any(x is not None and x < 0 for x in window)
    if mods.mask_mod is not None and (causal or window is not None):
        name, got = ("causal", causal) if causal else ("window_size", window_size)
        raise ValueError(
            f"{name}: got {got} beside mask_mod, expected one of them: FlashAttention-4 ignores "
            f"{name} there; write it in the mask_mod"
        )
    if mods.score_mod is not None and softcap:
        raise ValueError(
            f"softcap: got {softcap} beside score_mod, expected one of them: write it in score_mod"
        )
    arguments = arguments_of(
        softmax_scale, causal, NO_WINDOW, softcap, None, learnable_sink, deterministic=deterministic
    )
    arguments["window"] = None if below else window
    functions = Functions(
        band=window if below else None,
        score_mod=None if mods.score_mod is None else mods.of_scores,
        mask_mod=None if mods.mask_mod is None else mods.of_masks,
    )
    return arguments, functions


def _window(window_size: Any, causal: bool) -> Window | None:
    edges = tuple(window_size) if isinstance(window_size, Iterable) else ()
    if len(edges) != 2 or not all(x is None or type(x) is int for x in edges):
        raise ValueError(f"window_size: got {window_size!r}, expected a pair of ints or None")
    left, right = edges
    if edges in ((None, None), NO_WINDOW) or (causal and edges == (-1, 0)):
        return None
    end = 0 if causal else right
    if left is not None and end is not None and left + end < 0:
        raise ValueError(
            f"window_size: got {window_size} with causal={causal}, expected edges with a key "
            "between: FlashAttention-4 takes these for no window; (None, None) is none"
        )
    return left, end


class _Mods(NamedTuple):
    """FlashAttention-4's functions as those of `fastattn.attention`."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    aux_tensors: Sequence[Tensor] | None
    aux_scalars: Sequence[Any] | None
    seqlen: Callable[[Count, Count, Any], SeqlenInfo]

    def of_scores(self, rows: Count, keys: Count) -> ScoreMod:
        theirs, seqlen = self.score_mod, self.seqlen
        assert theirs is not None
        aux: dict[str, Any] = dict(aux_tensors=() if self.aux_tensors is None else self.aux_tensors)
        if self.aux_scalars:
            aux["aux_scalars"] = tuple(self.aux_scalars)

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            info = seqlen(rows, keys, b)
            return theirs(score, b, h, q_idx=i, kv_idx=j, seqlen_info=info, **aux)

        return score_mod

    def of_masks(self, rows: Count, keys: Count) -> MaskMod:
        theirs, seqlen = self.mask_mod, self.seqlen
        assert theirs is not None
        aux: tuple[Any, ...] = (self.aux_tensors,)
        if self.aux_scalars:
            aux += (tuple(self.aux_scalars),)
        return lambda b, h, i, j: theirs(b, h, i, j, seqlen(rows, keys, b), *aux)


def seqlens_of(
    cu_q: Tensor | None, cu_k: Tensor | None
) -> Callable[[Count, Count, Any], SeqlenInfo]:
    """From the numbers of rows and keys, and b, to the lengths and offsets of sequence b."""
    first_row, first_key = (0 if x is None else x for x in (cu_q, cu_k))

    def seqlen(rows: Count, keys: Count, b: Any) -> SeqlenInfo:
        return SeqlenInfo(each(rows, b), each(keys, b), each(first_row, b), each(first_key, b))

    return seqlen


def _need_alone(functions: Functions, arguments: Arguments) -> None:
    """Raise for what selected keys do not go with."""
    shown = functions._asdict() | dict(window_size=arguments["window"])
    for name, x in shown.items():
        if x:
            raise NotImplementedError(
                f"{'window_size' if name == 'band' else name}: got it beside gather_kv_indices, "
                "expected None"
            )


def _gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    indices: Tensor,
    arguments: Arguments,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and LSE of rows that attend to the keys of these places in their sequence."""
    if cu_seqlens_q is None:
        need_integers("gather_kv_indices", indices, (*q.shape[:2], "keys"))
        indices = indices.flatten(0, 1)
    else:
        need_integers("gather_kv_indices", indices, (len(q), "keys"))
    if any(x.dtype in STORAGE for x in (q, k, v)):
        raise NotImplementedError("q.dtype: got eight bits with gather_kv_indices")
    rows = Rows.of(q, qv, cu_seqlens_q, seqused_q, max_seqlen_q)
    where = cu_seqlens_k, seqused_k, max_seqlen_k, page_table
    keys = Keys.of(k, v, *where, len(rows.cu) - 1)
    q, k, v = rows.q, keys.k, keys.v
    if rows.qv is not None:
        q, k = joined(q, k, v, rows.qv)
    sizes = rows.longest, keys.longest, None, None
    lengths = dict(key_lengths=keys.counts)
    used = rows.cu.diff() if rows.used is None else rows.used
    names = dict(key_lengths="seqused_k", row_lengths="seqused_q", block_table="page_table")
    with in_their_names(**names):  # the rows that are not used are sequences without keys
        given = q, k, v, rows.cu, keys.cu, keys.table, *sizes
        t, _ = prepare_packed(*given, lengths, row_lengths=used)
    tokens = Tokens.of("cu_seqlens_q", t.cu_q, rows.q)
    M, N = (x[tokens.item] for x in (t.given("cu_q").diff(), t.given("key_lengths")))
    last = N - 1
    if arguments["causal"]:
        last = torch.minimum(last, tokens.step + N - M)
    seen = (indices >= 0) & (indices <= last[:, None])
    # All sequences are one item here, with the keys that each row sees of its own.
    if keys.table is None:
        places = indices + t.given("cu_k")[tokens.item][:, None]
    else:
        page, places = k.shape[1], indices.clamp(min=0, max=keys.longest - 1)  # ty: ignore
        places = t.given("block_table")[tokens.item[:, None], places // page] * page + places % page
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    indices = torch.where(seen, places, -1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    own: dict[str, Any] = {name: arguments[name] for name in ("scale", "softcap", "sinks")}
    with in_their_names(indices="gather_kv_indices", sinks="learnable_sink"):
        out, lse = attention_selected(q, k, v, indices[None, None], return_lse=True, **own)
    return rows.as_given(out[0].transpose(0, 1), lse[0].transpose(0, 1))
