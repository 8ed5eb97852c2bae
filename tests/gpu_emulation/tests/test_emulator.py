"""The emulator of CUDA kernels computes what the PTX ISA specifies, and reports misuse.

Expected results come from independent sources, never from the emulator's own formulas: the layouts
of PyPI's tensor-layouts (CuTe's algebra), numpy's float16 and float64, torch's bfloat16. The inputs
are those of probe.py. test_emulator_misuse.py tests that it finds errors in kernels.
Each fault seeded into the emulator must make at least one check fail.
"""

import faulthandler
import os
import re
import warnings

import numpy as np
import pytest
import torch

from tests.gpu_emulation import misuses, probe
from tests.gpu_emulation.emulator import KERNELS, Emulator, altered, needs_emulator
from tests.gpu_emulation.misuses import RIGHT, WRONG, check_right, check_wrong
from tests.gpu_emulation.tests import test_emulator_banks, test_emulator_misuse

pytestmark = [needs_emulator, pytest.mark.slow]
SOURCES = (probe.SOURCE, *misuses.SOURCES, test_emulator_banks.SOURCE)
OTHER_CHECKS = (
    test_emulator_misuse.test_unwritten_registers_have_all_bits_set,
    test_emulator_misuse.test_stores_of_one_value_race_unless_allowed,
    test_emulator_misuse.test_blocks_run_in_any_order,
    test_emulator_misuse.test_the_first_finding_is_kept,
    test_emulator_misuse.test_copies_in_flight_read_as_nan,
    test_emulator_banks.test_conflicts_are_counted,
    test_emulator_banks.test_the_swizzle_is_free_of_conflicts,
)


@pytest.fixture(scope="module")
def emulator():
    return Emulator(*SOURCES)


# --- conformance --------------------------------------------------------------------------------


def loaded(case):
    """The layout maps bits to registers of lanes."""
    layouts = pytest.importorskip("tensor_layouts.atoms_nv")
    transposed = case.what == probe.LOAD_TRANSPOSED
    atom = layouts.SM75_U16x8_LDSM_T if transposed else layouts.SM75_U32x4_LDSM_N
    source = case.inputs["words"].view(np.uint16).reshape(256, 8)[case.inputs["address"] // 16]
    bits = range(0, 128, 16)  # the layout maps (lane, bit) of source and of destination
    at = {int(atom.src_layout_bits(x, y)): source[x, y // 16] for x in range(32) for y in bits}
    found = [[at[int(atom.dst_layout_bits(x, y))] for y in bits] for x in range(32)]
    return np.array(found, np.uint16).view(np.uint32)


def copied(case):
    """Even lanes' 16 bytes arrive; odd lanes' bytes, which are marked invalid, become zeros."""
    expected = case.inputs["words"].reshape(256, 4)[case.inputs["address"] // 16]
    expected[1::2] = 0
    return expected


def multiplied(case):
    layouts = pytest.importorskip("tensor_layouts.atoms_nv")
    bfloat16 = case.what == probe.MULTIPLY_BF16
    kind = "BF16BF16" if bfloat16 else "F16F16"
    atom = getattr(layouts, f"SM80_16x8x16_F32{kind}F32_TN")

    def lanes(layout, count):
        return [[int(layout(x, y)) for y in range(count)] for x in range(32)]

    def matrix(name, layout, rows, columns):
        bits = case.inputs[name]
        if bits.dtype == np.uint32:
            bits = bits.view(np.uint16)
            bits = (bits.astype(np.uint32) << 16).view("f4") if bfloat16 else bits.view("f2")
        flat = np.empty(rows * columns)  # in float64, column by column
        flat[lanes(layout, len(flat) // 32)] = bits.reshape(32, -1)
        return flat.reshape(rows, columns, order="F")

    a, b = matrix("a", atom.a_layout, 16, 16), matrix("b", atom.b_layout, 8, 16)
    with np.errstate(invalid="ignore"):  # 0 times infinity
        d = (a[:, None] * b).sum(-1) + matrix("d", atom.c_layout, 16, 8)
    return d.flatten("F")[lanes(atom.c_layout, 4)].astype(np.float32).view(np.uint32)


def packed(case):
    """Each element packed with its neighbour: as the low half, then as the next high half."""
    x = case.inputs["d"].reshape(32, 4)
    if case.what == probe.PACK_F16:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            low = x.astype(np.float16).view(np.uint16)
    else:
        low = torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return np.stack([low, low[:, [1, 0, 3, 2]]], -1).reshape(32, 8).view(np.uint32)


def widened(case):
    halves = (case.inputs["a"] & 0xFFFF).astype(np.uint16).reshape(32, 4)
    if case.what == probe.WIDEN_F16:
        with np.errstate(invalid="ignore"):
            return halves.view(np.float16).astype(np.float32).view(np.uint32)
    return torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).float().numpy().view("u4")


def shuffled(case):
    lanes = np.arange(32) ^ case.inputs["b"][0]
    return case.inputs["d"].view(np.uint32).reshape(32, 4)[lanes]


def multiplied_whole(case):
    b = np.asarray(case.inputs["b"], np.uint64).reshape(32, 2)[:, :1]
    wide = case.inputs["a"].astype(np.uint64).reshape(32, 4) * b
    return (wide >> np.uint64(32 * (case.what == probe.PRODUCT_HIGH))).astype(np.uint32)


def added(case):
    b = np.asarray(case.inputs["b"], np.uint32).reshape(32, 2)[:, :1]
    return case.inputs["a"].astype(np.uint32).reshape(32, 4) + b


EXPECTED = {
    probe.FETCH_ADD: added,
    **dict.fromkeys([probe.PRODUCT_LOW, probe.PRODUCT_HIGH], multiplied_whole),
    **dict.fromkeys([probe.LOAD, probe.LOAD_TRANSPOSED], loaded),
    **dict.fromkeys([probe.MULTIPLY_BF16, probe.MULTIPLY_F16], multiplied),
    **dict.fromkeys([probe.PACK_BF16, probe.PACK_F16], packed),
    **dict.fromkeys([probe.WIDEN_BF16, probe.WIDEN_F16], widened),
    probe.COPY: copied,
    probe.SHUFFLE: shuffled,
}
# Computed in float64.
APPROXIMATED = {probe.EXP2: np.exp2, probe.LOG2: np.log2, probe.RECIPROCAL: np.reciprocal}


def flushed(x):
    """Instructions with .ftz flush subnormal inputs and outputs to zero."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


def check(emulator, name, **options):
    case = probe.CASES[name]
    found = probe.on_emulator(emulator, case, **options)
    if case.what in APPROXIMATED:
        x = case.inputs["d"].reshape(32, 4)
        with np.errstate(all="ignore"):
            exact = APPROXIMATED[case.what](flushed(x).astype(np.float64))
            expected = flushed(exact.astype(np.float32))
        wrong = probe.ulps(found.view(np.float32), expected) > 2
        if options.get("pessimistic") and case.what == probe.LOG2:  # near 1 the bound is absolute
            with np.errstate(invalid="ignore"):
                wrong &= np.abs(found.view(np.float32) - exact) > 2.0**-22.6
        assert not wrong.any(), f"{name} of {x[wrong]}"
    else:
        wrong = probe.complaints(name, found, EXPECTED[case.what](case))
        assert not wrong, wrong[0]


@pytest.mark.parametrize("name", probe.CASES)
def test_an_instruction_by_an_independent_source(emulator, name):
    check(emulator, name)


def test_copies_and_their_zeros_when_they_land_at_once(emulator):
    check(emulator, "copy16", lazy=False)


ONES = np.full(128, 0x3F803F80, np.uint32)  # in bfloat16


@pytest.mark.parametrize(
    "before, exact, worst",
    [(1.0, 17.0, 17.0), (2.0**24, 2.0**24, 2.0**24 + 16), (2.0**25, 2.0**25, 2.0**25)],
)
def test_tensor_cores_that_round_worst(emulator, before, exact, worst):
    """Add 16 products of 1 to a larger term. Tensor cores keep products of at least half the last
    bit of that term, and drop smaller ones. Sums that are rounded one by one lose them earlier."""
    inputs = {"a": ONES, "b": ONES[:64], "d": np.full(128, before, np.float32)}
    case = probe.Case(probe.MULTIPLY_BF16, inputs)
    for pessimistic, sum in ((False, exact), (True, worst)):
        found = probe.on_emulator(emulator, case, pessimistic=pessimistic)
        assert (found.view(np.float32) == sum).all()


@pytest.mark.parametrize("name", ["exp2", "log2", "multiply_bf16_infinite", "multiply_f16_whole"])
def test_the_worst_rounding_is_within_its_bounds(emulator, name):
    check(emulator, name, pessimistic=True)


def test_every_instruction_with_a_result_is_probed():
    """Instructions that only synchronise have a Site parameter instead."""
    wrappers = re.findall(r"FA_DEVICE \w+ (\w+)\((\w+)", probe.INSTRUCTIONS.read_text())
    probed = re.findall(r"ptx::(\w+)", probe.SOURCE.read_text())
    assert {name for name, first in wrappers if first != "Site"} <= set(probed)


def test_files_of_one_name_have_inline_assembly():
    with_assembly = {
        str(file.relative_to(KERNELS))
        for file in KERNELS.rglob("*")
        if file.suffix in (".cu", ".cuh", ".h") and re.search(r"\basm\b|__asm", file.read_text())
    }
    assert with_assembly == {"ptx.cuh", "sm90/ptx.cuh"}


# --- faults of the emulator itself ----------------------------------------------------------------


# Title: part of the emulator; then the code as it is, and the fault.
FAULTS = r"""
columns of A are swapped: matrix
-+ 8 * (i / 4)] = element(x.a
++ 8 * (1 - i / 4)] = element(x.a
rows of A are swapped: matrix
-a[g + 8 * (i / 2 % 2)]
+a[g + 8 * (1 - i / 2 % 2)]
rows of B are swapped: matrix
-b[2 * t + i % 2 + 8 * (i / 2)][g]
+b[2 * t + i % 2 + 8 * (1 - i / 2)][g]
D starts at zero: matrix
-for (int i = 0; i < 4; ++i) d[g + 8 * (i / 2)][2 * t + i % 2] = x.d[i];
+for (int i = 0; i < 4; ++i) d[g + 8 * (i / 2)][2 * t + i % 2] = 0;
ldmatrix never transposes: matrix
-low = first.transposed ? m[column][row]
+low = false ? m[column][row]
halves are swapped: matrix
-low | high << 16
+high | low << 16
addresses from other lanes: matrix
-const int lane = 8 * matrix + row;
-      const uint32_t address = lane_of(lane)->address;
-      std::memcpy(m
+const int lane = 8 * matrix + 7 - row;
+      const uint32_t address = lane_of(lane)->address;
+      std::memcpy(m
float16 taken for bfloat16: matrix
-bfloat16 ? fa::emulator::from_bf16(bits)
+true ? fa::emulator::from_bf16(bits)
all narrowed to bfloat16: matrix
-bfloat16 ? fa::emulator::to_bf16(x)
+true ? fa::emulator::to_bf16(x)
no zeros where invalid: copy
-std::memset(to + copy.bytes, 0, copy.size - copy.bytes);
a wait completes no copy: copy
-land(copy);
-    fiber
+(void)copy;
+    fiber
copies complete at once: copy
-  if (options.lazy)
-    std::memset
+  if (false)
+    std::memset
a wait is one group short: copy
-pending.size()) > pending
+pending.size()) > pending + 1
a barrier orders nothing: meet
-    fiber.clocks = barrier.clocks;
+    (void)fiber;
an arrival orders nothing: meet
-      barrier.clocks.join(fiber.clocks);
+      (void)fiber;
a barrier lets one warp through early: meet
-barrier.arrived >= barrier.threads;
+barrier.arrived >= barrier.threads - 32;
a barrier waits for warps that have exited: meet
-if (block->warps[i].live && !(
+if (!(
a warp's barrier waits for lanes that have exited: meet
-  meeting.exits_count = all;
+  meeting.exits_count = false;
a warp takes the state of its first lane: meet
-    if (mine.id != other.id || mine.threads != other.threads || mine.wait != other.wait)
+    if (false)
the place of a warp's barrier is ignored: meet
-if (meeting.place != place || meeting.mask
+if (meeting.mask
the place of a product is ignored: matrix
-&mine, multiply, site ? site : place_here(__builtin_return_address(0)));
+&mine, multiply);
a warp's barrier orders nothing: meet
-      fiber.clocks = all;
a warp's barrier orders the block: meet
-    for (uint32_t rest = lanes; rest; rest &= rest - 1)
-      all.join
+    for (Fiber& fiber : block->fibers) all.join(fiber.clocks);
+    for (uint32_t rest = lanes; rest; rest &= rest - 1)
+      all.join
divergence is not detected: meet
-    if (meeting.place != place ||
+    if (false && meeting.place != place ||
reads are not recorded: shadow
-    cell.read = {now, lane};
only four reads are recorded: shadow
-  groups.push_back(one);
+  if (groups.size() < 4) groups.push_back(one);
two bytes share a race record: shadow
-(at | end) % 2 ? kChunkBytes :
+false ? kChunkBytes :
writes are not recorded: shadow
-    cell.written = now;
+    (void)now;
all memory counts as written: shadow
-    if (cell.fresh)
-      complain_(kUninitialised, at, Step(), now);
-    else if (!known.know(cell.written))
-      complain_(kWriteRead
+    if (!known.know(cell.written))
+      complain_(kWriteRead
atomics never race: shadow
-know_all(cell, at, kOfAtomics, now, known_of_readers);
+(void)0;
loads do not race with atomics: shadow
-      know_all(cell.crowd->atomics, at, kOfAtomics, now, known, false);
-    cell.fresh = false;  // report once
+      (void)0;
+    cell.fresh = false;  // report once
atomics that load race with loads: shadow
-    if (group.first.loads && !of_loads) continue;
atomic stores count as reads of old contents: shadow
-if (cell.fresh && reads)
+if (cell.fresh)
loads by atomics race with readers: shadow
-    else if (!now.loads)
+    else
atomics ignore their scope: shadow
-!(group.first.narrow || now.narrow)
+true
all blocks count as synchronised: clocks
-return of != others->end() &&
+return true || of != others->end() &&
ordered blocks are not synchronised: clocks
-emu::join(all[from.block], from.own);
+all[from.block];
an acquire does not synchronise: atomics
-  to.join(published[{at, block->number}]);
-  if (scope == Scope::kDevice) to.join(published[{at, kEverywhere}]);
+  (void)to, (void)at, (void)scope;
a release publishes for any scope: atomics
-  if (scope == Scope::kDevice) published[{at, kEverywhere}].join(from);
+  published[{at, kEverywhere}].join(from);
readers of finished blocks are not recorded: atomics
-!running(block) && !publishers.count(block)
+!running(block)
a load counts as a release: atomics
-if (access != Access::kLoad) write
+write
a store keeps an earlier release: atomics
-  if (access == Access::kStore) take_back(address);
a store removes its own release: atomics
-  release(at, fences.released_at[{at, Scope::kDevice}], scope);
+  if (releases(order)) release(at, fences.released_at[{at, Scope::kDevice}], scope);
a fence releases nothing: atomics
-  (scope == Scope::kDevice ? fences.released : fences.released_in_block) = fiber.clocks;
plain loads are not checked: memory
-shadow->read(reinterpret_cast<uintptr_t>(at), bytes, by.step(what), by.clocks);
+(void)by;
plain stores are not checked: memory
-shadow->write(reinterpret_cast<uintptr_t>(at), bytes, by.step(what), by.clocks);
+(void)by;
global memory is not checked: memory
-(at)) ? nullptr : &global;
+(at)) ? nullptr : nullptr;
the end of shared memory is not checked: memory
-if (offset < 0 || offset + bytes >
+if (offset < -4096 || offset - 4096 >
copies read nothing: memory
-  if (source) source->read(reinterpret_cast<uintptr_t>(from), bytes, step, by.clocks);
copies count as accesses of their thread: memory
-  step.agent = block->agents.copies(by.id);
-  step.clock = by.committed + 1;
shared memory keeps the previous block's record: memory
-  begins.shadow.clear();
writes of different values count as equal: memory
-  if (std::memcmp(doubt.at, doubt.before, static_cast<size_t>(doubt.bytes))) found(doubt.finding);
misalignment is not detected: hooks
-  if (!emu::self) return;
+  return;
stacks keep their contents: run
-  poison(stack_end);
blocks run in one order: run
-int64_t& chosen = launch.upcoming[next_random(launch.random_state) % launch.upcoming.size()];
+int64_t& chosen = launch.upcoming.back();
the last finding is kept: run
-if (report.findings++) return;
+report.findings++;
exits with copies in flight: run
-if (!group.empty()) fail(
+if (false) fail(
"""


def faults():
    """{title: (part, old, new)}"""
    found = {}
    for title, part, old, new in re.findall(
        r"^(\w[^:]*): (\w+)\n((?:-.*\n)+)((?:\+.*\n)*)", FAULTS, re.MULTILINE
    ):
        old, new = (re.sub("^[-+]", "", x, flags=re.MULTILINE).rstrip("\n") for x in (old, new))
        found[title] = (part, old, new)
    return found


@pytest.mark.parametrize("part, old, new", faults().values(), ids=faults())
def test_a_fault_of_the_emulator_is_detected(part, old, new, tmp_path):
    faulty = Emulator(*SOURCES, parts=altered(part, old, new, tmp_path))
    checks = [lambda x=x: check(faulty, x) for x in probe.CASES]
    checks += [lambda: check(faulty, "copy16", lazy=False)]
    checks += [lambda x=x: check_right(faulty, x) for x in RIGHT]
    checks += [lambda x=x: check_wrong(faulty, x) for x in WRONG]
    checks += [lambda x=x: x(faulty) for x in OTHER_CHECKS]
    assert detected(checks), "no check failed"


def detected(checks):
    """Run the checks in a forked process: a faulty emulator may crash, which counts as detected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fork warns of other threads' locks: there are none
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        try:
            os._exit(any(fails(check) for check in checks))
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] != 0


def fails(check):
    try:
        check()
    except AssertionError:
        return True
    return False
