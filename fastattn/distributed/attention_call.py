"""The public call: what the ranks agree on, and the strategy that runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..api import DEFAULTS, Arguments, draw_seed, prepare, resolved, with_arguments
from ..backends.shared.value_checks import check_values
from ..call.need import flag, need_a_tensor
from ..call.spec import EVERYTHING
from ..call.validation import check, describe
from ..dispatch.library_ops import opaque_to_dynamo
from . import cost_model, gather, ring, ulysses, usp
from .consistency import NOTHING, ROWS, UNCLEAR, Own, Team, facts_of, mask_rows, need_team, told
from .consistency import agree as _agree
from .cost_model import Cost, machine_of
from .global_call import (
    NO_FUNCTIONS,
    GlobalCall,
    placeholder_with_all_rows,
    shared_functions,
    traced,
)
from .layout import CONTIGUOUS, Layout, need_layout, size_of, spans_of

OF_ROWS = (-2,)  # of q, k, v and mask, counted from the end


Strategy = Literal["auto", "gather", "ring", "ulysses", "usp"]
STRATEGIES: dict[str, Callable[[GlobalCall, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "gather": gather.attention,
    "ring": ring.attention,
    "ulysses": ulysses.attention,
    "usp": usp.attention,
}
DIMENSIONS = {"ring": 1, "ulysses": 1, "usp": 2}  # of the mesh; a strategy not listed takes any


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    strategy: Strategy = "auto",
    layout: Layout = CONTIGUOUS,
    agree: bool = True,
    return_lse: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    strategy: Strategy = "auto",
    layout: Layout = CONTIGUOUS,
    agree: bool = True,
    return_lse: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    strategy: Strategy = "auto",
    layout: Layout = CONTIGUOUS,
    agree: bool = True,
    return_lse: bool,
    **arguments: Unpack[Arguments],
) -> Tensor | tuple[Tensor, Tensor]: ...
@opaque_to_dynamo  # by compilers: communication between ranks is not part of a graph
@with_arguments
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    strategy: Strategy = "auto",
    layout: Layout = CONTIGUOUS,
    agree: bool = True,
    return_lse: bool = False,
    **arguments: Unpack[Arguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `fastattn.attention` of a sequence that is divided among the ranks of a group.

    Each rank passes its own rows and keys, with all heads, and gets the results of its rows. These
    are the results of one call on the whole sequence, with causal, windows, ALiBi and dropout's
    draws. Gradients of q, k and v are those of the sum of all ranks' losses.

    The strategies, on P ranks:

    - "gather" sends every rank all keys and values. out, LSE and the gradients of q and of a mask
      that has rows have the bits that they have on one rank.
    - "ulysses" (DeepSpeed-Ulysses, Jacobs 2023) sends each rank all rows of H / P heads. P must
      divide H. If it divides Hk, too, everything has the bits of one rank.
    - "ring" (Ring Attention, Liu 2023) sends keys from rank to rank while it computes, so that
      memory falls as 1 / P. It leaves out hops with keys that no row sees. It has first derivatives
      only.
    - "usp" (Fang 2024) is ulysses along the last dimension of a mesh of two and a ring along the
      first.
    - "auto" is the strategy that takes the least time by `cost_model.py`, from sizes and stated
      rates; with row_invariant, among those that keep the bits. `explain` shows which, and why.

    Args:
        q: Queries of this rank.
        k: Keys of this rank.
        v: Values of this rank.
        group: A torch.distributed group, a DeviceMesh, or None for all ranks. In a mesh of several
            dimensions ranks count along the last one first.
        strategy: "auto", "gather", "ring", "ulysses" or "usp".
        layout: How the sequence is divided: "contiguous" (parts of any sizes, in the order of
            ranks) or "zigzag"; see `shard`.
        agree: If True, first check in one small exchange that all ranks make the same call; a
            difference raises on every rank. If False, each rank must have as many rows and keys as
            the others, and parts that the layout allows; with dropout a seed is required.
        return_lse: If True, also return the LSE.
        **arguments: Those of `fastattn.attention`. The mask has this rank's rows and all keys.
            key_lengths, alibi_slopes, sinks, score_mod and mask_mod are those of the whole call:
            b, h, i and j count there. Every rank has the whole of sinks, of a mask without rows,
            and of captured tensors: their gradients are sums over ranks, the same on each. With
            seed None the first rank draws. Only head, item and bottom_right of place may be set.

    Shape:
        q: (B, H, M, D), M rows of this rank. Dtypes are those of `fastattn.attention`.
        k: (B, Hk, N, D), N keys of this rank.
        v: (B, Hk, N, Dv).
        mask: Broadcasts to (B, H, M, all keys).
        out: (B, H, M, Dv), q's dtype.
        lse: (B, H, M), float32 (float64 for float64).

    Returns:
        out, or (out, lse) with return_lse.

    Raises:
        ValueError: As `fastattn.attention`. If ranks differ, the text names the rank and the
            argument.
        TypeError: As `fastattn.attention`.
        NotImplementedError: As `fastattn.attention`, and for second derivatives of a ring.
        RuntimeError: torch.distributed has no group, or another rank raised, died, or did not
            answer within the group's timeout.

    Example:
        >>> import torch
        >>> from torch import distributed as dist
        >>> import fastattn
        >>> from fastattn import distributed
        >>> store = dist.HashStore()  # of a group with one rank; torchrun makes groups of several
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> whole = torch.randn(3, 1, 4, 16, 8)
        >>> q, k, v = (distributed.shard(x, layout="zigzag") for x in whole)
        >>> out = distributed.attention(q, k, v, layout="zigzag", causal=True)
        >>> out = distributed.unshard(out, layout="zigzag")
        >>> torch.testing.assert_close(out, fastattn.attention(*whole, causal=True))
        >>> dist.destroy_process_group()
    """
    flag("agree", agree)
    flag("return_lse", return_lse)
    team = need_team(group)
    given = resolved(arguments, "fastattn.distributed.attention")
    how = dict(strategy=strategy, layout=layout, return_lse=return_lse)
    call = whole(q, k, v, team, how, agree, given)
    name = cheapest(weighed(call, q, k, v)[1]) if strategy == "auto" else strategy
    out, lse = STRATEGIES[name](call, q, k, v)
    return (out, lse) if return_lse else out


def weighed(
    call: GlobalCall, q: Tensor, k: Tensor, v: Tensor
) -> tuple[cost_model.CallSizes, dict[str, Cost]]:
    """Return the sizes of a call, and the cost of each strategy that `auto` may choose.

    Both are the same on every rank: they depend on nothing that differs between ranks.
    """
    undropped = NO_FUNCTIONS | {"place": call.at(), "dropout_p": 0.0, "seed": None}
    t, o = prepare(q, k, v, call.arguments | undropped)
    lo, hi = ring.band(call.rows, call.keys, o, t.key_lengths is not None)
    (B, H, _, D), Hk, Dv = q.shape, k.shape[1], v.shape[3]
    sizes = call.team.sizes
    mask = cost_model.MaskSizes.of(t.mask) if call.mask_rows and t.mask is not None else None
    known = cost_model.CallSizes(
        sizes, call.rows, call.keys, B, H, Hk, D, Dv, q.dtype, o.grad, lo, hi, mask
    )
    machine = machine_of(q.device.type)
    able = (x for x in STRATEGIES if not why_not(x, H, sizes, o.row_invariant))
    return known, {name: cost_model.cost(name, known, machine) for name in able}


def cheapest(costs: Mapping[str, Cost]) -> str:
    return min(costs, key=lambda name: costs[name].seconds)


def why_not(strategy: str, heads: int, sizes: tuple[int, ...], row_invariant: bool = False) -> str:
    """Return why a strategy cannot run a call, or cannot keep the bits that row_invariant promises.

    Returns "" if it can. heads: the heads of q. sizes: those of the mesh.
    """
    dims, ranks = len(sizes), sizes[-1]
    if DIMENSIONS.get(strategy, dims) != dims:
        expected = {1: "a group, or a mesh of 1", 2: "a mesh of 2"}[DIMENSIONS[strategy]]
        got = f"{dims} dimension{'s' * (dims > 1)} for strategy={strategy!r}"
        return f"group: got {got}, expected {expected}"
    if strategy in ("ulysses", "usp") and heads % ranks:
        return (
            f"strategy: got {strategy!r} for {heads} heads on {ranks} ranks, expected ranks that "
            "divide the heads; use strategy='gather' or 'ring'"
        )
    if row_invariant and strategy in ("ring", "usp"):
        return (
            "row_invariant: got True, expected False: in a ring the bits of a row depend on the "
            "ranks; use strategy='gather' or 'ulysses'"
        )
    return ""


def whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    team: Team,
    how: dict[str, Any],
    asks: bool,
    given: dict[str, Any],
) -> GlobalCall:
    strategy, layout = how["strategy"], how["layout"]
    check_own = functools.partial(_check_own, q, k, v, team, strategy, layout)
    draws = bool(given["dropout_p"]) and given["seed"] is None
    if asks:
        of_ranks = _agreed(q, k, v, team, given, how, draws, check_own)
    else:
        check_own(given)
        if draws:
            raise ValueError("seed: got None, expected the same on every rank if agree is False")
        of_ranks = [_own(q, k, given, 0)] * team.ranks
    rows = spans_of(layout, [x.rows for x in of_ranks], "q.shape[2]")
    keys = spans_of(layout, [x.keys for x in of_ranks], "k.shape[2]")
    _check_whole(q, k, v, sum(map(size_of, keys)), given)
    if draws:
        given = given | {"seed": of_ranks[0].seed}
    given = shared_functions(traced(given, q), team)
    kinds = {x.mask_rows for x in of_ranks}
    has_rows = ROWS in kinds or kinds == {UNCLEAR}
    return GlobalCall(team, rows, keys, given, has_rows, given["place"] or EVERYTHING)


def _agreed(q, k, v, team, given, how, draws, check_own) -> list[Own]:
    own, trouble, facts = NOTHING, None, dict.fromkeys((*"qkv", *DEFAULTS, *how))
    try:
        check_own(given)
        given = traced(given, q)
        own = _own(q, k, given, int(draw_seed("cpu")) if draws else 0)
        facts |= {name: told(x, OF_ROWS) for name, x in zip("qkv", (q, k, v))}
        facts |= facts_of(given, OF_ROWS) | how
    except (TypeError, ValueError) as caught:
        trouble = caught
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    return _agree(own, facts, trouble, device, team)


def _own(q, k, given, seed) -> Own:
    rows = q.shape[2]
    return Own(rows, k.shape[2], seed, mask_rows(given["mask"], rows))


def _check_own(q, k, v, team, strategy, layout, given) -> None:
    """Raise for every error that this rank can find without the others."""
    of_whole = ("mask", "key_lengths")  # they are of all keys, not of this rank's
    check(*prepare(q, k, v, _placeless(given) | dict.fromkeys(of_whole)))
    need_layout(layout)
    if strategy not in ("auto", *STRATEGIES):
        expected = ", ".join(map(repr, ("auto", *STRATEGIES)))
        raise ValueError(f"strategy: got {strategy!r}, expected one of {expected}")
    if reason := why_not(strategy, q.shape[1], team.sizes):
        raise ValueError(reason)
    mask, place = given["mask"], given["place"]
    if isinstance(mask, Tensor) and mask.ndim > 1 and mask.shape[-2] not in (1, q.shape[2]):
        got = f"{mask.shape[-2]} rows"
        raise ValueError(f"mask: got {got}, expected 1, or this rank's {q.shape[2]}, by all keys")
    if mask is not None:
        need_a_tensor("mask", mask, "a torch.Tensor or None")
    if place is not None and (place.row, place.key, place.rows, place.keys) != (0, 0, None, None):
        expected = "only head, item and bottom_right to be set: the ranks give rows and keys"
        raise ValueError(f"place: got {place}, expected {expected}")


def _check_whole(q, k, v, N: int, given) -> None:
    """Check what is of all keys, once their number is known. If one rank raises here, all do: they
    have agreed on dtypes, and on shapes except for rows."""
    t, o = prepare(
        q, placeholder_with_all_rows(k, N), placeholder_with_all_rows(v, N), _placeless(given)
    )
    check(t, o)
    check_values(describe(t, o), t)


def _placeless(given) -> dict[str, Any]:
    """The arguments with a fixed seed, so that none is drawn, and without a place and functions:
    for checks."""
    seed = 0 if given["seed"] is None else given["seed"]
    return given | NO_FUNCTIONS | {"seed": seed, "place": EVERYTHING}
