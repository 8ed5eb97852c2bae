"""The attention function of `AttentionInterface`: translates transformers' arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils import output_capturing

from .. import mla
from ..api import attention, attention_packed, attention_weights, draw_seed
from . import transformers_selected
from .transformers_forms import ELSEWHERE, refuse_unknown
from .transformers_latent import heads
from .transformers_masks import RELATIVE, StructuredMask
from .transformers_paged import KEYWORDS, attend_pages, is_paged

# Keyword arguments of attention layers beside those that `attend` names.
KNOWN = ELSEWHERE | KEYWORDS | {"sinks", "indices", "block_indices", "output_attentions"}


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: StructuredMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    deterministic: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend query (B,H,M,D) to key (B,Hk,N,D) and value (B,Hk,N,Dv).

    Returns out (B,M,H,Dv), and the weights (B,H,M,N) if `output_attentions` requests them. With
    gradients, the outputs are then computed from the weights, which `retain_grad` and hooks serve.
    A batch of one query or of one key and value serves all items of the other.

    attention_mask: from `make_mask`, or the caller's own tensor, boolean or added to scores.
    Without a mask, `is_causal` or else module.is_causal applies, aligned to the top left.
    position_bias (B,H,M,N) is added to scores; s_aux (H,) are sinks. deterministic is that of
    flash-attn, which ModernBERT passes. If the mask has no padding,
    sequences given by cu_seq_lens_q and cu_seq_lens_k run as a packed batch. cache is the paged
    cache of continuous batching in transformers 5.23; attention_mask is then ignored. indices
    (B,M,S) and block_indices (B,G,M,S) are the keys, or blocks of them, that a model selects.
    Raises NotImplementedError for sinks of rows, and for what goes beside selected keys in no
    model; TypeError for an argument that is not KNOWN.
    """
    refuse_unknown("attention", kwargs, KNOWN)
    if kwargs.get("sinks") is not None:
        raise NotImplementedError(
            "sinks: got some, expected none: fastattn has a sink for each head, not for each row; "
            "leave this model at 'eager' or 'sdpa'"
        )
    paged = cache is not None or is_paged(kwargs)
    wants_weights = kwargs.get("output_attentions") or _captures_weights()
    query, key, value, weights = heads(module, query, key, value, expand=paged)
    given = _given(query, scaling, softcap, s_aux, dropout)
    if (chosen := _selected(module, kwargs)) is not None:
        if paged or position_bias is not None or wants_weights:
            raise NotImplementedError(
                "indices: got some beside a paged cache, a position bias or output_attentions, "
                "expected them alone; leave this model at 'eager' or 'sdpa'"
            )
        out = transformers_selected.attend(query, key, value, *chosen, attention_mask, given)
        return (out if weights is None else mla.outputs(out, weights)).transpose(1, 2), None
    if paged:
        asked = kwargs | dict(is_causal=is_causal, position_bias=position_bias)
        asked["output_attentions"] = wants_weights
        return attend_pages(module, query, key, value, cache, asked, given), None
    if query.shape[0] != key.shape[0]:  # one set of learned queries, or one encoding, for all items
        B = query.shape[0] if key.shape[0] == 1 else key.shape[0]
        query, key, value = (x.expand(B, -1, -1, -1) for x in (query, key, value))
    if isinstance(attention_mask, StructuredMask):
        arguments, offsets = attention_mask.arguments, _offsets(attention_mask, query, key, kwargs)
    else:
        arguments, offsets = _plain(module, attention_mask, is_causal, query), None
        if attention_mask is None:
            offsets = _given_offsets(query, kwargs)
    if offsets is not None and (wants_weights or position_bias is not None):
        arguments, offsets = {"mask": _exact(attention_mask)}, None
    if position_bias is not None:
        arguments = arguments | {"mask": _biased(position_bias, arguments.get("mask"), query)}
    given |= arguments
    if deterministic:  # else torch's flag decides
        given["deterministic"] = True
    shown = attention_weights(query, key, **given) if wants_weights else None
    if shown is not None and shown.requires_grad:
        out: Any = _of_weights(shown, value)
    elif offsets is not None:
        out = _packed(query, key, value, offsets, given).transpose(1, 2)
    else:
        out = attention(query, key, value, **given)
    if weights is not None:
        out = mla.outputs(out, weights)
    return out.transpose(1, 2), shown


def _captures_weights() -> bool:
    """True if transformers captures weights of the layers that run now. Some models do not pass
    their argument `output_attentions` on to the attention function."""
    collector: Any = output_capturing._active_collector
    # Compiled code cannot read a ContextVar: transformers then uses a variable instead.
    captured = collector.global_var if torch.compiler.is_compiling() else collector.get()
    return any(name.endswith("attentions") for name in captured or ())


def _selected(module: Any, kwargs: dict[str, Any]) -> tuple[Tensor, int] | None:
    """The keys or blocks that a model selects, and the size of a block."""
    if (indices := kwargs.get("indices")) is not None:
        return indices, 1
    if (indices := kwargs.get("block_indices")) is not None:
        return indices, module.indexer.block_size
    return None


def _given(query: Tensor, scaling: Any, softcap: Any, sinks: Any, dropout: float) -> dict[str, Any]:
    """The arguments of `fastattn.attention` that do not decide which keys a row attends to."""
    given: dict[str, Any] = dict(scale=scaling)
    if softcap is not None:
        given["softcap"] = softcap
    if sinks is not None:
        given["sinks"] = sinks
    if dropout:
        given |= dict(dropout_p=dropout, seed=draw_seed(query.device))
    return given


Offsets = tuple[Tensor, Tensor, int | None, int | None]  # cu_q, cu_k, max_q, max_k


def _offsets(mask: StructuredMask, query: Tensor, key: Tensor, kwargs: Any) -> Offsets | None:
    if not mask.fits(query.shape[2], key.shape[2]):
        got, expected = tuple(mask.shape[2:]), (query.shape[2], key.shape[2])
        raise ValueError(
            f"attention_mask: got one of (M, N) = {got}, expected {expected} or one that is the "
            "same for all rows; leave this model at 'eager' or 'sdpa'"
        )
    if mask.offsets is not None:
        offsets, longest = mask.offsets
        return offsets, offsets, longest, longest
    plain = mask.arguments.get("causal") in (None, True) and mask.arguments.keys() <= RELATIVE
    return _given_offsets(query, kwargs) if plain else None


def _exact(mask: StructuredMask | Tensor | None) -> Tensor:
    """The (M, N) mask of a packed batch, which weights and a position bias need."""
    if isinstance(mask, StructuredMask) and mask.starts is not None:
        return mask.exact()
    raise NotImplementedError(
        "cu_seq_lens_q: got some beside output_attentions or a position bias, expected "
        "position_ids that restart in every sequence"
    )


def _given_offsets(query: Tensor, kwargs: Any) -> Offsets | None:
    """The caller's Offsets for a batch of one item, as from `DataCollatorWithFlattening`."""
    rows, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if not isinstance(rows, Tensor) or not isinstance(keys, Tensor) or query.shape[0] != 1:
        return None
    return rows, keys, kwargs.get("max_length_q"), kwargs.get("max_length_k")


def _plain(module: torch.nn.Module, mask: Any, is_causal: bool | None, query: Tensor) -> dict:
    """Arguments for the caller's own mask, or for no mask."""
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return {"causal": True} if causal and query.shape[2] > 1 else {}
    if mask.is_floating_point() and mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    return {"mask": mask}


def _biased(bias: Tensor, mask: Tensor | None, query: Tensor) -> Tensor:
    """The bias plus the mask: -inf where a boolean mask hides a key. Its rows are contiguous: T5's
    bias has its heads last in memory, and the kernels read and write such rows number by number."""
    if bias.dtype not in (query.dtype, torch.float32):
        bias = bias.to(query.dtype)
    if mask is not None:
        bias = torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask
    return bias if bias.stride(-1) == 1 else bias.contiguous()


def _of_weights(weights: Tensor, value: Tensor) -> Tensor:
    """(B,H,M,Dv): the outputs as a product of the weights (B,H,M,N). As in eager attention, the
    gradient of a loss on the outputs then passes through the weights, where hooks see it."""
    group = weights.shape[1] // value.shape[1]
    rows = weights.unflatten(1, (-1, group)).flatten(2, 3)  # those of a key head
    return (rows @ value).unflatten(2, (group, -1)).flatten(1, 2)


def _packed(query: Tensor, key: Tensor, value: Tensor, offsets: Offsets, given: Any) -> Tensor:
    """(B,M,H,Dv): run a batch as one packed batch, its items one after the other."""
    cu_q, cu_k, max_q, max_k = offsets
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out: Any = attention_packed(q, k, v, cu_q, cu_k, max_q=max_q, max_k=max_k, **given)
    return out.unflatten(0, (query.shape[0], query.shape[2]))
