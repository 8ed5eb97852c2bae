"""Head dims past 512, as of latent attention (576 of q and k, 512 of v): each pass, on every
instruction set."""

import itertools

import pytest

from fastattn.backends import base
from tests.features import checking, factors
from tests.semantics import test_tangents
from tests.semantics.test_features import run_all
from tests.semantics.test_weights import about_weights
from tests.support.backends import DECLARED, REASONS, not_interpreted, passed
from tests.support.cases import DTYPES, FEATURE, PLAIN, Dims, build
from tests.support.marks import parametrize

WIDE = [x for x in REASONS if (base.get(x).support.max_head_dim or 0) >= 1024 and not REASONS[x]]
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not WIDE, reason="no fused backend here has head dims past 512"),
]
every_wide_backend = pytest.mark.parametrize("name", WIDE)
LATENT = Dims(1, 4, 1, 19, 140, 576, 512)
# The edges of the tiles of every instruction set, which the sizes of test_every_odd_head_dim have.
EDGES = [n + e for n in (16, 32, 64, 128) for e in (-1, 0, 1)]


def in_turn(*lists):
    """Each element of the first list, with the elements of the others in turn."""
    return list(zip(lists[0], *(itertools.cycle(x) for x in lists[1:])))


@every_wide_backend
@parametrize("first, dtype", in_turn(range(513, 1025, 32), DECLARED), fast=2)
def test_every_odd_head_dim(name, first, dtype):
    """D from 513 to 1023, each with another Dv, at the edge of a tile."""
    problems = []
    for at, dim in enumerate(range(first, first + 32, 2)):
        value_dim = (dim, 1, 577, 1024, dim - 512)[at % 5]
        m, n = EDGES[(at + first) % len(EDGES)], EDGES[(at * 5 + first // 32) % len(EDGES)]
        features = (FEATURE["causal"],) if at % 2 else PLAIN
        problems.append(build(Dims(1, 1, 1, m, n, dim, value_dim), features, DTYPES[dtype]))
    run_all(name, problems)


WIDTHS = ((576, 512), (513, 1024), (577, 3), (1024, 544))
ROWS = [
    ("dense", row | dict(zip(("D", "Dv"), WIDTHS[row["M"] % 4])))
    for row in factors.rows("dense", most=24, qv=("no",), B=(2, 1), heads=((2, 2), (4, 2), (3, 1)))
]
ROWS += [("paged", row) for row in factors.rows("paged", most=24, widths=WIDTHS, qv=("no",))]


@not_interpreted
@parametrize("form, row", ROWS, fast=6)
def test_calls(form, row):
    for way in checking.ways(row)[:: 3 if form == "dense" else 1]:
        assert not checking.report(form, row, way)


@every_wide_backend
@parametrize("dtype", DECLARED, fast=2)
def test_passes_with_tangents(name, dtype):
    dims = LATENT, Dims(1, 1, 1, 9, 33, 1023, 700), Dims(1, 2, 1, 1, 140, 520, 1024)
    test_tangents.run_all(name, [build(x, (FEATURE["causal"],), DTYPES[dtype]) for x in dims])


@every_wide_backend
@pytest.mark.parametrize("dtype", DECLARED)
@pytest.mark.parametrize("average", [False, True], ids=["per head", "mean"])
def test_weights(name, dtype, average):
    problem = build(LATENT, (FEATURE["softcap"],), DTYPES[dtype])
    passed(about_weights(name, problem, average))
