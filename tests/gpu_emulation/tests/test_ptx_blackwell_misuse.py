"""Misuses of tensor memory must be reported, and similar correct code must pass.

The rules are those of the PTX ISA on tcgen05: its sections on allocation, on the memory consistency
model with its canonical patterns, and on tcgen05.mma.
"""

import re

import numpy as np
import pytest

from tests.gpu_emulation.emulator import SCHEDULES, Emulator, aligned, needs_emulator
from tests.gpu_emulation.ptx import library
from tests.gpu_emulation.tests.test_ptx_blackwell import (
    AFTER,
    ALLOC,
    BEFORE,
    COMMIT,
    DEALLOC,
    HEADER,
    LOADED,
    RELINQUISH,
    SHARED,
    STORED,
)
from tests.gpu_emulation.tests.test_ptx_hopper import wait
from tests.gpu_emulation.tests.test_ptx_values import entry

pytestmark = needs_emulator
named = pytest.mark.parametrize
THREADS = 128

# D (128 x 16) = A B of ones, bfloat16 without a swizzle. Each thread fills 48 bytes at %w: A is at
# %m, B behind it. Then there are an mbarrier at %bar, and the address of tensor memory.
BYTES, ALL_BYTES = 48 * THREADS, 48 * THREADS + 32
BEGIN = f"""
.reg .b32 %t, %m, %w, %bar, %tm, %own, %lane, %i, %s<4>, %r<32>; .reg .b64 %da, %db, %at, %o;
.reg .pred %p<4>, %first, %warp, %other, %second, %part;
mov.u32 %t, %tid.x; mov.u32 %m, memory; mad.lo.s32 %w, %t, 48, %m; add.s32 %bar, %m, {BYTES};
setp.eq.u32 %first, %t, 0; setp.eq.u32 %second, %t, 1; setp.lt.u32 %warp, %t, 32;
shr.u32 %lane, %t, 5; setp.eq.u32 %other, %lane, 2; shl.b32 %lane, %lane, 21;
and.b32 %i, %t, 31; setp.lt.u32 %part, %i, 16; mov.b32 %s0, 0x3F803F80;
shr.u32 %s1, %m, 4; cvt.u64.u32 %da, %s1; add.s64 %da, %da, 0x401000080000; add.s64 %db, %da, 256;
ld.param.u64 %o, [out]; mul.wide.u32 %at, %t, 64; add.s64 %o, %o, %at;
"""
FILL = "".join(f"st.shared.v4.b32 [%w+{x}], {{%s0, %s0, %s0, %s0}};" for x in (0, 16, 32))
PROXY, BARRIER = "fence.proxy.async.shared::cta;", "bar.sync 0;"
INIT = "@%first mbarrier.init.shared::cta.b64 [%bar], 1;"


def allocate(columns=64, at="%bar+8", who="%warp"):
    return f"@{who} {ALLOC} [{at}], {columns};"


def deallocate(columns=64, at="%tm", who="%warp"):
    return f"@{who} {DEALLOC} {at}, {columns};"


ADDRESS = "ld.shared.b32 %tm, [%bar+8]; add.s32 %own, %tm, %lane;"
ALLOCATED = f"{INIT} {allocate()} {BARRIER} {ADDRESS}"
READY = f"{FILL} {PROXY} {ALLOCATED}"
INSTRUCTION = 1 << 4 | 1 << 7 | 1 << 10 | 16 // 8 << 17 | 128 // 16 << 24
ROWS_64 = INSTRUCTION ^ (128 // 16 ^ 64 // 16) << 24
A_INSIDE, WIDE = "[%tm + 32]", INSTRUCTION ^ (16 // 8 ^ 32 // 8) << 17


def mma(add=0, d="%tm", a="%da", b="%db", instruction=INSTRUCTION, who="%first", kind="f16"):
    product = f"tcgen05.mma.cta_group::1.kind::{kind} [{d}], {a}, {b}, {instruction}, {add};"
    return f"@{who} {product}"


def registers(count=16, of="%r"):
    return f"{{{', '.join(f'{of}{i}' for i in range(count))}}}"


def load(at="%own", count=16):
    return f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {registers(count)}, [{at}];"


def store(at="%own", count=16):
    return f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [{at}], {registers(count)};"


SYNC = f"{BEFORE} {BARRIER} {AFTER}"
COMMITTED = f"@%first {COMMIT} [%bar];"
WAITED, AGAIN = f"{wait('%bar', 0)} {AFTER}", f"{wait('%bar', 1)} {AFTER}"
KEEP = "".join(
    f"st.global.v4.b32 [%o+{4 * i}], {{%r{i}, %r{i + 1}, %r{i + 2}, %r{i + 3}}};"
    for i in (0, 4, 8, 12)
)
ONES = "".join(f"mov.b32 %r{i}, 0x3F803F80;" for i in range(8))
INSIDE = f"{ONES} {store('%own+32', 8)}"  # A: ones in tensor memory
END = f"{BEFORE} {BARRIER} {deallocate()}"
BEGUN = f"{mma()} {COMMITTED}"
DONE = f"{BEGUN} {WAITED} {load()} {LOADED}"
RIGHT = {
    "product": f"{READY} {DONE} {KEEP} {END}",
    # Registers are used before the wait: a dependency between registers is respected.
    "used_before_the_wait": f"{READY} {BEGUN} {WAITED} {load()} {KEEP} {LOADED} {END}",
    "the_same_accumulator": f"{READY} {mma()} {mma(1)} {COMMITTED} {WAITED} {load()} {LOADED} "
    f"{KEEP} {END}",
    "a_inside": f"{READY} {INSIDE} {STORED} {SYNC} {mma(a=A_INSIDE)} {COMMITTED} {WAITED} {load()} "
    f"{LOADED} {KEEP} {END}",
    "again": f"{READY} {DONE} {SYNC} {BEGUN} {AGAIN} {load()} {LOADED} {KEEP} {END}",
    "filled_again": f"{READY} {BEGUN} {WAITED} {FILL} {PROXY} {BARRIER} {BEGUN} {AGAIN} {load()} "
    f"{LOADED} {KEEP} {END}",
    "stored_and_loaded": f"{READY} {DONE} {store()} {STORED} {load()} {LOADED} {KEEP} {END}",
    "two_shapes": f"{READY} {mma(instruction=WIDE, d='%tm + 32')} {DONE} {KEEP} {END}",
    "two_commits": f"{READY} {BEGUN} {wait('%bar', 0)} {BARRIER} {COMMITTED} {AGAIN} {load()} "
    f"{LOADED} {KEEP} {END}",
    "two_allocations": f"{FILL} {PROXY} {INIT} {allocate()} {allocate(32, '%bar+12')} "
    f"@%warp {RELINQUISH} {BARRIER} {ADDRESS} ld.shared.b32 %i, [%bar+12]; {DONE} {KEEP} {END} "
    f"{deallocate(32, '%i')}",
    "given_back_and_allocated": f"{INIT} {allocate(512)} {BARRIER} {ADDRESS} {deallocate(512)} "
    f"{BARRIER} {READY.replace(INIT, '')} {DONE} {KEEP} {END}",
    "another_warp_gives_it_back": f"{READY} {DONE} {KEEP} {BEFORE} {BARRIER} "
    f"{deallocate(who='%other')}",
}
RESULTS = {"the_same_accumulator": 32}
PAST = "add.s32 %own, %own, 56;"
WRONG = {
    "loaded_before_the_wait": (
        f"{READY} {BEGUN} {BARRIER} {load()} {LOADED} {WAITED} {END}",
        r"(READ IN FLIGHT|RACE write/read) at lane \d+, column \d+ of tensor memory: products in "
        r"tensor memory by warp 0 \(tcgen05.mma.* in line \d+ of loaded_before_the_wait\), then "
        r"loads of tensor memory by warp \d|NO TENSOR FENCE",
    ),
    "no_fence_after_the_wait": (
        f"{READY} {BEGUN} {wait('%bar', 0)} {load()} {LOADED} {END}",
        "NO TENSOR FENCE at lane .*: products in tensor memory by warp 0",
    ),
    "no_fence_before_the_barrier": (
        f"{READY} {DONE} {BARRIER} {AFTER} {BEGUN} {AGAIN} {END}",
        "NO TENSOR FENCE at lane .*: loads of tensor memory by warp [1-3]",
    ),
    "no_fence_after_the_barrier": (
        f"{READY} {DONE} {BEFORE} {BARRIER} {BEGUN} {AGAIN} {END}",
        "NO TENSOR FENCE at lane .*: loads of tensor memory by warp [1-3]",
    ),
    "no_barrier": (
        f"{READY} {DONE} {BEFORE} {AFTER} {BEGUN} {AGAIN} {END}",
        "RACE read/write|SOURCE CHANGED IN FLIGHT|READ IN FLIGHT|DEADLOCK",  # a phase may be missed
    ),
    "loads_not_waited_for": (
        f"{READY} {BEGUN} {WAITED} {load()} {SYNC} {BEGUN} {AGAIN} {LOADED} {END}",
        r"SOURCE CHANGED IN FLIGHT at lane .*: loads of tensor memory by warp \d .*then products",
    ),
    "loads_not_waited_for_at_the_end": (
        f"{READY} {BEGUN} {WAITED} {load()} {KEEP} {END}",
        "SOURCE CHANGED IN FLIGHT at lane .*: loads of tensor memory.*, then thread",
    ),
    "stores_not_waited_for": (
        f"{READY} {INSIDE} {SYNC} {mma(a=A_INSIDE)} {COMMITTED} {WAITED} {STORED} {END}",
        r"READ IN FLIGHT at lane .*: stores to tensor memory by warp \d.*, then products",
    ),
    "loaded_before_the_store_ends": (
        f"{READY} {ONES} {store('%own', 8)} {load(count=8)} {LOADED} {STORED} {END}",
        r"READ IN FLIGHT at lane .*: stores to tensor memory by warp \d.*, then loads",
    ),
    "stored_over_a_load": (
        f"{READY} {DONE} {load()} {store()} {STORED} {LOADED} {END}",
        "SOURCE CHANGED IN FLIGHT at lane .*: loads .*, then stores",
    ),
    "stored_over_products": (
        f"{READY} {ONES} {BEGUN} {BARRIER} {store('%own', 8)} {STORED} {WAITED} {END}",
        "(WRITE IN FLIGHT|RACE write/write) at lane|NO TENSOR FENCE",
    ),
    "no_proxy_fence": (
        f"{FILL} {ALLOCATED} {DONE} {END}",
        r"NO PROXY FENCE at shared byte \d+: thread \d+ \(st.*products in tensor memory by warp 0",
    ),
    "filled_while_read": (
        f"{READY} {BEGUN} {BARRIER} {FILL} {WAITED} {END}",
        "(SOURCE CHANGED IN FLIGHT|RACE read/write) at shared byte",
    ),
    **{
        f"{matrix}_stored_while_read": (
            f"{READY} {BEGUN} {BARRIER} setp.eq.u32 %p1, %t, {thread}; "
            f"@%p1 st.shared.b32 [%w], %s0; {WAITED} {END}",
            "(SOURCE CHANGED IN FLIGHT|RACE read/write) at shared byte",
        )
        for matrix, thread in (("a", 1), ("b", 90))
    },
    "two_shapes_of_one_accumulator": (
        f"{READY} {mma()} {mma(1, instruction=WIDE)} {COMMITTED} {WAITED} {END}",
        "NOT IN ORDER with tcgen05.mma",
    ),
    "a_is_an_accumulator": (
        f"{READY} {mma()} {mma(0, d='%tm + 32', a='[%tm]')} {COMMITTED} {WAITED} {END}",
        "NOT IN ORDER with tcgen05.mma",
    ),
    "an_accumulator_of_nothing": (
        f"{READY} {mma(1)} {COMMITTED} {WAITED} {END}",
        "UNINITIALISED at lane .* of tensor memory: products",
    ),
    "never_committed": (f"{READY} {mma()}", "products in tensor memory that no commit holds"),
    "never_waited_for": (
        f"{READY} {BEGUN} {END}",
        "(WRITE IN FLIGHT|RACE write/write) at lane .*: products in tensor memory",
    ),
    "committed_by_another": (
        f"{READY} {mma()} {BARRIER} @%second {COMMIT} [%bar]; {WAITED} {END}",
        "lane 1 commits what lane 0 of its warp issued",
    ),
    "committed_to_nothing": (
        f"{READY} {mma()} @%first {COMMIT} [%bar+16]; {WAITED} {END}",
        "no mbarrier at shared byte",
    ),
    "never_given_back": (f"{READY} {DONE} {KEEP}", "ends with 64 columns of tensor memory"),
    "half_given_back": (
        f"{READY} {BEFORE} {BARRIER} {deallocate(32)}",
        "32 columns at 0x.*, expected an allocation of as many",
    ),
    "given_back_twice": (
        f"{READY} {END} {deallocate()}",
        "64 columns at 0x.*, expected an allocation of as many",
    ),
    "allocated_after_relinquishing": (
        f"{READY} @%warp {RELINQUISH} {allocate(32)} {END}",
        "this block has relinquished the right to allocate",
    ),
    "relinquished_by_another_warp": (
        f"{READY} @%other {RELINQUISH} {BARRIER} {allocate(32)} {END}",
        "this block has relinquished the right to allocate",
    ),
    "out_of_columns": (
        f"{INIT} {allocate(512)} {allocate(32, '%bar+12')}",
        "OUT OF TENSOR MEMORY: 0 columns of 512 are free in one piece, 32 are asked for",
    ),
    "no_power_of_two": (allocate(96), "96 columns, expected a power of two from 32 to 512"),
    "too_few_columns": (allocate(16), "16 columns, expected a power of two from 32"),
    "too_many_columns": (allocate(1024), "1024 columns, expected a power of two from 32 to 512"),
    "lanes_allocate_differently": (
        f"add.s32 %s1, %bar, 8; @%first add.s32 %s1, %bar, 12; {allocate(at='%s1')}",
        "lanes of a warp give different operands",
    ),
    "some_lanes_allocate": (f"@%first {ALLOC} [%bar+8], 64; {BARRIER}", "diverged|DEADLOCK"),
    "some_lanes_load": (f"{READY} {DONE} @%part {load()} {LOADED} {END}", "diverged|DEADLOCK"),
    "lanes_of_others": (
        f"{READY} {BEGUN} {WAITED} {load('%tm')} {LOADED} {END}",
        r"warp \d begins at lane 0, expected (32|64|96): it has 32 lanes of its own",
    ),
    "lanes_load_differently": (
        f"{READY} {BEGUN} {WAITED} @%part add.s32 %own, %own, 1; {load()} {LOADED} {END}",
        "lanes of a warp have different addresses",
    ),
    "past_the_columns": (
        f"{READY} {BEGUN} {WAITED} {PAST} {load()} {LOADED} {END}",
        r"16 columns at \d+ of tensor memory, which were not allocated",
    ),
    "product_past_the_columns": (
        f"{READY} {mma(d='%tm + 56')} {COMMITTED} {WAITED} {END}",
        r"16 columns at \d+ of tensor memory, which were not allocated",
    ),
    "product_in_no_lane": (
        f"{READY} add.s32 %tm, %tm, 0x100000; {mma()}",
        "lane 16, expected 0",
    ),
    "product_in_a_lane_of_64_rows": (
        f"{READY} add.s32 %tm, %tm, 0x80000; {mma(instruction=ROWS_64)}",
        "lane 8, expected 0 or 16",
    ),
    "halves_of_a_and_d": (
        f"{READY} add.s32 %own, %tm, 0x100020; {mma(a='[%own]', instruction=ROWS_64)}",
        "A in lane 16, D in lane 0, expected one",
    ),
    "no_constant": (
        f"{READY} add.s64 %da, %da, -0x400000000000; {mma()}",
        "expected 1 in bits 46 to 48",
    ),
    "base_offset": (
        f"{READY} add.s64 %db, %db, 0x2000000000000; {mma()}",
        "expected a base offset of 0",
    ),
    "another_swizzle": (
        f"{READY} add.s64 %db, %db, 0x2000000000000000; {mma()}",
        "has swizzle 1, expected 0, 2, 4 or 6",
    ),
    "past_shared": (f"{READY} add.s64 %db, %db, 1024; {mma()}", r"16 bytes at \d+, of"),
    "sparse": (f"{READY} {mma(instruction=INSTRUCTION | 4)}", "expected no sparsity"),
    "saturated": (
        f"{READY} {mma(instruction=INSTRUCTION | 8)}",
        "expected no sparsity, saturation",
    ),
    "float16_sums": (
        f"{READY} {mma(instruction=INSTRUCTION & ~(1 << 4))}",
        "formats 0, 1 and 1 of D, A and B, expected float32",
    ),
    "two_formats": (
        f"{READY} {mma(instruction=INSTRUCTION & ~(1 << 7))}",
        "formats 1, 0 and 1 of D, A and B",
    ),
    "bfloat16_as_tf32": (f"{READY} {mma(kind='tf32')}", "and of A and B tf32"),
    "eight_columns": (
        f"{READY} {mma(instruction=INSTRUCTION - (8 // 8 << 17))}",
        "128 x 8, expected 64 rows and a multiple of 8 columns, or 128 and of 16",
    ),
    "thirty_two_rows": (
        f"{READY} {mma(instruction=INSTRUCTION ^ (128 // 16 ^ 32 // 16) << 24)}",
        "32 x 16, expected 64 rows",
    ),
    "across_in_tensor_memory": (
        f"{READY} {mma(a=A_INSIDE, instruction=INSTRUCTION | 1 << 15)}",
        "A in tensor memory, expected along k",
    ),
}
# What loads get too early, where work happens as late as it may.
EARLY = {
    "early_load_of_stores": f"{READY} {ONES} {store('%own', 8)} {load(count=8)} {KEEP} {LOADED} "
    f"{STORED} {END}",
    "early_load_of_products": f"{READY} {BEGUN} {BARRIER} {load()} {KEEP} {LOADED} {WAITED} {END}",
}
# What only a fence of tcgen05 orders: ptxas makes no instruction of one (CUDA 13.0), and Triton has
# none, so that its kernels run without this rule.
OF_FENCES = [x for x in WRONG if x.startswith("no_fence")]


def made(emulator):
    kernels = [entry(f"t_{x}", "given out", [BEGIN, code], "") for x, code in RIGHT.items()]
    kernels += [entry(x, "given out", [BEGIN, code], "") for x, (code, _) in WRONG.items()]
    others = EARLY | {"address": f"{ALLOCATED} st.global.b32 [%o], %tm; {END}"}
    kernels += [entry(x, "given out", [BEGIN, code], "") for x, code in others.items()]
    return library.Executor(emulator, HEADER + SHARED + "".join(kernels))


@pytest.fixture(scope="module")
def executor():
    return made(Emulator())


WAYS = [(schedule, lazy) for schedule in SCHEDULES for lazy in (False, True)]


def run(executor, name, **options):
    out = aligned(16 * THREADS, np.float32)
    return out, executor.launch(name, (1,), (THREADS,), ALL_BYTES, [out, out], **options)


@pytest.mark.slow
@named("name", RIGHT)
def test_correct_code_passes(executor, name):
    for schedule, lazy in WAYS:
        for seed in range(3):
            out, found = run(executor, f"t_{name}", schedule=schedule, lazy=lazy, seed=seed)
            assert not found.count and (out == RESULTS.get(name, 16)).all(), found.first


@named("name", WRONG)
def test_a_misuse_is_named(executor, name):
    for schedule, lazy in WAYS:
        _, found = run(executor, name, schedule=schedule, lazy=lazy)
        assert found.count and re.search(WRONG[name][1], found.first), found.first


def test_an_allocation_begins_at_either_end(executor):
    """Another block may hold the other columns of the multiprocessor."""
    found = {int(run(executor, "address", seed=x)[0].view(np.uint32)[0]) for x in range(12)}
    assert found == {0, 512 - 64}


@named("name", EARLY)
def test_values_are_late(executor, name):
    """Without the checker, a load that is too early gets another value, unless work is eager."""
    runs = [run(executor, name, lazy=True, check=False, seed=seed)[0] for seed in range(8)]
    assert any(np.isnan(out.reshape(THREADS, 16)[:, :8]).any() for out in runs)
    eager, _ = run(executor, name, lazy=False, check=False)
    assert not np.isnan(eager.reshape(THREADS, 16)[:, :8]).any()


@named("name", OF_FENCES)
def test_without_the_rule_no_fence_is_needed(executor, name):
    for schedule, lazy in WAYS:
        _, found = run(executor, name, schedule=schedule, lazy=lazy, tensor_fences=False)
        assert not found.count, found.first
