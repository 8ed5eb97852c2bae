"""An attention backend named "fastattn" for diffusers.

Call `register()`, then `model.set_attention_backend("fastattn")`, or use `with
diffusers.attention_backend("fastattn")`. Processors without `_attention_backend`, such as those of
UNets and SD3, ignore backends and call torch's function: use `fastattn.sdpa()` for these.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from torch import Tensor

from ..dropin.sdpa import scaled_dot_product_attention

NAME = "fastattn"
_MEMBER = NAME.upper()
_DEFAULT = "DIFFUSERS_ATTN_BACKEND"  # environment variable that diffusers reads


def register() -> None:
    """Register "fastattn" as an attention backend of diffusers.

    A second call changes nothing.

    Raises:
        ImportError: There is no diffusers that has backends (0.35 or newer).
        ValueError: The environment variable DIFFUSERS_ATTN_BACKEND names "fastattn". diffusers
            reads it before `register` can run.

    Example:
        Needs the library diffusers.

        >>> import torch
        >>> from diffusers.models import attention_dispatch
        >>> import fastattn.integrations.diffusers
        >>> fastattn.integrations.diffusers.register()
        >>> q, k, v = torch.randn(3, 1, 16, 2, 32)
        >>> with attention_dispatch.attention_backend("fastattn"):
        ...     attention_dispatch.dispatch_attention_fn(q, k, v).shape
        torch.Size([1, 16, 2, 32])
        >>> fastattn.integrations.diffusers.unregister()
    """
    dispatch = _dispatch()
    if NAME in dispatch.AttentionBackendName._value2member_map_:
        return
    member = _add(dispatch.AttentionBackendName)
    checks = [dispatch._check_device, dispatch._check_shape, dispatch._check_attn_mask_or_causal]
    registry = dispatch._AttentionBackendRegistry
    registry.register(member, constraints=checks)(_attend)
    registry._supported_arg_names[member] = _Every(registry._supported_arg_names[member])


def unregister() -> None:
    """Undo `register`.

    Nothing happens if `register` was not called. If "fastattn" is diffusers' active backend, its
    default becomes active again. Models set to "fastattn" need another backend, or
    `reset_attention_backend()`, before this call.

    Raises:
        ImportError, ValueError: As `register`.

    Example:
        Needs the library diffusers.

        >>> from diffusers.models.attention_dispatch import AttentionBackendName
        >>> import fastattn.integrations.diffusers
        >>> fastattn.integrations.diffusers.register()
        >>> fastattn.integrations.diffusers.unregister()
        >>> "fastattn" in [x.value for x in AttentionBackendName]
        False
    """
    dispatch = _dispatch()
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    if NAME not in names._value2member_map_:
        return
    member = names(NAME)
    if registry._active_backend is member:
        registry.set_active_backend(names(dispatch.DIFFUSERS_ATTN_BACKEND))
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        del table[member]
    _remove(names)


def _dispatch() -> Any:
    try:
        return importlib.import_module("diffusers.models.attention_dispatch")
    except ImportError as error:
        raise ImportError(
            "diffusers: got none with attention backends, expected 0.35 or newer: pip install -U "
            "diffusers"
        ) from error
    except ValueError as error:
        if os.environ.get(_DEFAULT) != NAME:
            raise
        raise ValueError(
            f"{_DEFAULT}: got {NAME!r}, which diffusers reads before it can be registered, "
            "expected a backend of its own or no value; after register() call "
            "model.set_attention_backend or attention_backend"
        ) from error


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
    **unknown: Any,
) -> Tensor:
    """Attend query (B,L,H,E) to key (B,S,Hk,E) and value (B,S,Hk,Ev); return out (B,L,H,Ev).

    attn_mask is (B,S), or any mask that torch takes; the shape decides, as in diffusers' own
    backends. Raises NotImplementedError for context parallelism, which each diffusers backend has
    to implement, and TypeError for an unknown argument that is not None.
    """
    if given := sorted(name for name, value in unknown.items() if value is not None):
        raise TypeError(
            f"{given[0]}: got this argument of attention, expected none that the backend "
            "'fastattn' does not know; leave it out, or use one of diffusers' backends"
        )
    ranks = None if _parallel_config is None else _parallel_config.context_parallel_config
    if ranks is not None and ranks._world_size > 1:
        raise NotImplementedError(
            f"parallel_config: got {ranks._world_size} ranks, expected 1: the backend "
            "'fastattn' would attend only to this rank's part of the sequence; use one of "
            "diffusers' backends, or fastattn.distributed"
        )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2)


class _Every(frozenset):
    """Names of arguments, and any other: diffusers drops those that are not in it in silence."""

    def __contains__(self, name: object) -> bool:
        return True


# Enum has no public way to add or remove members. These functions edit its internal tables, which
# are the same from Python 3.10 to 3.14.


def _add(names: Any) -> Any:
    member = str.__new__(names, NAME)
    member._name_, member._value_ = _MEMBER, NAME
    member._sort_order_ = len(names._member_names_)
    type.__setattr__(names, _MEMBER, member)
    names._member_names_.append(_MEMBER)
    names._member_map_[_MEMBER] = names._value2member_map_[NAME] = member
    return member


def _remove(names: Any) -> None:
    names._member_names_.remove(_MEMBER)
    del names._member_map_[_MEMBER], names._value2member_map_[NAME]
    type.__delattr__(names, _MEMBER)
