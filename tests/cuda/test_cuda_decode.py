"""The CUDA decode kernels in the emulator: few rows, keys split among blocks, and their
combination.

The number of multiprocessors decides the number of splits: one for a call that fills them all,
otherwise several.
"""

import itertools
from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.backends.native import libraries
from fastattn.backends.triton import tile_configs
from fastattn.call.spec import AttentionSpec
from tests.gpu_emulation.emulated import DTYPES as NAMES
from tests.gpu_emulation.emulated import decode_splits, everywhere, survivors
from tests.gpu_emulation.emulator import SCHEDULES, needs_emulator
from tests.support.backends import passed
from tests.support.cases import (
    DTYPES,
    FEATURE,
    PLAIN,
    Dims,
    build,
)
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator]
every_dtype = pytest.mark.parametrize("dtype", NAMES)
MANY, ONE = 132, 1  # multiprocessors


@pytest.fixture
def emulated():
    """Every call runs on the emulator. A test sets its options."""
    with everywhere(sm_count=MANY) as backend:
        yield backend


def judged(problem):
    passed(Verdict(problem, backward=False).complaints(fastattn.attention))


# --- splits ---------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5])
def test_any_number_of_splits(emulated, splits, dtype):
    """Also where a window or a length leaves some splits without keys."""
    emulated.sm_count = splits
    dims = Dims(1, 3, 1, 2, max(300, 128 * splits - 20), 16, 20)
    chosen = (PLAIN, (FEATURE["sinks"], FEATURE["lse_loss"]), (FEATURE["dropout"],))
    for features in chosen:
        judged(build(dims, features, DTYPES[dtype]))
        assert emulated.splits == splits
    mask = torch.arange(dims.N)[None] // 128 == splits - 1  # only one split sees anything
    problem = build(dims, (), DTYPES[dtype])
    judged(replace(problem, kwargs=dict(mask=mask)))


def test_a_short_item_leaves_splits_without_keys(emulated):
    problem = build(Dims(4, 2, 1, 3, 700, 16, 16), (), torch.bfloat16)
    lengths = torch.tensor([700, 0, 130, 1])
    judged(replace(problem, kwargs=dict(key_lengths=lengths)))
    assert emulated.splits == 6


def params(**sizes):
    """FaParams without tensors: only what determines the number of splits."""
    given = dict(B=1, H=1, Hk=1, M=1, N=0, D=128, Dv=128) | sizes
    return libraries.form(AttentionSpec(**given, dtype=torch.bfloat16, device="cuda", scale=1.0))


@pytest.mark.parametrize(
    "sizes, splits",
    [
        (dict(N=0), 1),
        (dict(N=256), 1),  # too few keys for a second kernel
        (dict(N=257), 5),
        (dict(N=2**15), 128),  # tiles of 64 keys, four for each split; 132 is no faster
        (dict(N=2**15, H=64, Hk=8), 14),
        (dict(N=2**15, H=64, Hk=8, B=8), 2),
        (dict(N=2**15, H=64, Hk=8, B=14), 1),  # 112 of 132 are busy
        (dict(N=2**15, left=200, right=0), 1),  # a window leaves 201 keys
        (dict(N=2**15, H=0, Hk=1), 1),
        (dict(N=2**15, B=0), 1),
    ],
)
def test_number_of_splits(sizes, splits):
    assert decode_splits(params(**sizes), 132) == splits


@pytest.mark.parametrize("multiprocessors", [1, 8, 108, 132])
def test_one_rule_splits_for_both_gpu_backends(multiprocessors):
    """Heads of 128 columns with one row each: a tile has 64 keys, and a block one key head."""
    for heads, N in itertools.product((1, 2, 7, 32, 105, 106, 131), (257, 300, 1000, 4097, 2**17)):
        found = decode_splits(params(H=heads, Hk=heads, N=N), multiprocessors)
        assert found == tile_configs.splits(heads, -(-N // 64), multiprocessors), (heads, N)


def test_both_gpu_backends_have_the_same_few_rows_limit():
    few, many = (
        decode_splits(params(M=tile_configs.DECODE_ROWS + x, N=2**15), MANY) for x in (0, 1)
    )
    assert few > many == 1


# --- order ----------------------------------------------------------------------------------------


@parametrize("lazy", [False, True], ids=["eager", "lazy"], fast=1)
@parametrize("schedule", SCHEDULES, fast=2)
@pytest.mark.parametrize("M", [1, 16])
def test_every_schedule_gives_the_same_bits(emulated, M, schedule, lazy):
    problem = build(Dims(1, 4, 1, M, 650, 24, 24), (FEATURE["dropout"],), torch.bfloat16)
    emulated.sm_count = 2
    expected = problem.run(fastattn.attention, backward=False)
    for seed in range(2):
        emulated.options = dict(schedule=schedule, lazy=lazy, seed=seed)
        found = problem.run(fastattn.attention, backward=False)
        assert all(torch.equal(x, found[name]) for name, x in expected.items())


# --- every synchronisation is needed --------------------------------------------------------------

SITES = {
    "decode: the rows",
    "decode: a tile",
    "decode: the rows have landed",
    "decode: all see the rows",
    "decode: this tile has landed",
    "decode: all see this tile and are done with the one before",
    "decode: all are done with the last tile",
    "decode: the warps' parts are there",
    "combine: the warps' sums are there",
}


@pytest.mark.parametrize("group", [1, 17], ids=["warps share the keys", "a warp for 16 rows"])
def test_each_site_deleted_is_caught(group):
    """Four tiles a split: the last uses the first of three stages, where partial results go."""
    problem = build(Dims(1, group, 1, 1, 1000, 24, 40), (), torch.bfloat16)

    def run():
        problem.run(fastattn.attention, backward=False)

    with everywhere(sm_count=2) as backend:
        run()
    assert {site for found in backend.findings for site in found.sites} == SITES
    assert not survivors(run, sm_count=2)
