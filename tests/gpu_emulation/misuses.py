"""Kernels of emu/misuse*.cu: the results of the correct ones, and what the emulator must
report for the others."""

import re

import numpy as np

from tests.gpu_emulation.emulator import EMULATOR, SCHEDULES, aligned

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
