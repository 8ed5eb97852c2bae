"""Head dims past 512, as of latent attention (576 of q and k, 512 of v): each pass, on every
instruction set."""

import itertools

import pytest
import torch

import fastattn
from fastattn.backends import base
from tests.semantics import test_packed, test_tangents
from tests.semantics.test_features import run_all
from tests.semantics.test_paged import in_pages
from tests.semantics.test_storage import NAMES, same
from tests.semantics.test_weights import about_weights
from tests.support.backends import DECLARED, REASONS, passed, variant, variants
from tests.support.cases import DTYPES, FEATURE, PLAIN, SINGLES, Dims, build, name_of
from tests.support.marks import parametrize

WIDE = [x for x in REASONS if (base.get(x).support.max_head_dim or 0) >= 1024 and not REASONS[x]]
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not WIDE, reason="no fused backend here has head dims past 512"),
]
every_wide_backend = pytest.mark.parametrize("name", WIDE)
LATENT = Dims(1, 4, 1, 19, 140, 576, 512)
FEW = {
    "one row": Dims(1, 16, 1, 1, 1111, 576, 512),
    "two rows": Dims(2, 6, 2, 2, 300, 1024, 513),
    "three rows": Dims(1, 4, 4, 3, 141, 513, 1024),
}
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


@every_wide_backend
@parametrize("features, dtype", in_turn([PLAIN, *SINGLES], DECLARED), ids=name_of, fast=9)
def test_features(name, features, dtype):
    run_all(name, [build(LATENT, features, DTYPES[dtype])])


@pytest.mark.slow
@every_wide_backend
@pytest.mark.parametrize("dtype", DECLARED)
@pytest.mark.parametrize("dims", FEW.values(), ids=FEW)
def test_few_rows(name, dims, dtype):
    names = ("gqa", "lengths", "sinks", "lse_loss")
    run_all(name, [build(dims, x, DTYPES[dtype]) for x in (PLAIN, [FEATURE[y] for y in names[1:]])])


@every_wide_backend
@parametrize("dtype", DECLARED, fast=3)
def test_packed_and_in_pages(name, dtype):
    features = (FEATURE["gqa"], FEATURE["bottom_right"])
    sizes = ((5, 37), (40, 130), (1, 3))
    passed(test_packed.everywhere(name, test_packed.batch(features, DTYPES[dtype], sizes, 577)))
    made = test_packed.batch(features, DTYPES[dtype], ((1, 130), (2, 64), (33, 70)), 576)
    for isa in variants(name, DTYPES[dtype]):
        with variant(isa), torch.no_grad():
            whole = fastattn.attention_packed(**made.given, backend=name)
            for page in (16, 64):
                paged = fastattn.attention_packed(**in_pages(made, page), backend=name)
                assert torch.equal(whole, paged), (isa, page)


@every_wide_backend
@pytest.mark.parametrize("storage, dtype", in_turn([*NAMES, *NAMES], DECLARED))
def test_in_eight_bits(name, storage, dtype):
    made = test_packed.batch((FEATURE["mqa"],), DTYPES[dtype], ((1, 130), (3, 64), (33, 70)), 576)
    same(name, made, storage, (16,))


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
