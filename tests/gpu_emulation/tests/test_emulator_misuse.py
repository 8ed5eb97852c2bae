"""The emulator reports every misuse in emu/misuse*.cu, in every schedule, and no more."""

import re

import numpy as np
import pytest

from tests.gpu_emulation.emulator import (
    DEPTH_FIRST,
    EMULATOR,
    IN_ORDER,
    RANDOM,
    SCHEDULES,
    Emulator,
    aligned,
    needs_emulator,
)

pytestmark = [needs_emulator, pytest.mark.slow]
SOURCES = [EMULATOR / f"misuse{x}.cu" for x in ("", "_global", "_warps")]

# -- misuse.cu: shared memory, copies, barriers ----------------------------------------------------

REVERSED = ("reversed", "reversed_by_copies", "handed_over", "within_warps", "zeros_where_invalid")
SHARED_MEMORY = {
    "no_barrier_before_reading": "RACE|UNINITIALISED",
    "a_warp_is_no_block": "RACE write/read|UNINITIALISED",
    "one_warp_reads_another": "RACE write/read|UNINITIALISED",
    "no_barrier_after_reading": "RACE (read/write|write/read)",
    "one_warp_overwrites_what_another_reads": "RACE (read/write|write/read)",
    "two_write_the_same": "RACE write/write",
    "never_written": "UNINITIALISED at shared byte 0",
    "copy_not_waited_for": "READ IN FLIGHT",
    "one_group_too_many": "READ IN FLIGHT",
    "copy_waited_for_by_its_thread_alone": "RACE write/read|READ IN FLIGHT|UNINITIALISED",
    "copy_over_what_others_read": "RACE read/write|READ IN FLIGHT|RACE write/read",
    "never_committed": "no group holds",
    "never_waited_for": "exits with asynchronous copies in flight",
    "misaligned_in_global_memory": "global address is not a multiple of 16",
    "misaligned_in_shared_memory": "16 bytes at 8 are misaligned",
    "out_of_shared_memory": "16 bytes at 4096, of 4096",
    "misaligned_matrix": "16 bytes at 8 are misaligned",
    "some_lanes_elsewhere": "warp [01] has diverged",
    "some_lanes_have_left": "shuffle: lane 7 reads lane 5, which is not among",
    "nobody_arrives": "DEADLOCK.*32 at never complete .barrier 3.",
    "half_a_warp": "of 48: 48 threads, expected whole warps",
    "counts_differ": "barrier 1 for|RACE|DEADLOCK",
    "no_such_barrier": "the seventeenth: barrier 16, expected 0 to 15",
}

# -- misuse_global.cu ------------------------------------------------------------------------------

ORDERED = (
    "reversed_in_global_memory",
    "blocks_add_atomically",
    "atomic_and_plain_loads_meet",
    "an_atomic_stores_first",
    "warps_add_for_their_block",
    "handed_to_other_blocks",
    "handed_over_by_fences",
    "handed_over_by_a_later_store",
)
OTHER_BLOCK = r"RACE (write/read|read/write|write/write) at global .* of block \("
GLOBAL_MEMORY = {
    "neighbours_race": "RACE (write/read|read/write) at global",
    "two_threads_write_a_word": "RACE write/write at global",
    "a_warp_barrier_is_none_of_the_block": "RACE (write/read|read/write) at global",
    "a_block_reads_what_another_writes": OTHER_BLOCK,
    "blocks_add_without_atomics": OTHER_BLOCK,
    "an_atomic_meets_a_plain_store": "RACE (with an atomic|write/write)",
    "an_atomic_meets_a_plain_load": "RACE with an atomic",
    "a_plain_load_meets_an_atomic": "RACE with an atomic",
    "an_atomic_load_meets_a_plain_store": "RACE (with an atomic|write/write)",
    "blocks_add_in_the_scope_of_one": "RACE with an atomic",
    "handed_over_without_fences": "RACE write/read at global",
    "released_for_one_block": "RACE write/read at global",
    "acquired_for_one_block": "RACE write/read at global",
    "another_stores_over_what_was_released": "RACE write/read at global",
    "a_load_releases_nothing": "RACE (write/read|read/write) at global",
    "more_is_read_than_was_handed_over": "RACE (write/read|read/write) at global",
    "one_of_two_readers_is_not_waited_for": "RACE (write/read|read/write) at global",
    "a_copy_of_what_others_write": "RACE (write/read|read/write) at global .*cp.async",
    "a_source_changes_in_flight": "SOURCE CHANGED IN FLIGHT at global",
}

# -- misuse_warps.cu -------------------------------------------------------------------------------

UNCHANGED = ("many_readers", "shuffles_at_two_places", "neighbours_store_bytes")
EXITS = ("a_warp_leaves_before_a_barrier_of_all", "lanes_leave_before_a_barrier_of_all")
ALIGNED = {
    "half_warps_at_two_barriers": "warp [0-9]+ has diverged.*the (upper|lower) half",
    "half_warps_at_one_barrier_twice": "warp [0-9]+ has diverged.* another place in the program",
    "halves_of_two_warps_are_no_warp": "DEADLOCK.*at 32 of two warps .barrier 1.",
    "lanes_name_two_barriers": "lane 0 at barrier 1 for 352 threads, lane 1 at barrier 2 for 352",
    "lanes_name_two_counts": "lane 0 at barrier 1 for 352 threads, lane 1 at barrier 1 for 320",
    "lanes_at_two_loads_of_matrices": "diverged.*at ldmatrix .*another place in the program",
    "lanes_at_two_products": "diverged.*at mma.bf16 .*another place in the program",
    "a_lane_leaves_before_a_product": "DEADLOCK.*31 at mma.bf16",
}
OWN_COPIES = {
    "own_store_over_a_copy": r"WRITE IN FLIGHT at shared .*thread (\d+) .cp.*then thread \1 .store",
    "own_load_of_a_copy": r"READ IN FLIGHT at shared .*thread (\d+) .cp.async., then thread \1 ",
    "two_own_copies_to_one_place": r"WRITE IN FLIGHT at shared .*thread (\d+) .*then thread \1 .cp",
}
MANY_READERS = {
    "one_of_many_readers_is_not_waited_for": r"RACE read/write at shared byte 0: thread \d+ .load"
}
MISALIGNED = {
    "misaligned_word": r"misuse_global.cu:\d+: MISALIGNED access to 'uint32_t'.* a multiple of 4",
    "misaligned_pair": r"misuse_warps.cu:\d+: MISALIGNED access to 'struct float2'.* of 8",
    "misaligned_chunk": r"misuse_warps.cu:\d+: MISALIGNED access to 'struct uint4'.* of 16",
}
BYTES = {"half_of_it_was_never_written": r"UNINITIALISED at shared byte \d*[13579]: .* .load"}
OUTSIDE = {
    "past_the_end_of_shared_memory": "store of 4 bytes at [89][0-9]+, of 8192",
    "before_shared_memory": "load of 4 bytes at -[0-9]+, of 8192",
    "far_past_the_end_of_shared_memory": "load of 4 bytes at 524288, of 8192",
}

RIGHT = (*REVERSED, *ORDERED, *UNCHANGED, *EXITS)
WRONG = {
    **SHARED_MEMORY,
    **GLOBAL_MEMORY,
    **ALIGNED,
    **OWN_COPIES,
    **MANY_READERS,
    **BYTES,
    **MISALIGNED,
    **OUTSIDE,
}


def run_misuse(emulator, name, **options):
    given, out = aligned(1024, np.uint32), aligned(1024, np.uint32)
    given[:] = 1000 + np.arange(1024)
    return emulator.run(f"misuse_{name}", given, out, **options), given, out


def expected(name, given):
    if name == "within_warps":
        return given[np.arange(64) ^ 32 ^ 31]
    if name == "blocks_add_atomically":
        return np.full(64, 4)
    if name in ("atomic_and_plain_loads_meet", "an_atomic_stores_first"):
        return np.tile(given[:64], 4)
    if name == "warps_add_for_their_block":
        return np.full(4, 64)
    if name.startswith("handed_") and name in ORDERED:
        return np.tile(given[:64], 4)
    if name == "reversed_in_global_memory":
        return given[np.arange(256) ^ 63]
    return given[:352] if name in (*UNCHANGED, *EXITS) else given[63 - np.arange(64)]


def check_right(emulator, name):
    for schedule in SCHEDULES:
        for lazy in (False, True):
            findings, given, out = run_misuse(emulator, name, schedule=schedule, lazy=lazy)
            assert not findings.count, f"{name}: {findings.first}"
            right = expected(name, given)
            assert out[: len(right)].tolist() == right.tolist(), name


def check_wrong(emulator, name):
    for schedule in SCHEDULES:
        for lazy in (False, True):
            findings, _, _ = run_misuse(emulator, name, schedule=schedule, lazy=lazy)
            assert findings.count, f"{name} was not detected in schedule {schedule}"
            assert re.search(WRONG[name], findings.first), findings.first


@pytest.fixture(scope="module")
def emulator():
    return Emulator(*SOURCES)


def named(names):
    return pytest.mark.parametrize("name", names)


def test_every_kernel_is_in_the_table():
    text = "".join(x.read_text() for x in SOURCES)
    assert sorted(re.findall(r"EACH\((\w+)\)", text)) == sorted([*RIGHT, *WRONG])


@named(RIGHT)
def test_correct_kernels_pass_in_every_schedule(emulator, name):
    check_right(emulator, name)


@named(SHARED_MEMORY)
def test_faults_are_named(emulator, name):
    check_wrong(emulator, name)


@named(GLOBAL_MEMORY)
def test_global_memory_has_an_order(emulator, name):
    """Within a block and between blocks: by barriers, atomics and fences; copies need that, too."""
    check_wrong(emulator, name)


@named(MISALIGNED)
def test_plain_accesses_are_aligned(emulator, name):
    check_wrong(emulator, name)


@named(BYTES)
def test_every_byte_is_checked(emulator, name):
    check_wrong(emulator, name)


@named(OUTSIDE)
def test_plain_accesses_end_where_shared_memory_does(emulator, name):
    check_wrong(emulator, name)


@named(ALIGNED)
def test_the_lanes_of_a_warp_are_at_one_instruction(emulator, name):
    """As PTX requires for .aligned: a barrier counts whole warps, and two instructions with the
    same barrier are different places."""
    check_wrong(emulator, name)


@named(OWN_COPIES)
def test_own_copies_in_flight_are_not_touched(emulator, name):
    check_wrong(emulator, name)


def test_copies_in_flight_read_as_nan(emulator):
    """Also without the race checker, unless copies complete at once."""
    for lazy in (True, False):
        options = dict(schedule=IN_ORDER, lazy=lazy, check=False)
        findings, given, out = run_misuse(emulator, "own_load_of_a_copy", **options)
        assert not findings.count
        assert (out[:352] == (0xFFFFFFFF if lazy else given[0])).all()


@named(MANY_READERS)
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
