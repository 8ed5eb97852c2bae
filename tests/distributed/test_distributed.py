"""Attention over ranks equals that on one rank: bits, sizes, seeds, layouts and derivatives.
`test_distributed_rows.py` has every argument."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import fastattn
from fastattn import distributed
from fastattn.distributed import layout as layouts
from tests.distributed.parts import has_rows, together
from tests.support.cases import DTYPES, FEATURE, Dims, build
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

MESH = (2, 2)
RANKS = {  # the numbers of ranks, or meshes, that each strategy runs on
    "gather": (1, 2, 3, 4, MESH),
    "ring": (1, 2, 3, 4),
    "ulysses": (1, 2, 3, 4),
    "usp": (MESH,),
}
STRATEGIES = tuple((name, ranks) for name, each in RANKS.items() for ranks in each)
every_strategy = pytest.mark.parametrize("strategy, count", STRATEGIES, ids=str)
MOST = [(name, each[-1]) for name, each in RANKS.items()]
most_ranks = pytest.mark.parametrize("strategy, count", MOST, ids=str)
# All the features that one call can combine.
EVERYTHING = ("causal", "left_window", "lengths", "alibi", "softcap", "bias_grad", "sinks")
EVERYTHING += ("dropout", "gqa", "wide_values", "lse_loss")
DIMS = Dims(2, 12, 12, 63, 63, 17, 17)  # the number of heads is a multiple of 2, 3 and 4


def problem_of(names, dtype, dims=DIMS):
    return build(dims, [FEATURE[x] for x in names], DTYPES[dtype])


# -- what the ranks run ----------------------------------------------------------------------------


def mine(group, problem, layout):
    """This rank's part of a problem."""
    cut = functools.partial(distributed.shard, layout=layout, group=group)
    kwargs = dict(problem.kwargs)
    if has_rows(kwargs.get("mask")):
        kwargs["mask"] = cut(kwargs["mask"], dim=-2)
    parts = {x: cut(getattr(problem, x)) for x in ("q", "k", "v", "dout")}
    dlse = None if problem.dlse is None else cut(problem.dlse)
    return replace(problem, **parts, dlse=dlse, kwargs=kwargs)


def run(group, names, dtype, dims, strategy, layout, more):
    own = mine(group, problem_of(names, dtype, dims), layout)
    attention = functools.partial(
        distributed.attention, group=group, strategy=strategy, layout=layout, **more
    )
    return own.run(attention)


def over(four, count, names, dtype, strategy, layout="contiguous", dims=DIMS, **more):
    """(the problem, the whole call's results)"""
    found = four.results(count, run, names, dtype, dims, strategy, layout, more)
    problem = problem_of(names, dtype, dims)
    return problem, together(problem.tensors(), found, layout)


@parametrize("layout", layouts.LAYOUTS, fast=1)
@every_strategy
@parametrize("dtype", DTYPES, fast=1)
def test_all_features_together(four, dtype, strategy, count, layout):
    problem, found = over(four, count, EVERYTHING, dtype, strategy, layout)
    assert not Verdict(problem).about(found)


@parametrize("dtype", ["float32", "bfloat16"], fast=1)
@most_ranks
def test_all_features_together_by_the_reference(four, strategy, count, dtype):
    """Its backward, too, handles rows with keys on other ranks."""
    given = "zigzag", DIMS
    problem, found = over(four, count, EVERYTHING, dtype, strategy, *given, backend="reference")
    assert not Verdict(problem).about(found)


# Fewer rows than ranks, one each, none; more keys than rows, and fewer.
SIZES = ((1, 1), (3, 3), (4, 4), (5, 9), (9, 5), (0, 6), (6, 0), (63, 7), (2, 131))


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@most_ranks
@parametrize("size", SIZES, ids=str, fast=6)
def test_sizes(four, size, strategy, count, layout):
    names, dims = (*EVERYTHING[:2], *EVERYTHING[3:]), replace(DIMS, M=size[0], N=size[1])
    problem, found = over(four, count, names, "float32", strategy, layout, dims)
    assert not Verdict(problem).about(found)


BITS = {"gather": ("out", "lse", "dq", "dmask")}  # the other gradients are sums over ranks
SAME_HEADS = ("causal", "left_window", "lengths", "bias_grad", "sinks", "dropout", "lse_loss")


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("strategy", ["gather", "ulysses"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_one_rank(four, dtype, strategy, layout):
    """If ranks divide key heads, or nothing is summed over ranks, a row has one chain of sums."""
    problem, found = over(four, 4, SAME_HEADS, dtype, strategy, layout, row_invariant=True)
    right = problem.run(fastattn.attention, row_invariant=True)
    for name in BITS.get(strategy, right):
        assert torch.equal(found[name], right[name]), name


@most_ranks
def test_twice_is_the_same_bits(four, strategy, count):
    (_, one), (_, two) = (over(four, count, EVERYTHING, "float32", strategy) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


# -- precision of a ring between hops --------------------------------------------------------------


def means(group):
    """out and dv of rows that attend to all keys equally, which makes them means."""
    rank = dist.get_rank(group)
    q = torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16)
    ulp = 2.0**-7
    halfway, above = [1, 1 + ulp, 1, 1 + ulp], [1 + ulp] * 4  # the first mean is a tie
    v = torch.tensor((halfway, above)[rank], dtype=q.dtype).view(1, 1, 4, 1).expand(q.shape)
    v = v.clone().requires_grad_()
    out = distributed.attention(q, q, v, group=group, strategy="ring")
    (dv,) = torch.autograd.grad(out, v, v.detach())
    return out.detach(), dv


def test_a_ring_rounds_once(four):
    """The mean, and the sum of the ranks' parts, is 1 + 3/4 ulp; rounded parts would give 1."""
    for found in four.run(2, means):
        for x in found:
            assert torch.equal(x, torch.full_like(x, 1 + 2.0**-7))


# -- masks with one row on a rank ------------------------------------------------------------------


@pytest.mark.parametrize("feature", ["bias_grad", "key_bias_grad"])
@most_ranks
def test_a_mask_of_one_row_where_a_rank_has_one(four, feature, strategy, count):
    """Three ranks have two rows and the last has one: the others tell it if the mask has rows."""
    dims = replace(DIMS, M=7, N=7)
    problem, found = over(four, count, (feature,), "float32", strategy, dims=dims)
    assert not Verdict(problem).about(found)


# -- seeds -----------------------------------------------------------------------------------------


def drop(group, seed, packed):
    """out for v = 1 under dropout, and the next number of torch's generator on this rank."""
    torch.manual_seed(5 if seed == "same" else dist.get_rank(group))
    given = dict(group=group, dropout_p=0.5)
    if packed:
        x, cu = torch.ones(6, 4, 8), torch.tensor([0, 4, 6 * group.size()])
        out = distributed.attention_packed(x, x, x, cu, cu, **given)
    else:
        x = torch.ones(1, 4, 6, 8)
        out = distributed.attention(x, x, x, strategy="gather", **given)
    return out, torch.rand(()).item()


@pytest.mark.parametrize("packed, count", [(False, 3), (True, 2), (True, 3)])
@pytest.mark.parametrize("seed", ["same", "own"])
def test_without_a_seed_the_first_rank_draws(four, seed, packed, count):
    found = four.run(count, drop, seed, packed)
    torch.manual_seed(5 if seed == "same" else 0)
    if packed:
        x, cu = torch.ones(6 * count, 4, 8), torch.tensor([0, 4, 6 * count])
        right = fastattn.attention_packed(x, x, x, cu, cu, dropout_p=0.5)
    else:
        x = torch.ones(1, 4, 6 * count, 8)
        right = fastattn.attention(x, x, x, dropout_p=0.5)
    assert torch.equal(torch.cat([out for out, _ in found], 0 if packed else 2), right)
    after = torch.rand(()).item()
    alike = found if seed == "same" else found[:1]
    assert {x for _, x in alike} == {after}, "generators are not where one rank's is"


# -- cutting ---------------------------------------------------------------------------------------


def cut_and_join(group, layout, n, dim):
    x = torch.arange(2.0 * n * 3).view(2, n, 3).movedim(1, dim).requires_grad_()
    own = distributed.shard(x, dim=dim, layout=layout, group=group)
    back = distributed.unshard(own, dim=dim, layout=layout, group=group)
    (grad,) = torch.autograd.grad((back * back.detach()).sum(), x)
    ranks = group.size()
    of = distributed.shard(x * ranks, dim=dim, layout=layout, group=group)
    same_grad = torch.equal(distributed.shard(grad, dim=dim, layout=layout, group=group), of)
    return own.detach(), torch.equal(back, x), same_grad


@pytest.mark.parametrize("n", [0, 1, 3, 8, 13])
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_cut_tensors_are_joined_again(four, layout, n):
    for dim in (0, 1, -1):
        for count in (4, MESH):
            found = four.run(count, cut_and_join, layout, n, dim)
            assert [x[1:] for x in found] == [(True, True)] * 4


@pytest.mark.parametrize("n", [0, 1, 3, 4, 7, 8, 13, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_layouts(n, ranks):
    x = torch.arange(n)
    chunks = [*x.chunk(ranks), *[x[:0]] * ranks][:ranks]
    of = layouts.spans("contiguous", n, ranks)
    for chunk, own in zip(chunks, of, strict=True):
        assert torch.equal(layouts.part(x, own, 0), chunk)
    of = layouts.spans("zigzag", n, ranks)
    parts = [layouts.part(x, own, 0) for own in of]
    assert torch.equal(layouts.whole(parts, of, 0), x)
    assert of == layouts.spans_of("zigzag", [len(x) for x in parts], "x")
    if n % (2 * ranks) == 0:  # each part is as far from the beginning as from the end
        assert {int(x.sum()) for x in parts} == {sum(range(n)) // ranks}


# -- derivatives, and compiled models --------------------------------------------------------------


def differentiate_twice(group, strategy):
    """Complaints of gradgradcheck. The loss, the sum over all ranks, is known to each of them."""
    g = torch.Generator().manual_seed(dist.get_rank(group))
    q, k, v = (torch.randn(1, 2, 3, 2, generator=g, dtype=torch.float64) for _ in range(3))
    moves = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (q, k, v)]
    whole = [distributed.unshard(x, group=group) for x in (q, k, v)]
    whole_moves = [distributed.unshard(x, group=group) for x in moves]

    def second(attention, given, moves):
        given = [x.requires_grad_() for x in given]
        loss = attention(*given, causal=True).square().sum()
        grads = torch.autograd.grad(loss, given, create_graph=True)
        product = sum((x * y).sum() for x, y in zip(grads, moves))
        return torch.autograd.grad(product, given)

    ours = functools.partial(distributed.attention, group=group, strategy=strategy)
    found = second(ours, [q, k, v], moves)
    right = second(fastattn.attention, whole, whole_moves)
    parts = [distributed.shard(x, group=group) for x in right]
    return [float((x - y).abs().max()) for x, y in zip(found, parts)]


@pytest.mark.parametrize("strategy", ["gather", "ulysses"])
def test_second_derivatives(four, strategy):
    for errors in four.run(2, differentiate_twice, strategy):
        assert max(errors) < 1e-13


def test_a_ring_has_first_derivatives_only(four):
    for error in four.run(2, differentiate_twice, "ring"):
        with pytest.raises(NotImplementedError, match="got 'ring' and create_graph=True, expected"):
            raise error


def train(group, compiled):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 24)

    def step(x):
        q, k, v = model(x).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        return distributed.attention(q, k, v, group=group, causal=True).square().sum()

    x = torch.randn(2, 12, 8)
    own = distributed.shard(x, dim=1, group=group)
    loss = (torch.compile(step, backend="aot_eager") if compiled else step)(own)
    (grad,) = torch.autograd.grad(loss, [model.weight])
    return grad


@pytest.mark.slow
def test_compiled_models_break_their_graph_there(four):
    torch.testing.assert_close(four.run(2, train, True), four.run(2, train, False))
