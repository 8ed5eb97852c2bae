"""Calls that a seed draws: their kinds, and the lines about their ratios."""

import random

import pytest

from bench.cases import FORWARD, TRAINING
from bench.races import race as races
from bench.races import random_calls
from tests.support.backends import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="about the CPU")


def test_a_seed_draws_every_kind_of_call():
    chance = random.Random(0)
    drawn = [random_calls.draw(chance, tuple(random_calls.DTYPES)) for _ in range(300)]
    again = random.Random(0)
    assert drawn == [random_calls.draw(again, tuple(random_calls.DTYPES)) for _ in range(300)]
    assert {x.what for x in drawn} == {FORWARD, TRAINING}
    for name, levels in (
        ("dtype", random_calls.DTYPES),
        ("mask", random_calls.MASKS),
        ("D", random_calls.DIMS),
    ):
        assert {getattr(x, name) for x in drawn} == set(levels)
    assert any(x.Hk < x.H for x in drawn) and any(x.M < 17 < x.N for x in drawn)
    assert all(x.H % x.Hk == 0 and (x.mask != "causal" or x.M == x.N) for x in drawn)


@pytest.mark.parametrize("dtype", random_calls.DTYPES)
def test_both_sides_have_the_same_results(dtype, monkeypatch):
    monkeypatch.setattr(random_calls, "MOST", 1e7)
    for race in random_calls.races((dtype,), 12, seed=1):
        assert not races.disagreement(race), race.name
        assert race.inner() is not None


def test_what_is_slower_is_named_with_its_cause():
    def row(ratio, what, **more):
        found = dict(dtype="float32", what=what, status="ok", ratio=dict(median=ratio))
        return found | {"pass": FORWARD} | more

    rows = [row(2.0, "a"), row(0.8, "b", within=0.9), row(0.95, "c", within=1.5)]
    lines = [*random_calls.summary(rows)][1:]
    assert lines[1].startswith(
        "all: 3 calls, least 0.80, median 0.95, most 2.0; 2 under 1, 2 under"
    )
    assert lines[2:] == [
        "0.80 b, float32 forward: the kernels (0.90 without Python)",
        "0.95 c, float32 forward: what Python does (1.50 without Python)",
    ]
