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
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .derivatives import Derivative, Differentiation
from .evaluate import NOWHERE, evaluate_all
from .mod_text import ModText
from .program import Program, needed, renumbered

FLOATS_T = 2  # the number of the captured tensor that has the tangent of 0


class Load(NamedTuple):
    """A load of a captured float: the values of its index, of f_k, of f_xk, and of the derivative
    of f_k along the tangent of captured floats, sum_l f_kl c_t[l]."""

    index: int
    slope: Derivative
    mixed: Derivative
    along: Derivative


class _Derived(NamedTuple):
    """A program with its derivatives, by the numbers of values."""

    program: Program
    result: int
    slope: Derivative
    bend: Derivative
    loads: tuple[Load, ...]


@functools.lru_cache(maxsize=64)
def _derived(text: str) -> _Derived | None:
    program = ModText.parse(text).score
    if program is None:
        return None
    d, result = Differentiation(program.values), len(program.values) - 1
    score = next((at for at, x in enumerate(program.values) if x.op == "score"), None)
    floats = {
        at: x.args[0] for at, x in enumerate(program.values) if x.op == "load" and x.kind == "float"
    }
    tangents = {at: d.builder.load(FLOATS_T, "float", (x,)) for at, x in floats.items()}
    slope, bend = d.by_score(result)
    loads = []
    for at, index in floats.items():
        by_load = d.by(at, result)
        mixed = along = None
        if by_load is not None:
            mixed = None if score is None else d.by(score, by_load)
            along = d.along(tangents, by_load)
        loads.append(Load(index, by_load, mixed, along))
    whole = Program(tuple(d.values), (*program.captured, program.captured[0]))
    return _Derived(whole, result, slope, bend, tuple(loads))


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
        self.where: dict[str, Any] = dict(score=products, seen=NOWHERE, **indices)

    def _at(self, *wanted: Derivative, floats_t: Tensor | None = None) -> Iterator[Any]:
        """These values of the program, tensors; 0.0 for None."""
        program, (floats, ints) = self.derived.program, self.captured
        kept = needed(program.values, *(x for x in wanted if x is not None))
        part = Program(renumbered(program.values, kept), program.captured)
        tensors = floats, ints, floats if floats_t is None else floats_t
        values = dict(zip(kept, evaluate_all(part, tensors, **self.where)))
        return iter([0.0 if x is None else values[x] for x in wanted])

    def value(self) -> Tensor:
        (value,) = self._at(self.derived.result)
        return value.expand(self.shape)

    def slope(self) -> Tensor | float:
        """f_x."""
        return next(self._at(self.derived.slope))

    def slope_tangent(self, products_t: Tensor, floats_t: Tensor | None) -> Tensor:
        moved = products_t * next(self._at(self.derived.bend))
        return moved if floats_t is None else moved + self._along(floats_t, "mixed")

    def of_floats(self, floats_t: Tensor) -> Tensor:
        """sum_k f_k c_t[k]."""
        return self._along(floats_t, "slope")

    def _along(self, floats_t: Tensor, name: str) -> Tensor:
        """The sum over the loads of c_t times the derivative of this name."""
        moved = floats_t.new_zeros(self.shape)
        for index, x in self._of_loads(name):
            moved = moved + x * floats_t[index]
        return moved

    def gradient(self, g: Tensor) -> Tensor:
        """c_g."""
        gradient = torch.zeros_like(self.captured[0])
        for index, slope in self._of_loads("slope"):
            self._add(gradient, index, g, slope)
        return gradient

    def gradient_tangent(
        self, g: Tensor, g_t: Tensor, products_t: Tensor, floats_t: Tensor | None
    ) -> Tensor:
        tangent = self.gradient(g_t)
        for index, mixed in self._of_loads("mixed"):
            self._add(tangent, index, g, products_t * mixed)
        for index, along in self._of_loads("along", floats_t) if floats_t is not None else ():
            self._add(tangent, index, g, along)
        return tangent

    def _of_loads(
        self, name: str, floats_t: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each load with a derivative of this name other than 0: its index, and that."""
        wanted = [(x.index, getattr(x, name)) for x in self.derived.loads]
        wanted = [x for x in wanted if x[1] is not None]
        values = self._at(*(y for x in wanted for y in x), floats_t=floats_t)
        for index, x in zip(values, values):
            yield index.clamp(0, max(self.captured[0].numel() - 1, 0)), x

    def _add(self, total: Tensor, index: Tensor, g: Tensor, slope: Tensor) -> None:
        x = torch.where(g == 0, 0.0, g * slope)  # a hidden score may have no derivative
        at = index.expand(self.shape).reshape(-1)
        total.index_add_(0, at, x.expand(self.shape).reshape(-1))
