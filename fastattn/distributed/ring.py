"""Ring attention: ranks send keys and values around a ring (Liu 2023, arXiv:2310.01889).

Each rank computes its own rows with the keys of one rank at a time, and merges the results.

The out of a block is stored in the dtype of its sums, float32 at least, and its LSE in two numbers,
so that nothing is rounded between hops. In backward the sums of the gradients of keys and values
are sent one hop behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .. import api
from ..call.spec import Options, Tensors, acc_dtype
from ..dispatch import run_pass
from ..dispatch.operation import ATTENTION, BACKWARD, FORWARD, spread
from ..merging import weigh
from ..score_mods.unlowered import lowered_call
from . import layout
from .collectives import Shape, waiting
from .global_call import GlobalCall, resized
from .layout import Span, Spans, held


def attention(call: GlobalCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, LSE) of this rank's rows."""
    arguments = call.arguments | call.differentiable()
    return around(call._replace(arguments=arguments), q, k, v)


def around(call: GlobalCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same, if the arguments include those of `GlobalCall.differentiable` already."""
    t, o = api.prepare(q, k, v, call.arguments | {"place": call.at()}, in_parts=True)
    out, normaliser = Ring.apply(RingCall.of(call, t, o._replace(acc_dtype_out=True)), *t)
    return out, normaliser[0]


# -- which blocks there are ------------------------------------------------------------------------


class KeyBlock(NamedTuple):
    """Rows of this rank and keys of an owner: their spans in the whole call, and their slices of
    this rank's rows and of the owner's keys."""

    rows: Span
    keys: Span
    own: slice
    of_owner: slice


class RingCall(NamedTuple):
    """The hops of a call around the ring. Everything but call.rank is the same on every rank.

    lo, hi: a row i may attend only to keys from i + lo to i + hi. hops: after so many hops no rank
    gets keys that its rows may attend to.
    """

    call: GlobalCall
    o: Options
    lo: int
    hi: int
    hops: int

    @classmethod
    def of(cls, call: GlobalCall, t: Tensors, o: Options) -> RingCall:
        lo, hi = band(call.rows, call.keys, o, t.key_lengths is not None)
        return cls(call, o, lo, hi, layout.hops(call.rows, call.keys, lo, hi))

    def owner(self, hop: int) -> int:
        """The rank that has the keys which are here after so many hops."""
        return (self.call.rank - hop) % self.call.ranks

    def blocks(self, hop: int) -> Iterator[KeyBlock]:
        for rows, own in held(self.call.rows[self.call.rank]):
            for keys, of_owner in held(self.call.keys[self.owner(hop)]):
                if layout.meet(rows, keys, self.lo, self.hi):
                    yield KeyBlock(rows, keys, own, of_owner)

    def part(
        self, t: Tensors, k: Tensor, v: Tensor, block: KeyBlock, first: bool
    ) -> tuple[Tensors, Options]:
        """(tensors, options) of a block. Only the first block of some rows gets their sinks."""
        mask = t.mask if t.mask is None else t.mask[self.of_mask(t.mask, block)]
        given = dict(q=t.q[:, :, block.own], k=k[:, :, block.of_owner], v=v[:, :, block.of_owner])
        tensors = t._replace(**given, mask=mask, sinks=t.sinks if first else None)
        o = self.o._replace(at_row=block.rows.first, at_key=block.keys.first)
        return lowered_call(tensors, o)

    def of_mask(self, mask: Tensor, block: KeyBlock) -> tuple[Any, ...]:
        """The index of a block in a mask of this rank's rows and all keys; either may broadcast."""
        whole = slice(None)
        rows = block.own if self.call.mask_rows else whole
        keys = slice(block.keys.first, block.keys.end) if mask.shape[-1:] != (1,) else whole
        return (..., *(rows, keys)[2 - min(mask.ndim, 2) :])  # a mask may lack both dimensions


def nothing(rows: Span, own: slice) -> KeyBlock:
    """A block without keys, for rows that are in no other block: they may have sinks."""
    return KeyBlock(rows, Span(0, 0), own, slice(0, 0))


def band(rows: Spans, keys: Spans, o: Options, lengths: bool) -> tuple[int, int]:
    """(lo, hi): a row i sees no keys but those from i + lo to i + hi, whatever the key lengths."""
    left, right, bottom_right = o.band
    M, N = (sum(map(layout.size_of, of)) for of in (rows, keys))
    if not bottom_right:
        return -left, right
    return -left + (-M if lengths else N - M), right + N - M


# -- the passes ------------------------------------------------------------------------------------


class PartialResult(NamedTuple):
    """The result for some rows: out in float32 at least, and the normaliser's two numbers."""

    out: Tensor
    normaliser: Tensor

    def merged(self, other: PartialResult) -> PartialResult:
        """The result merged with that of other keys."""
        (lses, lost) = torch.stack([self.normaliser, other.normaliser], 1)
        (own, others), top, log = weigh(lses, lost)
        lse = top + log
        # The rounding error of that sum. If top is large, log is only its last digits.
        lost = torch.where(lse == -torch.inf, 0.0, top - lse + log)
        return PartialResult(self.out * own + other.out * others, torch.stack([lse, lost]))


class Ring(Function):
    """(round, *tensors). Returns out and normaliser of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, way: Any, *tensors: Any) -> Any:
        t = Tensors(*tensors)
        partials: dict[int, PartialResult] = {}

        def compute(block: KeyBlock, k: Tensor, v: Tensor) -> None:
            at = block.own.start
            part = way.part(t, k, v, block, at not in partials)
            new = PartialResult(*run_pass.run(FORWARD, ATTENTION, *part))
            partials[at] = partials[at].merged(new) if at in partials else new

        for hop, k, v in _keys(way, t):
            for block in way.blocks(hop):
                compute(block, k, v)
        for rows, own in held(way.call.rows[way.call.rank] or (Span(0, 0),)):
            if own.start not in partials:
                compute(nothing(rows, own), t.k, t.given("v"))
        in_order = [partials[at] for at in sorted(partials)]
        out = torch.cat([x.out for x in in_order], 2).to(t.q.dtype)
        normaliser = torch.cat([x.normaliser for x in in_order], 3)
        ctx.way = way
        ctx.save_for_backward(*tensors, out, normaliser)
        ctx.set_materialize_grads(False)
        return out, normaliser

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "strategy: got 'ring' and create_graph=True, expected 'gather' or 'ulysses': a "
                "ring has first derivatives only"
            )
        *tensors, out, normaliser = ctx.saved_tensors
        needs_grad = ATTENTION.needs_grad(ctx.needs_input_grad[1:])
        gradients = Backward(ctx.way, Tensors(*tensors), (out, normaliser), grads, needs_grad).run()
        return None, *spread([gradients[name] for name in needs_grad], needs_grad)


def _keys(way: RingCall, t: Tensors) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(hop, k, v) of each hop. The next k and v are received meanwhile."""
    k, v = t.k, t.given("v")
    for hop in range(way.hops):
        coming = None
        if hop + 1 < way.hops:
            size = layout.size_of(way.call.keys[way.owner(hop + 1)])
            shapes = [resized(x, 2, size) for x in (k, v)]
            coming = Hop((k, v), shapes, way.call.group, "the keys and values of a ring")
        yield hop, k, v
        if coming:
            k, v = coming.arrived()


class Backward:
    """The backward pass. Gradients are summed in float32 at least.

    Those of keys and values are sent around the ring one hop behind the keys.
    """

    way: RingCall
    t: Tensors
    outs: Sequence[Tensor]
    grads: Sequence[Tensor | None]
    needs_grad: Sequence[str]
    sums: dict[str, Tensor]

    def __init__(
        self,
        way: RingCall,
        t: Tensors,
        outs: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needs_grad: Sequence[str],
    ):
        self.way, self.t, self.outs, self.grads, self.needs_grad = way, t, outs, grads, needs_grad
        given = ((name, t.given(name)) for name in needs_grad if name not in ("k", "v"))
        self.sums = {name: torch.zeros_like(x, dtype=acc_dtype(x.dtype)) for name, x in given}

    def run(self) -> dict[str, Tensor]:
        t, way, seen, behind = self.t, self.way, set(), None
        for hop, k, v in _keys(way, t):
            moving = [torch.zeros_like(x, dtype=acc_dtype(x.dtype)) for x in (k, v)]
            for block in way.blocks(hop):
                self.add(block, k, v, moving, block.own.start not in seen)
                seen.add(block.own.start)
            if behind:
                moving = [x + y for x, y in zip(moving, behind.arrived())]
            behind = self.send(moving, hop)
        for rows, own in held(way.call.rows[way.call.rank]):
            if own.start not in seen:
                self.add(nothing(rows, own), k, v, moving, True)
        home = zip("kv", behind.arrived() if behind else moving)
        self.sums |= {name: x for name, x in home if name in self.needs_grad}
        return {name: x.to(t.given(name).dtype) for name, x in self.sums.items()}

    def send(self, moving: Sequence[Tensor], hop: int) -> Hop | None:
        """Send the gradients to the rank that gets these keys next. After the last hop, send them
        to the owner of the keys, which may be another rank than the next."""
        call, last = self.way.call, self.way.hops - 1
        step = 1 if hop < last else -hop % call.ranks
        if not step:
            return None
        size = layout.size_of(call.keys[self.way.owner(hop + 1) if hop < last else call.rank])
        shapes = [resized(x, 2, size) for x in moving]
        return Hop(moving, shapes, call.group, "the gradients of a ring's keys and values", step)

    def add(
        self, block: KeyBlock, k: Tensor, v: Tensor, moving: Sequence[Tensor], first: bool
    ) -> None:
        """Add the gradients of a block."""
        needs_grad = [name for name in self.needs_grad if first or name != "sinks"]
        rows = (..., block.own), (..., block.own, slice(None))
        outs = self.outs[0][rows[1]], self.outs[1][rows[0]]
        grads = [x if x is None else x[at] for x, at in zip(self.grads, (rows[1], rows[0]))]
        part = self.way.part(self.t, k, v, block, first)
        gradients = run_pass.run(BACKWARD, ATTENTION, *part, (grads, outs), needs_grad)
        gradients = dict(zip(needs_grad, gradients))
        for name, x in gradients.items():
            if name in ("k", "v"):
                moving[name == "v"][:, :, block.of_owner] += x
            elif name == "mask":
                self.sums[name][self.way.of_mask(self.sums[name], block)] += x
            else:
                self.sums[name][rows[1] if name == "q" else ...] += x


# --------------------------------------------------------------------------------------- transfers


class Hop:
    """A transfer in progress: to the rank `step` further, and from the rank `step` before.

    All tensors have one dtype. shapes: those of the received tensors.
    """

    group: dist.ProcessGroup
    what: str
    shapes: Sequence[Shape]
    sent: Tensor
    sizes: list[int]
    received: Tensor
    works: list[dist.Work]

    def __init__(
        self,
        tensors: Sequence[Tensor],
        shapes: Sequence[Shape],
        group: dist.ProcessGroup,
        what: str,
        step: int = 1,
    ):
        self.group, self.what, self.shapes = group, what, shapes
        self.sent = torch.cat([x.reshape(-1) for x in tensors])
        self.sizes = [torch.Size(x).numel() for x in shapes]
        self.received = self.sent.new_empty(sum(self.sizes))
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        each = (dist.isend, self.sent, rank + step), (dist.irecv, self.received, rank - step)
        # Empty messages are not sent: both sides know the sizes.
        posted = [
            dist.P2POp(send, x, group=group, group_peer=peer % ranks)
            for send, x, peer in each
            if x.numel()
        ]
        with waiting(group, what):
            self.works = dist.batch_isend_irecv(posted) if posted else []

    def arrived(self) -> list[Tensor]:
        with waiting(self.group, self.what):
            for work in self.works:
                work.wait()
        return [x.view(shape) for x, shape in zip(self.received.split(self.sizes), self.shapes)]
