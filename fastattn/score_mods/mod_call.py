"""The score_mod and the mask_mod of one call: their programs, and the forms that a call takes.

`lowered` is for kernels that run programs. `masks` and `bias` are for those that do not: tensors in
the smallest shape that the indices of a program span.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.sizes import known
from .additive import Sum, as_sum, capped, conjunction
from .diagonals import diagonal_indices, is_of_difference, spread
from .evaluate import evaluate
from .lowering import Begin, Lowered, lower, may_lower
from .program import Program, conjuncts, part
from .recognition import Shape, Structure, recognise
from .tracing import Traced, merge
from .unlowered import unlowered


class Rest(NamedTuple):
    """A score_mod and a mask_mod as programs, and a softcap that is an argument of `attention`. If
    there is a program of the score_mod, it contains the softcap that follows it."""

    score: Program | None
    mask: Program | None
    softcap: float | None


class ModCall(NamedTuple):
    """The programs of a call, what was recognised in them, and their arguments.

    score: the program of the score_mod.
    mask: the program of the mask_mod.
    tensors: what both capture.
    sum: the score_mod as softcap(score) + bias; None if it has another form.
    structure: what is recognised in the mask_mod, and slopes of a score_mod, which then is no sum.
    sizes: of the call; of a packed batch, the longest.
    begin: the first index of each kind.
    dtype: that of scores and of floats.
    """

    score: Program | None
    mask: Program | None
    tensors: tuple[Tensor, ...]
    sum: Sum | None
    structure: Structure
    sizes: Shape
    begin: Begin
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(
        cls,
        of_score: Traced | None,
        of_mask: Traced | None,
        sizes: Shape,
        dtype: torch.dtype,
        device: torch.device,
        begin: Begin | None = None,
    ) -> ModCall:
        """begin: None if the call is no part of a larger one: then structure is recognised."""
        score, mask, tensors = merge(of_score, of_mask)
        if begin is None and not torch.compiler.is_compiling():
            structure = recognise(score, mask, tensors, sizes, dtype)

        else:
            structure = Structure(score=score, mask=mask)
        parts: Sum | None = Sum(structure.softcap)
        if structure.score is not None and score is not None:
            structure, parts = structure._replace(alibi=None), as_sum(score)
        if structure.band is not None and any(x is not None and x < 0 for x in structure.band):
            # No window begins there.
            structure = structure._replace(band=None, key_lengths=None, mask=mask)
        given = sizes, begin or Begin(), dtype, device
        return cls(score, mask, tensors, parts, structure, *given)

    def shown(self) -> Program | None:
        """What the mask_mod shows and a score_mod that is a sum does not hide, as a program."""
        return conjunction(self.structure.mask, None if self.sum is None else self.sum.mask)

    def rest(self, softcap: float | None = None) -> Rest:
        """What is left after the arguments that were recognised.

        softcap: the call's own, which follows the score_mod.
        """
        parts, mask = self.sum, self.structure.mask
        score = self.score
        if parts is not None and not (parts.mask is not None and softcap is not None):
            # Else the score_mod stays whole: a softcap makes finite scores of those that it hides.
            mask = self.shown()
            if parts.bias is None and None in (parts.softcap, softcap):
                return Rest(None, mask, parts.softcap if softcap is None else softcap)
            score = parts.program(() if self.score is None else self.score.captured)
        if score is not None and softcap is not None:
            score = capped(score, softcap)
        return Rest(score, mask, None)

    def lowered(self, rest: Rest, in_parts: bool = False) -> Lowered | None:
        """Its programs as kernels run them. None if there is none, or if a mask serves better.

        in_parts: the call is computed in parts, for each of which `lowered_call` lowers them.
        """
        if rest.score is None and rest.mask is None:
            return None
        if in_parts:
            return unlowered(*rest[:2], self.tensors, self.dtype)
        symbols = any(type(n) is not int for n in self.sizes)  # in a graph of make_fx
        if symbols or torch.compiler.is_compiling():
            given = *rest[:2], self.tensors
            return unlowered(*given, self.dtype) if may_lower(*given) else None
        try:
            about = self.sizes, self.dtype, self.begin, self.device
            return lower(*rest[:2], self.tensors, *about)
        except RuntimeError:  # under vmap, or of tensors without data: values are not known
            return None

    def indices(self) -> dict[str, Tensor]:
        """b, h, i and j, as they broadcast."""
        return {
            name: torch.arange(first, first + size, device=self.device).view(-1, *(1,) * (3 - dim))
            for dim, (name, first, size) in enumerate(zip("bhij", self.begin, self.sizes))
        }

    def value(self, program: Program, score: Tensor | None = None, **indices: Tensor) -> Tensor:
        """The result of a program, for all indices or for some. A condition of the mask_mod may
        index out of range at pairs that those before it hide, a score_mod where any does."""
        own = self.indices() | indices
        where: dict[str, Any] = dict(dtype=self.dtype, score=score) | own
        rows, keys = own["i"].numel(), own["j"].numel()
        whole = self.begin.row == self.begin.key == 0
        try:
            long = known(rows > 1) and known(keys > 1)
            if not (long and whole and is_of_difference(program)):
                return evaluate(program, self.tensors, **where)
            once: dict[str, Any] = where | diagonal_indices(rows, keys, self.device)
            return spread(evaluate(program, self.tensors, **once), keys)
        except IndexError:
            if program.kind == "bool":
                return self._shown(program, where)
            if self.mask is None:
                raise
            seen = self._shown(self.mask, where)
            return evaluate(program, self.tensors, seen=seen, **where)

    def _shown(self, mask: Program, where: dict[str, Any]) -> Tensor:
        """What a mask_mod shows, by one of its conditions after the other."""
        shown: Tensor | None = None
        for at in conjuncts(mask):
            found = evaluate(part(mask, at), self.tensors, seen=shown, **where)
            shown = found if shown is None else shown & found
        assert shown is not None
        return shown

    def check_indices(self) -> None:
        """Raise IndexError, with the index, if a captured tensor is indexed out of range."""
        for program in (self.mask, self.score):
            if program is not None:
                score = torch.zeros(self.sizes, dtype=self.dtype)
                self.value(program, score)

    def masks(self) -> dict[str, Any]:
        """What the mask_mod amounts to, as arguments."""
        structure, shown = self.structure, self.shown()
        mask = None if shown is None else self.value(shown)
        return dict(window=structure.band, key_lengths=structure.key_lengths, mask=mask)

    def bias(self, mask: Tensor | None) -> Tensor | None:
        """What the score_mod, which is a sum, adds to scores; with a bool mask, -inf where it is
        False."""
        if self.sum is None or self.sum.bias is None:
            return mask
        bias = self.value(self.sum.bias)
        return bias if mask is None else torch.where(mask, bias, -math.inf)
