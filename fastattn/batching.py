"""vmap's arithmetic: V calls of batch B as one call of batch V B, and back. Pure functions.

Where the batch of a tensor lies is read off its letters in `spec.ARGUMENTS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .spec import ARGUMENTS, RESULTS, Argument, Options, Tensors

Dim = int | None  # which dimension of a tensor is mapped; None where it is not


def can_fold(t: Tensors, dims: Sequence[Dim], o: Options) -> bool:
    """Not where a call's place in the batch matters (dropout counts by it), nor where something
    that has no batch dimension (sinks, what is packed) is mapped."""
    each = zip(ARGUMENTS.values(), t, dims)
    mapped = (a for a, x, dim in each if x is not None and dim is not None)
    return t.cu_q is None and o.dropout_p == 0 and all(any(map(batched, a.shapes)) for a in mapped)


def gradients_fold(wants: Sequence[str]) -> bool:
    """Are these gradients of each item alone? That of a mask may be a sum over items."""
    return all(batched(ARGUMENTS[x].shapes[0]) and not ARGUMENTS[x].broadcast for x in wants)


def batched(shape: str) -> bool:
    return "B" in shape.split()


def batch_at(shape: str) -> int:
    return shape.split().index("B")


def batch_of(t: Tensors, dims: Sequence[Dim]) -> int:
    """B of one call."""
    shape = list(t.q.shape)
    if dims[0] is not None:
        del shape[dims[0]]
    return shape[0]


def fold_tensors(V: int, dims: Sequence[Dim], t: Tensors) -> Tensors:
    B = batch_of(t, dims)
    folded: list[Any] = [
        None if x is None else _fold_argument(a, V, B, x, dim)
        for a, x, dim in zip(ARGUMENTS.values(), t, dims)
    ]
    return Tensors(*folded)


def fold_results(
    results: Sequence[str], V: int, B: int, tensors: Sequence[Tensor | None], dims: Sequence[Dim]
) -> list[Tensor | None]:
    """Outputs, or their gradients."""
    return [
        None if x is None else _merge(V, B, x, dim, batch_at(RESULTS[name]))
        for name, x, dim in zip(results, tensors, dims)
    ]


def unfold(V: int, B: int, x: Tensor, at: int) -> Tensor:
    """The mapped dimension comes first."""
    return x.unflatten(at, (V, B)).movedim(at, 0)


def unfold_results(results: Sequence[str], V: int, B: int, tensors: Sequence[Tensor]):
    return tuple(unfold(V, B, x, batch_at(RESULTS[name])) for name, x in zip(results, tensors))


def pick(tensors: Sequence[Any], dims: Sequence[Dim], i: int) -> list[Any]:
    """The tensors of call i."""
    return [x if x is None or dim is None else x.select(dim, i) for x, dim in zip(tensors, dims)]


def _front(V: int, x: Tensor, dim: Dim) -> Tensor:
    """The mapped dimension first; made by expansion where there is none."""
    return x.expand(V, *x.shape) if dim is None else x.movedim(dim, 0)


def _merge(V: int, B: int, x: Tensor, dim: Dim, at: int) -> Tensor:
    """The mapped dimension into the batch, which is dimension `at` of a call's tensor."""
    x = _front(V, x, dim).movedim(0, at)
    return x.reshape(*x.shape[:at], V * B, *x.shape[at + 2 :])


def _fold_argument(a: Argument, V: int, B: int, x: Tensor, dim: Dim) -> Tensor:
    rank = x.ndim - (dim is not None)
    if a.broadcast:
        return _fold_broadcast(V, B, x, dim)
    shape = next((s for s in a.shapes if len(s.split()) == rank), a.shapes[0])
    if batched(shape):
        return _merge(V, B, x, dim, batch_at(shape))
    if dim is None:
        return x  # the same for every item
    shape = next(s for s in a.shapes if batched(s))  # each call has its own, so each item has
    at = batch_at(shape)
    x = _front(V, x, dim).unsqueeze(1 + at)
    x = x.expand(*x.shape[: 1 + at], B, *x.shape[2 + at :])
    return _merge(V, B, x, 0, at)


def _fold_broadcast(V: int, B: int, x: Tensor, dim: Dim) -> Tensor:
    if dim is None and (x.ndim < 4 or x.shape[0] == 1):
        return x  # the same for every item
    x = _front(V, x, dim)
    x = x.reshape(V, *[1] * (5 - x.ndim), *x.shape[1:])
    return x.expand(V, B, *x.shape[2:]).reshape(V * B, *x.shape[2:])
