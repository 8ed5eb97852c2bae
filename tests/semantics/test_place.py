"""The position of a block of a larger call (`fastattn.Place`): draws, weights and errors. Values
are in tests/features; that blocks of rows, keys and heads make the whole, in tests/distributed."""

import pytest
import torch

import fastattn
from fastattn import Place
from tests.support.backends import every_backend, not_interpreted
from tests.support.cases import FEATURE, Dims, build

DIMS = Dims(3, 3, 3, 37, 51, 8, 8)


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
