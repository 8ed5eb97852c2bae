"""Packed batches over ranks: their bits, parts of any size, and second derivatives.
`test_distributed_rows.py` has every argument."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import fastattn
from fastattn import distributed
from tests.distributed.parts import OF_ROWS
from tests.semantics import test_packed
from tests.support.cases import DTYPES, FEATURE

BATCH = "bottom_right left_window lengths alibi_batch softcap sinks dropout gqa lse_loss"
GROUPED = "causal bias_grad sinks wide_values gqa"
BIASED = "head_bias_grad window dropout lse_loss"
SEQUENCES = ((5, 7), (0, 3), (1, 1), (37, 51), (3, 0), (16, 64), (1, 40), (65, 69), (33, 20))


def packed_of(names, dtype, sizes, mask=None):
    """A batch of test_packed; with a mask of a shape, if one is given."""
    batch = test_packed.batch([FEATURE[x] for x in names.split()], DTYPES[dtype], sizes)
    if mask is None:
        return batch
    x = torch.randn(mask, dtype=DTYPES[dtype], generator=torch.Generator().manual_seed(1))
    return replace(batch, given=batch.given | {"mask": x}, needs_grad=(*batch.needs_grad, "mask"))


def part_of(x, sizes, group):
    """This rank's rows: as `shard` cuts them, or by the given sizes."""
    if sizes is None:
        return distributed.shard(x, dim=0, group=group)
    return x.split(sizes)[dist.get_rank(group)]


def run_packed(group, names, dtype, sizes, mask, cuts, more):
    """This rank's part of a packed batch."""
    batch = packed_of(names, dtype, sizes, mask)
    rows, keys = (functools.partial(part_of, sizes=x, group=group) for x in cuts)
    given = batch.given | {x: (rows if x == "q" else keys)(batch.given[x]) for x in "qkv"}
    own = replace(batch, given=given, dout=rows(batch.dout))
    own = replace(own, dlse=None if batch.dlse is None else rows(batch.dlse))
    found = own.run(functools.partial(distributed.attention_packed, group=group, **more))
    return {name: x.detach() for name, x in found.items()}


def over_packed(four, count, names, dtype, sizes=SEQUENCES, mask=None, cuts=(None, None), **more):
    """(the batch, the whole call's results)"""
    given = names, dtype, sizes, mask
    found, whole = four.results(count, run_packed, *given, cuts, more), {}
    for name in found[0]:
        each = [x[name] for x in found]
        if name in ("dmask", "dsinks"):
            assert all(torch.equal(x, each[0]) for x in each), f"{name} differs between ranks"
            whole[name] = each[0]
        else:
            whole[name] = torch.cat(each)
    return packed_of(*given), whole


def close(batch, found):
    right = batch.run()
    assert found.keys() == right.keys()
    for name, x in right.items():
        torch.testing.assert_close(found[name], x, rtol=1e-11, atol=1e-12, msg=name)


PART = ((5, 7), (0, 3), (1, 1), (18, 21), (3, 0), (17, 16))
MASKS = [
    shape
    for rank in range(5)
    for shape in itertools.product(*((1, n) for n in (len(PART), 2, 18, 21)[4 - rank :]))
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy, count", [("gather", 3), ("ulysses", 2)], ids=str)
def test_every_shape_of_a_mask_of_packed_batches(four, strategy, count):
    for shape in MASKS:
        close(*over_packed(four, count, "lse_loss", "float64", PART, shape, strategy=strategy))


@pytest.mark.parametrize("names", [BATCH, BIASED])
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
@pytest.mark.parametrize("names", [BATCH, GROUPED])
def test_packed_batches_are_cut_anywhere(four, names, cuts):
    """Ranks without rows or keys take part in the gradients."""
    close(*over_packed(four, 3, names, "float64", cuts=CUTS[cuts]))


@pytest.mark.parametrize(
    "sizes", [((3, 5),), ((0, 0), (0, 4)), ((1, 2), (1, 1)), ((0, 0),)], ids=str
)
def test_packed_batches_of_fewer_rows_than_ranks(four, sizes):
    close(*over_packed(four, 4, GROUPED, "float64", sizes))


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gather", "ulysses"])
def test_second_derivatives_of_packed_batches(four, strategy):
    assert max(four.run(2, packed_twice, strategy)) < 1e-13
