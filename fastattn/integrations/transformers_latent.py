"""Latent attention of transformers' models (DeepSeek-V2, V3 and their kin): where rows are few, as
in decoding, the keys and values of heads are not made (`fastattn.mla`).

These models keep latent vectors in their cache, and `expand_kv` of their attention makes keys and
values of each head from all of them, at every token. In its place they get the latent vectors, and
`attend` applies the weights to queries and outputs; or it calls `expand_kv` after all.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import mla
from . import transformers_forms

_EXPANDS = "3c92377aad61fe74"  # `expand_kv` of all models: keys, then values, in each head's rows


class Heads(NamedTuple):
    """What attention is computed of. weights: to apply to the outputs, or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    weights: mla.Weights | None = None


@functools.cache
def layers(kind: type) -> list[type]:
    """The attention classes beside a model that have an `expand_kv`. Raises ValueError if it, or
    the `forward` that hands its results to attention, is not of the known form."""
    classes = []
    for x in vars(sys.modules.get(kind.__module__)).values():
        if not isinstance(x, type) or x.__module__ != kind.__module__ or "expand_kv" not in vars(x):
            continue
        expand_kv = original_of(x) or x.expand_kv
        if transformers_forms.form(expand_kv) != _EXPANDS:
            raise transformers_forms.unknown(expand_kv)
        if not transformers_forms.hands_on(x.forward, "expand_kv", "attention_interface"):
            raise transformers_forms.unknown(x.forward)
        classes.append(x)
    return classes


def original_of(layer: Any) -> Callable | None:
    """The class's own `expand_kv`, if a wrapper is in its place; else None."""
    return getattr(getattr(layer, "expand_kv", None), "made_by_fastattn_of", None)


def keeping_latent(name: str) -> Callable[[Callable], Callable]:
    """Return a wrapper of `expand_kv`, which gives latent vectors to the implementation `name`."""

    def wrapper(original: Callable) -> Callable:
        @functools.wraps(original)
        def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
            if self.config._attn_implementation != name or not _is_known(self, kv_nope):
                return original(self, kv_nope, k_rot)
            key = mla.keys(kv_nope, k_rot)
            return key, key[..., : kv_nope.shape[-1]]

        marked: Any = expand_kv
        marked.made_by_fastattn_of = original
        return marked

    return wrapper


def heads(module: Any, query: Tensor, key: Tensor, value: Tensor, expand: bool) -> Heads:
    """What to compute attention of, where keys may be latent vectors. expand: make keys of heads
    whatever the number of rows."""
    original = original_of(type(module))
    if original is None or key.shape[1] != 1 or query.shape[1] == 1:
        return Heads(query, key, value)
    latent = value.shape[-1]
    if expand or not _absorbs(module, query.shape[2:], key.shape[2], latent):
        return Heads(query, *original(module, key[..., :latent], key[..., latent:]))
    nope = module.qk_nope_head_dim
    weights = mla.split(module.kv_b_proj.weight, query.shape[1], nope)
    queries = mla.absorbed(query[..., :nope], query[..., nope:], weights)
    return Heads(queries, key, value, weights)


def _is_known(module: Any, kv_nope: Tensor) -> bool:
    """True if the weights of the layer can be absorbed: it is a plain linear layer without hooks,
    as those of offloading and of parallel layers are. Not in training, which has as many rows as
    keys."""
    layer = module.kv_b_proj
    return (
        type(layer) is torch.nn.Linear
        and layer.bias is None
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
        and (layer.weight.dtype, layer.weight.device) == (kv_nope.dtype, kv_nope.device)
        and layer.weight.shape[0] > module.qk_nope_head_dim + module.v_head_dim  # several heads
        and not (torch.is_grad_enabled() and (kv_nope.requires_grad or layer.weight.requires_grad))
        and not torch.is_autocast_enabled(kv_nope.device.type)
    )


def _absorbs(module: Any, query: tuple[int, ...], keys: int, latent: int) -> bool:
    """True if queries with absorbed weights take fewer multiplications of each head than keys.
    query: its rows, and its numbers in a row."""
    (rows, wide), nope, value = query, module.qk_nope_head_dim, module.v_head_dim
    absorbed = rows * keys * (2 * latent + wide - nope) + rows * latent * (nope + value)
    expanded = rows * keys * (wide + value) + keys * latent * (nope + value)
    return absorbed < expanded
