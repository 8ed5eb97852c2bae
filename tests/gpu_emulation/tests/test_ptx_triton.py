"""Triton's kernels, compiled for sm_75, sm_80, sm_90 and sm_100 and run on the emulator, which
shows faults that Triton's interpreter cannot.

Blocks of masks and weights on one small tile, and every tile of the tuning tables: test_ptx_rows.py
has calls with every argument. The launcher chooses kernels and their arguments, as on a GPU.
"""

from typing import NamedTuple

import pytest
import torch

import fastattn
from fastattn.backends.triton import tile_configs
from tests.gpu_emulation.emulator import IN_ORDER, SCHEDULES, needs_emulator
from tests.gpu_emulation.ptx import triton
from tests.semantics import test_weights
from tests.support.backends import looked_at, needs_triton, passed
from tests.support.cases import DTYPES, FEATURE, PLAIN, Dims, build, name_of, square
from tests.support.error_budget import Verdict

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator, needs_triton, pytest.mark.slow]


class Small(NamedTuple):
    """A small tile, and sizes of problems with several tiles, the last one partial."""

    tile: tile_configs.Config
    keys: int
    keys_of_decode: int
    d: int


# On sm_90, products of warpgroups need 64 rows, and boxes of tensors need multiples of 16 bytes. On
# sm_100 products in tensor memory need 64 rows, and as many keys for those of dK and dV.
SMALL = {
    75: Small(tile_configs.Config(32, 32, 4, 1), 40, 170, 17),
    80: Small(tile_configs.Config(32, 32, 4, 2), 40, 170, 17),
    90: Small(tile_configs.Config(64, 64, 4, 2), 70, 340, 24),
    100: Small(tile_configs.Config(64, 64, 4, 2), 70, 340, 24),
}
ATTENTION = {"forward_kernel", "delta_kernel", "dq_kernel", "dkv_kernel"}


@pytest.fixture(params=SMALL, ids="sm_{}".format)
def arch(request):
    return request.param


def on(arch):
    return pytest.mark.parametrize("arch", [arch], ids="sm_{}".format, indirect=True)


@pytest.fixture
def compiled(arch):
    """Every call runs on the emulator, with kernels compiled by Triton."""
    with triton.compiled(arch) as driver:
        yield driver
    assert driver.launched


@pytest.fixture
def small(arch, monkeypatch):
    """All kernels use a small tile."""
    monkeypatch.setattr(tile_configs, "config", lambda *about: SMALL[arch].tile)
    return SMALL[arch]


def judge(problem, backward=True):
    passed(Verdict(problem, backward=backward).complaints(fastattn.attention))


def kernels(driver):
    return {name for name, _ in driver.launched}


# --- on one tile ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bool", "finfo.min"])
def test_blocks_of_a_mask(compiled, small, form):
    """The block-mask kernel runs. The first row has no keys, or finfo.min everywhere."""
    n = 2 * small.keys + 3
    problem = build(Dims(1, 2, 1, n - 20, n, small.d, small.d), (), DTYPES["bfloat16"])
    problem.q, problem.k = (x.round().clamp(-2, 2) for x in (problem.q, problem.k))
    mask = torch.ones(n - 20, n, dtype=torch.bool).tril(20)
    mask[0] = False
    if form != "bool":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    problem.kwargs["mask"] = mask
    with looked_at():
        judge(problem)
    assert kernels(compiled) == ATTENTION | {"block_mask_kernel"}


@pytest.mark.parametrize("mean", test_weights.MEANS)
@pytest.mark.parametrize("features", test_weights.ALONE, ids=name_of)
def test_features_of_weights(compiled, small, features, mean):
    problem = build(square(1, 2, small.keys, small.d), features, DTYPES["bfloat16"])
    passed(test_weights.about_weights(None, problem, mean == "mean"))
    assert kernels(compiled) >= {"weights_kernel", "dq_kernel", "dkv_kernel"}


# --- every tile of the tables ---------------------------------------------------------------------

BUSY = (FEATURE["softcap"], FEATURE["key_bias_grad"])
KINDS = {"plain": (FEATURE["causal"],), "busy": BUSY}
TABLES = [("bfloat16", 64), ("float16", 64), ("bfloat16", 128), ("bfloat16", 256)]
TABLES += [("float32", 64), ("float32", 128)]
every_table = pytest.mark.parametrize("dtype, d", TABLES, ids=lambda x: str(x))
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@every_table
def test_tiles(compiled, dtype, d, kind):
    judge(build(Dims(1, 2, 1, 150, 140, d, d), KINDS[kind], DTYPES[dtype]))


@every_kind
@every_table
def test_tiles_of_decode(compiled, dtype, d, kind):
    judge(build(Dims(1, 4, 1, 3, 600, d, d), KINDS[kind], DTYPES[dtype]), backward=False)
    assert kernels(compiled) == {"split_kernel", "combine_kernel"}


@pytest.mark.parametrize("kb", [32, 48, 64, 99, 100, 228])
def test_tiles_of_chips_that_do_not_exist(kb):
    """sm_89 has no table, and less shared memory here, or more, than sm_86: the driver refuses what
    a block of it cannot have."""
    with triton.compiled(89, shared=kb << 10) as driver:
        judge(build(Dims(1, 2, 1, 150, 140, 64, 64), KINDS["busy"], DTYPES["bfloat16"]))
        judge(build(Dims(1, 4, 1, 3, 600, 64, 64), KINDS["plain"], DTYPES["float16"]), False)
    assert kernels(driver) >= ATTENTION | {"dmask_kernel", "split_kernel"}


@every_table
def test_tiles_of_weights(compiled, dtype, d):
    problem = build(square(1, 2, 150, d), KINDS["plain"], DTYPES[dtype])
    passed(test_weights.about_weights(None, problem, False))


@pytest.fixture
def precision():
    """A function that sets torch's precision of float32 products until the test ends."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield lambda name: setattr(matmul, "fp32_precision", name)
    matmul.fp32_precision = before


def test_tf32_where_torch_allows_it(compiled, precision):
    """Errors of IEEE float32 and of parts, without a setting, are below 3e-5; tf32's are over 4
    times larger, but below 1e-2."""
    problem = build(square(1, 2, 97, 16), KINDS["plain"], torch.float32)
    exact = problem.to(torch.float64).run(fastattn.reference.attention)
    errors = {}
    for name in ("ieee", "none", "tf32"):
        precision(name)
        found = problem.run(fastattn.attention)
        errors[name] = {x: (found[x].double() - y).abs().max() for x, y in exact.items()}
    for name, allowed in errors["tf32"].items():
        error = max(errors["ieee"][name], errors["none"][name])
        assert error < 3e-5 and 4 * error < allowed < 1e-2, name


@pytest.mark.parametrize("arch", tile_configs.PARTS, ids="sm_{}".format, indirect=True)
def test_infinity_and_nan_in_parts_are_where_ieee_has_them(compiled, precision):
    q, k, v = (torch.randn(1, 1, 70, 16) for _ in "qkv")
    q[0, 0, 3, 2], v[0, 0, 7, 1], v[0, 0, 8, 4] = torch.inf, -torch.inf, torch.nan
    k[0, 0, 60, 1], v[0, 0, 30] = torch.inf, torch.finfo(torch.float32).max / 100
    found = {}
    for name in ("ieee", "none"):
        precision(name)
        found[name] = fastattn.attention(q, k, v, causal=True)
    assert not found["ieee"].isfinite().all()
    torch.testing.assert_close(found["none"], found["ieee"], equal_nan=True)


@pytest.mark.parametrize("short", ["aligned", "odd"])
def test_rows_that_no_copy_of_16_bytes_reads(compiled, small, short):
    """Head dims 24 and 23, which take wide and narrow copies."""
    judge(build(square(1, 2, 70, 24 - (short == "odd")), KINDS["plain"], DTYPES["float16"]))


@pytest.mark.parametrize("features", [PLAIN, (FEATURE["softcap"],)], ids=name_of)
def test_the_worst_rounding_stays_within_the_budget(compiled, small, features):
    """Products and approximations with the largest errors that hardware may have."""
    compiled.options = dict(pessimistic=True)
    judge(build(square(1, 2, small.keys, small.d), features, DTYPES["bfloat16"]))


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_same_bits(compiled, small, schedule, lazy):
    problem = build(square(1, 2, 100, 40), (FEATURE["dropout"],), DTYPES["bfloat16"])
    expected = problem.run(fastattn.attention)
    compiled.options = dict(schedule=schedule, lazy=lazy, seed=2)
    found = problem.run(fastattn.attention)
    assert all((found[name] == x).all() for name, x in expected.items())


def without_each(driver, problem, backward, chosen):
    """(synchronisation sites that ran, those with a removal that the checker or a changed
    result reveals)."""

    def run(**options):
        driver.options = options
        return problem.run(fastattn.attention, backward=backward)

    def detected(site):
        for order in ({}, dict(lazy=False, schedule=IN_ORDER)):
            try:
                found = run(disabled=site, **order)
            except AssertionError as caught:
                assert "findings" in str(caught)
                return True
            if not all(torch.equal(found[name], x) for name, x in expected.items()):
                return True
        return False

    expected = run()
    sites = {x for _, found in driver.launched for x in found.sites if x.startswith(chosen)}
    return sites, {x for x in sorted(sites) if detected(x)}


@on(80)
def test_a_deleted_barrier_is_detected(compiled, small):
    """Triton also emits barriers that this call does not need, before it reuses memory."""
    problem = build(square(1, 1, 100, 40), (), DTYPES["bfloat16"])
    sites, detected = without_each(compiled, problem, False, "bar.sync")
    assert len(detected) > 0.9 * len(sites) > 10, sites - detected


# Instructions that order products, boxes and proxies. (bar.sync is tested above: on sm_90 most are
# redundant with an mbarrier.)
HOPPER = ("wgmma.", "fence.proxy.", "mbarrier.init", "mbarrier.arrive", "mbarrier.try_wait")
HOPPER += ("cp.async.bulk.tensor", "tensormap.cp_fenceproxy", "tensormap.replace", "bar.warp.sync")


@on(90)
def test_every_ordering_instruction_of_the_forward_is_needed(compiled, small):
    problem = build(square(1, 1, 280, 64), (FEATURE["causal"],), DTYPES["bfloat16"])
    sites, detected = without_each(compiled, problem, False, HOPPER)
    assert {x for x in HOPPER if not any(y.startswith(x) for y in sites)} == set()
    assert sites == detected, sites - detected


@on(90)
def test_every_ordering_instruction_of_the_backward_is_needed(compiled, small):
    """Except for waits and fences between two products that are both used only after the second."""
    problem = build(square(1, 1, 150, 64), (FEATURE["causal"],), DTYPES["bfloat16"])
    sites, detected = without_each(compiled, problem, True, HOPPER)
    between = ("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")
    assert {x for x in sites - detected if not x.startswith(between)} == set()
    ordering = {x for x in sites if x.startswith(between)}
    assert len(detected & ordering) > 0.7 * len(ordering) > 20


# Without bar.sync: as on sm_90, most are redundant with an mbarrier.
BLACKWELL = ("tcgen05.", "fence.proxy.", "mbarrier.init", "mbarrier.arrive", "mbarrier.try_wait")
BLACKWELL += ("cp.async.bulk.tensor", "tensormap.cp_fenceproxy", "bar.warp.sync")
# What nothing notices: the permit, which is for other blocks of the multiprocessor; a wait for
# loads or stores that a later one repeats before threads synchronise (for S, then for O); a wait
# for products that a later commit of the same thread covers (P V, then Q K of the next tile).
COVERED = ("tcgen05.wait::ld", "tcgen05.wait::st", "mbarrier.try_wait")
PERMIT = "tcgen05.relinquish_alloc_permit"


def most_are_needed(sites, detected):
    assert {x for x in BLACKWELL if not any(y.startswith(x) for y in sites)} == set()
    assert {x for x in sites - detected if not x.startswith((*COVERED, PERMIT))} == set()
    for name in COVERED:
        assert any(x.startswith(name) for x in detected)
    assert len(detected) > 0.9 * len(sites) > 60, sites - detected


@on(100)
def test_ordering_instructions_of_the_forward_are_needed(compiled, small):
    problem = build(square(1, 1, 150, 64), (FEATURE["causal"],), DTYPES["bfloat16"])
    most_are_needed(*without_each(compiled, problem, False, BLACKWELL))


@on(100)
def test_ordering_instructions_of_the_backward_are_needed(compiled, small):
    problem = build(square(1, 1, 150, 64), (FEATURE["causal"],), DTYPES["bfloat16"])
    most_are_needed(*without_each(compiled, problem, True, BLACKWELL))
