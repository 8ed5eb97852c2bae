"""All rows of some heads on each rank (DeepSpeed-Ulysses, Jacobs 2023, arXiv:2309.14509)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import api
from ..call.spec import ARGUMENTS
from . import layout
from .collectives import Exchange
from .global_call import GlobalCall, gathered, heads_of
from .layout import Spans


def attention(call: GlobalCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, LSE) of this rank's rows."""
    heads = Heads(call, q.shape[1], k.shape[1])
    about = heads.arguments(call.differentiable())
    about["place"] = call.at(head=heads.own.start)
    of_heads = heads.take(q, k, v)
    out, lse = api.attention(*of_heads, **call.arguments | about, return_lse=True)
    return heads.give(out), heads.give(lse.unsqueeze(-1)).squeeze(-1)


class Heads:
    """The heads of each rank of a call, all equally many. `take` exchanges this rank's rows of all
    heads for all rows of its own heads, and `give` does the reverse."""

    call: GlobalCall
    group: int
    heads: list[range]
    own: range

    def __init__(self, call: GlobalCall, H: int, Hk: int):
        each = H // call.ranks
        self.call, self.group = call, max(1, H // max(1, Hk))
        self.heads = [range(r * each, r * each + each) for r in range(call.ranks)]
        self.own = self.heads[call.rank]

    def arguments(self, differentiable: dict[str, Tensor | None]) -> dict[str, Any]:
        """The arguments for all rows and this rank's heads. differentiable: those that
        `GlobalCall.differentiable` returns."""
        own, arguments = slice(self.own.start, self.own.stop), {}
        given = self.call.arguments | differentiable
        for argument in ARGUMENTS.values():
            letters, name = argument.shapes[-1].split(), argument.name
            if name in given and "H" in letters:
                at = letters.index("H") - len(letters)
                mask = argument.broadcast and self.call.mask_rows
                arguments[name] = (
                    self._mask(given[name]) if mask else heads_of(given[name], own, at)
                )
        return arguments

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All rows of this rank's heads, and all keys and values that these heads read."""
        read = [self._read(heads) for heads in self.heads]
        q = self._to_heads(q, self.call.rows, self.heads, "rows of some heads")
        k = self._to_heads(k, self.call.keys, read, "keys of some heads")
        v = self._to_heads(v, self.call.keys, read, "values of some heads")
        if (each := self._each()) is not None:
            k, v = k[:, each], v[:, each]
        return q, k, v

    def give(self, x: Tensor) -> Tensor:
        """(B, own heads, all rows, ...) to (B, H, own rows, ...)"""
        call, (B, _, _, *columns) = self.call, x.shape
        pieces = layout.parts(x, call.rows, 2)
        own = layout.size_of(call.rows[call.rank])
        shapes = [(B, len(heads), own, *columns) for heads in self.heads]
        return torch.cat(Exchange.apply(call.group, "rows of all heads", shapes, *pieces), 1)

    def _to_heads(self, x: Tensor, of: Spans, heads: list[range], what: str) -> Tensor:
        """(B, all heads, own rows, ...) to (B, own heads, all rows, ...)"""
        call, (B, _, _, *columns) = self.call, x.shape
        pieces = [x[:, each.start : each.stop] for each in heads]
        own = len(heads[call.rank])
        shapes = [(B, own, layout.size_of(rows), *columns) for rows in of]
        return layout.whole(Exchange.apply(call.group, what, shapes, *pieces), of, 2)

    def _read(self, heads: range) -> range:
        """The key heads that these heads read."""
        return range(heads.start // self.group, -(-heads.stop // self.group))

    def _each(self) -> list[int] | None:
        """For each own head, which of the key heads it reads; None if the heads share them evenly,
        as grouped heads do."""
        own, read = self.own, self._read(self.own)
        if len(read) <= 1 or own.start % self.group == 0 == own.stop % self.group:
            return None
        return [h // self.group - read.start for h in own]

    def _mask(self, mask: Tensor | None) -> Tensor | None:
        """All rows of a mask for this rank's heads, if each rank has its own rows of it."""
        if mask is None:
            return None
        if mask.ndim > 2 and mask.shape[-3] != 1:
            mask = mask if mask.ndim == 4 else mask[None]
            return self._to_heads(mask, self.call.rows, self.heads, "a mask of some heads")
        team, rows = self.call.team, self.call.rows
        return gathered(team, mask, rows, "all rows of a mask", mask.ndim - 2)
