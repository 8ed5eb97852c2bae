"""Cost estimates of calls over ranks: bytes compared with what is sent, scores with what is seen,
and the choice of `auto` with the estimates."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import distributed
from fastattn.distributed import cost_model
from fastattn.distributed import layout as layouts
from fastattn.distributed.ring import PartialResult
from tests.support.cases import DTYPES, FEATURE, Dims, build

MESH = (2, 2)
WAYS = [
    *(("gather", n) for n in (3, MESH)),
    *(("ring", n) for n in (1, 2, 4)),
    *(("ulysses", n) for n in (3, 4)),
    ("usp", MESH),
]
DIMS = Dims(2, 12, 4, 13, 22, 3, 5)  # uneven parts; values with another head dim


class Counted:
    """Count the bytes that this rank sends with torch.distributed inside the block, except int64
    tensors, which belong to the exchange before a call."""

    def __enter__(self):
        self.sent = 0
        self.were = dist.all_to_all_single, dist.batch_isend_irecv
        self._put(self.exchange, self.post)
        return self

    def __exit__(self, *_):
        self._put(*self.were)

    def _put(self, *functions):
        for name, function in zip(("all_to_all_single", "batch_isend_irecv"), functions):
            setattr(dist, name, function)

    def exchange(self, received, sent, coming, going, group=None):
        self._add(sent, sum(going) - going[dist.get_rank(group)])
        return self.were[0](received, sent, coming, going, group=group)

    def post(self, posted):
        for x in posted:
            self._add(x.tensor, x.tensor.numel() if x.op is dist.isend else 0)
        return self.were[1](posted)

    def _add(self, x, numbers):
        self.sent += numbers * x.element_size() if x.dtype != torch.int64 else 0


# -- bytes -----------------------------------------------------------------------------------------


def count(group, names, dtype, dims, strategy, layout):
    """(bytes sent in forward, in backward), (the estimates of both)."""
    problem = build(dims, [FEATURE[x] for x in names], DTYPES[dtype])
    given = {"group": group, "layout": layout}
    kwargs = dict(problem.kwargs)
    if (mask := kwargs.get("mask")) is not None:
        kwargs["mask"] = distributed.shard(mask.detach(), dim=-2, **given)
        kwargs["mask"].requires_grad_(mask.requires_grad)
    q, k, v, dout = (
        distributed.shard(getattr(problem, x), **given).detach() for x in ("q", "k", "v", "dout")
    )
    for x in (q, k, v):
        x.requires_grad_()
    given |= {"strategy": strategy}
    about = distributed.explain(q, k, v, **given, **kwargs)
    with Counted() as found:
        out = distributed.attention(q, k, v, **given, **kwargs)
        forward = found.sent
        out.backward(dout)
    team = distributed.consistency.need_team(group)
    predicted = [0, 0]
    for x in cost_model.STEPS[strategy](about.call, team.rank):
        predicted[x.backward] += x.sent
    return (forward, found.sent - forward), tuple(predicted)


CALLS = {
    "plain": ((), DIMS),
    "causal": (("causal",), replace(DIMS, M=22)),
    "a window": (("left_window",), replace(DIMS, M=64, N=64)),
    "a mask of each head": (("bias_grad",), DIMS),
    "a bool mask": (("bool_mask",), DIMS),
    "as many key heads": ((), replace(DIMS, Hk=12)),
    "one key head": ((), replace(DIMS, Hk=1)),
    "less than a row each": ((), replace(DIMS, M=2, N=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("strategy, count_of", WAYS, ids=str)
def test_bytes_are_those_that_leave(four, strategy, count_of, call, layout):
    """On each rank, forward and backward, in two dtypes."""
    names, dims = CALLS[call]
    for dtype in ("float32", "bfloat16"):
        for found in four.results(count_of, count, names, dtype, dims, strategy, layout):
            sent, predicted = found
            assert sent == predicted


# -- scores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lo, hi", [(-3, 0), (-40, 40), (0, 0), (-2, 5), (4, 9), (-9, -4)])
def test_scores_are_those_that_are_seen(lo, hi):
    """Compared with a count of the visible (row, key) pairs."""
    spans = [layouts.Span(a, b) for a, b in itertools.combinations((0, 1, 5, 6, 13), 2)]
    for rows, keys in itertools.product(spans, spans):
        every = itertools.product(range(*rows), range(*keys))
        right = sum(i + lo <= j <= i + hi for i, j in every)
        assert cost_model.seen(rows, keys, lo, hi) == right
        assert layouts.meet(rows, keys, lo, hi) or not right


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize(
    "lo, hi", [(-cost_model.UNLIMITED, cost_model.UNLIMITED), (-9, 0), (-1, 3), (20, 30)]
)
def test_hops_end_after_the_last_visible_keys(layout, lo, hi):
    for ranks_of, n, keys in itertools.product((1, 2, 3, 5), (0, 1, 7, 40), (1, 16, 40)):
        rows, of = (layouts.spans(layout, x, ranks_of) for x in (n, keys))
        met = [
            (rank - owner) % ranks_of
            for rank, owner in itertools.product(range(ranks_of), repeat=2)
            if any(layouts.meet(x, y, lo, hi) for x in rows[rank] for y in of[owner])
        ]
        assert layouts.hops(rows, of, lo, hi) == max(met, default=0) + 1


def of_sizes(N, mesh, layout="zigzag", H=32, Hk=8, hi=0, dtype=torch.bfloat16, **more):
    spans = layouts.spans(layout, N, math.prod(mesh))
    return cost_model.CallSizes(mesh, spans, spans, 1, H, Hk, 128, 128, dtype, hi=hi, **more)


SHAPES = {"gather": (8,), "ring": (8,), "ulysses": (8,), "usp": (2, 4)}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("strategy, mesh", SHAPES.items())
def test_every_score_is_computed_once(strategy, mesh, backward):
    """The sum over ranks is that of the whole call."""
    n = 1000
    for layout, hi in itertools.product(layouts.LAYOUTS, (0, cost_model.UNLIMITED)):
        c = of_sizes(n, mesh, layout, hi=hi, backward=backward)
        steps = [x for rank in range(8) for x in cost_model.STEPS[strategy](c, rank)]
        whole = 32 * (n * (n + 1) // 2 if hi == 0 else n * n)
        assert sum(x.scores for x in steps if not x.backward) == whole
        assert sum(x.scores for x in steps if x.backward) == whole * backward


# -- time and memory -------------------------------------------------------------------------------


def test_a_ring_hop_costs_the_longer_of_compute_and_transfer():
    """Computed by hand, for a machine with round rates: two ranks, two hops, forward."""
    link = cost_model.Link(rate=100.0, latency=0.5, message=0.25)
    flops = {torch.float32: (1000.0, 1000.0)}
    given = dict(memory=math.inf, call=0.0, merge=0.0, node=1, near=link, far=link)
    machine = cost_model.Machine("", flops, **given)
    spans = layouts.spans("contiguous", 20, 2)
    c = cost_model.CallSizes((2,), spans, spans, 1, 2, 1, 3, 4, torch.float32)
    hop = 2 * (2 * 10 * 10) * (3 + 4) / 1000  # 2.8
    sending = 10 * (3 + 4) * 4 / 100 + 0.75  # 3.55
    assert cost_model.cost("ring", c, machine).seconds == pytest.approx(sending + hop)
    slow = replace(machine, flops={torch.float32: (100.0, 100.0)})
    assert cost_model.cost("ring", c, slow).seconds == pytest.approx(20 * hop)
    both = 2 * (10 * 7 * 4 / 2 / 100 + 0.75)  # keys, then values
    assert cost_model.cost("gather", c, machine).seconds == pytest.approx(both + 2 * hop)


class OfOneSize(TorchDispatchMode):
    """Counts the tensors of a size that operations take, and make."""

    def __init__(self, size):
        super().__init__()
        self.size, self.taken, self.made = size, 0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **kwargs or {})
        self.taken += sum(x.shape == self.size for x in args if isinstance(x, torch.Tensor))
        self.made += isinstance(found, torch.Tensor) and found.shape == self.size
        return found


def test_a_merge_takes_the_time_and_memory_of_its_operations():
    out, normaliser = torch.zeros(1, 2, 10, 4), torch.zeros(2, 1, 2, 10)
    with OfOneSize(out.shape) as counted:
        PartialResult(out, normaliser).merged(PartialResult(out, normaliser))
    spans = layouts.spans("contiguous", 20, 2)
    c = cost_model.CallSizes((2,), spans, spans, 1, 2, 1, 3, 4, torch.float32)
    free = replace(cost_model.H100, flops={torch.float32: (math.inf,) * 2}, call=0.0, merge=0.0)
    link = cost_model.Link(rate=math.inf, latency=0.0, message=0.0)
    machine = replace(free, memory=1.0, near=link, far=link)
    bytes, keys, norm = out.nbytes, 10 * (3 + 4) * 4, normaliser.nbytes
    found = cost_model.cost("ring", c, machine)
    assert found.seconds == (counted.taken + counted.made) * bytes
    # Keys in use, coming and sent; out, a part of it, and what its merge makes.
    assert found.memory == 3 * keys + (2 + counted.made) * bytes + 2 * norm


@pytest.mark.parametrize("strategy, mesh", SHAPES.items())
def test_cost_rises_with_work_and_falls_with_ranks(strategy, mesh):
    def found(n, mesh=mesh, **more):
        return cost_model.cost(strategy, of_sizes(n, mesh, **more), cost_model.H100)

    small, large = found(1 << 16), found(1 << 17)
    assert all(x < y for x, y in zip(small, large))
    assert all(x < y for x, y in zip(small, found(1 << 16, backward=True)))
    more = found(1 << 17, (mesh[0] * 2, *mesh[1:]))
    assert more.seconds < large.seconds
    if strategy != "gather":  # gather has all keys on each rank
        assert more.memory < 0.6 * large.memory


def test_hops_and_balance_are_seen():
    """A window omits hops; zigzag halves a causal ring's time; both only where they should."""

    def ring(layout, **more):
        return cost_model.cost("ring", of_sizes(1 << 18, (8,), layout, **more), cost_model.H100)

    assert ring("zigzag").seconds < 0.6 * ring("contiguous").seconds
    window = ring("contiguous", lo=-4096)
    assert window.sent * 7 == ring("contiguous").sent
    assert ring("zigzag", lo=-4096).sent == ring("zigzag").sent


# -- auto ------------------------------------------------------------------------------------------


def choose(group, shape, more):
    """(the strategy that `auto` ran, explain's choice, ...)."""
    B, H, Hk, N, D = shape
    team = distributed.consistency.need_team(group)
    n = N // team.ranks + (team.rank == 0)  # one rank has a row more
    q, k, v = (torch.zeros(B, h, n, D) for h in (H, Hk, Hk))
    about = distributed.explain(q, k, v, group=group, **more)
    ran = []
    calls = distributed.attention_call
    spies = {
        name: lambda *given, name=name, f=f: ran.append(name) or f(*given)
        for name, f in calls.STRATEGIES.items()
    }
    with mock.patch.dict(calls.STRATEGIES, spies):
        distributed.attention(q, k, v, group=group, **more)
    return ran, about.strategy, about.costs, about.declined, str(about)


@pytest.mark.parametrize(
    "shape, count_of, more",
    [
        ((1, 4, 4, 64, 8), 4, {}),
        ((1, 3, 1, 64, 8), 4, {}),
        ((1, 4, 1, 2048, 8), 3, {"window": (9, 0)}),
        ((1, 4, 1, 2048, 8), 4, {"window": (9, 0), "row_invariant": True}),
        ((2, 4, 2, 512, 16), MESH, {"causal": True}),
        ((2, 3, 3, 64, 16), MESH, {}),
    ],
    ids=str,
)
def test_auto_is_the_cheapest_on_every_rank(four, shape, count_of, more):
    found = four.results(count_of, choose, shape, more)
    assert all(x == found[0] for x in found)
    ran, chosen, costs, declined, text = found[0]
    assert ran == [chosen] == [min(costs, key=lambda name: costs[name].seconds)]
    assert set(costs) | set(declined) == set(RANKS_OF) and not set(costs) & set(declined)
    assert f"  {chosen}: " in text and text.count("would run") == 1
    for name, why in declined.items():
        assert f"  {name}: {why}" in text


RANKS_OF = distributed.attention_call.STRATEGIES
DECLINED = [
    (3, "usp", "group: got 1 dimension for strategy='usp', expected a mesh of 2", {}),
    (3, "ulysses", "got 'ulysses' for 4 heads on 3 ranks, expected ranks that divide", {}),
    (2, "ring", "row_invariant: got True", {"row_invariant": True}),
    (MESH, "ring", "got 2 dimensions for strategy='ring'", {}),
]


@pytest.mark.parametrize("count_of, strategy, words, more", DECLINED, ids=str)
def test_explain_has_the_reason_of_each_declined_strategy(four, count_of, strategy, words, more):
    for _, chosen, costs, declined, _ in four.results(count_of, choose, (1, 4, 4, 64, 8), more):
        assert words in declined[strategy] and strategy not in costs and chosen != strategy


@pytest.mark.slow
def test_a_requested_strategy_can_run(four):
    """Also with row_invariant, for which `auto` would not choose a ring."""
    for strategy, asking in (("ring", {"row_invariant": True}), ("ulysses", {})):
        more = {"strategy": strategy} | asking
        for ran, chosen, costs, _, text in four.results(2, choose, (1, 4, 4, 64, 8), more):
            assert ran == [chosen] == [strategy] and strategy in costs
            assert ("takes the least time, but another one was requested" in text) == (
                strategy != min(costs, key=lambda name: costs[name].seconds)
            )
