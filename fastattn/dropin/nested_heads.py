"""MultiheadAttention of nested tensors: sequences of different lengths, each by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import nested

Module = Any  # fastattn.MultiheadAttention, which imports this file
Masks = tuple[Tensor | None, Tensor | None]


def forward(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    need_weights: bool,
    average: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """`MultiheadAttention.forward` of jagged (B,L*,E), causal if asked; or of one strided nested
    tensor, which nn.TransformerEncoder makes from padding. Weights are padded with zeros, as
    torch's are.

    Raises AssertionError, in torch's words, for arguments that nested tensors do not support.
    """
    inputs = query, key, value
    _check(module, inputs, masks)
    if nested.is_jagged(query):
        return _jagged(module, query, key, value, need_weights, average, is_causal)
    return _strided(module, query, need_weights, average)


def _jagged(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    need_weights: bool,
    average: bool,
    causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute packed rows: only the weights are padded."""
    inputs = {}  # by id: `_project` checks which inputs are one tensor
    for name, x in (("query", query), ("key", key), ("value", value)):
        if id(x) not in inputs:
            of_x = nested.rows_of(name, x)
            inputs[id(x)] = of_x, of_x.rows[None]
    rows, flat = zip(*(inputs[id(x)] for x in (query, key, value)), strict=True)
    module._check_inputs(*flat, seq_first=False)
    projected = module._project(*flat, seq_first=False)
    q, k, v = (
        x._replace(rows=heads[0].transpose(0, 1)) for x, heads in zip(rows, projected, strict=True)
    )
    options = module._drawn(query.device) | {"causal": causal}
    out = nested.attend_rows(q, k, v, **options)
    out = F.linear(out.flatten(1), module.out_proj.weight, module.out_proj.bias)
    weights = nested.weights_of(q, k, average, **options) if need_weights else None
    return nested.as_jagged(out, q), weights


def _strided(
    module: Module, x: Tensor, need_weights: bool, average: bool
) -> tuple[Tensor, Tensor | None]:
    """The lengths are known on the host, so keys past the end are skipped instead of masked."""
    lengths = [item.size(0) for item in x.unbind()]
    padded = torch.nested.to_padded_tensor(x, 0.0)
    module._check_inputs(padded, padded, padded, seq_first=False)
    q, k, v = module._project(padded, padded, padded, seq_first=False)
    key_lengths = torch.tensor(lengths, device=x.device)
    out, weights = module._attend(q, k, v, need_weights, average, key_lengths=key_lengths)
    if weights is not None:
        weights = nested.without_rows_past(weights, key_lengths)
    out = module._project_out(out, seq_first=False)
    items = [item[:length] for item, length in zip(out.unbind(), lengths, strict=True)]
    return torch.nested.as_nested_tensor(items), weights


def _check(module: Module, inputs: tuple[Tensor, Tensor, Tensor], masks: Masks) -> None:
    """Strided nested input follows the rules of torch's fast path, but may require gradients."""
    query, key, value = inputs
    jagged = [nested.is_jagged(x) for x in inputs]
    packed, instead = all(jagged), " (is_causal=True needs none)" if any(jagged) else ""
    rules = [
        (packed or not any(jagged), "some of query, key and value are jagged, and others are not"),
        (packed or query is key is value, "query, key and value are not the same Tensor"),
        (
            all(x.dim() == 3 for x in inputs),
            f"input not batched; expected query.dim() of 3 but got {query.dim()}",
        ),
        (module.batch_first, "batch_first was not True"),
        (packed or module.in_proj_weight is not None, "_qkv_same_embed_dim was not True"),
        (
            module.bias_k is None and not module.add_zero_attn,
            "add_bias_kv or add_zero_attn was enabled",
        ),
        (
            all(mask is None for mask in masks),
            f"masks are not supported with NestedTensor input{instead}",
        ),
    ]
    for ok, reason in rules:
        if not ok:
            raise AssertionError(
                f"MultiheadAttention does not support NestedTensor here, because {reason}"
            )
