"""vmap of a pass: V calls become one call with V times as many items or heads, if they fold; else
they run one after the other. Results have the mapped dimension first, and come with its index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.spec import WITH_TANGENTS, Tensors
from ..call.validation import check
from . import vmap_fold
from .formulas import PassCall, Run
from .operation import FORWARD, JVP
from .vmap_fold import NO_DIMS, Dim


def batched(
    run: Run, call: PassCall, V: int, dims: Sequence[Dim], tensors: Sequence[Any]
) -> tuple[Sequence[Tensor], tuple[int, ...]]:
    """dims: which dimension of each of the tensors is mapped."""
    which, op, o, needs_grad = call.which, call.op, call.o, call.needs_grad
    groups, t = call.split(tensors)
    dims_of_groups, dims_t = call.split(dims)
    if which is FORWARD and V:
        check(Tensors(*vmap_fold.pick(t, dims_t, 0)), o)  # the rules are for one call, not for V
    moving = "tangents" in which.given
    dims_u = dims_of_groups[0] if moving else NO_DIMS
    fold = vmap_fold.fold_of(V, Tensors(*t), dims_t, o, dims_u, needs_grad)
    if fold is None:

        def each(*tensors):
            groups, t = call.split(tensors)
            return run(which, op, t, o, groups, needs_grad)

        return _in_turn(V, each, tensors, dims)
    if moving:
        folded, u = fold.moving(Tensors(*t), dims_t, groups[0], dims_u)
        folded_groups = [u]
    else:
        folded, folded_groups = fold.tensors(Tensors(*t), dims_t), []
    others = zip(which.names(op)[moving:], groups[moving:], dims_of_groups[moving:])
    folded_groups += [fold.results(*of) for of in others]
    results = run(which, op, folded, fold.options(o), folded_groups, needs_grad)
    if which is JVP:
        names: Sequence[str] = WITH_TANGENTS[-len(results) :]
    else:
        names = needs_grad if which.chooses else op.results
    return _first(fold.back(names, results))


def _in_turn(V: int, function: Callable, tensors: Sequence, dims: Sequence[Dim]):
    if V == 0:
        raise NotImplementedError(
            "vmap over a dimension of size 0 with per-example seeds or sinks, or gradients of "
            "masks or sinks: got 0, expected at least 1"
        )
    calls = [function(*vmap_fold.pick(tensors, dims, i)) for i in range(V)]
    return _first(tuple(torch.stack(x) for x in zip(*calls)))


def _first(results: Sequence[Tensor]):
    return tuple(results), (0,) * len(results)
