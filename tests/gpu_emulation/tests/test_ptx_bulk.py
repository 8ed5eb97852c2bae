"""Bulk copies in the PTX translator: from shared memory to tensors and to contiguous memory, sums,
and contiguous bytes to shared memory.

Boxes are checked against numpy and the swizzles of PyPI's tensor-layouts, the rest against the PTX
ISA. Maps are those of the host, in a parameter. Misuses are in test_ptx_bulk_misuse.py.
"""

import numpy as np
import pytest

from tests.gpu_emulation import tensor_maps
from tests.gpu_emulation.emulator import SCHEDULES, aligned, needs_emulator
from tests.gpu_emulation.ptx import library
from tests.gpu_emulation.tests.test_ptx_hopper import (
    BEGIN,
    INIT,
    SHAPES,
    Tensor,
    coordinates_of,
    wait,
)
from tests.gpu_emulation.tests.test_ptx_products import HEADER, SHARED
from tests.gpu_emulation.tests.test_ptx_values import as_aligned, entry

pytestmark = needs_emulator
LANES = 64
named = pytest.mark.parametrize
WAYS = [(schedule, lazy) for schedule in SCHEDULES for lazy in (False, True)]

# --- kernels --------------------------------------------------------------------------------------

COMMIT, PROXY = "cp.async.bulk.commit_group;", "fence.proxy.async.shared::cta;"
READ, DONE = "cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 0;"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
END = "mbarrier::complete_tx::bytes"
MAP = ".param .align 64 .b8 map[128]"
# %map is the address of the map; %c and %x, those of coordinates and of the given bytes.
OF_MAP = """
.reg .b64 %map, %c, %x; .reg .b32 %to, %bytes, %at<5>; mov.b64 %map, map;
cvta.param.u64 %map, %map; ld.param.u64 %c, [at]; ld.param.u64 %x, [bytes];
cvt.u32.u64 %bytes, %x; ld.param.u64 %x, [skip]; cvt.u32.u64 %to, %x; add.s32 %to, %to, %m;
ld.param.u64 %x, [count]; cvt.u32.u64 %i, %x;
"""
# All threads copy the given bytes of all boxes to shared memory.
FILL = """
mul.lo.s32 %q, %bytes, %i; mov.u32 %s7, %t; $fill: mul.lo.s32 %s6, %s7, 16;
setp.ge.u32 %p0, %s6, %q; @%p0 bra $filled; ld.param.u64 %x, [given]; cvt.u64.u32 %d0, %s6;
add.s64 %x, %x, %d0; ld.global.v4.b32 {%s0, %s1, %s2, %s3}, [%x]; add.s32 %s5, %to, %s6;
st.shared.v4.b32 [%s5], {%s0, %s1, %s2, %s3}; add.s32 %s7, %s7, 64; bra $fill; $filled:
"""
BOXED = "map given out at bytes skip count"


def of_map(name, lines, pointers=BOXED):
    return entry(name, pointers, lines, "").replace(".param .u64 map", MAP)


def store(rank, source="%to", tile=""):
    at = ", ".join(f"%at{i}" for i in range(rank))
    name = f"cp.async.bulk.tensor.{rank}d.global.shared::cta{tile}.bulk_group"
    return f"{name} [%map, {{{at}}}], [{source}];"


def stores(rank):
    """A kernel: its first thread stores boxes, one group for each."""
    coordinates = "".join(f"ld.global.b32 %at{i}, [%c+{4 * i}];" for i in range(rank))
    return f"""{OF_MAP} {FILL} {PROXY} bar.sync 0; @!%first bra $end; $next: {coordinates}
    {store(rank, tile=".tile" if rank == 2 else "")} {COMMIT}
    add.s32 %to, %to, %bytes; add.s64 %c, %c, 32; add.s32 %i, %i, -1;
    setp.ne.s32 %p0, %i, 0; @%p0 bra $next; {READ} $end:"""


def loads(space):
    """A kernel that loads contiguous bytes in two pieces, and stores them as it got them."""
    load = f"cp.async.bulk.{space}.global.{END}"
    expect = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 1024;"
    return f"""
    @%first {INIT} [%bar], 1; bar.sync 0; @!%first bra $wait; {expect}
    {load} [%m+64], [%a], 64, [%bar]; {load} [%m+128], [%a+64], 896, [%bar];
    {load} [%m], [%a+960], 64, [%bar]; $wait: {wait("%bar", 0)}
    ld.shared.v4.b32 {{%s0, %s1, %s2, %s3}}, [%w];
    st.global.v4.b32 [%o], {{%s0, %s1, %s2, %s3}};"""


# Each thread gives 16 bytes; the first of each warp stores or adds those of the warp.
GIVE = f"""ld.global.v4.b32 {{%s0, %s1, %s2, %s3}}, [%a]; st.shared.v4.b32 [%w], {{%s0, %s1, %s2,
%s3}}; {PROXY} bar.warp.sync -1; and.b32 %i, %t, 31; setp.eq.u32 %p0, %i, 0;"""
OTHERS = "xor.b32 %s7, %t, 63; mul.wide.u32 %at, %s7, 16; ld.param.u64 %d0, [out];"
OTHERS += "add.s64 %d0, %d0, %at; ld.global.v4.b32 {%s0, %s1, %s2, %s3}, [%d0];"
# In the second kilobyte of `out`.
KEEP = "st.global.v4.b32 [%o+1024], {%s0, %s1, %s2, %s3};"
RIGHT = {
    "bytes": f"{GIVE} @!%p0 bra $end; {STORE} [%o], [%w], 512; {COMMIT} {READ} $end:",
    "sums": f"""{GIVE} @!%p0 bra $end; {ADD} [%o], [%w], 512; {COMMIT}
        {ADD} [%o], [%w], 256; {ADD} [%o], [%w], 256; {COMMIT} {DONE} $end:""",
    "seen_after_the_wait": f"""{GIVE} @!%p0 bra $end; {STORE} [%o], [%w], 512; {COMMIT} {DONE}
        $end: bar.sync 0; {OTHERS} {KEEP}""",
    "older_groups": f"""{GIVE} @!%p0 bra $end; {STORE} [%o], [%w], 256; {COMMIT}
        {STORE} [%o+256], [%w+256], 256; {COMMIT} cp.async.bulk.wait_group 1;
        ld.global.v4.b32 {{%s0, %s1, %s2, %s3}}, [%o]; st.global.v4.b32 [%o+1024], {{%s0, %s1, %s2,
        %s3}}; {READ} $end:""",
    "reused": f"""{GIVE} @!%p0 bra $end; {STORE} [%o], [%w], 512; {COMMIT} {READ} $end:
        bar.warp.sync -1; st.shared.v4.b32 [%w], {{%i, %i, %i, %i}};""",
    "loaded_and_stored": f"""@%first {INIT} [%bar], 1; bar.sync 0; @!%first bra $wait;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 1024;
        cp.async.bulk.shared::cluster.global.{END} [%m], [%a], 1024, [%bar];
        $wait: {wait("%bar", 0)} setp.eq.u32 %p0, %t, 63; @!%p0 bra $end;
        {STORE} [%o+-1008], [%m], 1024; {COMMIT} {READ} $end:""",
}
KERNELS = {
    **{f"stores_{x}": of_map(f"stores_{x}", [BEGIN, stores(x)]) for x in SHAPES},
    **{
        f"loads_{i}": entry(f"loads_{i}", "given out", [BEGIN, loads(space)], "")
        for i, space in enumerate(("shared::cta", "shared::cluster"))
    },
    **{x: entry(x, "given out", [BEGIN, code], "") for x, code in RIGHT.items()},
}


def made(emulator):
    return library.Executor(emulator, HEADER + SHARED + "".join(KERNELS.values()))


@pytest.fixture(scope="module")
def executor():
    return made(tensor_maps.with_driver())


# --- boxes ----------------------------------------------------------------------------------------


def after(tensor, memory, coordinates, box):
    """A tensor's memory after a store of this box: bytes outside are dropped."""
    memory = as_aligned(memory)
    strides = [tensor.size, *tensor.strides][::-1]
    shape = (*tensor.dims[::-1], tensor.size)
    whole = np.lib.stride_tricks.as_strided(memory, shape, (*strides, 1))
    inside, of = [], []
    for at, count, dim in zip(coordinates[::-1], tensor.box[::-1], tensor.dims[::-1]):
        first, end = max(0, at), max(0, at, min(dim, at + count))
        inside.append(slice(first - at, end - at))
        of.append(slice(first, end))
    whole[tuple(of)] = box.reshape(*tensor.box[::-1], tensor.size)[tuple(inside)]
    return memory


def store_boxes(executor, tensor, coordinates, skip=0, **options):
    """(the tensor's memory, the expected one). Boxes are stored one after another."""
    layouts = pytest.importorskip("tensor_layouts")
    each, rank = tensor.bytes(), len(tensor.dims)
    given = as_aligned(tensor.g.integers(0, 256, each * len(coordinates), dtype=np.uint8))
    at = aligned(8 * len(coordinates), np.int32)
    for i, x in enumerate(coordinates):
        at[8 * i : 8 * i + rank] = x
    map = tensor_maps.of_tensor(executor.emulator, tensor)
    swizzle, expected = layouts.Swizzle(tensor.swizzle, 4, 3), tensor.memory
    for i, x in enumerate(coordinates):
        box = given[swizzle(skip + i * each + np.arange(each)) - skip]
        expected = after(tensor, expected, x, box)
    numbers = [x.to_bytes(8, "little") for x in (each, skip, len(coordinates))]
    shared = skip + each * len(coordinates)
    arguments = [map, given, bytes(8), at, *numbers]
    executor.launch(f"stores_{rank}", (1,), (LANES,), shared, arguments, **options).none()
    return tensor.memory, expected


def apart(tensor, count):
    """Coordinates of boxes that do not overlap: one inside or before the tensor, the others on
    other sides of it."""
    first, *rest = coordinates_of(tensor, 3)
    yield first
    yield tuple(x + n for x, n in zip(first, tensor.box))
    yield rest[-1]
    if count > 3:
        yield tuple(-b + 1 for b in tensor.box[:1]) + tuple(n + 9 for n in tensor.dims[1:])


@named("size", tensor_maps.TYPES)
@named("rank", SHAPES)
def test_boxes_are_stored(executor, rank, size):
    for seed, (schedule, lazy) in enumerate(WAYS):
        tensor = Tensor(*SHAPES[rank], size, 0, np.random.default_rng(seed))
        at = [*apart(tensor, 4)] if rank > 1 else [(-5,), (123,)]
        memory, expected = store_boxes(executor, tensor, at, schedule=schedule, lazy=lazy)
        assert np.array_equal(memory, expected)


@named("size", tensor_maps.TYPES)
@named("swizzle", [1, 2, 3], ids=lambda x: f"{16 << x}")
def test_swizzled_boxes_are_stored(executor, swizzle, size):
    row = (16 << swizzle) // size
    for skip in (0, 128, 384):
        for at in ((0, 0), (-3, 2), (2, -3), (1, 15)):
            tensor = Tensor((row + 3, 21), (row, 8), size, swizzle, np.random.default_rng(skip))
            memory, expected = store_boxes(executor, tensor, [at], skip)
            assert np.array_equal(memory, expected)


# --- contiguous bytes -----------------------------------------------------------------------------


def run(executor, name, given, out=None, **options):
    out = aligned(2 * LANES * 4, np.uint32) if out is None else out
    executor.launch(name, (1,), (LANES,), 4096, [as_aligned(given), out], **options).none()
    return out[: LANES * 4], out[LANES * 4 :]


def words():
    return np.random.default_rng(0).integers(0, 2**32, LANES * 4, dtype=np.uint32)


@named("name", ["loads_0", "loads_1"])
def test_bytes_are_loaded(executor, name):
    for schedule, lazy in WAYS:
        out, _ = run(executor, name, words(), schedule=schedule, lazy=lazy)
        assert np.array_equal(out, np.roll(words(), 16))


@named("name", [x for x in RIGHT if x != "sums"])
def test_bytes_are_stored(executor, name):
    for schedule, lazy in WAYS:
        out, seen = run(executor, name, words(), schedule=schedule, lazy=lazy)
        assert np.array_equal(out, words())
        if name == "seen_after_the_wait":
            assert np.array_equal(seen, words().reshape(LANES, 4)[::-1].ravel())
        if name == "older_groups":
            assert np.array_equal(seen.reshape(LANES, 4)[::32], words().reshape(LANES, 4)[::32])


def flushed(x):
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def test_sums_round_and_flush(executor):
    """By the ISA: to nearest even, subnormal numbers are zeros, in operands and results."""
    g = np.random.default_rng(1)
    given = g.standard_normal(LANES * 4).astype(np.float32)
    before = g.standard_normal(LANES * 4).astype(np.float32)
    tiny = np.float32(2.0**-130)
    for at in (0, 64):  # added three times, and once
        given[at:][:8] = [tiny, -tiny, 1, 2.0**-126, -0.0, np.inf, np.nan, -(2.0**-126)]
        before[at:][:8] = [2.0**-126, -0.0, tiny, -(1.5 * 2.0**-126), -tiny, 1, 1, 2.0**-126]
    expected = flushed(flushed(before) + flushed(given))
    half = np.arange(LANES * 4) % 128 < 64  # the first 256 bytes of a warp's: added three times
    for _ in range(2):
        expected = np.where(half, flushed(expected + flushed(given)), expected)
    for schedule, lazy in WAYS:
        out = aligned(2 * LANES * 4, np.float32)
        out[: LANES * 4] = before
        found, _ = run(executor, "sums", given, out, schedule=schedule, lazy=lazy)
        same = found.view(np.uint32) == expected.astype(np.float32).view(np.uint32)
        assert (same | (np.isnan(found) & np.isnan(expected))).all()
