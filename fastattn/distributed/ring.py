"""Keys and values travel from rank to rank (Ring Attention, Liu 2023, arXiv:2310.01889): each rank
has its own rows against one rank's keys at a time, and merges what it finds.

Blocks are computed in float32 at least, and leave the LSE in two numbers, so that nothing is
rounded between hops: keys of 16 bits travel as they are and are widened where they arrive. In
backward the sums of the gradients of keys and values travel behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .. import api, passes
from ..operation import ATTENTION, spread
from ..spec import UNLIMITED, Options, Tensors, wide
from . import layout
from .hops import Hop
from .layout import Span
from .whole import Whole, resized


def attention(call: Whole, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, LSE) of this rank's rows."""
    shared = dict(mask=call.mask(), sinks=call.shared("sinks"))
    return around(call._replace(arguments=call.arguments | shared), q, k, v)


def around(call: Whole, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same where mask and sinks are what `Whole` says they are."""
    t, o = api.prepare(q, k, v, call.arguments | {"place": call.at()})
    out, normaliser = Ring.apply(Round(call, o), *t)
    return out, normaliser[0]


# -- which blocks there are ------------------------------------------------------------------------


class Block(NamedTuple):
    """Rows of this rank against keys of an owner: as they lie in the whole call, and here."""

    rows: Span
    keys: Span
    own: slice
    of_owner: slice


class Round(NamedTuple):
    """A call's way around the ring."""

    call: Whole
    o: Options

    def owner(self, hop: int) -> int:
        """Whose keys are here after so many hops."""
        return (self.call.rank - hop) % self.call.ranks

    def reach(self, t: Tensors) -> tuple[int, int]:
        """(lo, hi): some row i may see keys from i + lo to i + hi, and none another."""
        o, (rows, keys) = self.o, (sum(map(layout.size_of, x)) for x in self.call[1:3])
        shifts = [0, 0]
        if o.bottom_right or o.causal == "bottom_right":
            shifts = [-rows if t.lengths is not None else keys - rows, keys - rows]
        left = UNLIMITED if o.left is None else o.left
        right = min(UNLIMITED if o.right is None else o.right, 0 if o.causal else UNLIMITED)
        return shifts[0] - left, shifts[1] + right

    def hops(self, t: Tensors) -> int:
        """After how many of them no rank meets keys that it may see; the same on every rank."""
        lo, hi = self.reach(t)
        ranks = range(self.call.ranks)
        far = [
            (rank - owner) % self.call.ranks
            for rank in ranks
            for owner in ranks
            for rows in self.call.rows[rank]
            for keys in self.call.keys[owner]
            if _meet(rows, keys, lo, hi)
        ]
        return 1 + max(far, default=0)

    def blocks(self, t: Tensors, hop: int) -> Iterator[Block]:
        lo, hi = self.reach(t)
        for rows, own in _here(self.call.rows[self.call.rank]):
            for keys, of_owner in _here(self.call.keys[self.owner(hop)]):
                if _meet(rows, keys, lo, hi):
                    yield Block(rows, keys, own, of_owner)

    def part(self, t: Tensors, k: Tensor, v: Tensor, block: Block, first: bool):
        """(tensors, options) of a block; the first of some rows has their sinks."""
        mask = t.mask
        if mask is not None:
            mask = widened(mask[self.of_mask(mask, block)])
        given = dict(q=t.q[:, :, block.own], k=k[:, :, block.of_owner], v=v[:, :, block.of_owner])
        given = {name: widened(x) for name, x in given.items()}
        tensors = t._replace(**given, mask=mask, sinks=t.sinks if first else None)
        return tensors, self.o._replace(at_row=block.rows.first, at_key=block.keys.first)

    def of_mask(self, mask: Tensor, block: Block) -> tuple:
        """Where the block lies in a mask of this rank's rows and all keys, which may be shared."""
        keys = slice(block.keys.first, block.keys.end) if mask.shape[-1] != 1 else slice(None)
        rows = (block.own,) if self.call.mask_rows else (slice(None),) * (mask.ndim > 1)
        return (..., *rows, keys)

    def nothing(self, rows: Span, own: slice) -> Block:
        """For rows that no block has, which may have sinks."""
        return Block(rows, Span(0, 0), own, slice(0, 0))


def widened(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype)) if x.is_floating_point() else x


def _here(spans: Sequence[Span]) -> Iterator[tuple[Span, slice]]:
    done = 0
    for x in spans:
        yield x, slice(done, done + x.size)
        done += x.size


def _meet(rows: Span, keys: Span, lo: int, hi: int) -> bool:
    return keys.first <= rows.end - 1 + hi and keys.end - 1 >= rows.first + lo


# -- the passes ------------------------------------------------------------------------------------


class Found(NamedTuple):
    """Of some rows: out in float32 at least, and the normaliser's two numbers."""

    out: Tensor
    normaliser: Tensor

    def merged(self, other: Found) -> Found:
        """With what other keys gave."""
        (hi, lo), (other_hi, other_lo) = self.normaliser, other.normaliser
        top = torch.maximum(hi, other_hi)
        top = torch.where(top == -torch.inf, 0.0, top)  # or -inf - (-inf) = NaN
        a, b = torch.exp(hi - top + lo), torch.exp(other_hi - top + other_lo)
        total = a + b
        seen = total > 0
        total = torch.where(seen, total, 1.0)
        of_a, of_b = (x.div_(total).unsqueeze(-1) for x in (a, b))
        log = torch.log(total)
        lse = top + log
        lost = top - lse + log  # what that rounding took, for log is at most the last digits of top
        whole = torch.stack([torch.where(seen, lse, -torch.inf), torch.where(seen, lost, 0.0)])
        return Found(self.out * of_a + other.out * of_b, whole)


class Ring(Function):
    """(round, *tensors) to out and normaliser, of this rank's rows."""

    @staticmethod
    def forward(ctx, way, *tensors):
        t = Tensors(*tensors)
        found: dict[int, Found] = {}

        def compute(block: Block, k: Tensor, v: Tensor) -> None:
            at = block.own.start
            part = way.part(t, k, v, block, at not in found)
            new = Found(*passes.forward(ATTENTION, *part))
            found[at] = found[at].merged(new) if at in found else new

        for hop, k, v in _keys(way, t):
            for block in way.blocks(t, hop):
                compute(block, k, v)
        for rows, own in _here(way.call.rows[way.call.rank] or (Span(0, 0),)):
            if own.start not in found:
                compute(way.nothing(rows, own), t.k, t.given("v"))
        in_order = [found[at] for at in sorted(found)]
        out = torch.cat([x.out for x in in_order], 2).to(t.q.dtype)
        normaliser = torch.cat([x.normaliser for x in in_order], 3)
        ctx.way = way
        ctx.save_for_backward(*tensors, out, normaliser)
        ctx.set_materialize_grads(False)
        return out, normaliser

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "strategy: got 'ring' and create_graph=True, expected 'gather' or 'ulysses': a "
                "ring has first derivatives alone"
            )
        *tensors, out, normaliser = ctx.saved_tensors
        wants = ATTENTION.wants(ctx.needs_input_grad[1:])
        found = Backward(ctx.way, Tensors(*tensors), (out, normaliser), grads, wants).run()
        return None, *spread([found[name] for name in wants], wants)


def _keys(way: Round, t: Tensors) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(hop, k, v), with the next on their way meanwhile."""
    k, v = t.k, t.given("v")
    for hop in range(last := way.hops(t)):
        coming = None
        if hop + 1 < last:
            size = layout.size_of(way.call.keys[way.owner(hop + 1)])
            shapes = [resized(x, 2, size) for x in (k, v)]
            coming = Hop((k, v), shapes, way.call.group, "the keys and values of a ring")
        yield hop, k, v
        if coming:
            k, v = coming.arrived()


class Backward:
    """Gradients are sums in float32 at least; those of keys and values come around behind them."""

    def __init__(self, way: Round, t: Tensors, outs, grads, wants: Sequence[str]):
        self.way, self.t, self.outs, self.grads, self.wants = way, t, outs, grads, wants
        given = ((name, t.given(name)) for name in wants)
        self.sums = {name: torch.zeros_like(x, dtype=wide(x.dtype)) for name, x in given}

    def run(self) -> dict[str, Tensor]:
        t, way, seen, behind = self.t, self.way, set(), None
        last = way.hops(t) - 1
        for hop, k, v in _keys(way, t):
            moving = [torch.zeros_like(x, dtype=wide(x.dtype)) for x in (k, v)]
            for block in way.blocks(t, hop):
                self.add(block, k, v, moving, block.own.start not in seen)
                seen.add(block.own.start)
            if behind:
                moving = [x + y for x, y in zip(moving, behind.arrived())]
            behind = self.send(moving, hop, last)
        for rows, own in _here(way.call.rows[way.call.rank]):
            if own.start not in seen:
                empty = [x.new_zeros(x.shape, dtype=wide(x.dtype)) for x in (t.k, t.given("v"))]
                self.add(way.nothing(rows, own), t.k, t.given("v"), empty, True)
        home = zip("kv", behind.arrived() if behind else moving)
        self.sums |= {name: x for name, x in home if name in self.wants}
        return {name: x.to(t.given(name).dtype) for name, x in self.sums.items()}

    def send(self, moving: Sequence[Tensor], hop: int, last: int) -> Hop | None:
        """On to who has these keys next; in the end home, which the next rank may not be."""
        call, step = self.way.call, 1 if hop < last else -hop % self.way.call.ranks
        if not step:
            return None
        size = layout.size_of(call.keys[self.way.owner(hop + 1) if hop < last else call.rank])
        shapes = [resized(x, 2, size) for x in moving]
        return Hop(moving, shapes, call.group, "the gradients of a ring's keys and values", step)

    def add(self, block: Block, k: Tensor, v: Tensor, moving: Sequence[Tensor], first: bool):
        """What a block adds."""
        wants = [name for name in self.wants if first or name != "sinks"]
        rows = (..., block.own), (..., block.own, slice(None))
        outs = widened(self.outs[0][rows[1]]), self.outs[1][rows[0]]
        each = zip(self.grads, (rows[1], rows[0]))
        grads = [x if x is None else widened(x[at]) for x, at in each]
        part = self.way.part(self.t, k, v, block, first)
        found = dict(zip(wants, passes.backward(ATTENTION, *part, outs, grads, wants)))
        for name, x in found.items():
            if name in "kv":
                moving["kv".index(name)][:, :, block.of_owner] += x
            elif name == "mask":
                self.sums[name][self.way.of_mask(self.sums[name], block)] += x
            else:
                self.sums[name][rows[1] if name == "q" else ...] += x
