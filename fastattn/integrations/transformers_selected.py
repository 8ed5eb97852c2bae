"""Models of transformers that select keys (DeepSeek-V3.2 and its kin, MiniMax-M3): their indices go
to `attention_selected`, and the indexer of DeepSeek-V3.2 chooses by `lightning_index`, without its
scores of all pairs.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..api import attention
from ..selection.attend import BLOCKS, attention_selected
from ..selection.indexer import lightning_index
from . import transformers_forms
from .transformers_masks import StructuredMask

EXPRESSED = {"causal", "key_lengths"}  # the arguments of a mask that the calls here take
# Forms of an indexer's `forward`: does it choose keys as `_choose` does?
_FORMS = {
    "5800f509c618b0c0": True,  # DeepSeek-V3.2, GLM-MoE-DSA, A.X K2, dots3_note
    "9a9c1615247384a4": False,  # HY-V4
    "587a9aea26922e5c": False,  # MiniMax-M3, which has no mask there
}
_ROTATES = r"q_rot, k_rot = (\w+)\(q_rot, k_rot, cos, sin, unsqueeze_dim=2\)"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    block: int,
    mask: StructuredMask | Tensor | None,
    given: dict[str, Any],
) -> Tensor:
    """(B,H,M,Dv): attention to the keys or blocks (B,M,S) or (B,G,M,S) that the mask shows.

    given: other arguments of `fastattn.attention`. A mask that is more than causal with key lengths
    becomes a dense one, in which the selection is written.
    """
    indices = indices[:, None] if indices.ndim == 3 else indices
    arguments = None
    if mask is None:
        arguments = {"causal": "bottom_right"}
    elif isinstance(mask, StructuredMask) and mask.starts is None:
        arguments = mask.arguments if mask.arguments.keys() <= EXPRESSED else None
    if arguments is not None and block in BLOCKS:
        return attention_selected(query, key, value, indices, block=block, **given, **arguments)
    shown = selected_mask(indices, block, key.shape[2], query.shape[1])
    if mask is None:
        shown = shown.tril(key.shape[2] - query.shape[2])
    else:
        dense = mask.exact() if isinstance(mask, StructuredMask) else mask
        shown = shown & (dense if dense.dtype == torch.bool else dense == 0)
    return attention(query, key, value, mask=shown, **given)


def selected_mask(indices: Tensor, block: int, keys: int, heads: int) -> Tensor:
    """(B,H,M,N), bool: the selection of keys."""
    blocks = -(-keys // block)
    chosen = indices.new_zeros((*indices.shape[:3], blocks + 1), dtype=torch.bool)
    chosen.scatter_(3, indices.long().masked_fill(indices < 0, blocks), True)
    shown = chosen[..., :blocks].repeat_interleave(block, 3)[..., :keys]
    return shown.repeat_interleave(heads // indices.shape[1], 1)


@functools.cache
def indexers(kind: type) -> list[Any]:
    """The classes beside a model that choose keys by a mask: they get it as `attention_mask`.
    Raises ValueError for one of another form."""
    classes = []
    for x in vars(sys.modules.get(kind.__module__)).values():
        if not (isinstance(x, type) and x.__name__.endswith("Indexer") and "forward" in vars(x)):
            continue
        forward = getattr(x.forward, "made_by_fastattn_of", x.forward)
        if transformers_forms.form(forward) not in _FORMS:
            raise transformers_forms.unknown(forward)
        if "attention_mask" in inspect.signature(forward).parameters:
            classes.append(x)
    return classes


def choosing(original: Callable) -> Callable:
    """Wrap an indexer's `forward`: a mask that fastattn made is made dense, or is not needed."""
    rotate = _rotation(original) if _FORMS[str(transformers_forms.form(original))] else None
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs)
        mask = given.arguments["attention_mask"]
        if not isinstance(mask, StructuredMask):
            return original(self, *args, **kwargs)
        if rotate is None or mask.starts is not None or not mask.arguments.keys() <= EXPRESSED:
            given.arguments["attention_mask"] = mask.exact()
            return original(*given.args, **given.kwargs)
        given.apply_defaults()
        _, hidden_states, q_resid, position_embeddings, _, _, cache = given.arguments.values()
        return _choose(self, rotate, hidden_states, q_resid, position_embeddings, cache, mask)

    marked: Any = forward
    marked.made_by_fastattn_of = original
    return marked


def _rotation(forward: Callable) -> Callable:
    """The function that rotates q and k in a `forward` of the known form."""
    (name,) = re.findall(_ROTATES, inspect.getsource(forward))
    return getattr(sys.modules[forward.__module__], name)


@torch.no_grad()
def _choose(
    indexer: Any,
    rotate: Callable,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any,
    mask: StructuredMask,
) -> Tensor:
    """The indexer's `forward`, with `lightning_index` in place of its scores and their top-k."""
    rope = indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    turned = rotate(q[..., :rope], k[..., :rope], *position_embeddings, unsqueeze_dim=2)
    q, k = (torch.cat([x, y[..., rope:]], -1) for x, y in zip(turned, (q, k)))
    k = k.squeeze(2)
    if cache is not None:
        k = cache.update_indexer(k, indexer.layer_idx)
    if k.shape[1] != mask.shape[-1]:
        raise ValueError(
            f"cache: got {k.shape[1]} keys of the indexer, expected {mask.shape[-1]}, as its mask "
            "has: a cache that is already updated, or is not given, chooses other keys; leave "
            "this model at 'eager' or 'sdpa'"
        )
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    count = min(indexer.index_topk, k.shape[1])
    q, weights = q.transpose(1, 2), weights.transpose(1, 2)
    return lightning_index(q, k.to(q.dtype), weights, count, **mask.arguments).squeeze(1)
