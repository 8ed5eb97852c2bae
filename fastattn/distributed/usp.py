"""Ulysses and a ring on a mesh of two dimensions (USP, Fang 2024, arXiv:2405.07719).

Ranks along the last dimension divide the heads. A ring along the first sends their keys on.
"""

from __future__ import annotations

from torch import Tensor

from . import layout, ring
from .consistency import Team
from .global_call import GlobalCall
from .ulysses import Heads


def attention(call: GlobalCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, LSE) of this rank's rows."""
    inside, outside = cut(call)
    heads = Heads(inside, q.shape[1], k.shape[1])
    about = heads.arguments(call.differentiable())
    outside = outside._replace(
        arguments=call.arguments | about,
        place=call.place._replace(head=call.place.head + heads.own.start),
    )
    out, lse = ring.around(outside, *heads.take(q, k, v))
    return heads.give(out), heads.give(lse.unsqueeze(-1)).squeeze(-1)


def cut(call: GlobalCall) -> tuple[GlobalCall, GlobalCall]:
    """The call among the ranks that divide heads, and the call among the ranks of a ring."""
    outer, inner = (Team((group,)) for group in call.team.groups)
    n = inner.ranks
    teams = [slice(r * n, r * n + n) for r in range(outer.ranks)]
    own = teams[outer.rank]
    inside = call._replace(team=inner, rows=call.rows[own], keys=call.keys[own])
    rows, keys = (tuple(layout.merged(of[x]) for x in teams) for of in (call.rows, call.keys))
    return inside, call._replace(team=outer, rows=rows, keys=keys)
