"""Attention over ranks equals that on one rank: every feature and strategy, and gradients."""

import functools
import itertools
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import fastattn
from fastattn import distributed
from fastattn.distributed import layout as layouts
from tests.semantics import test_packed
from tests.support import ranks
from tests.support.argument_shapes import shapes_of
from tests.support.cases import DTYPES, FEATURE, FEATURES, Dims, build
from tests.support.error_budget import Verdict

MESH = (2, 2)
RANKS = {  # the numbers of ranks, or meshes, that each strategy runs on
    "gather": (1, 2, 3, 4, MESH),
    "ring": (1, 2, 3, 4),
    "ulysses": (1, 2, 3, 4),
    "usp": (MESH,),
}
STRATEGIES = [(name, ranks) for name, each in RANKS.items() for ranks in each]
every_strategy = pytest.mark.parametrize("strategy, count", STRATEGIES, ids=str)
MOST = [(name, each[-1]) for name, each in RANKS.items()]
most_ranks = pytest.mark.parametrize("strategy, count", MOST, ids=str)
OF_ROWS = ("out", "lse", "dq")
# All the features that one call can combine.
EVERYTHING = ("causal", "left_window", "lengths", "alibi", "softcap", "bias_grad", "sinks")
EVERYTHING += ("dropout", "gqa", "wide_values", "lse_loss")
# `place` gives the position in a whole call; here the ranks determine that.
ALONE = [x.name for x in FEATURES if x.group != "place"]
DIMS = Dims(2, 12, 12, 63, 63, 17, 17)  # the number of heads is a multiple of 2, 3 and 4


@pytest.fixture(scope="module")
def four():
    with ranks.ranks(4) as found:
        yield found


def problem_of(names, dtype, dims=DIMS):
    return build(dims, [FEATURE[x] for x in names], DTYPES[dtype])


def has_rows(mask):
    return mask is not None and mask.ndim > 1 and mask.shape[-2] != 1


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


# -- assembling the whole --------------------------------------------------------------------------


def together(problem, found, layout):
    """The whole call's results, assembled from those of the ranks."""
    rows, keys = (layouts.spans(layout, x.shape[2], len(found)) for x in (problem.q, problem.k))
    whole = {}
    for name in found[0]:
        each = [x[name] for x in found]
        if name in OF_ROWS:
            whole[name] = layouts.whole(each, rows, 2)
        elif name in ("dk", "dv"):
            whole[name] = layouts.whole(each, keys, 2)
        elif name == "dmask" and has_rows(problem.kwargs["mask"]):
            whole[name] = layouts.whole(each, rows, problem.kwargs["mask"].ndim - 2)
        else:
            assert all(torch.equal(x, each[0]) for x in each), f"{name} differs between ranks"
            whole[name] = each[0]
    return whole


def over(four, count, names, dtype, strategy, layout="contiguous", dims=DIMS, **more):
    """(the problem, the whole call's results)"""
    found = four.run(count, run, names, dtype, dims, strategy, layout, more)
    for x in found:
        if isinstance(x, Exception):
            raise x
    problem = problem_of(names, dtype, dims)
    return problem, together(problem, found, layout)


BY_FEATURE = (
    ("gather", 2, "contiguous"),
    ("gather", 3, "zigzag"),
    ("ring", 3, "contiguous"),
    ("ring", 4, "zigzag"),
    ("ulysses", 3, "zigzag"),
    ("ulysses", 4, "contiguous"),
    ("usp", MESH, "zigzag"),
)


def divides(strategy, count, feature, dims=DIMS):
    dividing = {"ulysses": count, "usp": MESH[1]}.get(strategy, 1)
    return FEATURE[feature].dims(dims).H % dividing == 0


@pytest.mark.parametrize(
    "feature, strategy, count, layout",
    [(x, *way) for x in ALONE for way in BY_FEATURE if divides(*way[:2], x)],
    ids=str,
)
def test_features(four, feature, strategy, count, layout):
    problem, found = over(four, count, (feature,), "float32", strategy, layout)
    assert not Verdict(problem).about(found)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@every_strategy
@pytest.mark.parametrize("dtype", DTYPES)
def test_everything(four, dtype, strategy, count, layout):
    problem, found = over(four, count, EVERYTHING, dtype, strategy, layout)
    assert not Verdict(problem).about(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@most_ranks
def test_everything_by_the_reference(four, strategy, count, dtype):
    """Its backward, too, handles rows with keys on other ranks."""
    given = "zigzag", DIMS
    problem, found = over(four, count, EVERYTHING, dtype, strategy, *given, backend="reference")
    assert not Verdict(problem).about(found)


# Fewer rows than ranks, one each, none; more keys than rows, and fewer.
SIZES = ((1, 1), (3, 3), (4, 4), (5, 9), (9, 5), (0, 6), (6, 0), (63, 7), (2, 131))


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@most_ranks
@pytest.mark.parametrize("size", SIZES, ids=str)
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


TO_ROUNDING = {"float32": 1e-6, "float64": 2e-15}  # relative to the largest value


@pytest.mark.parametrize("dtype", TO_ROUNDING)
def test_the_table_of_equality(four, dtype):
    """`pytest -s -k table` prints the distance from one rank's results, relative to the largest."""
    right = problem_of(EVERYTHING, dtype).run(fastattn.attention, row_invariant=True)
    print(f"\n{dtype}, everything at once" + " " * 6 + "".join(f"{x:>9}" for x in right))
    for (strategy, count), layout in itertools.product(STRATEGIES, layouts.LAYOUTS):
        _, found = over(four, count, EVERYTHING, dtype, strategy, layout, row_invariant=True)
        apart = {x: (found[x] - right[x]).abs().max() / right[x].abs().max() for x in right}
        said = ("the bits" if not x else f"{x.item():.1e}" for x in apart.values())
        ranks_of = "x".join(map(str, count)) if isinstance(count, tuple) else count
        print(f"{strategy:8}{ranks_of:>5} {layout:16}" + "".join(f"{x:>9}" for x in said))
        assert max(apart.values()) < TO_ROUNDING[dtype]
        exact = right if count == 1 else BITS.get(strategy, right if strategy == "ulysses" else ())
        assert not any(apart[name] for name in exact)


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


# -- every shape of a mask -------------------------------------------------------------------------

MASKED = Dims(3, 4, 4, 5, 6, 8, 7)
MASKS = shapes_of("mask", dict(B=3, H=4, M=5, N=6))


def masked(shape):
    problem = problem_of(("lse_loss",), "float64", MASKED)
    mask = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return replace(problem, kwargs=problem.kwargs | {"mask": mask}, wants=(*problem.wants, "mask"))


def run_masked(group, strategy, layout):
    attention = functools.partial(
        distributed.attention, group=group, strategy=strategy, layout=layout
    )
    return [mine(group, masked(shape), layout).run(attention) for shape in MASKS]


MASKED_WAYS = (
    ("gather", 2, "zigzag"),
    ("ring", 3, "contiguous"),
    ("ulysses", 2, "contiguous"),
    ("usp", MESH, "zigzag"),
)


@pytest.mark.parametrize("strategy, count, layout", MASKED_WAYS, ids=str)
def test_every_shape_of_a_mask(four, strategy, count, layout):
    found = four.run(count, run_masked, strategy, layout)
    for x in found:
        if isinstance(x, Exception):
            raise x
    for shape, *each in zip(MASKS, *found, strict=True):
        problem = masked(shape)
        right = problem.run(fastattn.attention)
        for name, x in together(problem, each, layout).items():
            torch.testing.assert_close(
                x, right[name], rtol=1e-11, atol=1e-12, msg=f"{shape} {name}"
            )


# -- masks with one row on a rank ------------------------------------------------------------------


@pytest.mark.parametrize("feature", ["bias_grad", "key_bias_grad"])
@most_ranks
def test_a_mask_of_one_row_where_a_rank_has_one(four, feature, strategy, count):
    """Three ranks have two rows and the last has one: the others tell it if the mask has rows."""
    dims = replace(DIMS, M=7, N=7)
    problem, found = over(four, count, (feature,), "float32", strategy, dims=dims)
    assert not Verdict(problem).about(found)


# -- seeds -----------------------------------------------------------------------------------------


def drop(group, seed):
    """out for v = 1 under dropout, and the next number of torch's generator on this rank."""
    torch.manual_seed(5 if seed == "same" else dist.get_rank(group))
    x = torch.ones(1, 4, 6, 8)
    out = distributed.attention(x, x, x, group=group, strategy="gather", dropout_p=0.5)
    return out, torch.rand(()).item()


def test_with_no_seed_the_first_rank_draws(four):
    found = four.run(3, drop, "same")
    torch.manual_seed(5)
    whole = torch.ones(1, 4, 18, 8)
    right = fastattn.attention(whole, whole, whole, dropout_p=0.5)
    assert torch.equal(torch.cat([out for out, _ in found], 2), right)
    after = torch.rand(()).item()
    assert [x for _, x in found] == [after] * 3, "generators are not where one rank's is"
    torch.manual_seed(0)
    other = torch.cat([out for out, _ in four.run(3, drop, "own")], 2)
    assert torch.equal(other, fastattn.attention(whole, whole, whole, dropout_p=0.5))


# -- packed batches --------------------------------------------------------------------------------


PACKED = ("", "bottom_right left_window lengths alibi_batch softcap sinks dropout gqa lse_loss")
PACKED += ("causal bias_grad sinks wide_values gqa", "head_bias_grad window dropout lse_loss")
SEQUENCES = ((5, 7), (0, 3), (1, 1), (37, 51), (3, 0), (16, 64), (1, 40), (65, 69), (33, 20))
PART = ((5, 7), (0, 3), (1, 1), (18, 21), (3, 0), (17, 16))
PACKED_DIMS = Dims(1, 2, 2, 1, 1, 8, 8)  # the heads of test_packed's batches
UNPACKED = [x.name for x in FEATURES if x.group in ("queries", "layout", "dout")]


def packed_of(names, dtype, sizes):
    return test_packed.batch([FEATURE[x] for x in names.split()], DTYPES[dtype], sizes)


def part_of(x, sizes, group):
    """This rank's rows: as `shard` cuts them, or by the given sizes."""
    if sizes is None:
        return distributed.shard(x, dim=0, group=group)
    return x.split(sizes)[dist.get_rank(group)]


def run_packed(group, names, dtype, sizes, cuts, more):
    """This rank's part of a packed batch."""
    batch = packed_of(names, dtype, sizes)
    rows, keys = (functools.partial(part_of, sizes=x, group=group) for x in cuts)
    given = batch.given | {x: (rows if x == "q" else keys)(batch.given[x]) for x in "qkv"}
    own = replace(batch, given=given, dout=rows(batch.dout))
    own = replace(own, dlse=None if batch.dlse is None else rows(batch.dlse))
    found = own.run(functools.partial(distributed.attention_packed, group=group, **more))
    return {name: x.detach() for name, x in found.items()}


def over_packed(four, count, names, dtype, sizes=SEQUENCES, cuts=(None, None), **more):
    """(the batch, the whole call's results)"""
    found, whole = four.run(count, run_packed, names, dtype, sizes, cuts, more), {}
    for x in found:
        if isinstance(x, Exception):
            raise x
    for name in found[0]:
        each = [x[name] for x in found]
        if name in ("dmask", "dsinks"):
            assert all(torch.equal(x, each[0]) for x in each), f"{name} differs between ranks"
            whole[name] = each[0]
        else:
            whole[name] = torch.cat(each)
    return packed_of(names, dtype, sizes), whole


def close(batch, found):
    right = batch.run()
    assert found.keys() == right.keys()
    for name, x in right.items():
        torch.testing.assert_close(found[name], x, rtol=1e-11, atol=1e-12, msg=name)


PACKED_WAYS = (("gather", 1), ("gather", 4), ("gather", MESH), ("ulysses", 2), ("auto", 3))


PACKED_SIZES = dict(B=len(PART), H=2, M=18, N=21)
PACKED_MASKS = shapes_of("mask", PACKED_SIZES)


def packed_masked(shape):
    batch = packed_of("lse_loss", "float64", PART)
    mask = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return replace(batch, given=batch.given | {"mask": mask}, wants=(*batch.wants, "mask"))


def run_packed_masked(group, strategy):
    cut = functools.partial(part_of, sizes=None, group=group)
    attention = functools.partial(distributed.attention_packed, group=group, strategy=strategy)
    found = []
    for batch in map(packed_masked, PACKED_MASKS):
        given = batch.given | {x: cut(batch.given[x]) for x in "qkv"}
        own = replace(batch, given=given, dout=cut(batch.dout), dlse=cut(batch.dlse))
        found.append({name: x.detach() for name, x in own.run(attention).items()})
    return found


@pytest.mark.parametrize("strategy, count", [("gather", 3), ("ulysses", 2)], ids=str)
def test_every_shape_of_a_mask_of_packed_batches(four, strategy, count):
    found = four.run(count, run_packed_masked, strategy)
    for x in found:
        if isinstance(x, Exception):
            raise x
    for shape, *each in zip(PACKED_MASKS, *found, strict=True):
        for name, x in packed_masked(shape).run().items():
            own = [y[name] for y in each]
            got = own[0] if name == "dmask" else torch.cat(own)
            torch.testing.assert_close(got, x, rtol=1e-11, atol=1e-12, msg=f"{shape} {name}")


@pytest.mark.parametrize("names", PACKED, ids=lambda x: x.replace(" ", "+") or "plain")
@pytest.mark.parametrize("strategy, count", PACKED_WAYS, ids=str)
def test_packed_batches(four, strategy, count, names):
    close(*over_packed(four, count, names, "float64", strategy=strategy))


@pytest.mark.parametrize(
    "feature, strategy, count",
    [
        (x, *way)
        for x in ALONE
        for way in (("gather", 3), ("ulysses", 2))
        if x not in UNPACKED and divides(*way, x, PACKED_DIMS)
    ],
)
def test_packed_features(four, feature, strategy, count):
    close(*over_packed(four, count, feature, "float64", PART, strategy=strategy))


@pytest.mark.parametrize("names", [PACKED[1], PACKED[3]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy, count", [("gather", 4), ("ulysses", 2)])
def test_packed_batches_have_the_bits_of_one_rank(four, strategy, count, dtype, names):
    """For rows and, if ranks divide key heads, for keys too."""
    given = dict(row_invariant=True)
    batch, found = over_packed(four, count, names, dtype, strategy=strategy, **given)
    right = batch.run(**given)
    for name in (*OF_ROWS, "dk", "dv") if strategy == "ulysses" else OF_ROWS:
        assert torch.equal(found[name], right[name]), name


CUTS = {  # of 161 rows and 255 keys
    "none at first": ((0, 1, 160), (200, 55, 0)),
    "none in between": ((80, 0, 81), (0, 255, 0)),
    "where sequences end": ((5, 2, 154), (7, 0, 248)),
    "all on the last": ((0, 0, 161), (0, 0, 255)),
}


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("names", PACKED[1:3])
def test_packed_batches_are_cut_anywhere(four, names, cuts):
    """Ranks without rows or keys take part in the gradients."""
    close(*over_packed(four, 3, names, "float64", cuts=CUTS[cuts]))


@pytest.mark.parametrize(
    "sizes", [((3, 5),), ((0, 0), (0, 4)), ((1, 2), (1, 1)), ((0, 0),)], ids=str
)
def test_packed_batches_of_fewer_rows_than_ranks(four, sizes):
    close(*over_packed(four, 4, PACKED[2], "float64", sizes))


def drop_packed(group, seed):
    torch.manual_seed(5 if seed == "same" else dist.get_rank(group))
    x, cu = torch.ones(6, 4, 8), torch.tensor([0, 4, 6 * group.size()])
    out = distributed.attention_packed(x, x, x, cu, cu, group=group, dropout_p=0.5)
    return out, torch.rand(()).item()


@pytest.mark.parametrize("count", [2, 3])  # ulysses, and gather
def test_with_no_seed_the_first_rank_draws_of_packed_batches(four, count):
    whole, cu = torch.ones(6 * count, 4, 8), torch.tensor([0, 4, 6 * count])
    for seed in ("same", "own"):
        found = four.run(count, drop_packed, seed)
        torch.manual_seed(5 if seed == "same" else 0)
        right = fastattn.attention_packed(whole, whole, whole, cu, cu, dropout_p=0.5)
        assert torch.equal(torch.cat([out for out, _ in found]), right)
        assert found[0][1] == torch.rand(()).item()


def packed_twice(group, strategy):
    g = torch.Generator().manual_seed(0)
    x, moves = (torch.randn(6, 2, 3, generator=g, dtype=torch.float64) for _ in range(2))
    cu = torch.tensor([0, 4, 6])

    def second(attention, x, moves):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(attention(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad((grad * moves).sum(), x)[0]

    ours = functools.partial(distributed.attention_packed, group=group, strategy=strategy)
    cut = functools.partial(distributed.shard, dim=0, group=group)
    found = second(lambda x: ours(x, x, x, cu, cu, causal=True), cut(x), cut(moves))
    whole = fastattn.attention_packed
    right = second(lambda x: whole(x, x, x, cu, cu, causal=True), x, moves)
    return float((found - cut(right)).abs().max())


@pytest.mark.parametrize("strategy", ["gather", "ulysses"])
def test_second_derivatives_of_packed_batches(four, strategy):
    assert max(four.run(2, packed_twice, strategy)) < 1e-13


def pack_wrongly(group, what):
    """Two sequences, of 3 rows and of all other rows: most ranks have no row of the first."""
    team = distributed.consistency.need_team(group)
    rank, x, cu = team.rank, torch.zeros(4, 3, 8), torch.tensor([0, 3, 4 * team.ranks])
    given = dict(q=x, k=x, v=x, cu_q=cu, cu_k=cu) | {n: y for n, y in what.items() if n != "on_1"}
    given |= what.get("on_1", {}) if rank == 1 else {}
    return distributed.attention_packed(**given, group=group)


def named(what):
    return "".join(c for c in str(what) if c.isalnum())[:40]


X = torch.zeros(4, 3, 8)


@pytest.mark.parametrize(
    "what, words",
    [
        (dict(strategy="ring"), "strategy: got 'ring', expected 'auto', 'gather' or 'ulysses' of"),
        (dict(strategy="ulysses"), "got 'ulysses' for 3 heads on 2 ranks, expected ranks that"),
        (dict(cu_q=torch.tensor([0, 3, 7])), "cu_q: got 7 last, expected 8, the rows of all ranks"),
        (
            dict(cu_k=torch.tensor([0, 9, 8])),
            r"cu_k: got \[0, 9, 8\], expected offsets from 0 that",
        ),
        (dict(cu_k=torch.tensor([0, 8])), r"cu_k: got shape \(2,\), expected .* = \(3,\)"),
        (dict(place=fastattn.Place(row=1)), "place: got .*, expected no row or key of a packed"),
        # Errors that a call on one rank would find itself.
        (dict(max_q=4), "cu_q: got a sequence, 1, of 5, expected at most max_q = 4"),
        (
            dict(key_lengths=torch.tensor([4, 1])),
            "key_lengths: got 4 of sequence 0, expected a val",
        ),
        (dict(key_lengths=torch.tensor([1])), r"key_lengths: got shape \(1,\), expected"),
        (
            dict(mask=torch.zeros(2, 1, 3, 5)),
            r"mask: got shape \(2, 1, 3, 5\), expected a shape that",
        ),
        (dict(mask=torch.zeros(4, 5)), r"mask: got shape \(4, 5\), expected a shape that"),
        (dict(alibi_slopes=torch.ones(3, 3)), r"alibi_slopes: got shape \(3, 3\), expected"),
        (dict(backend="none"), "backend"),
    ],
    ids=named,
)
def test_packed_batches_that_raise(four, what, words):
    for found in four.run(2, pack_wrongly, what):
        with pytest.raises(ValueError, match=words):
            raise found


@pytest.mark.parametrize(
    "what, words",
    [
        (dict(cu_k=torch.tensor([0, 2, 12])), r"cu_k: .*\[0, 2, 12\].* on rank 1, .*\[0, 3, 12\]"),
        (dict(cu_q=torch.tensor([0, 3, 12]).int()), "cu_q: got .*int32.* on rank 1, expected .*64"),
        (dict(causal=True), "causal: got True on rank 1, expected False, as on rank 0"),
        (dict(q=X.double(), k=X.double(), v=X.double()), "q: got .*float64.* on rank 1, expected"),
        (dict(v=X[..., :4]), "v: got .*'any', 3, 4.* on rank 1, expected .*'any', 3, 8"),
        (dict(k=X[:, :1], v=X[:, :1]), "k: got .*'any', 1, 8.* on rank 1, .*; v: got .* on rank 1"),
        (dict(k=X.clone().requires_grad_()), "k: got .*'with gradient'.* on rank 1, expected"),
        (dict(mask=torch.zeros(1)), "mask: got .*float32.* on rank 1, expected None, as on rank 0"),
        (dict(sinks=torch.zeros(3)), "sinks: got .* on rank 1, expected None, as on rank 0"),
        (dict(max_k=16), "max_k: got 16 on rank 1, expected None, as on rank 0"),
        (dict(dropout_p=0.5, seed=torch.tensor([3])), "seed: got .*3.* on rank 1, expected None"),
        (dict(place=fastattn.Place(head=3)), "place: got .*head=3.* on rank 1, expected None"),
        (dict(strategy="gather"), "strategy: got gather on rank 1, expected auto, as on rank 0"),
        (dict(return_lse=True), "return_lse: got True on rank 1, expected False, as on rank 0"),
    ],
    ids=named,
)
@pytest.mark.parametrize("count", [3, MESH], ids=str)
def test_ranks_that_differ_on_a_packed_batch(four, count, what, words):
    if count == MESH:  # a mesh has 16 rows
        words = words.replace(r"\[0, 3, 12\]", r"\[0, 3, 16\]")
    for found in four.run(count, pack_wrongly, dict(on_1=what)):
        with pytest.raises(ValueError, match=words):
            raise found


@pytest.mark.parametrize(
    "what, kind, words",
    [
        (dict(q=X[0]), ValueError, r"q: got shape \(3, 8\), expected 3 dimensions"),
        (dict(q=X.numpy()), TypeError, "q: got ndarray, expected a torch.Tensor"),
        (dict(v=X[:3]), ValueError, r"v: got .*, expected 4 rows, as k has"),
        (dict(k=X.double()), ValueError, "k.dtype: got torch.float64, expected torch.float32"),
        (dict(cu_q=[0, 12]), TypeError, "cu_q: got list, expected a torch.Tensor"),
        (dict(cu_q=torch.tensor(12)), ValueError, r"cu_q: got shape \(\), expected \(B \+ 1,\)"),
        (
            dict(cu_k=torch.tensor([0.0, 3, 12])),
            ValueError,
            "cu_k.dtype: got torch.float32, expect",
        ),
        (dict(cu_k=torch.tensor([1, 3, 12])), ValueError, r"cu_k: got \[1, 3, 12\], expected offs"),
        (dict(max_q=2.5), TypeError, "max_q: got 2.5"),
        (dict(mask=torch.zeros(13, 9)), ValueError, r"mask: got shape \(13, 9\), expected a shape"),
        (dict(mask=[0.0]), TypeError, "mask: got list, expected a torch.Tensor or None"),
        (dict(key_lengths=torch.tensor([3, 10])), ValueError, "key_lengths: got 10 of sequence 1"),
        (dict(sinks=torch.ones(2)), ValueError, r"sinks: got shape \(2,\), expected"),
        (dict(softcap=-1.0), ValueError, "softcap: got -1.0"),
        (dict(dropout_p=2.0), ValueError, "dropout_p: got 2.0"),
        (dict(backend="cuda"), NotImplementedError, "cuda"),
        # Our checks allow so many rows; torch raises, and the other ranks learn of that, too.
        (dict(cu_q=torch.tensor([0, 3, 2**62])), RuntimeError, "overflow"),
    ],
    ids=named,
)
def test_a_rank_in_trouble_with_a_packed_batch_is_named(four, what, kind, words):
    one, own, other = four.run(3, pack_wrongly, dict(on_1=what))
    with pytest.raises(kind, match=words):
        raise own
    name = type(own).__name__
    for found in (one, other):
        with pytest.raises(RuntimeError, match=f"rank 1 of 3 raised {name}.*{words}"):
            raise found


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
def test_what_is_cut_is_joined(four, layout, n):
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


# -- ranks that differ or are missing --------------------------------------------------------------


def differ(group, what):
    rank = dist.get_rank(group)
    x = torch.zeros(2, 4, 6, 8)
    own = {"group": group}
    if rank == 2:
        given = {
            "shape": ((x[:1], x[:1], x[:1]), {}),
            "dtype": ((x.double(), x.double(), x.double()), {}),
            "dims": ((x[0], x, x), {}),
            "type": ((x.numpy(), x, x), {}),
            "causal": ((x, x, x), dict(causal=True)),
            "dropout": ((x, x, x), dict(dropout_p=0.1, seed=1)),
            "sinks": ((x, x, x), dict(sinks=torch.ones(4))),
            "strategy": ((x, x, x), dict(strategy="gather")),
            "return_lse": ((x, x, x), dict(return_lse=True)),
            "gradient": ((x.requires_grad_(), x, x), {}),
            "softcap": ((x, x, x), dict(softcap=-1.0)),
            "mask": ((x, x, x), dict(mask=torch.zeros(5, 18))),
            "place": ((x, x, x), dict(place=fastattn.Place(row=3))),
        }[what]
    else:
        given = ((x, x, x), {})
    args, more = given
    if what == "sinks":
        own["sinks"] = torch.zeros(4)
    return distributed.attention(*args, **own | more).shape


DIFFERENCES = {
    "shape": r"q: got .*1, 4, 'any', 8.* on rank 2, expected .*2, 4, 'any', 8.* as on rank 0",
    "dtype": r"q: got \('torch.float64'.* on rank 2, expected \('torch.float32'",
    "causal": r"causal: got True on rank 2, expected False, as on rank 0",
    "dropout": r"seed: got 1 on rank 2, expected None.*dropout_p: got 0.1 on rank 2, expected 0",
    "sinks": r"sinks: got .*1.0, 1.0.* on rank 2, expected .*0.0, 0.0.* as on rank 0",
    "strategy": r"strategy: got gather on rank 2, expected auto, as on rank 0",
    "return_lse": r"return_lse: got True on rank 2, expected False, as on rank 0",
    "gradient": r"q: got .*'with gradient'\) on rank 2, expected .*'without gradient'",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ(four, what):
    for found in four.run(3, differ, what):
        assert isinstance(found, ValueError)
        with pytest.raises(ValueError, match=DIFFERENCES[what]):
            raise found


TROUBLES = {
    "dims": (ValueError, "q: got"),
    "type": (TypeError, "q: got ndarray, expected a torch.Tensor"),
    "softcap": (ValueError, "softcap: got -1.0"),
    "mask": (ValueError, "mask: got 5 rows, expected 1, or this rank's 6, by all keys"),
    "place": (ValueError, "place: got Place.row=3.* expected only head, item and bottom_right"),
}


@pytest.mark.parametrize("what", TROUBLES)
def test_a_rank_in_trouble_is_named(four, what):
    kind, words = TROUBLES[what]
    *others, own = four.run(3, differ, what)
    with pytest.raises(kind, match=words):
        raise own
    for found in others:
        with pytest.raises(RuntimeError, match=f"rank 2 of 3 raised {kind.__name__}.*{words}"):
            raise found


def meshed(mesh, strategy):
    x = torch.zeros(1, 3, 4, 4)
    return distributed.attention(x, x, x, group=mesh, strategy=strategy)


@pytest.mark.parametrize(
    "ranks, strategy, words",
    [
        (MESH, "ring", "got 2 dimensions for strategy='ring', expected a group, or a mesh"),
        (2, "usp", "got 1 dimension for strategy='usp', expected a mesh of 2"),
        (MESH, "usp", "got 'usp' for 3 heads on 2 ranks, expected ranks that divide the heads"),
    ],
)
def test_strategies_have_meshes_of_their_own(four, ranks, strategy, words):
    for found in four.run(ranks, meshed, strategy):
        with pytest.raises(ValueError, match=words):
            raise found


def test_auto_is_what_the_ranks_can_do(four):
    for count in (3, 2, MESH):
        assert {x.shape for x in four.run(count, meshed, "auto")} == {(1, 3, 4, 4)}


def alike(group, strategy, layout, more):
    rank = dist.get_rank(group)
    x = torch.zeros(1, 3, 5 + (rank == 1), 4)
    return distributed.attention(x, x, x, group=group, strategy=strategy, layout=layout, **more)


@pytest.mark.parametrize(
    "strategy, layout, more, words",
    [
        ("ulysses", "contiguous", {}, "got 'ulysses' for 3 heads on 2 ranks, expected ranks that"),
        ("rings", "contiguous", {}, "strategy: got 'rings', expected one of 'auto', 'gather', "),
        ("gather", "spiral", {}, "layout: got 'spiral', expected 'contiguous' or 'zigzag'"),
        ("gather", "contiguous", dict(mask=torch.zeros(1, 7)), "mask: got"),
    ],
)
def test_what_all_do_wrong(four, strategy, layout, more, words):
    for found in four.run(2, alike, strategy, layout, more):
        with pytest.raises(ValueError, match=words):
            raise found


WRONG = {  # for 11 keys: checked before anything is sent
    "mask: got": dict(mask=torch.zeros(1, 16)),
    "mask.dtype: got torch.int64": dict(mask=torch.ones(1, 11, dtype=torch.int64)),
    "mask: got .*7": dict(mask=torch.zeros(7, 1, 11)),
    "key_lengths: got": dict(key_lengths=torch.tensor([12])),
    "key_lengths.*got": dict(key_lengths=torch.tensor([1, 2])),
    "key_lengths.dtype: got": dict(key_lengths=torch.tensor([1.0])),
}


@pytest.mark.parametrize("words", WRONG)
@pytest.mark.parametrize("strategy", ["gather", "ring", "ulysses"])
def test_what_all_do_wrong_of_all_keys(four, strategy, words):
    """A single rank raises the same error."""
    x = torch.zeros(1, 2, 11, 4)
    with pytest.raises((TypeError, ValueError), match=words):
        fastattn.attention(x, x, x, **WRONG[words])
    for found in four.run(2, even, strategy, WRONG[words]):
        with pytest.raises((TypeError, ValueError), match=words):
            raise found


def even(group, strategy, more):
    x = torch.zeros(1, 2, 5 + dist.get_rank(group), 4)
    return distributed.attention(x, x, x, group=group, strategy=strategy, **more)


def of_rank(rank):
    return torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(rank))


def unasked(group, seed):
    x = of_rank(dist.get_rank(group))
    given = dict(group=group, strategy="gather", agree=False, dropout_p=0.4, seed=seed)
    return distributed.attention(x, x, x, **given)


def on_one_rank(group, seed):
    """In a rank's process: this one may have an instruction set that another test selected."""
    x = torch.cat([of_rank(0), of_rank(1)], 2)
    return fastattn.attention(x, x, x, dropout_p=0.4, seed=seed)


def test_ranks_need_not_be_asked(four):
    (right,) = four.run(1, on_one_rank, 7)
    assert torch.equal(torch.cat(four.run(2, unasked, 7), 2), right)
    for error in four.run(2, unasked, None):
        with pytest.raises(ValueError, match="seed: got None, expected the same on every rank"):
            raise error


def die(group, when):
    rank = dist.get_rank(group)
    x = torch.randn(1, 2, 64, 16, requires_grad=True)
    if rank == 1 and when == "before":
        os._exit(1)
    out = distributed.attention(x, x, x, group=group)
    if rank == 1:
        os._exit(1)
    out.sum().backward()


@pytest.mark.parametrize("when", ["before", "before its backward"])
def test_a_rank_that_dies_is_told_of(when):
    with ranks.ranks(3, timeout=10) as three:
        one, gone, other = three.run(3, die, when)
    assert str(gone) == "gone"
    for found in (one, other):
        with pytest.raises(
            RuntimeError, match=r"rank [02] of 3 lost its group while it waited for"
        ):
            raise found


def test_without_a_group_there_is_advice():
    x = torch.zeros(1, 1, 2, 4)
    for call in (lambda: distributed.attention(x, x, x), lambda: distributed.shard(x)):
        with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group"):
            call()


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


def test_a_ring_has_first_derivatives_alone(four):
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


def test_compiled_models_break_their_graph_there(four):
    for compiled, eager in zip(four.run(2, train, True), four.run(2, train, False)):
        torch.testing.assert_close(compiled, eager)
