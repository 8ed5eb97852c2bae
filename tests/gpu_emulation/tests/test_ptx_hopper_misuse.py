"""Misuses of sm_90's additions must be reported, and similar correct code must pass."""

import re

import numpy as np
import pytest

from tests.gpu_emulation.emulator import SCHEDULES, Emulator, aligned, needs_emulator
from tests.gpu_emulation.ptx import library
from tests.gpu_emulation.tests.test_ptx_hopper import (
    ACQUIRE,
    BEGIN,
    BOXED,
    COPY_OUT,
    INIT,
    MAKE,
    PUBLISH,
    Tensor,
    load,
    wait,
)
from tests.gpu_emulation.tests.test_ptx_products import COMMIT, FENCE, GROUP, HEADER, SHARED, WAIT
from tests.gpu_emulation.tests.test_ptx_values import as_aligned, entry

pytestmark = needs_emulator
LANES = 64
named = pytest.mark.parametrize

# --- products -------------------------------------------------------------------------------------

# D (64 x 8) = A B of ones, without a swizzle; each thread fills 32 bytes at %w.
PRODUCTS = """
.reg .b32 %t, %m, %w, %lane, %warp, %s<4>, %a<4>; .reg .b64 %da, %db, %at, %o; .reg .pred %p<4>;
.reg .f32 %d<9>; mov.u32 %t, %tid.x; mov.u32 %m, memory; mad.lo.s32 %w, %t, 32, %m;
ld.param.u64 %o, [out]; mul.wide.u32 %at, %t, 16; add.s64 %o, %o, %at; and.b32 %lane, %t, 31;
shr.u32 %warp, %t, 5; shr.u32 %s0, %m, 4; cvt.u64.u32 %da, %s0; add.s64 %da, %da, 0x1000080000;
add.s64 %db, %da, 128; mov.u32 %s0, 0x3F803F80;
mov.u32 %a0, %s0; mov.u32 %a1, %s0; mov.u32 %a2, %s0; mov.u32 %a3, %s0;
"""
FILL = (
    "st.shared.v4.b32 [%w], {%s0, %s0, %s0, %s0}; st.shared.v4.b32 [%w+16], {%s0, %s0, %s0, %s0};"
)
PROXY, BARRIER = "fence.proxy.async.shared::cta;", "bar.sync 0;"
FILLED = f"{FILL} {PROXY} {BARRIER}"
KEEP = "st.global.v4.f32 [%o], {%d0, %d1, %d2, %d3};"


def wgmma(d=(0, 1, 2, 3), a="%da", b="%db"):
    last = "0, 1, 1, 0, 0" if a == "%da" else "0, 1, 1, 0"
    registers = ", ".join(f"%d{i}" for i in d)
    shape = f"m64n{2 * len(d)}k16.f32.bf16.bf16"
    return f"wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, {a}, {b}, {last};"


PRODUCT, OF_REGISTERS = wgmma(), wgmma(a="{%a0, %a1, %a2, %a3}")
BEGUN = f"{FENCE} {PRODUCT} {COMMIT}"
RIGHT = {
    "fence_of_the_writer": f"{FILLED} {BEGUN} {WAIT} {KEEP}",
    "fence_of_the_reader": f"{FILL} {BARRIER} {PROXY} {BEGUN} {WAIT} {KEEP}",
    "changed_after_the_group": f"{FILLED} {BEGUN} {WAIT} {FILL} {KEEP}",
    "filled_again": f"{FILLED} {BEGUN} {WAIT} {BARRIER} {FILLED} {BEGUN} {WAIT} {KEEP}",
    "of_registers": f"{FILLED} {FENCE} {OF_REGISTERS} {COMMIT} {WAIT} {KEEP}",
    "a_of_registers_again": f"""{FILLED} {FENCE} {OF_REGISTERS} {COMMIT} {WAIT}
        mov.u32 %a0, %s0; {FENCE} {OF_REGISTERS} {COMMIT} {WAIT} {KEEP}""",
    "another_shape_fenced": f"""{FILLED} {BEGUN} {WAIT} {FENCE} {wgmma(range(8), b="%da")} {COMMIT}
        {WAIT} {FENCE} {PRODUCT} {COMMIT} {WAIT} {KEEP}""",
    "a_warp_beside_the_group": f"""setp.ge.u32 %p0, %t, {GROUP}; @%p0 bra $end; {FILL} {PROXY}
        bar.sync 1, {GROUP}; {BEGUN} {WAIT} {KEEP} $end:""",
}
WARPS = {"three_warps": 3, "a_warp_beside_the_group": 5, "changed_while_another_group_reads": 8}
OTHER_LANES = "setp.eq.u32 %p0, %lane, 5; selp.b32 %s1, 1, 0, %p0; cvt.u64.u32 %at, %s1;"
OTHER_WARPS = "setp.eq.u32 %p0, %warp, 2; selp.b32 %s1, 1, 0, %p0; cvt.u64.u32 %at, %s1;"
LAST_WARP = "setp.eq.u32 %p0, %warp, 3;"
FROM_D, ALL_COLUMNS = "{%d0, %d1, %d2, %d3}", wgmma(range(8), b="%da")
WRONG = {
    "no_proxy_fence": f"{FILL} {BARRIER} {BEGUN} {WAIT}",
    "proxy_fence_too_early": f"{PROXY} {FILL} {BARRIER} {BEGUN} {WAIT}",
    "no_barrier": f"{FILL} {PROXY} {BEGUN} {WAIT}",
    "no_fence": f"{FILLED} {PRODUCT} {COMMIT} {WAIT}",
    "written_since_the_fence": f"""{FILLED} {FENCE} mov.f32 %d1, 0f3F800000;
        {PRODUCT} {COMMIT} {WAIT}""",
    "read_since_the_fence": f"{FILLED} {BEGUN} {WAIT} {KEEP} {PRODUCT} {COMMIT} {WAIT}",
    "a_written_since_the_fence": f"""{FILLED} {FENCE} mov.u32 %a2, 0;
        {OF_REGISTERS} {COMMIT} {WAIT}""",
    "another_shape_later": f"{FILLED} {BEGUN} {WAIT} {ALL_COLUMNS} {COMMIT} {WAIT}",
    "accumulators_as_a": f"""{FILLED} {BEGUN} {WAIT} {wgmma((4, 5, 6, 7), FROM_D)}
        {COMMIT} {WAIT}""",
    "written_in_flight": f"{FILLED} {BEGUN} mov.f32 %d2, 0f3F800000; {WAIT}",
    "a_written_in_flight": f"{FILLED} {FENCE} {OF_REGISTERS} {COMMIT} mov.u32 %a3, 0; {WAIT}",
    "changed_in_flight": f"{FILLED} {BEGUN} {FILL} {WAIT}",
    "changed_by_others": f"{FILLED} {BEGUN} {BARRIER} {FILL} {WAIT}",
    "changed_while_another_group_reads": f"""setp.ge.u32 %p0, %t, {GROUP}; @%p0 bra $filled; {FILL}
        $filled: {PROXY} {BARRIER} {BEGUN} {WAIT} @%p0 bra $end; {FILL} $end:""",
    "another_shape": f"{FILLED} {BEGUN} {FENCE} {wgmma(range(8))} {COMMIT} {WAIT}",
    "shifted_up": f"{FILLED} {BEGUN} {wgmma((1, 2, 3, 4))} {COMMIT} {WAIT}",
    "shifted_down": f"{FILLED} {FENCE} {wgmma((1, 2, 3, 4))} {COMMIT} {PRODUCT} {COMMIT} {WAIT}",
    "a_among_the_accumulators": f"""{FILLED} {BEGUN} mov.b32 %a0, %s0;
        {FENCE} {wgmma((4, 5, 6, 7), "{%d0, %a1, %a2, %a3}")} {COMMIT} {WAIT}""",
    "never_waited_for": f"{FILLED} {BEGUN}",
    "never_committed": f"{FILLED} {FENCE} {PRODUCT} {WAIT}",
    "three_warps": f"{FILLED} {BEGUN} {WAIT}",
    "two_places": f"{FILLED} {FENCE} {LAST_WARP} @%p0 bra $other; {PRODUCT} bra $end; "
    f"\n$other: {PRODUCT} $end: {COMMIT} {WAIT}",
    "absent_warp": f"{FILLED} {LAST_WARP} @%p0 bra $end; {BEGUN} {WAIT} $end:",
    "some_lanes": f"{FILLED} {FENCE} setp.lt.u32 %p0, %lane, 16; @%p0 {PRODUCT} {COMMIT} {WAIT}",
    "lanes_of_other_descriptors": f"{FILLED} {OTHER_LANES} add.s64 %db, %db, %at; {BEGUN} {WAIT}",
    "warps_of_other_descriptors": f"{FILLED} {OTHER_WARPS} add.s64 %db, %db, %at; {BEGUN} {WAIT}",
    "base_offset": f"{FILLED} add.s64 %db, %db, 0x2000000000000; {BEGUN} {WAIT}",
    "inside_a_pattern": f"""{FILLED} add.s64 %db, %db, 8; mov.b64 %at, 1; shl.b64 %at, %at, 62;
        add.s64 %db, %db, %at; {BEGUN} {WAIT}""",
    "stray_bit": f"{FILLED} add.s64 %da, %da, 0x8000; {BEGUN} {WAIT}",
    "past_shared": f"{FILLED} add.s64 %db, %db, 128; {BEGUN} {WAIT}",
}
EXPECTED = {
    "no_proxy_fence": r"NO PROXY FENCE at shared byte \d+: thread \d+ \(st.*products of warp \d",
    "proxy_fence_too_early": "NO PROXY FENCE",
    "no_barrier": "RACE write/read|UNINITIALISED",
    "no_fence": r"NO FENCE: its registers were used",
    "written_since_the_fence": "NO FENCE",
    "read_since_the_fence": "NO FENCE",
    "a_written_since_the_fence": "NO FENCE",
    "another_shape_later": "NO FENCE",
    "accumulators_as_a": "NO FENCE",
    "written_in_flight": "an accumulator was written in flight",
    "a_written_in_flight": "a register of A was written in flight",
    "changed_in_flight": "SOURCE CHANGED IN FLIGHT.*products of warp",
    "changed_by_others": "SOURCE CHANGED IN FLIGHT.*products of warp",
    "changed_while_another_group_reads": "(SOURCE CHANGED IN FLIGHT|RACE).*products of warp [4-7]",
    "another_shape": "its registers are in flight in another shape",
    "shifted_up": "its registers are in flight in another shape",
    "shifted_down": "its registers are in flight in another shape",
    "a_among_the_accumulators": "a register of A is an accumulator in flight",
    "never_waited_for": "exits with products of its warp in flight",
    "never_committed": "exits with products of its warp in flight",
    "three_warps": r"warp \d of 3, expected one of a whole warpgroup",
    "two_places": r"warps of a warpgroup have diverged: warp \d is at wgmma.mma.*in line \d+",
    "absent_warp": "warps of a warpgroup have diverged|DEADLOCK.*wgmma.wait_group",
    "some_lanes": "DEADLOCK.*wgmma.mma|diverged",
    "lanes_of_other_descriptors": "lanes of a warp have different descriptors",
    "warps_of_other_descriptors": "warps of a warpgroup have different descriptors",
    "base_offset": "descriptor 0x2.*expected a base offset of 0",
    "inside_a_pattern": "begins inside the pattern of its swizzle, expected a multiple of 1024",
    "stray_bit": "no bit beside its fields",
    "past_shared": "16 bytes at 4096, of 4096",
}

# --- mbarriers ------------------------------------------------------------------------------------

ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%bar];"
READY = f"@%first {INIT} [%bar], 1; bar.sync 0;"
MBARRIERS = {
    "never_initialised": (ARRIVE, "no mbarrier at shared byte 1024, expected mbarrier.init"),
    "never_initialised_to_wait": (wait("%bar", 0), "no mbarrier at shared byte 1024"),
    "of_no_arrivals": (f"{INIT} [%bar], 0;", "0 arrivals, expected 1 to"),
    "misaligned": (f"@%first {INIT} [%bar+4], 1;", "8 bytes at 1028 are misaligned"),
    "twice": (
        f"{READY} @%first {INIT} [%bar], 1;",
        "there is an mbarrier at shared byte 1024 already",
    ),
    "overwritten": (
        f"{READY} @%first st.shared.b32 [%bar], 0; bar.sync 0; @%first {ARRIVE}",
        "the mbarrier at shared byte 1024 was overwritten",
    ),
    "overwritten_by_another": (
        f"{READY} @%first {ARRIVE} @!%first st.shared.b32 [%bar+4], %t;",
        "RACE with an atomic|was overwritten|RACE write/write",
    ),
    "used_before_it_is_known": (f"@%first {INIT} [%bar], 64; {ARRIVE}", "no mbarrier|RACE with"),
    "too_many_arrive": (
        f"{READY} mbarrier.arrive.shared::cta.b64 _, [%bar], 2;",
        "2 arrive at the mbarrier at shared byte 1024, expected at least 1 and at most 1",
    ),
    "none_arrives": (
        f"{READY} @%first mbarrier.arrive.shared::cta.b64 _, [%bar], 0;",
        "0 arrive at the mbarrier at shared byte 1024, expected at least 1",
    ),
    "invalid_while_waited_for": (
        f"{READY} @!%first bra $wait; mbarrier.inval.shared::cta.b64 [%bar]; ret; "
        f"$wait: {wait('%bar', 0)}",
        "are still waited for|no mbarrier|RACE with an atomic",
    ),
    "invalid_twice": (
        f"{READY} @%first mbarrier.inval.shared::cta.b64 [%bar]; "
        "@%first mbarrier.inval.shared::cta.b64 [%bar];",
        "no mbarrier at shared byte 1024",
    ),
    "parity_of_two": (f"{READY} {wait('%bar', 2)}", "parity 2, expected 0 or 1"),
    "too_many_bytes": (
        f"{READY} @%first mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], 0x100000;",
        r"more than 2\^20 - 1 bytes",
    ),
    "nobody_arrives": (
        f"{READY} {wait('%bar', 0)}",
        r"DEADLOCK.* 64 at mbarrier.try_wait.* in line \d+",
    ),
    "wrong_parity": (
        f"{READY} @%first {ARRIVE} {wait('%bar', 0)} {wait('%bar', 1)}",
        r"DEADLOCK.* 64 at mbarrier.try_wait.* in line \d+",
    ),
    "stored_after_it_arrived": (
        f"{READY} @%first {ARRIVE} @%first st.shared.b32 [%m], 1; {wait('%bar', 0)} "
        "ld.shared.b32 %s0, [%m];",
        "RACE|UNINITIALISED",
    ),
    "not_waited_for": (
        f"{READY} @%first st.shared.b32 [%m], 1; @%first {ARRIVE} ld.shared.b32 %s0, [%m];",
        "RACE|UNINITIALISED",
    ),
    "phase_before": (  # the wait is for the previous phase, not for the current one
        f"{READY} @%first st.shared.b32 [%m], 1; @%first {ARRIVE} {wait('%bar', 1)} "
        "ld.shared.b32 %s0, [%m];",
        "RACE|UNINITIALISED|DEADLOCK",  # the arrival may precede the wait
    ),
}

# --- boxes ----------------------------------------------------------------------------------------

# One box of 16 x 8 elements of 2 bytes.
AT = "ld.global.b32 %at0, [%c]; ld.global.b32 %at1, [%c+4];"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], %total;"
LOAD = load(2)
TARGET = "add.s32 %w, %w, 2048;"  # the part of the box of threads 0 to 15, 16 bytes each
STORE = f"{TARGET} setp.lt.u32 %p2, %t, 16; @%p2 st.shared.v4.b32 [%w], {{%s0, %s0, %s0, %s0}};"
ASK, LOADED = f"{AT} {EXPECT} {ACQUIRE} {LOAD}", f"{wait('%bar', 0)} {COPY_OUT}"
SOURCE = "ld.global.b64 %d1, [%f]; st.global.b32 [%d1+72], %t;"  # one element of the source tensor
SEVERAL = {  # correct kernels that use the map
    "one_box": f"{MAKE} @!%first bra $wait; {ASK} $wait: {LOADED}",
    "stored_before": f"{STORE} {PROXY} {MAKE} @!%first bra $wait; {ASK} $wait: {LOADED}",
    "fenced_by_who_asks": f"{STORE} {MAKE} @!%first bra $wait; {PROXY} {ASK} $wait: {LOADED}",
    "source_stored": f"""{MAKE} @!%first bra $wait; {SOURCE} fence.proxy.async; {ASK}
        $wait: {LOADED}""",
    "read_before": f"""@%first {INIT} [%bar+8], 1; {MAKE} @!%first bra $wait; {ASK}
        $wait: {wait("%bar", 0)} {TARGET} setp.lt.u32 %p2, %t, 16;
        @%p2 ld.shared.b32 %s3, [%w]; bar.sync 0; @!%first bra $again;
        {EXPECT.replace("%bar", "%bar+8")} {load(2, bar="%bar+8")}
        $again: {wait("%bar+8", 0)} {COPY_OUT}""",
}
WRONG_BOXES = {
    "stored_without_a_fence": (
        f"{STORE} {MAKE} @!%first bra $wait; {ASK} $wait: {LOADED}",
        "NO PROXY FENCE",
    ),
    "source_stored_without_a_fence": (
        f"{MAKE} @!%first bra $wait; {SOURCE} {ASK} $wait: {LOADED}",
        "NO PROXY FENCE at global address",
    ),
    "source_stored_with_a_fence_of_shared": (
        f"{MAKE} @!%first bra $wait; {SOURCE} {PROXY} {ASK} $wait: {LOADED}",
        "NO PROXY FENCE at global address",
    ),
    "never_acquired": (
        f"{MAKE} @!%first bra $wait; {AT} {EXPECT} {LOAD} $wait: {LOADED}",
        "NO PROXY FENCE: the tensor map was published by thread",
    ),
    "acquired_by_another": (
        f"{MAKE} setp.eq.u32 %p1, %t, 40; @%p1 {ACQUIRE} @!%first bra $wait; "
        f"{AT} {EXPECT} {LOAD} $wait: {LOADED}",
        "NO PROXY FENCE: the tensor map",
    ),
    "never_published": (
        f"{MAKE.replace(f'{PUBLISH} [%map], [%m], 128;', '')} @!%first bra $wait; {ASK} "
        f"$wait: {LOADED}",
        "no tensor map that this block published",
    ),
    "not_waited_for": (
        f"{MAKE} @!%first bra $wait; {ASK} $wait: {COPY_OUT} {wait('%bar', 0)}",
        "READ IN FLIGHT|RACE write/read|UNINITIALISED",
    ),
    "over_what_is_read": (
        SEVERAL["read_before"].replace("bar.sync 0; @!%first bra $again", "@!%first bra $again"),
        "RACE read/write|RACE write/read|READ IN FLIGHT",
    ),
    "stored_in_flight": (
        f"{MAKE} @!%first bra $wait; {ASK} $wait: bar.sync 0; {STORE} {wait('%bar', 0)}",
        "WRITE IN FLIGHT|RACE write/write",
    ),
    "source_changed": (
        f"{MAKE} @!%first bra $wait; {ASK} $wait: bar.sync 0; setp.eq.u32 %p1, %t, 33; "
        f"ld.global.b64 %d1, [%f]; @%p1 st.global.b32 [%d1+72], %t; {wait('%bar', 0)}",
        "SOURCE CHANGED IN FLIGHT|RACE read/write",
    ),
    "invalid_in_flight": (
        f"{MAKE} @!%first bra $wait; {ASK} mbarrier.inval.shared::cta.b64 [%bar]; $wait:",
        "are still waited for",
    ),
    "two_of_one": (
        f"{MAKE} @!%first bra $wait; {ASK} add.s32 %to, %to, 256; {LOAD} $wait: {wait('%bar', 0)}",
        "whose phase is over|ends with (bulk copies|256 bytes that came to the mbarrier)",
    ),
    "at_no_mbarrier": (
        f"{MAKE} @%first {AT} @%first {ACQUIRE} @%first {load(2, bar='%bar+8')}",
        "no mbarrier at shared byte 1032",
    ),
    "map_overwritten": (
        f"{MAKE} @!%first bra $wait; ld.global.b64 %d1, [%f]; add.s64 %d1, %d1, 16; "
        f"st.global.b64 [%map], %d1; {ASK} $wait: {LOADED}",
        "its tensor map was overwritten since it was published",
    ),
    "lanes_publish_others": (
        MAKE.replace("[%map], [%m]", "[%x], [%m]").replace(
            "$publish:", "$publish: cvt.u64.u32 %x, %t; mad.lo.s64 %x, %x, 128, %map;"
        ),
        "lanes of a warp publish different maps",
    ),
    "never_waited_for": (
        f"{MAKE} @!%first bra $wait; {ASK} $wait:",
        "ends with bulk copies in flight",
    ),
}
THIRD = dict(global_dim2=1, box_dim2=1, element_stride2=1, global_stride1=64)
# {case: (fields replaced in the correct kernel, the error)}.
FIELDS = {
    "address": (dict(global_address=8), "address .*expected a multiple of 16"),
    "null": (dict(global_address=0), "address 0, expected a multiple of 16"),
    "nowhere": (dict(global_address=1 << 20), "bytes that are no memory"),
    "stride": (dict(global_stride0=72), "stride 72, expected a multiple of 16"),
    "box": (dict(box_dim1=257), "box 257, expected 1 to 256"),
    "no_box": (dict(box_dim1=0), "box 0, expected 1 to 256"),
    "no_dimension": (dict(global_dim1=0), "dimension 0, expected at least 1"),
    "row": (dict(box_dim0=4), "bytes of a row of the box 8, expected a multiple of 16"),
    "swizzle": (dict(swizzle_mode=2), "bytes of a row of a swizzled box 32"),
    "no_swizzle": (dict(swizzle_mode=4), "swizzle mode 4"),
    "rank": (dict(rank=2, **THIRD), "2 coordinates, its tensor map has 3"),
    "no_rank": (dict(rank=5), "rank less one 5"),
    "element": (dict(elemtype=13), "element type 13"),
    "element_stride": (dict(element_stride0=2), "element stride 2, expected 1"),
    "interleaved": (dict(interleave_layout=1), "an interleaved layout"),
    "filled": (dict(fill_mode=1), "a fill with NaN"),
    "target": (dict(skip=64), "its target, .* is no multiple of 128"),
    "past_shared": (dict(skip=2048), "16 bytes at 4336, of 4096"),
    "more_bytes": (dict(total=272), r"DEADLOCK.*mbarrier.try_wait.* in line \d+"),
    "fewer_bytes": (dict(total=240), r"DEADLOCK.*mbarrier.try_wait.* in line \d+"),
}


IN_FLIGHT = {  # they store accumulators of a group that is still in flight
    "read_in_flight": f"{FILLED} {BEGUN} {KEEP} {WAIT}",
    "younger_read_in_flight": f"""{FILLED} {BEGUN} {wgmma((4, 5, 6, 7))} {COMMIT}
        wgmma.wait_group.sync.aligned 1; st.global.v4.f32 [%o], {{%d4, %d5, %d6, %d7}}; {WAIT}""",
}


def made(emulator):
    # Prefixes make the names of kernels unique, also across modules.
    of_two = {f"p_{x}": code for x, code in (RIGHT | WRONG | IN_FLIGHT).items()}
    of_two |= {f"m_{x}": code for x, (code, _) in MBARRIERS.items()}
    begins = {x: BEGIN if x.startswith("m_") else PRODUCTS for x in of_two}
    kernels = [entry(x, "given out", [begins[x], code], "") for x, code in of_two.items()]
    loads = SEVERAL | {f"b_{x}": code for x, (code, _) in WRONG_BOXES.items()}
    kernels += [entry(x, BOXED, [BEGIN, code], "") for x, code in loads.items()]
    return library.Executor(emulator, HEADER + SHARED + "".join(kernels))


@pytest.fixture(scope="module")
def executor():
    return made(Emulator())


WAYS = [(schedule, lazy) for schedule in SCHEDULES for lazy in (False, True)]


def multiply(executor, name, **options):
    out, threads = aligned(4 * GROUP, np.float32), 32 * WARPS.get(name, 4)
    return out, executor.launch(f"p_{name}", (1,), (threads,), 4096, [out, out], **options)


@named("name", RIGHT)
def test_correct_products_pass(executor, name):
    for schedule, lazy in WAYS:
        out, found = multiply(executor, name, schedule=schedule, lazy=lazy)
        assert not found.count and (out == 16).all(), found.first


@named("name", WRONG)
def test_a_misuse_of_products_is_named(executor, name):
    for schedule, lazy in WAYS:
        _, found = multiply(executor, name, schedule=schedule, lazy=lazy)
        assert found.count and re.search(EXPECTED[name], found.first), found.first


@named("name", IN_FLIGHT)
def test_an_accumulator_in_flight_is_nan(executor, name):
    for schedule, lazy in WAYS:
        out, _ = multiply(executor, name, schedule=schedule, lazy=lazy)
        assert np.isnan(out).all()


@named("name", MBARRIERS)
def test_a_misuse_of_mbarriers_is_named(executor, name):
    for schedule in SCHEDULES:
        given = [aligned(LANES * 4, np.uint32) for _ in range(2)]
        found = executor.launch(f"m_{name}", (1,), (LANES,), 4096, given, schedule=schedule)
        assert found.count and re.search(MBARRIERS[name][1], found.first), found.first


def load_box(executor, name, skip=0, total=256, **options):
    """(the findings, the kernel's output, the expected output)"""
    names = ("schedule", "lazy", "seed")
    launch = {x: options.pop(x) for x in names if x in options}
    tensor = Tensor((19, 11), (16, 8), 2, 0, np.random.default_rng(0))
    if options.get("global_address", 0) == 8:
        options["global_address"] += tensor.memory.ctypes.data
    out, map, at = aligned(256, np.uint8), aligned(256 * 64, np.uint8, to=64), (2, 1)
    at = as_aligned(np.array([2, 1, 0, 0], np.int32))
    numbers = [x.to_bytes(8, "little") for x in (256, skip, 1, total)]
    arguments = [bytes(8), out, tensor.fields(**options), map, at, *numbers]
    found = executor.launch(name, (1,), (LANES,), 4096, arguments, **launch)
    return found, out, tensor.at((2, 1))


@named("name", SEVERAL)
def test_correct_boxes_pass(executor, name):
    for schedule, lazy in WAYS:
        found, out, expected = load_box(executor, name, schedule=schedule, lazy=lazy)
        assert not found.count and np.array_equal(out, expected), found.first


@named("name", WRONG_BOXES)
def test_a_misuse_of_boxes_is_named(executor, name):
    for schedule, lazy in WAYS:
        if name == "invalid_in_flight" and not lazy:
            continue  # eager boxes arrive at once
        found, *_ = load_box(executor, f"b_{name}", schedule=schedule, lazy=lazy)
        assert found.count and re.search(WRONG_BOXES[name][1], found.first), found.first


@named("name", FIELDS)
def test_an_invalid_tensor_map_is_named(executor, name):
    for lazy in (False, True):
        found, *_ = load_box(executor, "one_box", lazy=lazy, **FIELDS[name][0])
        assert found.count and re.search(FIELDS[name][1], found.first), found.first
