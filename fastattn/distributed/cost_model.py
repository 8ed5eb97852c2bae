"""Estimate the cost of a call over ranks for each strategy: seconds, bytes sent, memory of a rank.

The inputs are the sizes of the call and the stated rates of kernels and links. `strategy="auto"`
runs the strategy of least time.

A rank's work is a sequence of steps. In a step it computes scores while it sends bytes; the step
takes the longer of the two times. The bytes are exact, except that two small parts are omitted: the
exchange before a call, and the gradients of tensors that every rank has whole. The time of a call
is that of the rank with the most work. Hidden scores cost nothing, key lengths count as full, and
if one of q, k and v has a gradient, all count as having one. Memory is the peak of the tensors that
the code allocates, within a factor of two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..call.spec import UNLIMITED, acc_dtype
from . import layout
from .layout import Span, Spans, size_of

# -- calls -----------------------------------------------------------------------------------------


class MaskSizes(NamedTuple):
    """A mask with rows. heads: 1, or one for each head. row: the bytes of a row in all items."""

    heads: int
    row: int
    grad: bool

    @classmethod
    def of(cls, mask: torch.Tensor) -> MaskSizes:
        items, heads, _, keys = (1,) * (4 - mask.ndim) + mask.shape
        grad = mask.requires_grad and torch.is_grad_enabled()
        return cls(heads, items * keys * mask.element_size(), grad)


class CallSizes(NamedTuple):
    """What all ranks know of a call. mesh: the number of ranks along each dimension, the outermost
    first. rows, keys: those of each rank. lo, hi: a row i sees no keys but i + lo to i + hi."""

    mesh: tuple[int, ...]
    rows: Spans
    keys: Spans
    B: int
    H: int
    Hk: int
    D: int
    Dv: int
    dtype: torch.dtype
    backward: bool = False
    lo: int = -UNLIMITED
    hi: int = UNLIMITED
    mask: MaskSizes | None = None

    @property
    def key(self) -> int:
        """How many numbers a key and its value have, in all heads and items."""
        return self.B * self.Hk * (self.D + self.Dv)

    def met(self, rows: tuple[Span, ...], keys: tuple[Span, ...]) -> list[tuple[Span, Span]]:
        """The blocks of these rows and keys in which some row sees some key."""
        return [(x, y) for x in rows for y in keys if layout.meet(x, y, self.lo, self.hi)]

    def scores(self, blocks: Sequence[tuple[Span, Span]]) -> int:
        """The number of scores in these blocks, of all heads and items."""
        return self.B * self.H * sum(seen(x, y, self.lo, self.hi) for x, y in blocks)


def seen(rows: Span, keys: Span, lo: int, hi: int) -> int:
    """Count the pairs (i, j) of a row and a key with i + lo <= j <= i + hi."""

    def up_to(edge: int) -> int:
        """Count the pairs with j - i <= edge.

        Row i has the keys up to i + edge: at least 0 and at most n. Without these two limits the
        counts of consecutive rows are consecutive integers, so their sums have a closed form.
        """
        last = rows.end - keys.first + edge
        first = last - rows.size
        n = keys.size
        return _sum(last) - _sum(first) - _sum(last - n) + _sum(first - n)

    return up_to(hi) - up_to(lo - 1)


def _sum(n: int) -> int:
    """1 + 2 + ... + n"""
    return n * (n + 1) // 2 if n > 0 else 0


# -- steps -----------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One step of a rank. blocks: calls of a kernel. sent: bytes, in so many exchanges and messages
    along a dimension of the mesh. merges: outs that are merged into others. touched: the bytes that
    sums read and write."""

    scores: int = 0
    blocks: int = 0
    sent: int = 0
    exchanges: int = 0
    messages: int = 0
    dim: int = -1
    backward: bool = False
    merges: int = 0
    touched: int = 0


def alone(c: CallSizes, rows: tuple[Span, ...]) -> Step:
    """The step that computes these rows with all keys, and sends nothing."""
    blocks = c.met(rows, (Span(0, sum(map(size_of, c.keys))),))
    return Step(c.scores(blocks), len(blocks))


def gather(c: CallSizes, rank: int) -> Iterator[Step]:
    """Keys and values are gathered, along the last dimension first; their gradients go back."""
    sizes, key = [size_of(x) for x in c.keys], c.key * c.dtype.itemsize
    ways, n = [], 1
    for dim in reversed(range(len(c.mesh))):
        group = n * c.mesh[dim]
        own, every = (sum(sizes[rank // x * x : rank // x * x + x]) for x in (n, group))
        ways.append((dim, own, every))
        n = group
    computed = alone(c, c.rows[rank])
    for dim, own, _ in ways:
        peers = c.mesh[dim] - 1
        yield Step(0, 0, own * key * peers, 2, 2 * peers, dim)
    yield computed
    if c.backward:
        yield computed._replace(backward=True)
        for dim, own, every in reversed(ways):
            yield Step(0, 0, (every - own) * key, 2, 2 * (c.mesh[dim] - 1), dim, True)


def ring(c: CallSizes, rank: int, dim: int = -1) -> Iterator[Step]:
    """The next keys arrive while these are computed. In backward, the gradients of the previous
    keys are sent on, too, and at the end they are sent to the rank that has the keys."""
    hops = layout.hops(c.rows, c.keys, c.lo, c.hi)
    owners = [(rank - hop) % len(c.rows) for hop in range(hops)]
    keys = [c.key * size_of(c.keys[owner]) for owner in owners]
    blocks = [c.met(c.rows[rank], c.keys[owner]) for owner in owners]
    scores, wider = [c.scores(x) for x in blocks], acc_dtype(c.dtype).itemsize
    coming = [n * c.dtype.itemsize for n in keys[:-1]] + [0]
    behind = [0, *(n * wider for n in keys)]
    known: set[Span] = set()
    for hop, of_hop in enumerate(blocks):
        again = []
        for rows, _ in of_hop:
            again += [rows] * (rows in known)
            known.add(rows)
        # Two products and their sum read or write out seven times.
        touched = 7 * wider * c.B * c.H * c.Dv * size_of(again)
        sends = hop + 1 < hops
        yield Step(
            *(scores[hop], len(of_hop), coming[hop], sends, sends, dim, False),
            *(len(again), touched),
        )
    for hop, of_hop in enumerate(blocks if c.backward else ()):
        # Two reads and a write: dq, dk and dv of a block, and the gradients that have arrived.
        added = c.B * c.H * c.D * size_of([x for x, _ in of_hop]) + 2 * keys[hop]
        sent, sends = coming[hop] + behind[hop], (hop + 1 < hops) + (hop > 0)
        yield Step(
            *(scores[hop], len(of_hop), sent, sends, sends, dim, True),
            *(0, 3 * wider * added),
        )
    if c.backward and hops > 1:
        yield Step(0, 0, behind[-1], 1, 1, dim, True)


def ulysses(c: CallSizes, rank: int) -> Iterator[Step]:
    """Each rank exchanges its rows of all heads for all rows of some heads; results go back."""
    heads = HeadGroups.of(c, rank)
    computed = alone(c._replace(H=heads.each), (Span(0, sum(map(size_of, c.rows))),))
    yield from heads.around([computed], [computed._replace(backward=True)])


def usp(c: CallSizes, rank: int) -> Iterator[Step]:
    """Ulysses along the last dimension, a ring along the first."""
    _, n = c.mesh
    own = rank // n * n
    heads = HeadGroups.of(
        c._replace(rows=c.rows[own : own + n], keys=c.keys[own : own + n]), rank - own
    )
    steps = list(ring(heads.outside(c), rank // n, dim=0))
    forward = [x for x in steps if not x.backward]
    yield from heads.around(forward, steps[len(forward) :])


class HeadGroups(NamedTuple):
    """The heads of the ranks along the last dimension: `each` on every rank. read: the number of
    key heads that the heads of each rank read."""

    c: CallSizes
    rank: int
    each: int
    read: tuple[int, ...]

    @classmethod
    def of(cls, c: CallSizes, rank: int) -> HeadGroups:
        each, group = c.H // c.mesh[-1], max(1, c.H // max(1, c.Hk))
        firsts = (r * each for r in range(c.mesh[-1]))
        read = tuple(-(-(h + each) // group) - h // group for h in firsts)
        return cls(c, rank, each, read)

    def outside(self, c: CallSizes) -> CallSizes:
        """The call among the ranks that have the same heads."""
        n, read, group = c.mesh[-1], self.read[self.rank], max(1, c.H // max(1, c.Hk))
        even = read <= 1 or self.each % group == 0  # else each head has its own copy
        rows, keys = (
            tuple(layout.merged(of[r : r + n]) for r in range(0, len(of), n))
            for of in (c.rows, c.keys)
        )
        return c._replace(rows=rows, keys=keys, H=self.each, Hk=read if even else self.each)

    def around(self, forward: list[Step], backward: list[Step]) -> Iterator[Step]:
        """These steps, with the exchanges before and after them."""
        c, e = self.c, self.c.dtype.itemsize
        peers, others = c.mesh[-1] - 1, c.H - self.each
        rows, keys = ([size_of(x) for x in of] for of in (c.rows, c.keys))
        own, rest = rows[self.rank], sum(rows) - rows[self.rank]
        key = c.B * (c.D + c.Dv) * e
        mine = self.read[self.rank]
        go = own * others * c.B * c.D * e + keys[self.rank] * (sum(self.read) - mine) * key
        back = rest * self.each * c.B * c.D * e + (sum(keys) - keys[self.rank]) * mine * key
        there, home = self._mask(own, rest)
        exchanges = 3 + (c.mask is not None)
        yield Step(0, 0, go + there, exchanges, exchanges * peers)
        yield from forward
        sent = rest * self.each * c.B * (c.Dv * e + acc_dtype(c.dtype).itemsize)
        yield Step(0, 0, sent, 2, 2 * peers)
        if c.backward:
            yield Step(0, 0, own * others * c.B * c.Dv * e, 1, peers, backward=True)
            yield from backward
            exchanges = 3 + (c.mask is not None and c.mask.grad)
            yield Step(0, 0, back + home, exchanges, exchanges * peers, backward=True)

    def _mask(self, own: int, rest: int) -> tuple[int, int]:
        """The bytes that are sent of the mask, and of its gradient."""
        mask = self.c.mask
        if mask is None:
            return 0, 0
        shared = mask.heads == 1
        there = own * (self.c.mesh[-1] - 1 if shared else self.c.H - self.each)
        home = rest * (1 if shared else self.each) if mask.grad else 0
        return there * mask.row, home * mask.row


# -- costs -----------------------------------------------------------------------------------------


STEPS: dict[str, Callable[[CallSizes, int], Iterator[Step]]] = {
    "gather": gather,
    "ring": ring,
    "ulysses": ulysses,
    "usp": usp,
}


class Cost(NamedTuple):
    """For the rank with the most work: the seconds of forward, and of backward if there is one; the
    bytes that it sends; and the peak of its bytes beside its inputs."""

    seconds: float
    sent: int
    memory: int


@functools.lru_cache(maxsize=512)
def cost(strategy: str, c: CallSizes, machine: Machine) -> Cost:
    rank = busiest(c)
    steps = list(STEPS[strategy](c, rank))
    taken = sum(seconds(x, c, machine) for x in steps)
    return Cost(taken, sum(x.sent for x in steps), MEMORY[strategy](c, rank))


@functools.lru_cache(maxsize=128)
def busiest(c: CallSizes) -> int:
    """The rank with the rows that see the most keys."""
    every = (Span(0, sum(map(size_of, c.keys))),)
    scores = [c.scores(c.met(own, every)) for own in c.rows]
    return scores.index(max(scores))


def seconds(x: Step, c: CallSizes, machine: Machine) -> float:
    rates = machine.flops[c.dtype]
    # As fastattn/dispatch/flops.py counts them.
    products = 3 * c.D + 2 * c.Dv if x.backward else c.D + c.Dv
    computing = 2 * x.scores * products / rates[x.backward] + x.blocks * machine.call
    computing += x.touched / machine.memory + x.merges * machine.merge
    link = machine.link(c.mesh, x.dim)
    sending = x.sent / link.rate + x.messages * link.message
    return max(computing, sending + x.exchanges * link.latency * (x.messages > 0))


def gathers(c: CallSizes, rank: int) -> int:
    """Memory of gather: all keys and values; in backward also their gradients for each part of the
    rows."""
    every = c.key * sum(map(size_of, c.keys)) * c.dtype.itemsize
    q, out, norm = _of_rows(c, size_of(c.rows[rank]), c.dtype)
    if not c.backward:
        return max(every * 3 // 2, every + out + norm)  # while values are put in order
    return every * (1 + max(1, len(c.rows[rank]))) + q + out + norm


def rings(c: CallSizes, rank: int) -> int:
    """Memory of ring: the keys and values in use, those that arrive and those that are sent, N / P
    of each; and out, or the gradients, in float32 at least."""
    most = max(map(size_of, c.keys))
    keys, widened = (c.key * most * x.itemsize for x in (c.dtype, acc_dtype(c.dtype)))
    rows, parts = size_of(c.rows[rank]), max(1, len(c.rows[rank]))
    q, out, norm = _of_rows(c, rows, acc_dtype(c.dtype))
    forward = 3 * keys + out + 4 * out // parts + 2 * norm  # to merge a part takes three more
    if not c.backward:
        return forward
    return max(forward, 3 * keys + 5 * widened + q + 2 * q // parts + out + 2 * norm)


def divided(c: CallSizes, rank: int) -> int:
    """Memory of ulysses: q, k, v and out of some heads and all rows, what is sent and received, and
    out."""
    own = HeadGroups.of(c, rank)
    here = own.outside(c)
    every = here.key * sum(map(size_of, c.keys)) * c.dtype.itemsize
    q, out, norm = _of_rows(here, sum(map(size_of, c.rows)), c.dtype)
    forward = q + every + 4 * out + norm
    return forward if not c.backward else max(forward, 2 * (q + every) + 4 * out + norm)


def divided_ring(c: CallSizes, rank: int) -> int:
    """Memory of usp: q, k and v of some heads and more rows, and the memory of a ring."""
    n = c.mesh[1]
    own = rank // n * n
    inside = c._replace(mesh=(n,), rows=c.rows[own : own + n], keys=c.keys[own : own + n])
    outside = HeadGroups.of(inside, rank - own).outside(c)
    q, _, _ = _of_rows(outside, sum(map(size_of, inside.rows)), c.dtype)
    kept = outside.key * sum(map(size_of, inside.keys)) * c.dtype.itemsize
    return q + kept + rings(outside, rank // n)


def _of_rows(c: CallSizes, rows: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes of q, of out and of the LSE in two numbers."""
    numbers = c.B * c.H * rows
    sizes = c.D * dtype.itemsize, c.Dv * dtype.itemsize, 2 * acc_dtype(dtype).itemsize
    q, out, norm = (numbers * x for x in sizes)
    return q, out, norm


MEMORY: dict[str, Callable[[CallSizes, int], int]] = {
    "gather": gathers,
    "ring": rings,
    "ulysses": divided,
    "usp": divided_ring,
}


# ---------------------------------------------------------------------------------------- machines


class Link(NamedTuple):
    """rate: bytes a second that a rank sends while it receives as many. latency: seconds of an
    empty exchange. message: additional seconds for each rank that it sends to."""

    rate: float
    latency: float
    message: float


@dataclass(frozen=True, eq=False)
class Machine:
    """flops: operations a second of a rank's kernels, forward and backward, by dtype. memory: bytes
    a second that it reads and writes. call: seconds of a kernel with nothing to compute. merge:
    seconds of a ring to merge an empty result. near: the link among `node` ranks in a row. far: the
    link among others."""

    name: str
    flops: Mapping[torch.dtype, tuple[float, float]]
    memory: float
    call: float
    merge: float
    node: int
    near: Link
    far: Link

    def link(self, mesh: tuple[int, ...], dim: int) -> Link:
        """The link of the ranks along a dimension. Ranks count along the last dimension first."""
        return self.near if math.prod(mesh[dim:]) <= self.node else self.far


# FlashAttention-3 on an H100 SXM, bfloat16, D = 128, N = 16K: forward causal and backward (Shah
# 2024, arXiv:2407.08608, figures 5 and 6). That is 0.62 and 0.57 of the data sheet's 989 TFLOP/s;
# float32 and float64 have these shares of its 67 and 34 without tensor cores. fastattn's own GPU
# kernels have not been timed.
_H100 = {
    torch.bfloat16: (616e12, 561e12),
    torch.float16: (616e12, 561e12),
    torch.float32: (42e12, 38e12),
    torch.float64: (21e12, 19e12),
}
# Latencies: those that NCCL assumes for its ring in src/graph/tuning.cc, protocol Simple: 8.4 us,
# and 3.4 over NVLink or 14 over the network. A microsecond for each further peer is a guess. Rates:
# nine tenths of 400 Gb/s a GPU (ConnectX-7); of NVLink 4's 450 GB/s each way the 370 that large
# messages reach in nccl-tests.
H100 = Machine(
    "H100, eight to a node by NVLink, 400 Gb/s a GPU between nodes",
    _H100,
    memory=3.35e12,  # by the data sheet
    call=20e-6,
    merge=100e-6,  # some fifteen launches
    node=8,
    near=Link(370e9, 11.8e-6, 1e-6),
    far=Link(45e9, 22.4e-6, 1e-6),
)

# In round numbers: a core with AVX2 or half-width AVX-512 (bench/results), and gloo over loopback
# on such a machine. Machines with more cores have faster networks, too.
CPU = Machine(
    "a CPU's core a rank, gloo on one machine",
    {
        torch.bfloat16: (200e9, 150e9),
        torch.float16: (100e9, 100e9),
        torch.float32: (100e9, 100e9),
        torch.float64: (50e9, 50e9),
    },
    memory=10e9,
    call=50e-6,
    merge=200e-6,
    node=1,
    near=Link(1e9, 200e-6, 100e-6),
    far=Link(1e9, 200e-6, 100e-6),
)


def machine_of(device: str) -> Machine:
    """The machine that is assumed for a type of device, on every rank. Nothing is measured."""
    return CPU if device == "cpu" else H100
