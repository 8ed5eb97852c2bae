"""Continuous batching: requests of any length in one packed batch, with a shared paged cache.

In transformers 5.23 attention gets the cache and updates it; in 5.24 a layer updates it before, and
attention gets the keys, or the arguments to find them by.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.generation.continuous_batching import PagedAttentionCache

from ..api import attention_packed
from .transformers_forms import VERSIONS

# The owner of a function, the function's name, and its wrapper.
Hook = tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]


def hooks(attention: Callable[..., Any]) -> list[Hook]:
    """Wrappers that make transformers' batch manager accept implementations: all names for which
    `attention` is registered.

    The list is empty if transformers does not have all of these functions: its manager then refuses
    the names.
    """
    try:
        from transformers.generation.continuous_batching import (
            cache,
            continuous_api,
            initialization,
            model_runner,
        )
    except ImportError:
        return []
    ours = functools.partial(runs, attention)
    counted = functools.partial(_counted_as_flash, ours)
    tables = functools.partial(_on_any_device, ours)
    hooks: list[Hook] = [
        (continuous_api, "is_flash_attention_requested", counted),
        (cache, "is_flash_attention_requested", counted),
        (initialization, "ensure_decode_fast_path_is_available", tables),
        (model_runner.ModelRunner, "compute_batch", functools.partial(_reaching_us, ours)),
    ]
    return hooks if all(hasattr(owner, what) for owner, what, _ in hooks) else []


def runs(attention: Callable[..., Any], name: str | None) -> bool:
    """Whether transformers calls `attention` for the implementation `name`."""
    return AttentionInterface._global_mapping.get(name) is attention


Ours = Callable[[str | None], bool]  # is this the name of one of our implementations?


def _counted_as_flash(ours: Ours, original: Callable) -> Callable:
    """Count our names as flash-attn. Otherwise the manager would replace or refuse the
    implementation, and the cache would reserve memory for a mask and for repeated heads."""

    @functools.wraps(original)
    def is_flash_attention_requested(
        config=None, requested_attention_implementation=None, version=None
    ):
        asked = requested_attention_implementation
        if config is not None and asked is None:
            asked = config._attn_implementation
        if version is None and ours(asked):
            return True
        return original(config, requested_attention_implementation, version)

    return is_flash_attention_requested


def _on_any_device(ours: Ours, original: Callable) -> Callable:
    """Allow block tables for steps of one row each on every device; transformers allows them only
    on GPUs. Sliding-window layers keep keys in a ring and have no block table."""

    @functools.wraps(original)
    def ensure_decode_fast_path_is_available(config, cb_config, user_requested):
        if not ours(config._attn_implementation) or not _has_tables(config):
            original(config, cb_config, user_requested)

    return ensure_decode_fast_path_is_available


def _has_tables(config: Any) -> bool:
    from transformers.generation.continuous_batching import cache

    kinds = cache.group_layers_by_attn_type(config)
    return all(cache.ATTN_TYPE_TO_ALLOCATOR[x].supports_block_table for x in kinds)


# What a paged cache needs and tells: arguments of the batch, then of a layer.
KEYWORDS = frozenset(
    [
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "read_index",
        "write_index",
        "block_table",
        "k_cache",
        "v_cache",
    ]
)
_running: ContextVar[Any] = ContextVar("cache of the batch", default=None)
_reached: weakref.WeakSet[PagedAttentionCache] = weakref.WeakSet()


def is_paged(kwargs: dict[str, Any]) -> bool:
    """Whether these are the arguments of a batch with a paged cache."""
    return kwargs.get("write_index") is not None


def _reaching_us(ours: Ours, original: Callable) -> Callable:
    """Tell attention which cache a batch has. Raise for a model that does not pass the batch's
    arguments to its attention: its rows would attend to nothing but the rows of the batch."""

    @functools.wraps(original)
    def compute_batch(self, model, batch_data):
        before, lacking = _running.set(self.cache), None
        try:
            original(self, model, batch_data)
        except KeyError as error:  # the cache's, updated without these arguments
            if self.cache in _reached:
                raise
            lacking = error
        finally:
            _running.reset(before)
        name = self.cache.config._attn_implementation
        if ours(name) and self.cache not in _reached:
            raise NotImplementedError(
                f"attn_implementation: got {name!r} for {type(model).__name__} in continuous "
                "batching, expected a model that passes the paged cache to its attention, which "
                "this one does not; generate without batching"
            ) from lacking
        if lacking is not None:
            raise lacking

    return compute_batch


# Not compiled: functionalisation would copy the whole cache in every layer that writes to it.
@torch.compiler.disable
def attend_pages(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    asked: dict[str, Any],
    given: dict[str, Any],
) -> Tensor:
    """Attend query (1,H,T,D) to the keys of its requests: (1,T,H,Dv). Each row attends to its own
    request's keys up to its position.

    cache: to which to write key and value, (1,Hk,T,D). None: the layer has updated the batch's
    cache, so that key and value are all that rows attend to, unless there is a block table. asked:
    transformers' keyword arguments. given: those of `fastattn.attention`, without the mask.
    """
    updated = cache is None
    cache = _running.get() if updated else cache
    _check(module, cache, asked)
    _check_update(updated, query, key, asked)
    _reached.add(cache)
    if not updated:
        key, value = cache.update(key, value, module.layer_idx, asked)  # `asked` is the layer's now
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if asked.get("block_table") is not None:
        trash = cache.layer_to_allocator[module.layer_idx].write_trash_index
        return _step(q, k, v, asked, trash, given)[None]
    max_q, max_k = asked["max_length_q"], asked["max_length_k"]
    cu_q, cu_k = asked["cu_seq_lens_q"], asked["cu_seq_lens_k"]
    if 1 < len(q) == max_q:
        # Rows at the end may be padding. To find out would synchronize with a GPU, so they become
        # one more sequence.
        cu_q, cu_k = _ending(cu_q, len(q)), _ending(cu_k, len(k))
        max_k = len(k)
    told = given | _band(asked.get("sliding_window"), max_q, max_k)
    out: Any = attention_packed(q, k, v, cu_q, cu_k, max_q=max_q, max_k=max_k, **told)
    return out[None]


def _band(window: int | None, max_q: int, max_k: int) -> dict[str, Any]:
    """Causal, limited to the last `window` keys. A single row without a window needs no band."""
    if window is not None and window < max_k:
        return dict(window=(window - 1, None), causal="bottom_right")
    return dict(causal="bottom_right") if max_q > 1 else {}


def _check(module: torch.nn.Module, cache: Any, asked: dict[str, Any]) -> None:
    if not isinstance(cache, PagedAttentionCache):
        raise NotImplementedError(
            f"cache: got {type(cache).__name__}, expected transformers' PagedAttentionCache; leave "
            "this model at 'eager' or 'sdpa'"
        )
    causal = asked["is_causal"]
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise NotImplementedError(
            "is_causal: got False beside a paged cache, expected True: a request is divided among "
            "several batches; run this model without continuous batching"
        )
    for name in ("output_attentions", "position_bias"):
        if asked.get(name) is not None and asked[name] is not False:
            raise NotImplementedError(
                f"{name}: got some beside a paged cache, expected none; run this model without "
                "continuous batching"
            )


def _check_update(updated: bool, query: Tensor, key: Tensor, asked: dict[str, Any]) -> None:
    """Raise unless the layer has updated the cache, or the cache is given and nothing has."""
    done = not isinstance(asked["cu_seq_lens_k"], dict)  # an update puts the layer's own there
    gathered = done and asked.get("block_table") is None  # else keys are the new ones alone
    if done != updated or not (gathered or key.shape[2] == query.shape[2]):
        raise NotImplementedError(
            f"cache: got a paged one that is {'' if done else 'not '}updated, and "
            f"{key.shape[2]} keys of {query.shape[2]} rows, expected it updated by the layer and "
            "not given to attention, or given and not updated, as in transformers "
            f"{' or '.join(VERSIONS)}; run this model without continuous batching"
        )


def _ending(offsets: Tensor, total: int) -> Tensor:
    return torch.nn.functional.pad(offsets, (0, 1), value=total)


def _step(q: Tensor, k: Tensor, v: Tensor, asked: Any, trash: int, given: dict) -> Tensor:
    """Attend one row for each request to keys in their pages. Requests at the end may be padding:
    they have no keys, and their new key goes to the slot `trash`, which is never read."""
    pages, table = (asked["k_cache"], asked["v_cache"]), asked["block_table"]
    lengths, page = asked["cu_seq_lens_k"].diff(), pages[0].shape[1]
    last = (lengths - 1).clamp(min=0).long()
    slot = table.gather(1, last[:, None] // page)[:, 0] * page + last % page
    slot = torch.where(lengths > 0, slot, trash).long()
    for into, new in zip(pages, (k, v)):
        into.view(-1, *into.shape[2:]).index_copy_(0, slot, new)
    each = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    told: dict[str, Any] = given | dict(block_table=table, key_lengths=lengths)
    out: Any = attention_packed(q, *pages, each, max_q=1, **told)
    return out
