"""Packed batches over ranks.

The rows of all sequences, one after the other, are divided among the ranks, and so are the keys. A
sequence that a rank has only in part becomes a call at a place of the sequence's own call
(`Place`). Sequences that a rank has whole stay one packed call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from .. import api
from ..api import Arguments, draw_seed, prepare, resolved, with_arguments
from ..backends.base import choose
from ..backends.shared.per_sequence import longest
from ..backends.shared.value_checks import check_values
from ..call.need import need, need_a_tensor
from ..call.packed_layout import heads_first, rows_first
from ..call.spec import ARGUMENTS, EVERYTHING
from ..call.validation import check, describe
from ..dispatch.library_ops import opaque_to_dynamo
from . import layout
from .consistency import NO_ROWS, NOTHING, Own, Team, agree, facts_of, need_team, told
from .global_call import (
    NO_FUNCTIONS,
    GlobalCall,
    gathered,
    placeholder_with_all_rows,
    shared_functions,
    traced,
)
from .layout import CONTIGUOUS, Span
from .ulysses import Heads

OF_ROWS = (-3,)  # of q, k and v, counted from the end


Strategy = Literal["auto", "gather", "ulysses"]


@overload
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    group: Any = None,
    strategy: Strategy = "auto",
    max_q: int | None = None,
    max_k: int | None = None,
    return_lse: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> Tensor: ...
@overload
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    group: Any = None,
    strategy: Strategy = "auto",
    max_q: int | None = None,
    max_k: int | None = None,
    return_lse: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    group: Any = None,
    strategy: Strategy = "auto",
    max_q: int | None = None,
    max_k: int | None = None,
    return_lse: bool,
    **arguments: Unpack[Arguments],
) -> Tensor | tuple[Tensor, Tensor]: ...
@opaque_to_dynamo
@with_arguments
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    group: Any = None,
    strategy: Strategy = "auto",
    max_q: int | None = None,
    max_k: int | None = None,
    return_lse: bool = False,
    **arguments: Unpack[Arguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `fastattn.attention_packed` of sequences that are divided among the ranks of a group.

    Each rank passes its part of all rows and of all keys. Parts are in the order of ranks and of
    any size, as `shard(x, dim=0)` cuts them: a sequence may be cut anywhere. Gradients of q, k and
    v are those of the sum of all ranks' losses. First all ranks compare their arguments in one
    small exchange. Offsets are read, which waits for a GPU.

    Args:
        q: Queries of this rank.
        k: Keys of this rank.
        v: Values of this rank.
        cu_q: Offsets of the rows of the whole batch.
        cu_k: Offsets of the keys of the whole batch.
        group: As in `fastattn.distributed.attention`.
        strategy: "gather" sends every rank all keys and values. "ulysses" sends each rank all rows
            of H / P heads; it needs a group of P ranks, not a mesh, and a P that divides H. "auto"
            is ulysses if it is possible, else gather. There is no ring. Results have the bits of
            one rank as `fastattn.distributed.attention` states for each strategy, except the
            gradients of mask and sinks, which sequences share.
        max_q: As in `fastattn.attention_packed`, of the whole batch.
        max_k: As in `fastattn.attention_packed`, of the whole batch.
        return_lse: If True, also return the LSE.
        **arguments: Those of `fastattn.attention_packed`, of the whole batch and the same on every
            rank. The gradients of mask and sinks are sums over ranks, the same on each. With seed
            None the first rank draws.

    Shape:
        q: (T, H, D), T rows of this rank. Dtypes are those of `fastattn.attention`.
        k: (S, Hk, D), S keys of this rank.
        v: (S, Hk, Dv).
        cu_q: (B + 1,), int32 or int64. They end at the number of rows of all ranks.
        cu_k: (B + 1,), int32 or int64. They end at the number of keys of all ranks.
        out: (T, H, Dv), q's dtype.
        lse: (T, H), float32 (float64 for float64).

    Returns:
        out, or (out, lse) with return_lse, of this rank's rows.

    Raises:
        ValueError: As `fastattn.distributed.attention`. If one rank raises for its arguments, all
            do, in the first exchange.
        TypeError: As `fastattn.distributed.attention`.
        NotImplementedError: As `fastattn.attention`.
        RuntimeError: As `fastattn.distributed.attention`.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> import fastattn
        >>> from fastattn import distributed
        >>> store = dist.HashStore()  # of a group with one rank; torchrun makes groups of several
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> whole, cu = torch.randn(3, 7, 4, 8), torch.tensor([0, 3, 3, 7])
        >>> q, k, v = (distributed.shard(x, dim=0) for x in whole)
        >>> out = distributed.unshard(distributed.attention_packed(q, k, v, cu, cu), dim=0)
        >>> torch.testing.assert_close(out, fastattn.attention_packed(*whole, cu, cu))
        >>> dist.destroy_process_group()
    """
    team = need_team(group)
    given: dict[str, Any] = resolved(arguments, "fastattn.distributed.attention_packed")
    offsets, most = dict(cu_q=cu_q, cu_k=cu_k), dict(max_q=max_q, max_k=max_k)
    how = dict(strategy=strategy, return_lse=return_lse)
    of_ranks = _agreed(q, k, v, team, given, offsets, most, how)
    rows = layout.spans_of(CONTIGUOUS, [x.rows for x in of_ranks], "q.shape[0]")
    keys = layout.spans_of(CONTIGUOUS, [x.keys for x in of_ranks], "k.shape[0]")
    T, S = (sum(map(layout.size_of, of)) for of in (rows, keys))
    for (name, cu), total in zip(offsets.items(), (T, S)):
        end = int(cu[-1])
        need(end == total, name, f"{end} last", f"{total}, the rows of all ranks")
    if given["dropout_p"] and given["seed"] is None:
        given = given | {"seed": of_ranks[0].seed}
    given = shared_functions(traced(given, q), team)
    call = GlobalCall(team, rows, keys, given, False, given["place"] or EVERYTHING)
    if strategy == "auto":
        strategy = "gather" if _why_not_heads(q.shape[1], team) else "ulysses"
    out, lse = STRATEGIES[strategy](call, q, k, v, cu_q, cu_k, _longest(offsets, most, T, S))
    return (out, lse) if return_lse else out


def _agreed(q, k, v, team, given, offsets, most, how) -> list[Own]:
    names = (*"qkv", *offsets, *api.DEFAULTS, *most, *how)
    own, trouble, facts = NOTHING, None, dict.fromkeys(names)
    try:
        _check_own(q, k, v, team, given, offsets, most, how["strategy"])
        given = traced(given, q)
        draws = given["dropout_p"] and given["seed"] is None
        seed = int(draw_seed("cpu")) if draws else 0
        own = Own(q.shape[0], k.shape[0], seed, NO_ROWS)
        facts |= {name: told(x, OF_ROWS) for name, x in zip("qkv", (q, k, v))}
        facts |= {name: (*told(cu), cu.tolist()) for name, cu in offsets.items()}
        facts |= facts_of(given) | most | how
    except Exception as caught:  # of any kind, because the other ranks wait for this one
        trouble = caught
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    return agree(own, facts, trouble, device, team)


def _check_own(q, k, v, team, given, offsets, most, strategy) -> None:
    """Raise every error that a call on any rank would raise.

    Sequences of other ranks are checked, too: if one rank raised after the exchange, the others
    would wait for it.
    """
    if strategy not in ("auto", *STRATEGIES):
        expected = "'auto', 'gather' or 'ulysses' of a packed batch"
        raise ValueError(f"strategy: got {strategy!r}, expected {expected}")
    seed = 0 if given["seed"] is None else given["seed"]  # so that none is drawn
    laid = (heads_first(name, x) for name, x in zip("qkv", (q, k, v)))
    t, o = prepare(*laid, given | NO_FUNCTIONS | {"seed": seed})
    check(
        t._replace(mask=None, key_lengths=None, alibi_slopes=None), o
    )  # these are the whole batch's
    T, S = (_end(name, cu) for name, cu in offsets.items())
    # The whole batch: only its shapes and offsets are checked.
    q_all, k_all, v_all = map(placeholder_with_all_rows, (t.q, t.k, t.given("v")), (T, S, S))
    max_q, max_k = _longest(offsets, most, T, S)
    t = t._replace(q=q_all, k=k_all, v=v_all, **offsets)
    spec = describe(t, o._replace(max_q=max_q, max_k=max_k))
    check_values(spec, t)
    choose(spec, o.backend, q.device)
    if strategy == "ulysses" and (why := _why_not_heads(q.shape[1], team)):
        raise ValueError(f"strategy: got 'ulysses' {why}; use strategy='gather'")


def _end(name: str, cu: Any) -> int:
    """The last of some offsets. Raises if they are not valid."""
    need_a_tensor(name, cu)
    need(cu.ndim == 1 and len(cu) > 0, name, f"shape {tuple(cu.shape)}", "(B + 1,) offsets")
    integers = not cu.is_floating_point()
    need(integers, f"{name}.dtype", cu.dtype, "torch.int32 or torch.int64")
    steps = cu.tolist()
    rises = steps[0] == 0 and all(x <= y for x, y in itertools.pairwise(steps))
    need(rises, name, steps, "offsets from 0 that never fall")
    return steps[-1]


def _longest(offsets, most, T: int, S: int) -> tuple[int, int]:
    """The most rows, and the most keys, of a sequence."""
    named = zip(most.items(), offsets.values(), (T, S))
    max_q, max_k = (longest(name, given, cu, total) for (name, given), cu, total in named)
    return max_q, max_k


def _why_not_heads(heads: int, team: Team) -> str:
    """Return why the heads cannot be divided among the ranks, or "" if they can."""
    *outer, ranks = team.sizes
    if outer:
        return "of a mesh, expected a group"
    if heads % ranks:
        return f"for {heads} heads on {ranks} ranks, expected ranks that divide them"
    return ""


# -- the strategies --------------------------------------------------------------------------------


def _ulysses(call: GlobalCall, q, k, v, cu_q, cu_k, most) -> tuple[Tensor, Tensor]:
    heads = Heads(call, q.shape[1], k.shape[1])
    about = heads.arguments(call.differentiable())
    about["place"] = call.place._replace(head=call.place.head + heads.own.start)
    laid = (heads_first(name, x) for name, x in zip("qkv", (q, k, v)))
    of_heads = map(rows_first, heads.take(*laid))
    where: dict[str, Any] = dict(max_q=most[0], max_k=most[1], return_lse=True)
    given = call.arguments | about | where
    out, lse = api.attention_packed(*of_heads, cu_q, cu_k, **given)
    lse = heads.give(heads_first("lse", lse.unsqueeze(-1)))
    return rows_first(heads.give(heads_first("out", out))), rows_first(lse).squeeze(-1)


def _gather(call: GlobalCall, q, k, v, cu_q, cu_k, most) -> tuple[Tensor, Tensor]:
    k = gathered(call.team, k, call.keys, "all keys", 0)
    v = gathered(call.team, v, call.keys, "all values", 0)
    arguments = call.arguments | call.differentiable()
    own = (*call.rows[call.rank], Span(0, 0))[0]
    starts, ends = cu_q.tolist(), cu_k.tolist()
    outs, lses = [], []
    for piece in pieces(starts, own):
        rows = slice(piece.rows.first - own.first, piece.rows.end - own.first)
        keys = slice(ends[piece.first], ends[piece.end])
        given = _of_items(arguments, slice(piece.first, piece.end))
        place = call.place._replace(item=call.place.item + piece.first)
        if piece.whole:
            of = slice(piece.first, piece.end + 1)
            cu = (x[of] - x[piece.first] for x in (cu_q, cu_k))
            given |= dict(max_q=most[0], max_k=most[1], place=place, return_lse=True)
            out, lse = api.attention_packed(q[rows], k[keys], v[keys], *cu, **given)
        else:
            at = piece.rows.first - starts[piece.first]
            whole = starts[piece.end] - starts[piece.first]
            N = keys.stop - keys.start
            mask = _cut(_cut(given["mask"], -2, at, at + piece.rows.size), -1, 0, N)
            place = place._replace(row=at, rows=whole, keys=N)
            laid = (heads_first(x, y) for x, y in zip("qkv", (q[rows], k[keys], v[keys])))
            given |= dict(place=place, mask=mask, return_lse=True)
            out, lse = api.attention(*laid, **given)
            out, lse = rows_first(out), rows_first(lse)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


STRATEGIES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "gather": _gather,
    "ulysses": _ulysses,
}


class Piece(NamedTuple):
    """Rows of the sequences from `first` up to `end`: all of them if `whole`, else some of one."""

    first: int
    end: int
    rows: Span  # of the whole batch
    whole: bool


def pieces(starts: Sequence[int], own: Span) -> list[Piece]:
    """The pieces of a rank with these rows. A rank without rows has one empty piece, because it
    has gradients, too."""
    of_rank: list[Piece] = []
    for b, (begin, stop) in enumerate(itertools.pairwise(starts)):
        rows = Span(max(begin, own.first), min(stop, own.end))
        whole = rows == (begin, stop)
        if rows.size <= 0:
            continue
        if whole and of_rank and of_rank[-1].whole:
            of_rank[-1] = of_rank[-1]._replace(end=b + 1, rows=Span(of_rank[-1].rows.first, stop))
        else:
            of_rank.append(Piece(b, b + 1, rows, whole))
    return of_rank or [Piece(0, 0, Span(own.first, own.first), True)]


def _of_items(arguments: dict[str, Any], items: slice) -> dict[str, Any]:
    """The arguments of these sequences, cut from those of the whole batch."""
    cut = dict(arguments)
    for argument in ARGUMENTS.values():
        x = arguments.get(argument.name)
        if not isinstance(x, Tensor):
            continue
        if argument.broadcast:
            cut[argument.name] = _cut(x, -len("BHMN"), items.start, items.stop)
        elif argument.counts_items(x):
            cut[argument.name] = x[items]
    return cut


def _cut(x: Tensor | None, dim: int, first: int, end: int) -> Tensor | None:
    """x from first up to end along dim; x itself if it broadcasts along dim."""
    if x is None or x.ndim < -dim or x.shape[dim] == 1:
        return x
    return x.narrow(dim, first, end - first)
