"""The decode kernels of csrc/cuda/sm90 as nvcc compiled them for sm_90a, held to float64 with the
checker on: few rows of many heads in a tile, keys split among blocks, and their combination."""

import itertools
from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.backends.native import libraries
from fastattn.call.spec import AttentionSpec
from tests.gpu_emulation.emulated import DTYPES as NAMES
from tests.gpu_emulation.emulated import decode_splits, everywhere, survivors
from tests.gpu_emulation.emulator import SCHEDULES, needs_emulator
from tests.gpu_emulation.ptx import ours
from tests.semantics.test_packed import batch, complaints
from tests.semantics.test_paged import in_pages
from tests.support.backends import passed
from tests.support.cases import (
    DTYPES,
    FEATURE,
    PLAIN,
    Dims,
    build,
    expanded,
    name_of,
    negative_logits,
    with_nan_behind,
)
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator, ours.needs_nvcc]
every_dtype = pytest.mark.parametrize("dtype", NAMES)

KEYS = 128  # of a tile up to head dim 128, which has 64 rows: csrc/cuda/sm90/tiles.h
MANY, ONE = 8, 1  # multiprocessors
DECODE = "sm_90"


def on_hopper(sm_count=MANY, **options):
    return everywhere(architecture=90, ptx=True, sm_count=sm_count, **options)


def run_all(problems, splits=None, **options):
    """Every call is one of sm_90's, split into so many parts if given, and right."""
    found = []
    with on_hopper(**options) as backend:
        for problem in problems:
            lines = Verdict(problem, backward=False).complaints(fastattn.attention)
            found += [f"{problem.name} {line}" for line in lines]
            assert splits in (None, backend.splits), backend.splits
    assert set(backend.kernels) == {DECODE}, backend.kernels
    assert backend.launches >= len(backend.findings) > 0
    passed(found)


# One split and several, one tile of rows and several, items and key heads.
SHAPES = (
    Dims(1, 2, 2, 3, 45, 24, 24),
    Dims(2, 8, 2, 5, 300, 64, 40),
    Dims(1, 5, 1, 16, 700, 8, 64),
)
NAMED = ("causal", "bottom_right", "window", "lengths", "sinks", "gqa", "mqa", "lse_loss")
FEATURES = [PLAIN, *((FEATURE[x],) for x in NAMED)]


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("features", FEATURES, ids=name_of)
def test_features(dtype, features):
    run_all([build(dims, features, DTYPES[dtype]) for dims in SHAPES])


BANDS, OTHERS = ("causal", "bottom_right", "window"), ("lengths", "sinks", "gqa")


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("band", BANDS)
def test_pairs_of_features(band, other):
    run_all([build(SHAPES[1], [FEATURE[x] for x in (band, other)], torch.bfloat16)])


@pytest.mark.slow
@parametrize("group", [1, 4, 8, 71], fast=1)
@parametrize("M", list(range(1, 17)), fast=1)
def test_rows_and_heads_of_a_tile(M, group):
    """64 rows have all rows of 64 / M heads. Where they do not fill it, the rest is not stored."""
    problem = build(Dims(1, 2 * group, 2, M, 150, 8, 8), [FEATURE["bottom_right"]], torch.bfloat16)
    run_all([problem])


AROUND = sorted({size + off for size in (KEYS, 2 * KEYS, 4 * KEYS) for off in (-1, 0, 1)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "bottom_right", "left_window", "lengths"])
@pytest.mark.parametrize("N", [1, 2, 15, *AROUND])
def test_keys_around_tiles(N, name):
    features = [FEATURE[name]] if name else []
    run_all([build(Dims(2, 2, 1, 3, N, 16, 16), features, torch.float16)])


HEAD_DIMS = {
    "64": [(64, 64), (8, 24)],
    "96": [(96, 96), (80, 72)],
    "128": [(128, 128), (104, 8)],
    "192 and 128": [(192, 128), (136, 128)],
    "192": [(160, 160), (136, 184)],
    "256": [(200, 256), (256, 64)],
}


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("padded", HEAD_DIMS)
def test_head_dims(padded, dtype):
    """In every kernel, with one split and with several."""
    dims = [Dims(1, 4, 2, 5, N, *x) for x in HEAD_DIMS[padded] for N in (70, 300)]
    run_all([build(x, [FEATURE["bottom_right"]], DTYPES[dtype]) for x in dims])


@pytest.mark.slow
@parametrize("splits", [1, 2, 3, 5], fast=1)
@parametrize("names", ["", "sinks lse_loss", "window"], fast=1)
def test_any_number_of_splits(splits, names):
    """A window leaves some of them without keys."""
    features = [FEATURE[x] for x in names.split()]
    problem = build(
        Dims(1, 3, 1, 2, max(300, KEYS * splits - 20), 16, 24), features, torch.bfloat16
    )
    run_all([problem], sm_count=splits, splits=None if names == "window" else splits)


@pytest.mark.slow
def test_a_short_item_leaves_splits_without_keys():
    problem = build(Dims(4, 2, 1, 3, 700, 16, 16), (), torch.bfloat16)
    lengths = torch.tensor([700, 0, 130, 1])
    run_all([replace(problem, kwargs=dict(key_lengths=lengths))], splits=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "causal", "window", "lengths"])
def test_hidden_keys_do_not_change_results(name):
    features = [FEATURE[name]] if name else []
    dims = Dims(1, 4, 2, 3, 267, 16, 16)
    run_all([negative_logits(build(dims, features, torch.bfloat16))])


@pytest.mark.slow
@pytest.mark.parametrize("sm_count", [ONE, MANY])
@pytest.mark.parametrize("d", [64, 128])
def test_nan_behind_a_length_is_not_read(d, sm_count):
    """TMA fills with zeros only what is behind the tensor."""
    problem = build(Dims(2, 4, 2, 7, 500, d, d), (), torch.bfloat16)
    lengths = torch.tensor([401, 17])
    spoiled = with_nan_behind(problem, lengths)
    with on_hopper(sm_count) as backend:
        right, found = (
            fastattn.attention(x.q, x.k, x.v, key_lengths=lengths) for x in (problem, spoiled)
        )
    assert torch.equal(right, found) and found.isfinite().all()
    assert backend.kernels == [DECODE] * 2 and (backend.splits > 1) == (sm_count > 1)


SIZES = ((5, 7), (0, 3), (1, 1), (13, 551), (3, 0), (16, 128), (1, 400), (2, 129), (4, 20))


@parametrize("names", ["", "bottom_right", "window sinks", "causal gqa"], fast=1)
@pytest.mark.parametrize("sm_count", [ONE, 132])
def test_packed(names, sm_count):
    """Boxes of a sequence's rows end in the next one's."""
    made = batch([FEATURE[x] for x in names.split()], torch.bfloat16, SIZES)
    with on_hopper(sm_count) as backend, torch.no_grad():
        found = made.run(backward=False)
    assert set(backend.kernels) == {DECODE}
    assert (backend.splits > 1) == (sm_count > 1 and "window" not in names)
    passed(list(complaints(made, found)))


@pytest.mark.slow
@parametrize("page", [8, 16, 24, 64, 128, 256], fast=2)
def test_pages(page):
    made = batch((), torch.bfloat16, SIZES)
    with on_hopper(132) as backend, torch.no_grad():
        found = dict(out=fastattn.attention_packed(**in_pages(made, page)))
    assert set(backend.kernels) == {DECODE} and backend.splits > 1
    passed(list(complaints(made, found)))


@pytest.mark.slow
def test_keys_of_one_head_and_of_one_item():
    """A dimension of stride 0 has size 1 in a tensor map."""
    problem = build(Dims(2, 2, 2, 4, 300, 64, 64), (), torch.bfloat16)
    run_all([expanded(problem)])


@pytest.mark.parametrize("M", [1, 5])
def test_every_schedule_gives_the_same_bits(M):
    problem = build(Dims(1, 20, 1, M, 650, 24, 24), [FEATURE["bottom_right"]], torch.bfloat16)
    found = []
    for schedule, lazy in itertools.product(SCHEDULES, (True, False)):
        with on_hopper(2, schedule=schedule, lazy=lazy, seed=len(found)) as backend:
            found.append(problem.run(fastattn.attention, backward=False))
        assert backend.kernels == [DECODE]
    for other in found[1:]:
        assert all(torch.equal(x, other[name]) for name, x in found[0].items())


# --- the number of splits, and what these kernels decline -----------------------------------------


@pytest.mark.parametrize(
    "sizes, splits",
    [
        (dict(N=256), 1),  # too few keys for a second kernel
        (dict(N=257), 3),
        (dict(N=2**15), 128),  # tiles of 128 keys, two for each split
        (dict(N=2**15, H=64, Hk=8), 15),
        (dict(N=2**15, H=71, Hk=1), 64),  # two tiles of rows
        (dict(N=2**15, M=17), 1),
    ],
)
def test_number_of_splits(sizes, splits):
    given = dict(B=1, H=1, Hk=1, M=1, D=64, Dv=64) | sizes
    spec = AttentionSpec(**given, dtype=torch.bfloat16, device="cuda", scale=1.0)
    assert decode_splits(libraries.form(spec), 132, 90, (False, 90, True)) == splits


DECLINED = {
    "softcap": (dict(softcap=3.0), "few rows with a mask, ALiBi, softcap or dropout"),
    "heads in one place": ({}, "few rows of heads that are one in memory"),
    "rows in one place": ({}, "rows of its tensors are in one place"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DECLINED)
def test_declined_calls_say_why_and_run(case):
    kwargs, why = DECLINED[case]
    problem = build(Dims(1, 4, 2, 3, 300, 64, 64), (), torch.bfloat16)
    if case == "heads in one place":
        problem = replace(problem, q=problem.q[:, :1].expand_as(problem.q))
    if case == "rows in one place":
        problem = replace(problem, q=problem.q[:, :, :1].expand_as(problem.q))
    with on_hopper() as backend:
        lines = Verdict(replace(problem, kwargs=kwargs), backward=False).complaints(
            fastattn.attention
        )
        passed(list(lines))
    assert all(x.startswith("sm_80: ") and why in x for x in backend.kernels), backend.kernels


@pytest.mark.slow
def test_row_invariant_calls_have_kernels_of_sm_80():
    problem = build(Dims(1, 4, 2, 3, 300, 64, 64), (), torch.bfloat16)
    with on_hopper() as backend:
        fastattn.attention(problem.q, problem.k, problem.v, row_invariant=True)
    assert len(backend.kernels) == 1 and backend.kernels[0].startswith("sm_80: row_invariant")


# --- every synchronisation is needed --------------------------------------------------------------


# They order nothing: products, of which the values tell, and the number of registers.
NO_ORDER = ("wgmma.mma_async", "setmaxnreg")


@pytest.mark.slow
def test_each_synchronisation_deleted_is_noticed():
    """Five tiles a split use both stages again, and a length ends in the last one. A block has one
    task: the mbarrier for the next one's rows is initialised, but nothing waits for it."""
    problem = build(Dims(1, 5, 1, 3, 1300, 64, 64), (), torch.bfloat16)
    problem = replace(problem, kwargs=dict(key_lengths=torch.tensor([1210])))

    def run():
        problem.run(fastattn.attention, backward=False)

    survived = survivors(run, architecture=90, ptx=True, sm_count=2)
    (unused,) = [x for x in survived if not x.startswith(NO_ORDER)]
    assert unused.startswith("mbarrier.init")
