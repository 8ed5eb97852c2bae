"""The emulator reports every misuse in emu/misuse*.cu, in every schedule, and no more."""

import re

import numpy as np
import pytest

from tests.gpu_emulation import misuses
from tests.gpu_emulation.emulator import (
    DEPTH_FIRST,
    IN_ORDER,
    RANDOM,
    Emulator,
    aligned,
    needs_emulator,
)
from tests.gpu_emulation.misuses import RIGHT, WRONG, check_right, check_wrong, run_misuse

pytestmark = [needs_emulator, pytest.mark.slow]


@pytest.fixture(scope="module")
def emulator():
    return Emulator(*misuses.SOURCES)


def named(names):
    return pytest.mark.parametrize("name", names)


def test_every_kernel_is_in_the_table():
    text = "".join(x.read_text() for x in misuses.SOURCES)
    assert sorted(re.findall(r"EACH\((\w+)\)", text)) == sorted([*RIGHT, *WRONG])


@named(RIGHT)
def test_correct_kernels_pass_in_every_schedule(emulator, name):
    check_right(emulator, name)


@named(misuses.SHARED_MEMORY)
def test_faults_are_named(emulator, name):
    check_wrong(emulator, name)


@named(misuses.GLOBAL_MEMORY)
def test_global_memory_has_an_order(emulator, name):
    """Within a block and between blocks: by barriers, atomics and fences; copies need that, too."""
    check_wrong(emulator, name)


@named(misuses.MISALIGNED)
def test_plain_accesses_are_aligned(emulator, name):
    check_wrong(emulator, name)


@named(misuses.BYTES)
def test_every_byte_is_checked(emulator, name):
    check_wrong(emulator, name)


@named(misuses.OUTSIDE)
def test_plain_accesses_end_where_shared_memory_does(emulator, name):
    check_wrong(emulator, name)


@named(misuses.ALIGNED)
def test_the_lanes_of_a_warp_are_at_one_instruction(emulator, name):
    """As PTX requires for .aligned: a barrier counts whole warps, and two instructions with the
    same barrier are different places."""
    check_wrong(emulator, name)


@named(misuses.OWN_COPIES)
def test_own_copies_in_flight_are_not_touched(emulator, name):
    check_wrong(emulator, name)


def test_copies_in_flight_read_as_nan(emulator):
    """Also without the race checker, unless copies complete at once."""
    for lazy in (True, False):
        options = dict(schedule=IN_ORDER, lazy=lazy, check=False)
        findings, given, out = run_misuse(emulator, "own_load_of_a_copy", **options)
        assert not findings.count
        assert (out[:352] == (0xFFFFFFFF if lazy else given[0])).all()


@named(misuses.MANY_READERS)
@pytest.mark.parametrize("seed", range(6))
def test_every_reader_is_checked_for_races(emulator, name, seed):
    """One of 352 readers races, however many read after it."""
    findings, _, _ = run_misuse(emulator, name, seed=seed)
    assert findings.count and re.search(WRONG[name], findings.first), findings.first


def test_unwritten_registers_have_all_bits_set(emulator):
    """In every block, also after another block has run."""
    for schedule in (IN_ORDER, RANDOM):
        out = aligned(8 * 352, np.uint32)
        assert not emulator.run("unwritten_registers", out, schedule=schedule).count
        assert not out.any()


def test_stores_of_one_value_race_unless_allowed(emulator):
    out = aligned(64, np.uint32)
    assert "RACE write/write" in emulator.run("stores_to_one_place", 0, out).first
    assert not emulator.run("stores_to_one_place", 0, out, same_value_stores=True).count
    assert (out == 7).all()
    found = emulator.run("stores_to_one_place", 1, out, same_value_stores=True)
    assert "RACE write/write" in found.first


# --- launches and schedules -----------------------------------------------------------------------


INVALID_VALUE, INVALID_CONFIGURATION = 1, 9  # the codes of CUDA's runtime


@pytest.mark.parametrize(
    "threads, shared, code",
    [
        (0, 0, INVALID_CONFIGURATION),
        (2048, 0, INVALID_CONFIGURATION),
        (64, 300 << 10, INVALID_VALUE),
        (64, (99 << 10) + 1, INVALID_VALUE),
    ],
    ids=str,
)
def test_impossible_launches_are_refused(emulator, threads, shared, code):
    """The limit of shared memory is the 99 KB of sm_86 and sm_89."""
    arrays = aligned(256, np.uint32), aligned(64, np.uint32)
    assert emulator.call("launch_of", threads, shared, *arrays)[0] == code


def test_a_partial_warp_is_reported(emulator):
    """A GPU would run it; none of our kernels is written for it."""
    findings = emulator.run("launch_of", 48, 0, aligned(256, np.uint32), aligned(64, np.uint32))
    assert findings.count == 1 and "48 threads" in findings.first


def test_the_first_finding_is_kept(emulator):
    """Later launches do not replace it."""
    findings = emulator.run("wrong_twice", aligned(256, np.uint32), aligned(64, np.uint32))
    assert findings.count > 1 and "RACE write/write" in findings.first


def test_shared_memory_has_the_requested_limit(emulator):
    arrays = aligned(256, np.uint32), aligned(64, np.uint32)
    for limit, code in ((227 << 10, 0), (200 << 10, INVALID_VALUE)):
        found = emulator.call("launch_of", 64, 227 << 10, *arrays, shared_limit=limit)
        assert found[0] == code and found[1].count == 0


@pytest.mark.parametrize(
    "grid", [(1, 65536, 1), (1, 1, 65536), (1 << 31, 1, 1), (0, 1, 1)], ids=str
)
def test_impossible_grids_are_refused(emulator, grid):
    code, _ = emulator.call("order_of_blocks", *grid, aligned(4, np.uint32))
    assert code == INVALID_CONFIGURATION


@pytest.mark.parametrize("grid", [(70_000, 1, 1), (2, 35_000, 1), (2, 1, 35_000)], ids=str)
def test_more_blocks_than_16_bits_number(emulator, grid):
    """Every block runs once, in grids of any shape."""
    out = aligned(70_000, np.uint32)
    assert not emulator.run("order_of_blocks", *grid, out, check=False).count
    assert sorted(out) == list(range(1, 70_001))


def test_blocks_run_in_any_order(emulator):
    def order(**options):
        out = aligned(24, np.uint32)
        assert not emulator.run("order_of_blocks", 4, 3, 2, out, **options).count
        return out.tolist()

    assert order(schedule=IN_ORDER) == list(range(1, 25))
    assert order(schedule=DEPTH_FIRST) != order(schedule=IN_ORDER)
    assert order(seed=3) == order(seed=3)
    assert len({order(seed=seed).index(1) for seed in range(12)}) > 4  # when the first block runs


@pytest.mark.parametrize(
    "name, site, kind",
    [
        ("reversed", "all written", "RACE write/read|UNINITIALISED"),
        ("reversed", "all read", "RACE (read/write|write/read)"),
        ("reversed_by_copies", "the first stage", "READ IN FLIGHT"),
        ("reversed_by_copies", "the second stage", "READ IN FLIGHT|in flight"),
        ("reversed_by_copies", "a stage", "no group holds|READ IN FLIGHT"),
        ("handed_over", "taken", "RACE|UNINITIALISED"),
        ("handed_over", "given", "DEADLOCK"),
        ("within_warps", "of a warp", "RACE|UNINITIALISED"),
        ("reversed_in_global_memory", "all written", "RACE"),
        ("reversed_in_global_memory", "all read", "RACE"),
    ],
)
def test_one_site_can_be_switched_off(emulator, name, site, kind):
    findings, _, _ = run_misuse(emulator, name)
    assert site in findings.sites
    findings, _, _ = run_misuse(emulator, name, disabled=site)
    assert findings.count and re.search(kind, findings.first), findings.first


def test_schedules_differ_and_repeat(emulator):
    """An unchecked race gives other values in another order, and the same for the same seed."""

    def values(**options):
        return run_misuse(emulator, "no_barrier_before_reading", check=False, **options)[2].tolist()

    assert values(seed=3) == values(seed=3)
    assert len({tuple(values(seed=seed)) for seed in range(6)}) > 1
