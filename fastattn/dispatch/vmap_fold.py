"""vmap: fold V calls into one with V times as many items or heads, and unfold its results.

The letters in `spec.ARGUMENTS` and `spec.RESULTS` tell which dimensions are items and heads. All
functions here are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..call.spec import ARGUMENTS, DIFFERENTIABLE, INDEX, RESULTS, Argument, Options, Tensors

Dim = int | None  # which dimension of a tensor is mapped; None where it is not
LETTERS: dict[str, tuple[str, ...]] = {"items": ("B",), "heads": ("H", "Hk")}
NO_DIMS: tuple[Dim, ...] = (None,) * len(DIFFERENTIABLE)


class Fold(NamedTuple):
    """How V calls become one: call v has the items, or heads, from v n on, if one call has n."""

    V: int
    along: str  # "items" or "heads"
    sizes: dict[str, int]  # of one call, by letter

    def at(self, shape: str) -> int | None:
        """The index of the folded dimension in `shape`, letters such as "B H M D"; or None."""
        indices = (i for i, x in enumerate(shape.split()) if x in LETTERS[self.along])
        return next(indices, None)

    def options(self, o: Options) -> Options:
        """The options of the folded call. Each call gets the dropout mask that it draws alone: the
        draws repeat after the items, or heads, of one call. If each call is itself a fold (nested
        vmap), they repeat already, and that period stays."""
        if not (o.dropout_p or o.score_mod):  # functions count items and heads, too
            return o
        if self.along == "items":
            return o._replace(dropout_batch_period=o.dropout_batch_period or self.sizes["B"])
        return o._replace(dropout_head_period=o.dropout_head_period or self.sizes["H"])

    def tensors(self, t: Tensors, dims: Sequence[Dim]) -> Tensors:
        each = zip(ARGUMENTS.values(), t, dims)
        return Tensors(*(self._argument(a, x, dim) for a, x, dim in each))  # ty: ignore

    def moving(
        self, t: Tensors, dims: Sequence[Dim], tangents: Sequence[Any], dims_t: Sequence[Dim]
    ) -> tuple[list[Any], list[Any]]:
        """The folded tensors, and their folded tangents. If only one of a mask and its tangent is
        mapped, the other is expanded, because both must have the same shape."""
        folded, moves = list(self.tensors(t, dims)), []
        for name, x_t, dim_t in zip(DIFFERENTIABLE, tangents, dims_t):
            at, a = INDEX[name], ARGUMENTS[name]
            if x_t is not None and a.broadcast and (dim_t is None) != (dims[at] is None):
                folded[at] = self._broadcast(a, front(self.V, t.given(name), dims[at]), 0)
                x_t, dim_t = front(self.V, x_t, dim_t), 0
            moves.append(self._argument(a, x_t, dim_t))
        return folded, moves

    def results(self, of: Sequence[str], tensors: Sequence[Any], dims: Sequence[Dim]) -> list[Any]:
        """Fold outputs, or their gradients or tangents. of: their names in `RESULTS`."""
        each = zip(of, tensors, dims)
        return [None if x is None else self._merge(RESULTS[name], x, dim) for name, x, dim in each]

    def back(self, of: Sequence[str], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Unfold tensors: the mapped dimension comes first. of: the name of each in `RESULTS`, or
        in `ARGUMENTS` for a gradient."""
        shapes = (RESULTS[name] if name in RESULTS else ARGUMENTS[name].shapes[0] for name in of)
        return tuple(self._split(shape, x) for x, shape in zip(tensors, shapes))

    def _split(self, shape: str, x: Tensor) -> Tensor:
        at = self.at(shape)
        assert at is not None
        return x.unflatten(at, (self.V, self.sizes[shape.split()[at]])).movedim(at, 0)

    def _merge(self, shape: str, x: Tensor, dim: Dim) -> Tensor:
        at = self.at(shape)
        assert at is not None
        x = front(self.V, x, dim).movedim(0, at)
        return x.reshape(*x.shape[:at], self.V * x.shape[at + 1], *x.shape[at + 2 :])

    def _argument(self, a: Argument, x: Tensor | None, dim: Dim) -> Tensor | None:
        if x is None:
            return None
        if a.broadcast:
            return self._broadcast(a, x, dim)
        rank = x.ndim - (dim is not None)
        shape = next((s for s in a.shapes if len(s.split()) == rank), a.shapes[0])
        if self.at(shape) is not None:
            return self._merge(shape, x, dim)
        if dim is None:
            return x  # the same for all calls
        # Each call has its own x: repeat it for each of the call's items, or heads.
        shape = next(s for s in a.shapes if self.at(s) is not None)
        at = self.at(shape)
        assert at is not None
        x = front(self.V, x, dim).unsqueeze(1 + at)
        size = self.sizes[shape.split()[at]]
        return self._merge(shape, x.expand(*x.shape[: 1 + at], size, *x.shape[2 + at :]), 0)

    def _broadcast(self, a: Argument, x: Tensor, dim: Dim) -> Tensor:
        (shape,) = a.shapes
        at, full = self.at(shape), len(shape.split())
        assert at is not None
        own = at - (full - x.ndim)
        if dim is None and (own < 0 or x.shape[own] == 1):
            return x  # the same for all calls
        x = front(self.V, x, dim)
        x = x.reshape(self.V, *[1] * (1 + full - x.ndim), *x.shape[1:])
        size = self.sizes[shape.split()[at]]
        return self._merge(shape, x.expand(*x.shape[: 1 + at], size, *x.shape[2 + at :]), 0)


def fold_of(
    V: int,
    t: Tensors,
    dims: Sequence[Dim],
    o: Options,
    tangents: Sequence[Dim] = NO_DIMS,
    needs_grad: Sequence[str] = (),
) -> Fold | None:
    """How to fold V calls; None if they cannot be folded: a mapped tensor has neither items nor
    heads (a packed batch, a seed), or a wanted gradient is summed over both (a mask's).

    tangents: the mapped dimension of each tangent. wants: the gradients to compute.
    """
    if t.cu_q is not None:
        return None
    mapped = [
        a for a, x, dim in zip(ARGUMENTS.values(), t, dims) if x is not None and dim is not None
    ]
    mapped += [ARGUMENTS[name] for name, dim in zip(DIFFERENTIABLE, tangents) if dim is not None]
    for along in LETTERS:
        fold = Fold(V, along, _sizes(t, dims))
        folds = all(any(fold.at(s) is not None for s in a.shapes) for a in mapped)
        made = (ARGUMENTS[name] for name in needs_grad)
        folds &= all(fold.at(a.shapes[0]) is not None and not a.broadcast for a in made)
        if folds and (along == "items" or (V and not o.average_heads)):
            return fold
    return None


def _sizes(t: Tensors, dims: Sequence[Dim]) -> dict[str, int]:
    """B, H and Hk of one call."""
    (B, H, *_), (_, Hk, *_) = (
        [n for at, n in enumerate(x.shape) if dim is None or at != dim % x.ndim]
        for x, dim in zip(t[:2], dims)
    )
    return {"B": B, "H": H, "Hk": Hk}


def pick(tensors: Sequence[Any], dims: Sequence[Dim], i: int) -> list[Any]:
    """The tensors of call i."""
    return [x if x is None or dim is None else x.select(dim, i) for x, dim in zip(tensors, dims)]


def front(V: int, x: Tensor, dim: Dim) -> Tensor:
    """x with the mapped dimension first; expanded to V if x is not mapped."""
    return x.expand(V, *x.shape) if dim is None else x.movedim(dim, 0)
