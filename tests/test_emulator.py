"""The emulator of CUDA kernels: that it computes what the PTX ISA says, and sees what is wrong.

What an instruction means comes from an independent source, the layouts of PyPI's tensor-layouts
(CuTe's algebra), never from the emulator's own formulas. Every misuse of tests/emu/misuse.cu must
be named; and each fault seeded into the emulator itself must make one of these checks fail.
"""

import faulthandler
import os
import re
import warnings

import numpy as np
import pytest
from emulator import EMULATOR, KERNELS, SCHEDULES, Emulator, aligned, needs_emulator

pytestmark = needs_emulator
LOAD, LOAD_TRANSPOSED, MULTIPLY_BF16, MULTIPLY_F16, COPY = range(5)
SOURCES = (KERNELS / "probe.cu", EMULATOR / "misuse.cu")


@pytest.fixture(scope="module")
def emulator():
    return Emulator(*SOURCES)


# --- conformance --------------------------------------------------------------------------------


def probe(emulator, what, words=None, address=None, a=None, b=None, d=None, **options):
    """Four words of each lane, after one instruction."""
    given = (words, 1024, np.uint32), (address, 32, np.uint32), (a, 128, np.uint32)
    given += (b, 64, np.uint32), (d, 128, np.float32)
    arrays = []
    for values, size, dtype in given:
        arrays.append(aligned(size, dtype))
        if values is not None:
            arrays[-1][:] = np.ravel(values)
    out = aligned(128, np.uint32)
    findings = emulator.run("fa_cuda_probe", what, *arrays, out, None, **options)
    assert not findings.count, findings.first
    return out.reshape(32, 4)


def check_load(emulator, what):
    """Rows of 8 elements in any order; the layout says which bits end in which lane's register."""
    layouts = pytest.importorskip("tensor_layouts.atoms_nv")
    atom = layouts.SM75_U16x8_LDSM_T if what == LOAD_TRANSPOSED else layouts.SM75_U32x4_LDSM_N
    random = np.random.default_rng(what)
    elements = random.permutation(2048).astype(np.uint16)
    rows = random.permutation(256)[:32]
    found = probe(emulator, what, words=elements.view(np.uint32), address=16 * rows)
    found = found.copy().view(np.uint16).reshape(32, 8)
    source = elements.reshape(256, 8)[rows]
    bits = range(0, 128, 16)  # a layout of bits: of (lane, bit) in its source and its destination
    at = {int(atom.src_layout_bits(x, y)): source[x, y // 16] for x in range(32) for y in bits}
    for x in range(32):
        expected = [at[int(atom.dst_layout_bits(x, y))] for y in bits]
        assert found[x].tolist() == expected, f"lane {x}"


def half(x, what):
    """float32 as bits of the format that is multiplied; small whole numbers are exact."""
    if what == MULTIPLY_F16:
        return x.astype(np.float16).view(np.uint16)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def check_multiply(emulator, what):
    layouts = pytest.importorskip("tensor_layouts.atoms_nv")
    atom = layouts.SM80_16x8x16_F32BF16BF16F32_TN
    if what == MULTIPLY_F16:
        atom = layouts.SM80_16x8x16_F32F16F16F32_TN
    random = np.random.default_rng(what)
    a, b, c = (random.integers(-8, 8, n).astype(np.float32) for n in ((16, 16), (8, 16), (16, 8)))

    def fragment(matrix, layout, count):
        flat = matrix.flatten("F")
        return np.array([[flat[int(layout(x, y))] for y in range(count)] for x in range(32)])

    found = probe(
        emulator,
        what,
        a=half(fragment(a, atom.a_layout, 8), what).view(np.uint32),
        b=half(fragment(b, atom.b_layout, 4), what).view(np.uint32),
        d=fragment(c, atom.c_layout, 4),
    ).view(np.float32)
    assert found.tolist() == fragment(a @ b.T + c, atom.c_layout, 4).tolist()


def check_copy(emulator, lazy):
    """Even lanes' 16 bytes arrive; odd lanes', which are not valid, are zeros."""
    words = np.random.default_rng(0).integers(1, 1 << 32, 1024, dtype=np.uint32)
    rows = np.random.default_rng(1).permutation(256)[:32]
    found = probe(emulator, COPY, words=words, address=16 * rows, lazy=lazy)
    expected = words.reshape(256, 4)[rows]
    expected[1::2] = 0
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("what", [LOAD, LOAD_TRANSPOSED], ids=["plain", "transposed"])
def test_ldmatrix_by_an_independent_layout(emulator, what):
    check_load(emulator, what)


@pytest.mark.parametrize("what", [MULTIPLY_BF16, MULTIPLY_F16], ids=["bf16", "f16"])
def test_mma_by_an_independent_layout(emulator, what):
    check_multiply(emulator, what)


@pytest.mark.parametrize("lazy", [False, True])
def test_copies_and_their_zeros(emulator, lazy):
    check_copy(emulator, lazy)


def test_infinity_and_nan_multiply_as_numbers_do(emulator):
    """0 times infinity is NaN, in every row and column that it reaches and in no other."""
    a = np.zeros((32, 8), np.float32)
    a[0, 0] = np.inf  # row 0, column 0 of A
    found = probe(emulator, MULTIPLY_BF16, a=half(a, MULTIPLY_BF16).view(np.uint32))
    lanes = np.isnan(found.view(np.float32)).any(1)
    assert lanes.tolist() == [lane < 4 for lane in range(32)]


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
    checks = [lambda x=x: check_load(faulty, x) for x in (LOAD, LOAD_TRANSPOSED)]
    checks += [lambda x=x: check_multiply(faulty, x) for x in (MULTIPLY_BF16, MULTIPLY_F16)]
    checks += [lambda x=x: check_copy(faulty, x) for x in (False, True)]
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
