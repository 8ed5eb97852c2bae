"""All rows of some heads on each rank (DeepSpeed-Ulysses, Jacobs 2023, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import api
from . import layout
from .collectives import Exchange
from .layout import Spans
from .whole import Whole, heads_of


def attention(call: Whole, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, LSE) of this rank's rows."""
    mine = _heads(q.shape[1], call.ranks)
    own, group = mine[call.rank], max(1, q.shape[1] // max(1, k.shape[1]))
    read = [_read(heads, group) for heads in mine]
    q = _to_heads(call, q, call.rows, mine, "rows of some heads")
    k = _to_heads(call, k, call.keys, read, "keys of some heads")
    v = _to_heads(call, v, call.keys, read, "values of some heads")
    if (each := _each(own, group)) is not None:
        k, v = k[:, each], v[:, each]
    heads = slice(own.start, own.stop)
    about: dict[str, Any] = dict(
        mask=_mask(call, mine),
        sinks=heads_of(call.shared("sinks"), heads, -1),
        alibi_slopes=heads_of(call.arguments["alibi_slopes"], heads, -1),
        place=call.at(head=own.start),
    )
    out, lse = api.attention(q, k, v, **call.arguments | about, return_lse=True)
    return _to_rows(call, out, mine), _to_rows(call, lse.unsqueeze(-1), mine).squeeze(-1)


def _heads(H: int, ranks: int) -> list[range]:
    """Of each rank."""
    each = H // ranks
    return [range(r * each, r * each + each) for r in range(ranks)]


def _read(own: range, group: int) -> range:
    """The key heads that these heads read, `group` of them one."""
    return range(own.start // group, -(-own.stop // group))


def _each(own: range, group: int) -> list[int] | None:
    """Which of those each reads; None where they share them evenly, as grouped heads do."""
    read = _read(own, group)
    if len(read) <= 1 or own.start % group == 0 == own.stop % group:
        return None
    return [h // group - read.start for h in own]


def _mask(call: Whole, mine: Sequence[range]) -> Tensor | None:
    """Of all rows and this rank's heads."""
    mask = call.mask()
    own = slice(mine[call.rank].start, mine[call.rank].stop)
    if mask is None or not call.mask_rows:
        return heads_of(mask, own, -3)
    if mask.ndim > 2 and mask.shape[-3] != 1:
        mask = mask if mask.ndim == 4 else mask[None]
        return _to_heads(call, mask, call.rows, mine, "a mask of some heads")
    return call.gathered(mask, call.rows, "all rows of a mask", mask.ndim - 2)


def _to_heads(call: Whole, x: Tensor, of: Spans, heads: Sequence[range], what: str) -> Tensor:
    """(B, H, own rows, ...) to (B, own heads, all rows, ...)"""
    own = heads[call.rank]
    B, _, _, *columns = x.shape
    pieces = [x[:, each.start : each.stop] for each in heads]
    shapes = [(B, len(own), layout.size_of(rows), *columns) for rows in of]
    found = Exchange.apply(call.group, what, shapes, *pieces)
    return layout.whole(found, of, 2)


def _to_rows(call: Whole, x: Tensor, heads: Sequence[range]) -> Tensor:
    """(B, own heads, all rows, ...) to (B, H, own rows, ...)"""
    B, _, _, *columns = x.shape
    pieces = [layout.part(x, rows, 2) for rows in call.rows]
    own = layout.size_of(call.rows[call.rank])
    shapes = [(B, len(each), own, *columns) for each in heads]
    return torch.cat(Exchange.apply(call.group, "rows of all heads", shapes, *pieces), 1)
