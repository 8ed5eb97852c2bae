"""The value of a score_mod on torch tensors with its derivatives, by scores and captured numbers.

The program is one of `lowering`: captured tensor 0 has floats, 1 has ints, each of one dimension.
With x the scaled products of a call, c the captured floats, and f the program,

    tangent of f           f_x x_t + sum_k f_k c_t[k]
    tangent of f_x         f_xx x_t + sum_k f_xk c_t[k]
    gradient of c          c_g[k] += g f_k

where k are the places that the program loads from. Nothing is recorded by autograd.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .derivatives import Derivative, Differentiation
from .evaluate import NOWHERE, evaluate_all
from .mod_text import ModText
from .program import Program


class Load(NamedTuple):
    """A load of a captured float: the values of its index, of f_k, and of f_xk."""

    index: int
    slope: Derivative
    mixed: Derivative


class _Derived(NamedTuple):
    """A program with its derivatives, by the numbers of values."""

    program: Program
    result: int
    slope: Derivative
    bend: Derivative
    loads: tuple[Load, ...]
    by_two: tuple[tuple[Derivative, ...], ...]  # of two loads


@functools.lru_cache(maxsize=64)
def _derived(text: str) -> _Derived | None:
    program = ModText.parse(text).score
    if program is None:
        return None
    d, result = Differentiation(program.values), len(program.values) - 1
    score = next((at for at, x in enumerate(program.values) if x.op == "score"), None)

    def by(at: int | None, of: Derivative) -> Derivative:
        return None if at is None or of is None else d.by(at, of)

    floats = [at for at, x in enumerate(program.values) if x.op == "load" and x.kind == "float"]
    slope, bend = d.by_score(result)
    slopes = [by(at, result) for at in floats]
    loads = tuple(
        Load(program.values[at].args[0], x, by(score, x)) for at, x in zip(floats, slopes)
    )
    by_two = tuple(tuple(by(at, x) for at in floats) for x in slopes)
    whole = Program(tuple(d.values), program.captured)
    return _Derived(whole, result, slope, bend, loads, by_two)


class ScoreModAt:
    """A score_mod at the scaled products of a call.

    captured: the floats and the ints.
    indices: b, h, i and j, which broadcast.
    products: (B, H, M, N), scaled.

    An index out of range is clamped: `ModText.outside` says where one is.
    """

    def __init__(
        self,
        text: str,
        captured: tuple[Tensor, Tensor],
        indices: dict[str, Tensor],
        products: Tensor,
    ) -> None:
        derived = _derived(text)
        assert derived is not None, "a text with a score_mod"
        self.derived, self.captured, self.shape = derived, captured, products.shape
        where: dict[str, Any] = dict(score=products, seen=NOWHERE, **indices)
        self.values = evaluate_all(derived.program, captured, **where)

    def _at(self, at: Derivative) -> Tensor | float:
        return 0.0 if at is None else self.values[at]

    def value(self) -> Tensor:
        return self.values[self.derived.result].expand(self.shape)

    def slope(self) -> Tensor | float:
        """f_x."""
        return self._at(self.derived.slope)

    def slope_tangent(self, products_t: Tensor, floats_t: Tensor | None) -> Tensor:
        moved = products_t * self._at(self.derived.bend)
        if floats_t is not None:
            for load in self.derived.loads:
                moved = moved + self._at(load.mixed) * floats_t[self._place(load)]
        return moved

    def of_floats(self, floats_t: Tensor) -> Tensor:
        """sum_k f_k c_t[k]."""
        moved = floats_t.new_zeros(self.shape)
        for load in self.derived.loads:
            moved = moved + self._at(load.slope) * floats_t[self._place(load)]
        return moved

    def gradient(self, g: Tensor) -> Tensor:
        """c_g."""
        gradient = torch.zeros_like(self.captured[0])
        for load in self.derived.loads:
            self._add(gradient, load, g, self._at(load.slope))
        return gradient

    def gradient_tangent(
        self, g: Tensor, g_t: Tensor, products_t: Tensor, floats_t: Tensor | None
    ) -> Tensor:
        tangent = self.gradient(g_t)
        for load, by_load in zip(self.derived.loads, self.derived.by_two):
            moved = products_t * self._at(load.mixed)
            if floats_t is not None:
                for other, x in zip(self.derived.loads, by_load):
                    moved = moved + self._at(x) * floats_t[self._place(other)]
            self._add(tangent, load, g, moved)
        return tangent

    def _place(self, load: Load) -> Tensor:
        return self.values[load.index].clamp(0, max(self.captured[0].numel() - 1, 0))

    def _add(self, total: Tensor, load: Load, g: Tensor, slope: Tensor | float) -> None:
        x = torch.where(g == 0, 0.0, g * slope)  # a hidden score may have no derivative
        at = self._place(load).expand(self.shape).reshape(-1)
        total.index_add_(0, at, x.expand(self.shape).reshape(-1))
