"""A call cut into blocks of rows, keys, heads or items equals the whole: values, gradients, draws.

Each block gets its position (`fastattn.Place`); blocks of keys are combined by `fastattn.merge`.
The oracle of the whole call judges the results, with the whole call's error budget.
"""

import itertools

import pytest
import torch

import fastattn
from fastattn import Place
from fastattn.call.spec import ARGUMENTS
from tests.support.backends import (
    every_backend,
    not_interpreted,
    passed,
    thinned,
    variant,
    variants,
)
from tests.support.cases import DTYPES, FEATURE, PLAIN, Dims, build, name_of
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

AXES = ("item", "head", "row", "key")  # of (B,H,M,N)
# Cuts inside tiles and inside groups of four keys that draw together. Heads are key heads.
CUTS = {"item": (1,), "head": (1, 2), "row": (13, 14, 30), "key": (7, 30)}
DIMS = Dims(3, 3, 3, 37, 51, 8, 8)
LETTERS = {"B": "item", "H": "head", "Hk": "head", "M": "row", "N": "key"}
# {tensor: {axis: its dimension, from the last}}.
LIES = {
    name: {LETTERS[x]: at - len(letters) for at, x in enumerate(letters) if x in LETTERS}
    for name, argument in ARGUMENTS.items()
    if (letters := argument.shapes[-1].split())
}
CROSSED = (
    "bottom_right lengths dropout",
    "bottom_right window dropout gqa",
    "window alibi lengths sinks lse_loss",
    "causal alibi dropout bias_grad place",
    "bottom_right lengths sinks place",
    "left_window softcap key_bias_grad dropout lse_loss",
)
CASES = [PLAIN, *(tuple(FEATURE[name] for name in names.split()) for names in CROSSED)]


def cut(name, x, axis, first, end, heads):
    """The slice of a tensor for a block of an axis; `first` and `end` count query heads."""
    dim = LIES.get(name, {}).get(axis)
    if dim is None or x is None or -dim > x.ndim or x.shape[dim] == 1:
        return x
    group = heads // x.shape[1] if name in "kv" and axis == "head" else 1
    return x.narrow(dim, first // group, (end - first) // group)


def in_parts(axis, function=fastattn.attention, cuts=None):
    """`function`, called once for each block along an axis, cut at `cuts` or at `CUTS[axis]`."""
    cuts = CUTS[axis] if cuts is None else cuts

    def attention(q, k, v, *, place=None, return_lse=False, **others):
        (B, H, M, _), (_, Hk, N, _) = q.shape, k.shape
        given = dict(q=q, k=k, v=v) | others
        place = place or Place()
        rows, keys = place.row + M, place.key + N
        whole = place._replace(
            rows=rows if place.rows is None else place.rows,
            keys=keys if place.keys is None else place.keys,
        )
        size = dict(item=B, head=H, row=M, key=N)[axis]
        group = H // Hk if axis == "head" else 1
        edges = [0, *(x * group for x in cuts if x * group < size), size]
        parts = []
        for n, (first, end) in enumerate(itertools.pairwise(edges)):
            mine = {name: cut(name, x, axis, first, end, H) for name, x in given.items()}
            if axis == "key" and n:
                mine.pop("sinks", None)  # one extra logit per row, not per block
            at = whole._replace(**{axis: getattr(whole, axis) + first})
            parts.append(function(**mine, place=at, return_lse=True))
        if axis == "key":
            out, lse = fastattn.merge(parts)
        else:
            out, lse = (torch.cat(x, AXES.index(axis)) for x in zip(*parts))
        return (out, lse) if return_lse else out

    return attention


@every_backend
@parametrize("features, axis", thinned(CASES, AXES), ids=name_of, fast=10)
def test_parts_make_the_whole(name, features, axis):
    for dtype in ("float32", "float64") if name == "cpu" else ("float32",):
        problem = build(DIMS, features, DTYPES[dtype])
        verdict = Verdict(problem)
        for isa in variants(name, problem.q.dtype):
            with variant(isa):
                passed(verdict.complaints(in_parts(axis), backend=name))


@every_backend
@pytest.mark.parametrize("key", range(9))
def test_draws_go_on_where_keys_begin(name, key):
    """Draws are bitwise equal wherever a cut splits a group of four keys, also in decoding."""
    v = torch.eye(30, dtype=torch.bfloat16).expand(2, 3, 30, 30)
    place = Place(row=2, key=key, head=4, item=1)
    for M in (1, 21):
        q, k = v.new_zeros(2, 3, M, 8), v.new_zeros(2, 3, 30, 8)
        given = dict(dropout_p=0.4, seed=5, place=place, backend=name)
        kept = fastattn.attention(q, k, v, **given) != 0
        whole = fastattn.reference.keep_mask((3, 7, 2 + M, key + 30), 0.4, 5)
        assert torch.equal(kept, whole[1:, 4:, 2:, key:])


@every_backend
def test_place_of_weights(name):
    features = [FEATURE[x] for x in ("bottom_right", "lengths", "dropout", "alibi")]
    problem = build(DIMS, features, torch.float32)
    tensors, given = (problem.q, problem.k), dict(problem.kwargs, backend=name)
    whole = fastattn.attention_weights(*tensors, **given)
    _, lse = fastattn.attention(*tensors, problem.v, **given, return_lse=True)
    rows, keys = slice(14, None), slice(7, 30)
    place = Place(row=14, key=7, rows=37, keys=51)
    part = fastattn.attention_weights(
        problem.q[:, :, rows], problem.k[:, :, keys], lse=lse[:, :, rows], **given, place=place
    )
    torch.testing.assert_close(part, whole[:, :, rows, keys])


def test_a_place_of_its_own_changes_nothing():
    problem = build(DIMS, (FEATURE["dropout"], FEATURE["bottom_right"]), torch.float32)
    given = problem.tensors()
    plain = fastattn.attention(**given)
    for place in (None, Place(), Place(rows=37, keys=51)):
        assert torch.equal(plain, fastattn.attention(**given, place=place))
        assert "place" not in str(fastattn.explain(**given, place=place).spec)
    assert "place" in str(fastattn.explain(**given, place=Place(row=1)).spec)


@pytest.mark.parametrize(
    "place, message",
    [
        (Place(row=-1), r"place.row: got -1, expected a number in \[0"),
        (Place(item=2**31), "place.item: got 2147483648"),
        (Place(rows=36), "place.rows: got 36, expected at least 37, where this call's end"),
        (Place(key=3, keys=53), "place.keys: got 53, expected at least 54"),
        (Place(bottom_right=True), "place.bottom_right: got True, expected False beside causal"),
        (Place(key=2**31 - 20), "place.key: got 2147483628, expected at most 2147483647 - 51 keys"),
    ],
    ids=lambda x: "".join(c for c in str(x) if c.isalnum())[:40],
)
def test_invalid_places_raise(place, message):
    problem = build(DIMS, (), torch.float32)
    for function in (fastattn.attention, fastattn.explain):
        with pytest.raises(ValueError, match=message):
            function(**problem.tensors(), place=place, causal=True)


@pytest.mark.parametrize(
    "place", [(0, 0), 3, Place(row=True), Place(head=1.5), Place(key=None), Place(bottom_right=1)]
)
def test_a_place_of_another_type_raises(place):
    problem = build(DIMS, (), torch.float32)
    with pytest.raises(TypeError, match="place"):
        fastattn.attention(**problem.tensors(), place=place)


@every_backend
def test_lengths_are_those_of_the_larger_call(name):
    problem = build(DIMS, (), torch.float32)
    lengths = torch.tensor([51, 60, 3])
    given = dict(problem.tensors(), key_lengths=lengths, backend=name)
    fastattn.attention(**given, place=Place(key=5, keys=60))
    with pytest.raises(ValueError, match=r"key_lengths: got 60, expected values in .* \[0, 59\]"):
        fastattn.attention(**given, place=Place(key=5, keys=59))


@not_interpreted
def test_place_is_compiled():
    problem = build(DIMS, (FEATURE["dropout"], FEATURE["bottom_right"]), torch.float32)
    place = Place(row=3, key=5, keys=70)
    function = lambda q, k, v, **given: fastattn.attention(q, k, v, **given, place=place)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    eager, found = problem.run(function), problem.run(compiled)
    assert all(torch.equal(eager[x], found[x]) for x in eager)
