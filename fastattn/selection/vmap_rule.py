"""A vmap rule for operators on batches: each tensor that they take or return begins with items."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..dispatch.vmap_fold import front


def fold_into_items(operator: Any) -> None:
    """Let V calls under vmap be one call with V times as many items."""

    @operator.register_vmap
    def rule(info, in_dims, *arguments):
        V = info.batch_size
        if V == 0:
            raise ValueError("vmap: got a dimension of size 0, expected one call or more")
        found = operator(
            *(
                front(V, x, dim).flatten(0, 1) if isinstance(x, Tensor) else x
                for x, dim in zip(arguments, in_dims)
            )
        )
        if isinstance(found, Tensor):
            return found.unflatten(0, (V, found.shape[0] // V)), 0
        return tuple(x.unflatten(0, (V, x.shape[0] // V)) for x in found), (0,) * len(found)
