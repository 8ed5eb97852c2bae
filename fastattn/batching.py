"""vmap's arithmetic: V calls as one of V times as many items, or heads, and back. Pure functions.

Where the items and heads of a tensor lie is read off its letters in `spec.ARGUMENTS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .spec import ARGUMENTS, DIFFERENTIABLE, INDEX, RESULTS, Argument, Options, Tensors

Dim = int | None  # which dimension of a tensor is mapped; None where it is not
LETTERS: dict[str, tuple[str, ...]] = {"items": ("B",), "heads": ("H", "Hk")}
NO_DIMS: tuple[Dim, ...] = (None,) * len(DIFFERENTIABLE)


class Fold(NamedTuple):
    """How V calls are one. Call v has the items, or heads, from v times as many as one has."""

    V: int
    along: str  # "items" or "heads"
    sizes: dict[str, int]  # of one call, by letter

    def at(self, shape: str) -> int | None:
        """Which dimension it is, in a shape of that many letters."""
        found = (i for i, x in enumerate(shape.split()) if x in LETTERS[self.along])
        return next(found, None)

    def options(self, o: Options) -> Options:
        """Dropout draws for each call what it draws for one. Where that is several calls itself,
        its draws repeat already, after a part of what it has, and go on so."""
        if not o.dropout_p:
            return o
        if self.along == "items":
            return o._replace(items_again=o.items_again or self.sizes["B"])
        return o._replace(heads_again=o.heads_again or self.sizes["H"])

    def tensors(self, t: Tensors, dims: Sequence[Dim]) -> Tensors:
        each = zip(ARGUMENTS.values(), t, dims)
        return Tensors(*(self._argument(a, x, dim) for a, x, dim in each))  # ty: ignore

    def moving(
        self, t: Tensors, dims: Sequence[Dim], tangents: Sequence[Any], dims_t: Sequence[Dim]
    ) -> tuple[list[Any], list[Any]]:
        """Tensors, then their tangents: where one of a mask and its tangent is mapped both are, for
        they have one shape."""
        found, moves = list(self.tensors(t, dims)), []
        for name, x_t, dim_t in zip(DIFFERENTIABLE, tangents, dims_t):
            at, a = INDEX[name], ARGUMENTS[name]
            if x_t is not None and a.broadcast and (dim_t is None) != (dims[at] is None):
                found[at] = self._broadcast(a, _front(self.V, t.given(name), dims[at]), 0)
                x_t, dim_t = _front(self.V, x_t, dim_t), 0
            moves.append(self._argument(a, x_t, dim_t))
        return found, moves

    def results(self, of: Sequence[str], tensors: Sequence[Any], dims: Sequence[Dim]) -> list[Any]:
        """Outputs, or their gradients or tangents."""
        each = zip(of, tensors, dims)
        return [None if x is None else self._merge(RESULTS[name], x, dim) for name, x, dim in each]

    def back(self, of: Sequence[str], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The mapped dimension first. of: what each is, of `RESULTS`, or of `ARGUMENTS` as a
        gradient is."""
        shapes = (RESULTS[name] if name in RESULTS else ARGUMENTS[name].shapes[0] for name in of)
        return tuple(self._split(shape, x) for x, shape in zip(tensors, shapes))

    def _split(self, shape: str, x: Tensor) -> Tensor:
        at = self.at(shape)
        assert at is not None
        return x.unflatten(at, (self.V, self.sizes[shape.split()[at]])).movedim(at, 0)

    def _merge(self, shape: str, x: Tensor, dim: Dim) -> Tensor:
        at = self.at(shape)
        assert at is not None
        x = _front(self.V, x, dim).movedim(0, at)
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
            return x  # the same for all
        shape = next(s for s in a.shapes if self.at(s) is not None)  # each call has its own, so
        at = self.at(shape)  # each item has
        assert at is not None
        x = _front(self.V, x, dim).unsqueeze(1 + at)
        size = self.sizes[shape.split()[at]]
        return self._merge(shape, x.expand(*x.shape[: 1 + at], size, *x.shape[2 + at :]), 0)

    def _broadcast(self, a: Argument, x: Tensor, dim: Dim) -> Tensor:
        (shape,) = a.shapes
        at, full = self.at(shape), len(shape.split())
        assert at is not None
        own = at - (full - x.ndim)
        if dim is None and (own < 0 or x.shape[own] == 1):
            return x  # the same for all
        x = _front(self.V, x, dim)
        x = x.reshape(self.V, *[1] * (1 + full - x.ndim), *x.shape[1:])
        size = self.sizes[shape.split()[at]]
        return self._merge(shape, x.expand(*x.shape[: 1 + at], size, *x.shape[2 + at :]), 0)


def fold_of(
    V: int,
    t: Tensors,
    dims: Sequence[Dim],
    o: Options,
    tangents: Sequence[Dim] = NO_DIMS,
    wants: Sequence[str] = (),
) -> Fold | None:
    """None where V calls are no single one: where something is mapped that has neither items nor
    heads of its own (what is packed, a seed), and where a gradient is a sum over both (of a mask).

    tangents: where those are mapped. wants: the gradients that are made.
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
        made = (ARGUMENTS[name] for name in wants)
        folds &= all(fold.at(a.shapes[0]) is not None and not a.broadcast for a in made)
        if folds and (along == "items" or (V and not o.average_heads)):
            return fold
    return None


def _sizes(t: Tensors, dims: Sequence[Dim]) -> dict[str, int]:
    """Items and heads of one call."""
    (B, H, *_), (_, Hk, *_) = (
        [n for at, n in enumerate(x.shape) if dim is None or at != dim % x.ndim]
        for x, dim in zip(t[:2], dims)
    )
    return {"B": B, "H": H, "Hk": Hk}


def pick(tensors: Sequence[Any], dims: Sequence[Dim], i: int) -> list[Any]:
    """The tensors of call i."""
    return [x if x is None or dim is None else x.select(dim, i) for x, dim in zip(tensors, dims)]


def _front(V: int, x: Tensor, dim: Dim) -> Tensor:
    """The mapped dimension first; made by expansion where there is none."""
    return x.expand(V, *x.shape) if dim is None else x.movedim(dim, 0)
