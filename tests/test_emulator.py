"""The emulator of CUDA kernels: that it computes what the PTX ISA says, and sees what is wrong.

What an instruction means comes from an independent source, never from the emulator's own formulas:
the layouts of PyPI's tensor-layouts (CuTe's algebra), numpy's float16 and float64, torch's
bfloat16. The inputs are those of tests/probe.py. Every misuse of tests/emu/misuse.cu must be named;
and each fault seeded into the emulator itself must make one of these checks fail.
"""

import faulthandler
import os
import re
import warnings

import numpy as np
import probe
import pytest
import torch
from emulator import EMULATOR, KERNELS, SCHEDULES, Emulator, aligned, needs_emulator

pytestmark = needs_emulator
SOURCES = (probe.SOURCE, EMULATOR / "misuse.cu")


@pytest.fixture(scope="module")
def emulator():
    return Emulator(*SOURCES)


# --- conformance --------------------------------------------------------------------------------


def loaded(case):
    """The layout says which bits end in which lane's register."""
    layouts = pytest.importorskip("tensor_layouts.atoms_nv")
    transposed = case.what == probe.LOAD_TRANSPOSED
    atom = layouts.SM75_U16x8_LDSM_T if transposed else layouts.SM75_U32x4_LDSM_N
    source = case.inputs["words"].view(np.uint16).reshape(256, 8)[case.inputs["address"] // 16]
    bits = range(0, 128, 16)  # a layout of bits: of (lane, bit) in its source and its destination
    at = {int(atom.src_layout_bits(x, y)): source[x, y // 16] for x in range(32) for y in bits}
    found = [[at[int(atom.dst_layout_bits(x, y))] for y in bits] for x in range(32)]
    return np.array(found, np.uint16).view(np.uint32)


def copied(case):
    """Even lanes' 16 bytes arrive; odd lanes', which are not valid, are zeros."""
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
        flat = np.empty(rows * columns)  # float64, by columns
        flat[lanes(layout, len(flat) // 32)] = bits.reshape(32, -1)
        return flat.reshape(rows, columns, order="F")

    a, b = matrix("a", atom.a_layout, 16, 16), matrix("b", atom.b_layout, 8, 16)
    with np.errstate(invalid="ignore"):  # 0 times infinity
        d = (a[:, None] * b).sum(-1) + matrix("d", atom.c_layout, 16, 8)
    return d.flatten("F")[lanes(atom.c_layout, 4)].astype(np.float32).view(np.uint32)


def packed(case):
    """Each element with its neighbour: as the low half, and of the next word as the high one."""
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


EXPECTED = {
    **dict.fromkeys([probe.LOAD, probe.LOAD_TRANSPOSED], loaded),
    **dict.fromkeys([probe.MULTIPLY_BF16, probe.MULTIPLY_F16], multiplied),
    **dict.fromkeys([probe.PACK_BF16, probe.PACK_F16], packed),
    **dict.fromkeys([probe.WIDEN_BF16, probe.WIDEN_F16], widened),
    probe.COPY: copied,
    probe.SHUFFLE: shuffled,
}
APPROXIMATED = {probe.EXP2: np.exp2, probe.LOG2: np.log2}  # in float64


def check(emulator, name, **options):
    case = probe.CASES[name]
    found = probe.on_emulator(emulator, case, **options)
    if case.what in APPROXIMATED:
        x = case.inputs["d"].reshape(32, 4)
        with np.errstate(all="ignore"):
            expected = APPROXIMATED[case.what](x.astype(np.float64)).astype(np.float32)
        wrong = probe.ulps(found.view(np.float32), expected) > 2
        assert not wrong.any(), f"{name} of {x[wrong]}"
    else:
        assert not (wrong := probe.complaints(name, found, EXPECTED[case.what](case))), wrong[0]


@pytest.mark.parametrize("name", probe.CASES)
def test_an_instruction_by_an_independent_source(emulator, name):
    check(emulator, name)


def test_copies_and_their_zeros_when_they_land_at_once(emulator):
    check(emulator, "copy16", lazy=False)


def test_every_instruction_that_gives_something_is_probed():
    """Those that only synchronise name their site."""
    wrappers = re.findall(r"FA_DEVICE \w+ (\w+)\((\w+)", probe.INSTRUCTIONS.read_text())
    probed = re.findall(r"ptx::(\w+)", probe.SOURCE.read_text())
    assert {name for name, first in wrappers if first != "Site"} <= set(probed)


# --- what is wrong is named -----------------------------------------------------------------------

RIGHT = ("reversed", "reversed_by_copies", "handed_over", "within_warps", "zeros_where_invalid")
WRONG = {
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
    "some_lanes_have_left": "DEADLOCK.*31 at shuffle",
    "a_warp_stays_away": "DEADLOCK.*32 at all of the block .barrier 0.*32 have exited",
    "nobody_arrives": "DEADLOCK.*32 at never complete .barrier 3.",
    "half_a_warp": "of 48: 48 threads, expected whole warps",
    "counts_differ": "barrier 1 for|RACE|DEADLOCK",
    "no_such_barrier": "the seventeenth: barrier 16, expected 0 to 15",
}


def run_misuse(emulator, name, **options):
    given, out = aligned(256, np.uint32), aligned(64, np.uint32)
    given[:] = 1000 + np.arange(256)
    return emulator.run(f"misuse_{name}", given, out, **options), given, out


def check_right(emulator, name):
    for schedule in SCHEDULES:
        for lazy in (False, True):
            findings, given, out = run_misuse(emulator, name, schedule=schedule, lazy=lazy)
            assert not findings.count, f"{name}: {findings.first}"
            if name == "within_warps":
                assert out.tolist() == given[(np.arange(64) ^ 32 ^ 31)].tolist()
            else:
                assert out.tolist() == given[63 - np.arange(64)].tolist(), name


def check_wrong(emulator, name):
    for schedule in SCHEDULES:
        findings, _, _ = run_misuse(emulator, name, schedule=schedule)
        assert findings.count, f"{name} was not noticed in schedule {schedule}"
        assert re.search(WRONG[name], findings.first), findings.first


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes_in_every_schedule(emulator, name):
    check_right(emulator, name)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(emulator, name):
    check_wrong(emulator, name)


def test_one_file_has_inline_assembly():
    with_assembly = {
        file.name
        for file in KERNELS.rglob("*")
        if file.is_file() and re.search(r"\basm\b|__asm", file.read_text())
    }
    assert with_assembly == {"ptx.cuh"}


def test_every_kernel_is_known_here():
    text = (EMULATOR / "misuse.cu").read_text()
    assert set(re.findall(r"EACH\((\w+)\)", text)) == {*RIGHT, *WRONG}


@pytest.mark.parametrize("threads, shared", [(48, 0), (0, 0), (2048, 0), (64, 300 << 10)], ids=str)
def test_impossible_launches_are_told(emulator, threads, shared):
    arrays = aligned(256, np.uint32), aligned(64, np.uint32)
    findings = emulator.run("launch_of", threads, shared, *arrays)
    assert findings.count == 1 and f"{threads} threads and {shared} bytes" in findings.first


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
    ],
)
def test_one_site_can_be_switched_off(emulator, name, site, kind):
    findings, _, _ = run_misuse(emulator, name)
    assert site in findings.sites
    findings, _, _ = run_misuse(emulator, name, disabled=site)
    assert findings.count and re.search(kind, findings.first), findings.first


def test_schedules_differ_and_repeat(emulator):
    """A race that is not looked for gives other values in another order; one seed, the same."""

    def values(**options):
        return run_misuse(emulator, "no_barrier_before_reading", check=False, **options)[2].tolist()

    assert values(seed=3) == values(seed=3)
    assert len({tuple(values(seed=seed)) for seed in range(6)}) > 1


# --- faults of the emulator itself ----------------------------------------------------------------


# Title: part of the emulator; then the code as it is, and the fault.
FAULTS = r"""
columns of A change places: matrix
-+ 8 * (i / 4)] = element(x.a
++ 8 * (1 - i / 4)] = element(x.a
rows of A change places: matrix
-a[g + 8 * (i / 2 % 2)]
+a[g + 8 * (1 - i / 2 % 2)]
rows of B change places: matrix
-b[2 * t + i % 2 + 8 * (i / 2)][g]
+b[2 * t + i % 2 + 8 * (1 - i / 2)][g]
D starts at zero: matrix
-[2 * t + i % 2] = x.d[i];
+[2 * t + i % 2] = 0;
ldmatrix never transposes: matrix
-first.transposed ? m[column][row]
+false ? m[column][row]
halves change places: matrix
-low | high << 16
+high | low << 16
addresses from other lanes: matrix
-const int lane = 8 * matrix + row;
+const int lane = 8 * matrix + 7 - row;
float16 taken for bfloat16: matrix
-bfloat16 ? fa::emulator::from_bf16(bits)
+true ? fa::emulator::from_bf16(bits)
all narrowed to bfloat16: matrix
-bfloat16 ? fa::emulator::to_bf16(x)
+true ? fa::emulator::to_bf16(x)
no zeros where invalid: copy
-std::memset(to + copy.bytes, 0, 16 - copy.bytes);
a wait waits for nothing: copy
-land(copy);
-    fiber
+(void)copy;
+    fiber
copies land at once: copy
-if (!options.lazy) {
+if (true) {
a wait is one group short: copy
-pending.size()) > pending
+pending.size()) > pending + 1
a barrier orders nothing: meet
-block->fibers[waiting].clocks.join(barrier.clocks);
an arrival orders nothing: meet
-barrier.clocks.join(fiber.clocks);
a barrier lets one through early: meet
-++barrier.arrived < threads
+++barrier.arrived < threads - 1
a warp's barrier orders the block: meet
-Clocks all(block->fibers.size());
+Clocks all(block->fibers.size(), 1000);
divergence goes unseen: meet
-meeting.name != std::string(name) || meeting.mask != mask
+false
reads are forgotten: clocks
-cell.readers[slot] = now;
writes are forgotten: clocks
-cell.written = now;
-    cell.reader_count = 0;
-    cell.fresh = cell.in_flight
+cell.fresh = cell.in_flight
all memory counts as written: clocks
-else if (cell.fresh)
+else if (false)
plain loads go unseen: hooks
-note_read(address, static_cast<int>(bytes), "load");
+(void)address;
plain stores go unseen: hooks
-note_write(address, static_cast<int>(bytes), "store");
+(void)address;
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
def test_a_fault_of_the_emulator_is_noticed(part, old, new, tmp_path):
    source = EMULATOR / f"{part}.cpp"
    text = source.read_text()
    assert text.count(old) == 1, f"{source.name} has {text.count(old)} times: {old}"
    changed = tmp_path / source.name
    changed.write_text(text.replace(old, new))
    faulty = Emulator(*SOURCES, parts={part: changed})
    checks = [lambda x=x: check(faulty, x) for x in probe.CASES]
    checks += [lambda: check(faulty, "copy16", lazy=False)]
    checks += [lambda x=x: check_right(faulty, x) for x in RIGHT]
    checks += [lambda x=x: check_wrong(faulty, x) for x in WRONG]
    assert noticed(checks), "no check noticed"


def noticed(checks):
    """In a process of its own: a faulty emulator may crash, which is noticed, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another thread could hold a lock: none is taken
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        os._exit(any(fails(check) for check in checks))
    return os.waitpid(child, 0)[1] != 0


def fails(check):
    try:
        check()
    except AssertionError:
        return True
    return False
