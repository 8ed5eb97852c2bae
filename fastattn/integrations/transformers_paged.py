"""Continuous batching: requests of any length in one packed batch, with a shared paged cache."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching import PagedAttentionCache

from ..api import attention_packed

# The owner of a function, the function's name, and its wrapper.
Hook = tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]


def hooks(name: str) -> list[Hook]:
    """Wrappers that make transformers' batch manager accept the implementation `name`.

    The list is empty if transformers does not have all of these functions: its manager then refuses
    the name.
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
    counted = functools.partial(_counted_as_flash, name)
    tables = functools.partial(_on_any_device, name)
    found: list[Hook] = [
        (continuous_api, "is_flash_attention_requested", counted),
        (cache, "is_flash_attention_requested", counted),
        (initialization, "ensure_decode_fast_path_is_available", tables),
        (model_runner.ModelRunner, "compute_batch", functools.partial(_reaching_us, name)),
    ]
    return found if all(hasattr(owner, what) for owner, what, _ in found) else []


def _counted_as_flash(name: str, original: Callable) -> Callable:
    """Count `name` as flash-attn. Otherwise the manager would replace or refuse the implementation,
    and the cache would reserve memory for a mask and for repeated heads."""

    @functools.wraps(original)
    def is_flash_attention_requested(
        config=None, requested_attention_implementation=None, version=None
    ):
        asked = requested_attention_implementation
        if config is not None and asked is None:
            asked = config._attn_implementation
        if asked == name and version is None:
            return True
        return original(config, requested_attention_implementation, version)

    return is_flash_attention_requested


def _on_any_device(name: str, original: Callable) -> Callable:
    """Allow block tables for steps of one row each on every device; transformers allows them only
    on GPUs. Sliding-window layers keep keys in a ring and have no block table."""

    @functools.wraps(original)
    def ensure_decode_fast_path_is_available(config, cb_config, user_requested):
        if config._attn_implementation != name or not _has_tables(config):
            original(config, cb_config, user_requested)

    return ensure_decode_fast_path_is_available


def _has_tables(config: Any) -> bool:
    from transformers.generation.continuous_batching import cache

    kinds = cache.group_layers_by_attn_type(config)
    return all(cache.ATTN_TYPE_TO_ALLOCATOR[x].supports_block_table for x in kinds)


_reached: weakref.WeakSet[PagedAttentionCache] = weakref.WeakSet()


def _reaching_us(name: str, original: Callable) -> Callable:
    """Raise for a model that does not pass the cache to its attention: its rows would attend to
    nothing but the rows of the batch."""

    @functools.wraps(original)
    def compute_batch(self, model, batch_data):
        original(self, model, batch_data)
        if self.cache.config._attn_implementation == name and self.cache not in _reached:
            raise NotImplementedError(
                f"attn_implementation: got {name!r} for {type(model).__name__} in continuous "
                "batching, expected a model that passes the paged cache to its attention, which "
                "this one does not; generate without batching"
            )

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
    """Write key and value, (1,Hk,T,D), to the cache, and attend query (1,H,T,D): (1,T,H,Dv). Each
    row attends to its own request's keys up to its position.

    asked: transformers' keyword arguments. given: those of `fastattn.attention`, without the mask.
    """
    _check(module, cache, asked)
    _reached.add(cache)
    key, value = cache.update(key, value, module.layer_idx, asked)  # `asked` is now this layer's
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
