"""Batches of gradients that autograd makes itself: is_grads_batched=True, vectorize=True."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_is_traced = torch.compiler.is_dynamo_compiling
_is_batched_by_autograd = torch._C._functorch.is_legacy_batchedtensor


def unbatched(function: Callable, given: Sequence[Tensor | None]) -> Sequence[Any]:
    """Call `function(*given)`. Batches that `is_grads_batched` or `vectorize` made are from torch's
    older vmap: convert them to torch.func.vmap, so that vmap rules fold them into one call."""
    if _is_traced() or not any(is_batched_by_autograd(x) for x in given):
        return function(*given)
    level = max(1, torch._C._vmapmode_increment_nesting() - 1)
    torch._C._vmapmode_decrement_nesting()
    dims = tuple(0 if is_batched_by_autograd(x) else None for x in given)
    plain = [
        torch._remove_batch_dim(x, level, 1, 0) if x is not None and dim == 0 else x
        for x, dim in zip(given, dims)
    ]
    places: list[int] = []
    length = 0

    def tensors(*given):
        nonlocal length
        results = function(*given)
        places[:] = [at for at, x in enumerate(results) if x is not None]
        length = len(results)
        return tuple(results[at] for at in places)

    mapped = torch.func.vmap(tensors, in_dims=dims)(*plain)
    every: list[Any] = [None] * length
    for at, x in zip(places, mapped):
        every[at] = torch._add_batch_dim(_in_front(x), 0, level)
    return every


def _in_front(x: Tensor) -> Tensor:
    """x with its batch outermost in memory: forward mode assumes that when it copies tangents."""
    if x.ndim < 2 or x.stride(0) >= max(x.stride()[1:]):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # resets strides of size-1 dims, too


def is_batched_by_autograd(x: Tensor | None) -> bool:
    return x is not None and _is_batched_by_autograd(x)
