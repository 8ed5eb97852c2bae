"""Misuses of bulk copies from shared memory and of contiguous ones to it must be reported, and
similar correct code must pass. The rules are those of the PTX ISA's asynchronous proxy and groups.
"""

import re

import numpy as np
import pytest

from tests.gpu_emulation import tensor_maps
from tests.gpu_emulation.emulator import SCHEDULES, aligned, needs_emulator
from tests.gpu_emulation.ptx import library
from tests.gpu_emulation.tests.test_ptx_bulk import (
    ADD,
    BEGIN,
    BOXED,
    COMMIT,
    DONE,
    END,
    GIVE,
    INIT,
    OF_MAP,
    OTHERS,
    PROXY,
    READ,
    STORE,
    WAYS,
    of_map,
    store,
    wait,
)
from tests.gpu_emulation.tests.test_ptx_hopper import Tensor
from tests.gpu_emulation.tests.test_ptx_products import HEADER, SHARED
from tests.gpu_emulation.tests.test_ptx_values import as_aligned, entry

pytestmark = needs_emulator
LANES = 64
named = pytest.mark.parametrize

# --- one block ------------------------------------------------------------------------------------

ALL_PROXIES, BARRIER = "fence.proxy.async;", "bar.sync 0;"
LEADS = "and.b32 %i, %t, 31; setp.eq.u32 %p0, %i, 0;"
FILL = "st.shared.v4.b32 [%w], {%t, %t, %t, %t};"
# The first lane of each warp asks for the 512 bytes of its warp.
ASK, SUM = f"@%p0 {STORE} [%o], [%w], 512;", f"@%p0 {ADD} [%o], [%w], 512;"
ASKED = f"{GIVE} {ASK} @%p0 {COMMIT}"
OVER = "st.shared.b32 [%w], %t;"
TARGET = "st.global.b32 [%o], %t;"
TO_SHARED = f"cp.async.bulk.shared::cta.global.{END}"
READY = f"@%first {INIT} [%bar], 1; {BARRIER}"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar],"
RIGHT = {
    "fence_of_the_writer": f"{LEADS} {FILL} {PROXY} {BARRIER} {ASK} @%p0 {COMMIT} @%p0 {READ}",
    "fence_of_who_asks": f"{LEADS} {FILL} {BARRIER} {PROXY} {ASK} @%p0 {COMMIT} @%p0 {READ}",
    "reused_after_the_wait": f"{ASKED} @%p0 {READ} {BARRIER} {OVER}",
    "target_stored_before": f"{TARGET} {ALL_PROXIES} {BARRIER} {ASKED} @%p0 {READ}",
    "target_read_before": f"{OTHERS} {BARRIER} {ASKED} @%p0 {READ}",
    "added_over_stores": f"{TARGET} {ALL_PROXIES} {BARRIER} {GIVE} {SUM} @%p0 {COMMIT} @%p0 {READ}",
    "added_twice_at_once": f"{GIVE} {SUM} {SUM} @%p0 {COMMIT} @%p0 {READ}",
    "stored_again_after_the_wait": f"{ASKED} @%p0 {DONE} {ASK} @%p0 {COMMIT} @%p0 {READ}",
    "no_groups": f"{COMMIT} {COMMIT} {READ} {DONE}",
    "exits_after_an_empty_group": f"{COMMIT}",
}
WRONG = {
    "no_proxy_fence": (
        f"{LEADS} {FILL} {BARRIER} {ASK} @%p0 {COMMIT} @%p0 {READ}",
        r"NO PROXY FENCE at shared byte \d+: thread \d+ \(st.*, then a bulk copy of thread \d+",
    ),
    "proxy_fence_too_early": (
        f"{LEADS} {PROXY} {FILL} {BARRIER} {ASK} @%p0 {COMMIT} @%p0 {READ}",
        "NO PROXY FENCE at shared byte",
    ),
    "no_barrier": (
        f"{LEADS} {FILL} {PROXY} {ASK} @%p0 {COMMIT} @%p0 {READ}",
        "RACE write/read.*then a bulk copy|UNINITIALISED.*bulk copy",
    ),
    "never_written": (f"{LEADS} {ASK} @%p0 {COMMIT} @%p0 {READ}", "UNINITIALISED at shared byte"),
    "reused_in_flight": (
        f"{ASKED} @%p0 {OVER} @%p0 {READ}",
        r"SOURCE CHANGED IN FLIGHT at shared byte \d+: a bulk copy of thread (\d+) .*thread \1 ",
    ),
    "reused_by_others": (
        f"{ASKED} {BARRIER} {OVER} @%p0 {READ}",
        "SOURCE CHANGED IN FLIGHT at shared",
    ),
    "reused_when_one_alone_knows": (
        f"{ASKED} {BARRIER} @%p0 {READ} {OVER}",
        "SOURCE CHANGED IN FLIGHT at shared|RACE read/write",
    ),
    "reused_by_a_copy": (
        f"{READY} {ASKED} {EXPECT} 16; @%first {TO_SHARED} [%m], [%a], 16, [%bar]; @%p0 {READ} "
        f"{wait('%bar', 0)}".replace(EXPECT, f"@%first {EXPECT}"),
        "SOURCE CHANGED IN FLIGHT at shared.*then an arrival at mbarrier",
    ),
    "one_group_too_few": (
        f"{ASKED} @%p0 cp.async.bulk.wait_group.read 1; @%p0 {OVER} @%p0 {READ}",
        "SOURCE CHANGED IN FLIGHT at shared",
    ),
    "never_committed": (f"{GIVE} {ASK} @%p0 {READ}", "exits with bulk copies that no group holds"),
    "exits_before_it_is_read": (
        f"{ASKED}",
        r"cp.async.bulk.global.* in line \d+ of .*: its thread exits before it has read shared",
    ),
    "exits_after_an_older_wait": (
        f"{ASKED} @%p0 {DONE} {ASK} @%p0 {COMMIT} @%p0 cp.async.bulk.wait_group.read 1;",
        "its thread exits before it has read shared",
    ),
    "target_read_in_flight": (
        f"{ASKED} @%p0 ld.global.b32 %s0, [%o]; @%p0 {DONE}",
        "READ IN FLIGHT at global address .*: a bulk copy of thread",
    ),
    "target_read_after_reads_alone": (
        f"{ASKED} @%p0 {READ} @%p0 ld.global.b32 %s0, [%o];",
        "READ IN FLIGHT at global address .*: a bulk copy of thread",
    ),
    "target_read_by_others": (
        f"{ASKED} @%p0 {DONE} {OTHERS}",
        "(RACE (write/read|read/write)|READ IN FLIGHT) at global",
    ),
    "target_stored_in_flight": (
        f"{ASKED} @%p0 {TARGET} @%p0 {READ}",
        "WRITE IN FLIGHT at global address .*: a bulk copy of thread",
    ),
    "target_stored_without_a_fence": (
        f"{TARGET} {BARRIER} {ASKED} @%p0 {READ}",
        "NO PROXY FENCE at global address",
    ),
    "target_stored_with_a_fence_of_shared": (
        f"{TARGET} {PROXY} {BARRIER} {ASKED} @%p0 {READ}",
        "NO PROXY FENCE at global address",
    ),
    "target_read_at_any_time": (
        f"{OTHERS} {ASKED} @%p0 {READ}",
        "RACE (read/write|write/read)|READ IN FLIGHT",
    ),
    "stored_twice_at_once": (
        f"{GIVE} {ASK} {ASK} @%p0 {COMMIT} @%p0 {READ}",
        r"WRITE IN FLIGHT at global .*: a bulk copy of thread (\d+) .*a bulk copy of thread \1 ",
    ),
    "added_over_a_store_in_flight": (
        f"{GIVE} {ASK} {SUM} @%p0 {COMMIT} @%p0 {READ}",
        "RACE with an atomic at global .*then a bulk copy",
    ),
    "added_over_stores_without_a_fence": (
        f"{TARGET} {BARRIER} {GIVE} {SUM} @%p0 {COMMIT} @%p0 {READ}",
        "NO PROXY FENCE at global address",
    ),
    "sum_read_in_flight": (
        f"{GIVE} {SUM} @%p0 {COMMIT} @%p0 {READ} @%p0 ld.global.b32 %s0, [%o];",
        "RACE with an atomic at global|READ IN FLIGHT",
    ),
    "misaligned_source": (
        f"{GIVE} @%p0 {STORE} [%o], [%w+8], 16;",
        r"16 bytes from \d+ to 0x.*, expected multiples of 16",
    ),
    "misaligned_target": (f"{GIVE} @%p0 {STORE} [%o+8], [%w], 16;", "16 bytes at 0x.* misaligned"),
    "misaligned_size": (f"{GIVE} @%p0 {STORE} [%o], [%w], 24;", "24 bytes from .*multiples of 16"),
    "no_bytes": (f"{GIVE} @%p0 {STORE} [%o], [%w], 0;", "0 bytes from .*multiples of 16"),
    "past_shared": (f"{GIVE} @%p0 {STORE} [%o], [%w], 8192;", r"16 bytes at \d+, of 4096"),
    "target_in_shared": (
        f"{GIVE} cvt.u64.u32 %d0, %m; cvta.shared.u64 %d0, %d0; @%p0 {STORE} [%d0], [%w], 16;",
        "its target, 0x.*, is not in global memory",
    ),
    "nowhere": (
        f"{GIVE} mov.b64 %d0, 0x100000; @%p0 {STORE} [%d0], [%w], 16; @%p0 {COMMIT} @%p0 {READ}",
        "16 bytes that are no memory",
    ),
    "sum_nowhere": (
        f"{GIVE} mov.b64 %d0, 0x100000; @%p0 {ADD} [%d0], [%w], 16; @%p0 {COMMIT} @%p0 {READ}",
        "16 bytes that are no memory",
    ),
    "loaded_from_misaligned": (
        f"{READY} @%first {TO_SHARED} [%m], [%a+8], 16, [%bar];",
        "16 bytes at 0x.* are misaligned",
    ),
    "loaded_to_misaligned": (
        f"{READY} @%first {TO_SHARED} [%m+8], [%a], 16, [%bar];",
        r"16 bytes from 0x.* to \d+, expected multiples of 16",
    ),
    "loaded_size": (f"{READY} @%first {TO_SHARED} [%m], [%a], 8, [%bar];", "8 bytes from 0x"),
    "loaded_past_shared": (
        f"{READY} @%first {TO_SHARED} [%m+4080], [%a], 32, [%bar];",
        "16 bytes at 4096, of 4096",
    ),
    "loaded_from_shared": (
        f"{READY} cvt.u64.u32 %d0, %m; cvta.shared.u64 %d0, %d0; "
        f"@%first {TO_SHARED} [%m+16], [%d0], 16, [%bar];",
        "its source, 0x.*, is not in global memory",
    ),
    "loaded_in_flight": (
        f"{READY} @%first {EXPECT} 16; @%first {TO_SHARED} [%m], [%a], 16, [%bar]; {BARRIER} "
        f"ld.shared.b32 %s0, [%m]; {wait('%bar', 0)}",
        "(READ IN FLIGHT|RACE write/read) at shared byte 0: an arrival at mbarrier",
    ),
    "loaded_and_never_waited_for": (
        f"{READY} @%first {EXPECT} 16; @%first {TO_SHARED} [%m], [%a], 16, [%bar];",
        "ends with bulk copies in flight: no thread has waited for those of cp.async.bulk.shared",
    ),
}

# --- maps in parameters ---------------------------------------------------------------------------

# One box of 16 x 8 elements of 2 bytes, of which this is a thread's part.
ONE = f"""ld.global.b32 %at0, [%c]; ld.global.b32 %at1, [%c+4]; setp.lt.u32 %p2, %t, 16;
@%p2 st.shared.v4.b32 [%w], {{%t, %t, %t, %t}}; {PROXY} {BARRIER} """
ASK_BOX = f"@%first {store(2)} @%first {COMMIT} @%first {READ}"
LOCAL = "".join(
    f"ld.param.v2.b64 {{%d0, %d1}}, [map+{i}]; st.local.v2.b64 [copy+{i}], {{%d0, %d1}};"
    for i in range(0, 128, 16)
)
BOXES = {  # {case: (code, the error or None)}
    "box": (ONE + ASK_BOX, None),
    "misaligned_box": (
        f"{ONE} add.s32 %to, %to, 16; {ASK_BOX}",
        r"its source, \d+, is no multiple of 128",
    ),
    "box_past_shared": (f"{ONE} add.s32 %to, %to, 3968; {ASK_BOX}", r"16 bytes at \d+, of 4096"),
    "coordinates_of_three": (
        f"{ONE} mov.b32 %at2, 0; @%first {store(3)} @%first {COMMIT}",
        "3 coordinates, its tensor map has 2",
    ),
    "map_in_local_memory": (
        f".local .align 64 .b8 copy[128]; {ONE} {LOCAL} mov.b64 %map, copy; "
        f"cvta.local.u64 %map, %map; {ASK_BOX}",
        "no tensor map that this block published, and no parameter, is at 0x",
    ),
    "map_in_global_memory": (
        f"{ONE} ld.param.u64 %map, [out]; {ASK_BOX}",
        "no tensor map that this block published, and no parameter, is at 0x",
    ),
    "part_of_a_parameter": (
        f"{ONE} add.s64 %map, %map, 64; {ASK_BOX}",
        "no tensor map that this block published, and no parameter, is at 0x",
    ),
    "misaligned_map": (
        f"{ONE} add.s64 %map, %map, 16; {ASK_BOX}",
        "64 bytes at 0x.* are misaligned",
    ),
    "map_of_eights": (ONE + ASK_BOX, "64 bytes at 0x.* are misaligned"),
    "box_without_a_fence": (
        f"{ONE.replace(PROXY, '')} {ASK_BOX}",
        "NO PROXY FENCE at shared byte .* a bulk copy of thread 0",
    ),
    "box_never_waited_for": (
        f"{ONE} {ASK_BOX.replace(READ, '')}".replace("@%first  ", ""),
        "its thread exits before it has read shared memory",
    ),
    "box_read_in_flight": (
        f"{ONE} {ASK_BOX} ld.param.u64 %d0, [given]; @%first ld.global.b16 %h, [%d0+72];",
        "READ IN FLIGHT at global address .*: a bulk copy of thread 0",
    ),
}


def kernel_of_box(name):
    code = of_map(name, [".reg .b16 %h;", BEGIN, OF_MAP, BOXES[name][0]], BOXED)
    # A structure of numbers may lie at any multiple of 8.
    return (
        code.replace(".align 64 .b8 map", ".align 8 .b8 map") if name == "map_of_eights" else code
    )


# --- two blocks -----------------------------------------------------------------------------------

FLAG = "ld.param.u64 %d2, [flag];"
BLOCKS = "mov.u32 %q, %ctaid.x; setp.eq.u32 %p3, %q, 0;"
SPIN = "$spin: ld.acquire.gpu.global.u32 %s0, [%d2]; setp.eq.u32 %p1, %s0, 0; @%p1 bra $spin;"
RELEASE = "st.release.gpu.global.u32 [%d2], 1;"
# Block 1 stores 512 bytes for block 0, which reads them.
HANDED = f"""{FLAG} {BLOCKS} {LEADS} @!%p3 bra $gives; {SPIN} ld.param.u64 %d0, [out];
ld.global.b32 %s1, [%d0]; st.global.b32 [%o+2048], %s1; ret; $gives: {FILL} {PROXY} {BARRIER}
@!%first bra $end; ld.param.u64 %d0, [out]; {STORE} [%d0], [%m], 512; {COMMIT} WAIT {RELEASE}
$end:"""
# Block 0 waits for block 1, and all threads of block 1 for bytes.
SPINNING = f"""{FLAG} {BLOCKS} {READY} @!%p3 bra $waits; {SPIN} ret; $waits:
@%first {EXPECT} 16; @%first {TO_SHARED} [%m], [%a], 16, [%bar]; {wait("%bar", 0)}
ld.shared.b32 %s1, [%m]; @%first st.global.b32 [%o], %s1; bar.sync 0; @%first {RELEASE}"""
TWO = {
    "handed_over": HANDED.replace("WAIT", DONE),
    "handed_over_after_reads_alone": HANDED.replace("WAIT", READ),
    "spinning": SPINNING,
}


def made(emulator):
    kernels = [entry(x, "given out", [BEGIN, code], "") for x, code in RIGHT.items()]
    kernels += [entry(f"w_{x}", "given out", [BEGIN, code], "") for x, (code, _) in WRONG.items()]
    kernels += map(kernel_of_box, BOXES)
    kernels += [entry(x, "given out flag", [BEGIN, code], "") for x, code in TWO.items()]
    return library.Executor(emulator, HEADER + SHARED + "".join(kernels))


@pytest.fixture(scope="module")
def executor():
    return made(tensor_maps.with_driver())


def run(executor, name, **options):
    given = as_aligned(np.arange(LANES * 4, dtype=np.uint32))
    arguments = [given, aligned(LANES * 8, np.uint32)]
    return executor.launch(name, (1,), (LANES,), 4096, arguments, **options)


@named("name", RIGHT)
def test_correct_copies_pass(executor, name):
    for schedule, lazy in WAYS:
        run(executor, name, schedule=schedule, lazy=lazy).none()


@named("name", WRONG)
def test_a_misuse_of_copies_is_named(executor, name):
    for schedule, lazy in WAYS:
        found = run(executor, f"w_{name}", schedule=schedule, lazy=lazy)
        assert found.count and re.search(WRONG[name][1], found.first), found.first


def store_box(executor, name, map=None, **options):
    tensor = Tensor((19, 11), (16, 8), 2, 0, np.random.default_rng(0))
    map = tensor_maps.of_tensor(executor.emulator, tensor) if map is None else map
    in_memory, at = aligned(128, np.uint8, 64), as_aligned(np.array([2, 1, 0, 0], np.int32))
    in_memory[:] = np.frombuffer(map, np.uint8)
    numbers = [x.to_bytes(8, "little") for x in (256, 0, 1)]
    arguments = [map, tensor.memory, in_memory, at, *numbers]
    return executor.launch(name, (1,), (LANES,), 4096, arguments, **options)


@named("name", BOXES)
def test_a_misuse_of_boxes_is_named(executor, name):
    expected = BOXES[name][1]
    for schedule, lazy in WAYS:
        found = store_box(executor, name, schedule=schedule, lazy=lazy)
        assert bool(found.count) == bool(expected), found.first
        assert not expected or re.search(expected, found.first), found.first


def test_a_map_that_nobody_encoded_is_named(executor):
    for map in (bytes(128), bytes(range(128))):
        found = store_box(executor, "box", map)
        assert "is no tensor map that cuTensorMapEncodeTiled made" in found.first


def run_two(executor, name, **options):
    given = as_aligned(np.arange(7, 7 + LANES * 4, dtype=np.uint32))
    out, flag = aligned(LANES * 16, np.uint32), aligned(4, np.uint32)
    found = executor.launch(name, (2,), (LANES,), 4096, [given, out, flag], **options)
    return found, out


def test_stores_are_handed_to_another_block(executor):
    """After a wait for the writes, by release and acquire. After one for the reads the other block
    reads in flight, if it was not too early for that."""
    for schedule, lazy in WAYS:
        run_two(executor, "handed_over", schedule=schedule, lazy=lazy)[0].none()
        found, _ = run_two(executor, "handed_over_after_reads_alone", schedule=schedule, lazy=lazy)
        assert re.search("RACE write/read at global .*: a bulk copy of thread", found.first)


def test_copies_of_a_block_land_while_another_spins(executor):
    for schedule in SCHEDULES:
        for seed in range(3):
            found, out = run_two(executor, "spinning", schedule=schedule, seed=seed)
            assert not found.count and out[0] == 7, found.first
