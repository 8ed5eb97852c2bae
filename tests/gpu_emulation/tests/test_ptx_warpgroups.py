"""What warpgroups share in the PTX translator: registers (setmaxnreg) and named barriers.

The rules are those of the PTX ISA; the number of registers at a launch is compared with ptxas's.
"""

import re
import subprocess

import pytest

from bench.static_gpu import ptxas
from tests.gpu_emulation.emulator import SCHEDULES, Emulator, needs_emulator
from tests.gpu_emulation.ptx import cpp, library, ours, text
from tests.gpu_emulation.tests.test_ptx_products import HEADER, SHARED

pytestmark = needs_emulator
named = pytest.mark.parametrize

BEGIN = """
.reg .b32 %t, %m, %w, %g, %lane, %warp, %s<4>; .reg .pred %p<4>, %of<4>, %first; .reg .b64 %d<4>;
mov.u32 %t, %tid.x; mov.u32 %m, memory; mad.lo.s32 %w, %t, 4, %m; shr.u32 %g, %t, 7;
and.b32 %lane, %t, 31; shr.u32 %warp, %t, 5; setp.eq.u32 %first, %lane, 0;
setp.eq.u32 %of0, %g, 0; setp.eq.u32 %of1, %g, 1; setp.eq.u32 %of2, %g, 2; setp.eq.u32 %of3, %g, 3;
"""
BARRIER = "bar.sync 0;"


def more(count):
    return f"setmaxnreg.inc.sync.aligned.u32 {count};"


def fewer(count):
    return f"setmaxnreg.dec.sync.aligned.u32 {count};"


def each(*codes):
    """A branch of each warpgroup, after which they come together."""
    lines = [f"@%of{i} bra $group{i};" for i in range(len(codes))]
    lines += [f"$group{i}: {code} bra.uni $end;" for i, code in enumerate(codes)]
    return "\n".join([*lines, "$end:"])


def bounds(threads, blocks=1):
    return f".maxntid {threads}, 1, 1\n.minnctapersm {blocks}"


# --- registers ------------------------------------------------------------------------------------

OF_384 = bounds(384)  # 168 registers a thread
LAST_WARP = "setp.eq.u32 %p0, %warp, 3;"
REGISTERS = {  # {case: (threads, bounds, code, the error or None)}
    "producer_of_two": (384, OF_384, each(fewer(24), more(240), more(240)), None),
    "producer_of_three": (
        512,
        bounds(512),
        each(fewer(32), more(160), more(160), more(160)),
        None,
    ),
    "by_maxnreg": (384, ".maxnreg 168", each(fewer(40), more(232), more(232)), None),
    "by_required_threads": (
        384,
        ".reqntid 384, 1, 1\n.minnctapersm 1",
        each(fewer(24), more(240), more(240)),
        None,
    ),
    "unchanged": (384, OF_384, each(fewer(168), more(168), more(168)), None),
    "later_returned": (
        384,
        OF_384,
        each(
            fewer(24),
            f"{more(240)} bar.sync 1, 128; {fewer(24)}",
            f"{more(240)} bar.sync 2, 128; {fewer(96)}",
        ),
        None,
    ),
    "waits_for_another_consumer": (
        384,
        OF_384,
        each(
            fewer(24),
            f"{more(256)} bar.sync 1, 128; {fewer(64)} bar.arrive 2, 256;",
            f"bar.sync 2, 256; {more(256)}",
        ),
        None,
    ),
    "two_blocks_for_each_multiprocessor": (256, bounds(256, 2), each(fewer(24), more(232)), None),
    # (80 + 2 x 224) x 128 of 64,512.
    "too_many_in_all": (
        384,
        OF_384,
        each(fewer(80), more(224), more(224)),
        r"DEADLOCK: .* at setmaxnreg.inc.* in line \d+ of .*; \d+ registers of the block's pool "
        r"are free, \d warps wait for \d+",
    ),
    "eight_too_many": (384, OF_384, each(fewer(24), more(240), more(248)), "DEADLOCK.*setmaxnreg"),
    "nothing_returned": (
        384,
        OF_384,
        each("", more(240), more(240)),
        "DEADLOCK: no thread can run; 128 at setmaxnreg.inc.*, 128 have exited; 0 registers of the "
        "block's pool are free, 8 warps wait for 18432",
    ),
    "half_for_each_of_two_blocks": (
        256,
        bounds(256, 2),
        each(fewer(24), more(240)),
        "DEADLOCK.*setmaxnreg",
    ),
    "below_24": (128, bounds(128), fewer(16), "16 registers, expected a multiple of 8 from 24 to"),
    "above_256": (128, bounds(128), more(264), "264 registers, expected a multiple of 8 from 24"),
    "not_of_eight": (128, bounds(128), fewer(100), "100 registers, expected a multiple of 8"),
    "fewer_by_inc": (
        384,
        OF_384,
        more(160),
        "160 registers, expected no less than the 168 that",
    ),
    "more_by_dec": (
        384,
        OF_384,
        fewer(176),
        "176 registers, expected no more than the 168 that",
    ),
    "no_bounds": (128, "", fewer(24), "neither .maxnreg nor .minnctapersm, and ptxas ignores it"),
    "bounds_of_threads_alone": (128, ".maxntid 128, 1, 1", fewer(24), "and ptxas ignores it"),
    "an_absent_warp": (
        128,
        bounds(128),
        f"{LAST_WARP} @%p0 bra $end; {fewer(24)} $end:",
        "warps of a warpgroup have diverged: warp 3 ends after 0 of setmaxnreg, warp 0 after 1",
    ),
    "two_places": (
        128,
        bounds(128),
        f"{LAST_WARP} @%p0 bra $other; {fewer(24)} bra $end; \n$other: {fewer(24)} $end:",
        r"warps of a warpgroup have diverged: warp \d is at setmaxnreg.dec.*, warp \d was at",
    ),
    "three_warps": (
        96,
        bounds(96),
        fewer(24),
        r"warp \d of 3, expected one of a whole warpgroup of four",
    ),
    "some_lanes": (
        128,
        bounds(128),
        f"setp.lt.u32 %p0, %lane, 16; @%p0 {fewer(24)}",
        "DEADLOCK.*setmaxnreg|diverged",
    ),
    "not_synchronised": (
        128,
        bounds(128),
        f"{fewer(40)} {fewer(24)}",
        r"warp \d has not synchronised with warp \d since the setmaxnreg before",
    ),
    "unchanged_without_a_barrier": (
        384,
        OF_384,
        each(f"{fewer(24)} {fewer(24)}", *[f"{more(240)} {more(240)}"] * 2),
        None,
    ),
    "synchronised": (128, bounds(128), f"{fewer(40)} {BARRIER} {more(64)}", None),
}

# --- barriers -------------------------------------------------------------------------------------

# Warpgroup 0 gives each thread of warpgroup 1 a number, and takes it back, twice.
GIVES = "st.shared.b32 [%w], %t; bar.arrive 1, 256; bar.sync 2, 256;"
TAKES = "bar.sync 1, 256; ld.shared.b32 %s0, [%w+-512]; bar.arrive 2, 256;"
COUNTS = r"barrier 1 for \d+ threads, others wait there for \d+"
BARRIERS = {  # {case: (the code of each warpgroup, the error or None)}
    "in_turns": ((f"{GIVES} {GIVES}", f"{TAKES} {TAKES}"), None),
    "of_each": (("bar.sync 1, 128;", "bar.sync 2, 128;"), None),
    "counts_of_arrivals_differ": (
        (GIVES.replace("arrive 1, 256", "arrive 1, 128"), TAKES),
        f"{COUNTS}|DEADLOCK",
    ),
    "counts_of_waits_differ": (
        (GIVES, TAKES.replace("sync 1, 256", "sync 1, 128")),
        f"{COUNTS}|RACE|UNINITIALISED",
    ),
    "count_of_more": (
        (GIVES.replace("arrive 1, 256", "arrive 1, 384"), TAKES.replace("1, 256", "1, 384")),
        "1: 384 threads, expected whole warps of a block of 256|"
        "384 threads, expected whole warps of a block of 256",
    ),
    "count_of_lanes": (("bar.sync 1, 72;", ""), "72 threads, expected whole warps"),
    "nobody_arrives": (
        (GIVES.replace("bar.arrive 1, 256;", ""), TAKES),
        r"DEADLOCK: .* 128 at bar.sync .*.barrier 2., 128 at bar.sync .*.barrier 1.",
    ),
    "another_barrier": (
        (GIVES.replace("arrive 1", "arrive 3"), TAKES),
        r"DEADLOCK: .* 128 at bar.sync .*.barrier 2., 128 at bar.sync .*.barrier 1.",
    ),
    "not_taken_back": (
        (f"{GIVES.replace('bar.sync 2, 256;', '')} {GIVES}", f"{TAKES} {TAKES}"),
        "RACE|DEADLOCK|UNINITIALISED",
    ),
    "one_warp_is_absent": (
        (f"setp.eq.u32 %p0, %warp, 2; @%p0 bra $end; {GIVES}", TAKES),
        "DEADLOCK",
    ),
}


def kernel(name, directives, code):
    """A kernel without parameters."""
    body = f"{BEGIN}\n{code}\nret;"
    return f".visible .entry {name}()\n{directives}\n{{\n{body}\n}}\n"


def made(emulator):
    kernels = [kernel(f"r_{x}", of, code) for x, (_, of, code, _) in REGISTERS.items()]
    kernels += [kernel(f"b_{x}", bounds(256), each(*codes)) for x, (codes, _) in BARRIERS.items()]
    return library.Executor(emulator, HEADER + SHARED + "".join(kernels))


@pytest.fixture(scope="module")
def executor():
    return made(Emulator())


def judge(executor, name, threads, expected):
    for schedule in SCHEDULES:
        for seed in range(3):
            found = executor.launch(name, (2,), (threads,), 4096, [], schedule=schedule, seed=seed)
            assert bool(found.count) == bool(expected), found.first
            assert not expected or re.search(expected, found.first), found.first


@named("name", REGISTERS)
def test_registers_of_warpgroups(executor, name):
    threads, _, _, expected = REGISTERS[name]
    judge(executor, f"r_{name}", threads, expected)


@named("name", BARRIERS)
def test_barriers_of_warpgroups(executor, name):
    judge(executor, f"b_{name}", 256, BARRIERS[name][1])


BOUNDS = [bounds(128), bounds(256), bounds(320), bounds(384), bounds(512), bounds(256, 2)]
BOUNDS += [bounds(160, 3), bounds(128, 3), ".reqntid 384, 1, 1\n.minnctapersm 1"]
BOUNDS += [".maxnreg 168", ".maxntid 384, 1, 1\n.maxnreg 96"]
UNKNOWN = [".reqntid 384, 1, 1", ".maxntid 384, 1, 1", ""]


@ours.needs_nvcc
def test_registers_at_a_launch_are_those_of_ptxas(tmp_path):
    """Where there is a setmaxnreg, ptxas uses all that .maxnreg gives, or .minnctapersm; without
    these it ignores the instruction. It reports 255 of 256, and .maxnreg as it is."""
    every = [*BOUNDS, *UNKNOWN]
    kernels = [kernel(f"k{i}", x, fewer(24)) for i, x in enumerate(every)]
    module = HEADER + SHARED + "".join(kernels)
    (tmp_path / "k.ptx").write_text(module)
    ptxas_of = [ptxas.nvcc(), "-cubin", "-arch=sm_90a", "-Xptxas", "-v", tmp_path / "k.ptx"]
    done = subprocess.run(
        [*ptxas_of, "-o", tmp_path / "k"], capture_output=True, text=True, check=True
    )
    pattern = r"entry function 'k(\d+)'(?:(?!entry function).)*?Used (\d+) registers"
    used = {int(i): int(n) for i, n in re.findall(pattern, done.stderr, re.S)}
    assert done.stderr.count("'setmaxnreg' ignored") == len(UNKNOWN)
    found = [cpp.registers(x) for x in text.kernels(module).values()]
    assert found[len(BOUNDS) :] == [0] * len(UNKNOWN)
    assert [min(x, 255) for x in found[: len(BOUNDS)]] == [used[i] for i in range(len(BOUNDS))]
