"""Calls on DTensors equal those on one rank: sharded by items, heads, rows or not, or refused."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.distributed import tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import fastattn
from fastattn.call.spec import Options, Tensors
from fastattn.dispatch.operation import FORWARD
from fastattn.dispatch.run_pass import arguments
from tests.distributed.test_distributed import EVERYTHING, MESH, problem_of
from tests.support.cases import DTYPES, FEATURES, Dims
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

# Ranks and the placement of q: an axis of (B, H, M), or "-", for each dimension of the mesh.
WAYS = [
    *((2, x) for x in "BHM-"),
    *((4, x) for x in "BHM"),
    *((MESH, x) for x in ("BH", "BM", "MH", "MM", "HH", "-H", "BB")),
]
every_way = pytest.mark.parametrize("count, axes", WAYS, ids=str)
DIMS = Dims(3, 4, 4, 63, 63, 17, 17)  # numbers of items and rows that ranks do not divide evenly
ALONE = [x.name for x in FEATURES if x.group != "place" and x.name != "mqa"]
# For each tensor: the dimension of each axis.
LIES = {
    **{name: dict(B=-4, H=-3, M=-2) for name in ("q", "k", "v", "mask")},
    "alibi_slopes": dict(B=-2, H=-1),
    "sinks": dict(H=-1),
    "key_lengths": dict(B=-1),
}


# -- what the ranks run ----------------------------------------------------------------------------


def mesh_of(group):
    return group if isinstance(group, DeviceMesh) else DeviceMesh.from_group(group, "cpu")


def placed(name, x, axes):
    """The placements of a tensor with all axes that it can have, for a q sharded by `axes`."""
    found = []
    for axis in axes:
        dim = LIES.get(name, {}).get(axis)
        whole = dim is None or -dim > x.ndim or (name == "mask" and x.shape[dim] == 1)
        found.append(Replicate() if whole else Shard(x.ndim + dim))
    return found


def dealt(mesh, name, x, axes):
    if not isinstance(x, torch.Tensor):
        return x
    return tensor.distribute_tensor(x, mesh, placed(name, x, axes))


def whole(results):
    return {name: x.full_tensor() for name, x in results.items()}


def run(group, names, dtype, dims, axes, more):
    """Run a problem on DTensors; return the full results, on each rank."""
    mesh, problem = mesh_of(group), problem_of(names, dtype, dims)
    dtensors = {name: dealt(mesh, name, x, axes) for name, x in problem.tensors().items()}
    q, k, v = (dtensors.pop(name) for name in "qkv")
    dout = dealt(mesh, "q", problem.dout, axes)
    dlse = None if problem.dlse is None else dealt(mesh, "q", problem.dlse[..., None], axes)[..., 0]
    own = replace(problem, q=q, k=k, v=v, kwargs=dtensors, dout=dout, dlse=dlse)
    found = own.run(fastattn.attention, **more)
    for name, x in found.items():
        like = own.tensors()[name[1:]] if name[0] == "d" else q
        assert x.placements == like.placements, f"{name} lies as {x.placements}"
    return whole(found)


def over(four, count, *given, **more):
    """The results, which must be equal on all ranks."""
    found = four.results(count, run, *given, more)
    for name in found[0]:
        assert all(torch.equal(x[name], found[0][name]) for x in found), f"{name} differs"
    return found[0]


# -- compared with one rank ------------------------------------------------------------------------


@every_way
@parametrize("feature", ALONE, fast=4)
def test_features(four, feature, count, axes):
    found = over(four, count, (feature,), "float32", DIMS, axes)
    assert not Verdict(problem_of((feature,), "float32", DIMS)).about(found)


@every_way
@parametrize("dtype", DTYPES, fast=1)
def test_all_features_together(four, dtype, count, axes):
    found = over(four, count, EVERYTHING, dtype, DIMS, axes)
    assert not Verdict(problem_of(EVERYTHING, dtype, DIMS)).about(found)


@pytest.mark.parametrize("size", [(1, 1), (0, 5), (5, 0), (3, 7)], ids=str)
@pytest.mark.parametrize("count, axes", [(4, "M"), (4, "B"), (4, "H"), (MESH, "MM")], ids=str)
def test_sizes(four, size, count, axes):
    """Fewer rows, items or heads than ranks, and none."""
    dims = Dims(*((3, 3, 3) if axes == "H" else (2, 2, 2)), *size, 8, 8)
    names = ("causal", "bias_grad", "dropout", "lse_loss")
    found = over(four, count, names, "float32", dims, axes)
    assert not Verdict(problem_of(names, "float32", dims)).about(found)


OF_BITS = [(2, "B"), (2, "H"), (4, "H"), (4, "B"), (MESH, "BH"), (MESH, "HH")]


@pytest.mark.parametrize("count, axes", OF_BITS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_items_and_heads_have_the_bits_of_one_rank(four, dtype, count, axes):
    """With the same dropout. Sums over ranks are left out: they have another order."""
    found = over(four, count, EVERYTHING, dtype, DIMS, axes)
    right = problem_of(EVERYTHING, dtype, DIMS).run(fastattn.attention)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(found[name], right[name]), name


# -- the table -------------------------------------------------------------------------------------


def grads(attention, q, k, v):
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*given)
    return [out, *torch.autograd.grad(out, given, torch.ones_like(out))]


def second(q, k, v):
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    first = torch.autograd.grad(fastattn.attention(*given).square().sum(), given, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in first), given)


def packed(q, k, v):
    offsets = torch.tensor([0, 1, 4])
    named = dict(max_q=3, max_k=3)
    of = (x[0].transpose(0, 1) for x in (q, k, v))
    return fastattn.attention_packed(*of, offsets, offsets, **named)


def operator(q, k, v):
    given = arguments(FORWARD, Tensors(q, k, v), Options())
    return torch.ops.fastattn.attention(*given)[0]


CALLS = {
    "attention": functools.partial(grads, fastattn.attention),
    "one key head": lambda q, k, v: grads(fastattn.attention, q, k[:, :1], v[:, :1]),
    "dropout, no seed": functools.partial(
        grads, functools.partial(fastattn.attention, dropout_p=0.5)
    ),
    "scaled_dot_product_attention": functools.partial(grads, fastattn.scaled_dot_product_attention),
    "packed": packed,
    "weights": lambda q, k, v: fastattn.attention_weights(q, k),
    "averaged weights": lambda q, k, v: fastattn.attention_weights(q, k, average_heads=True),
    "second derivatives": second,
    "attention_jvp": lambda q, k, v: fastattn.attention_jvp(q, k, v, k, None, v)[1],
    "torch.ops.fastattn": operator,
}
SENTENCES = {
    "1": "q: got placements [Shard(dim=3)], expected Shard(0) by items, Shard(1) by heads, "
    "Shard(2) by rows, or Replicate(): use its redistribute(placements=...)",
    "2": "q: got placements [Partial(sum)], expected Shard(0) by items, Shard(1) by heads, "
    "Shard(2) by rows, or Replicate(): use its redistribute(placements=...)",
    "3": "k: got 1 heads for q's 2 on 2 ranks, expected ranks that divide them: use its "
    "redistribute(placements=...) of q, k and v so that fewer ranks do, or repeat_interleave k's "
    "and v's",
    "4": "q: got a packed batch cut by rows, expected heads, Shard(1) of (T, H, D), or "
    "Replicate(): use its redistribute(placements=...)",
    "5": "q: got placements [Shard(dim=2)], expected Shard(0) by items, Shard(1) by heads, or "
    "Replicate(), where weights are asked for: use its redistribute(placements=...)",
    "6": "average_heads: got True for heads on 2 ranks, expected average_heads=False; then "
    "take the mean over heads",
    "7": "attention_jvp: got DTensors, expected plain tensors",
    "8": "Operator fastattn.attention.default does not have a sharding strategy registered.",
}
PLACEMENTS = ("Replicate()", "Shard(0)", "Shard(1)", "Shard(2)", "Shard(3)", "Partial()")
TABLE = {  # by call: runs, or the number of the sentence that it raises
    "attention": "runs runs runs runs 1 2",
    "one key head": "runs runs 3 runs 1 2",
    "dropout, no seed": "runs runs runs runs 1 2",
    "scaled_dot_product_attention": "runs runs runs runs 1 2",
    "packed": "runs runs runs 4 1 2",
    "weights": "runs runs runs 5 1 2",
    "averaged weights": "runs runs 6 5 1 2",
    "second derivatives": "runs runs runs runs 1 2",
    "attention_jvp": "7 7 7 7 7 7",
    "torch.ops.fastattn": "8 8 8 8 8 8",
}


def inputs():
    g = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, 4, 8, dtype=torch.float64, generator=g) for _ in range(3)]


def cells(group, placement):
    """By call: the distance from one rank's result, or the error raised."""
    mesh = mesh_of(group)
    place = eval(placement, vars(tensor))
    found = {}
    for name, function in CALLS.items():
        torch.manual_seed(1)
        right = listed(function(*inputs()))
        torch.manual_seed(1 + mesh.get_rank())  # without a seed, the first rank's is used
        whole = [tensor.distribute_tensor(x, mesh, [tensor.Replicate()]) for x in inputs()]
        if place.is_partial():
            of = [tensor.DTensor.from_local(x.to_local() / 2, mesh, [place]) for x in whole]
        else:
            of = [x.redistribute(placements=[place]) for x in whole]
        try:
            ours = listed(function(*of))
            pairs = zip(ours, right, strict=True)
            found[name] = max(float((x.full_tensor() - y).abs().max()) for x, y in pairs)
        except Exception as error:
            found[name] = str(error)
    return found


def listed(found):
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_table(four, placement):
    """pytest -s prints the table, one column at a time."""
    at = PLACEMENTS.index(placement)
    for found in four.run(2, cells, placement):
        assert isinstance(found, dict), found
        for name, got in found.items():
            expected = TABLE[name].split()[at]
            print(f"{placement:12} {name:28} {expected if expected == 'runs' else got}")
            if expected == "runs":
                assert isinstance(got, float) and got < 1e-13, f"{name}: {got}"
            else:
                assert SENTENCES[expected] in str(got), f"{name}: {got}"


# -- other placements than q's ---------------------------------------------------------------------


def beside(group, what):
    """A call in which one tensor is placed differently from the others."""
    mesh = mesh_of(group)
    q, k, v = (dealt(mesh, "q", x, "H") for x in inputs())
    sinks = torch.zeros(2, dtype=torch.float64)
    named = {
        "plain k": lambda: dict(k=k.to_local()),
        "plain q": lambda: dict(q=q.full_tensor()),
        "k by rows": lambda: dict(k=k.redistribute(placements=[Shard(2)])),
        "whole k": lambda: dict(k=k.redistribute(placements=[Replicate()])),
        "whole v": lambda: dict(v=v.redistribute(placements=[Replicate()])),
        "plain mask": lambda: dict(mask=torch.zeros(2, 4, 4, dtype=torch.float64)),
        "plain sinks": lambda: dict(sinks=sinks),
        "sinks with gradient": lambda: dict(sinks=sinks.requires_grad_()),
        "mask by rows": lambda: dict(mask=dealt(mesh, "mask", torch.zeros(4, 4).double(), "M")),
    }[what]()
    given = dict(q=q, k=k, v=v) | named
    with torch.no_grad() if what == "plain sinks" else torch.enable_grad():
        return fastattn.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)._spec


OTHERWISE = {
    "plain k": (TypeError, "k: got a plain tensor beside DTensors, expected a DTensor"),
    "plain q": (TypeError, "q: got a plain tensor beside DTensors, expected a DTensor"),
    "k by rows": (ValueError, r"k: got placements \[Shard\(dim=2\)\], expected \[Shard\(dim=1\)\]"),
    "whole k": None,
    "whole v": None,
    "plain mask": None,
    "plain sinks": None,
    "sinks with gradient": (TypeError, "sinks: got a plain tensor beside DTensors"),
    "mask by rows": (ValueError, r"mask: got placements \[Shard.dim=0.\], expected \[Replicate"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", OTHERWISE)
def test_tensors_with_other_placements(four, what):
    for found in four.run(2, beside, what):
        if OTHERWISE[what] is None:
            assert not isinstance(found, Exception), found
            continue
        kind, words = OTHERWISE[what]
        with pytest.raises(kind, match=words):
            raise found
