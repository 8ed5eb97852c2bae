"""Additions of sm_100 in the PTX translator: tensor memory, and products there.

Operands lie in shared memory as CUTLASS's mma_traits_sm100.hpp has them, built with the algebra and
swizzles of PyPI's tensor-layouts; descriptors have the bits of its mma_sm100_desc.hpp; registers of
loads and stores are those of its copy_traits_sm100.hpp. Numbers are whole and small, so that
products are exact. Misuses are in test_ptx_blackwell_misuse.py, arithmetic is in
test_ptx_blackwell_values.py.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from tests.gpu_emulation.emulator import SCHEDULES, Emulator, aligned, needs_emulator
from tests.gpu_emulation.ptx import cpp, library, text
from tests.gpu_emulation.tests.test_ptx_hopper import wait
from tests.gpu_emulation.tests.test_ptx_products import ACROSS, Lies, bits_of, end, lying, steps_of
from tests.gpu_emulation.tests.test_ptx_products import K as ALONG
from tests.gpu_emulation.tests.test_ptx_values import as_aligned, entry

pytestmark = needs_emulator
named = pytest.mark.parametrize
HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
SHARED = ".extern .shared .align 1024 .b8 memory[];\n"
THREADS, INSIDE = 128, "tensor"  # INSIDE: A is in tensor memory
COLUMNS = {"d": 0, "a": 256}  # where D and A begin in what is allocated

# --- kernels --------------------------------------------------------------------------------------

ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32"
RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
LOADED, STORED = (f"tcgen05.wait::{x}.sync.aligned;" for x in ("ld", "st"))
BEFORE, AFTER = (f"tcgen05.fence::{x}_thread_sync;" for x in ("before", "after"))

# All threads copy the image into shared memory; warp 0 allocates. Then %tm is the address, with the
# lanes of this warp in %own, %m is the image, %bar an mbarrier behind it.
POINTERS = "image values out bytes a b step_a step_b steps add"
BEGIN = f"""
.reg .b32 %t, %w, %i, %m, %bar, %tm, %own, %lane, %to, %ta, %s<4>, %r<128>;
.reg .b64 %at, %end, %g, %x, %da, %db, %sa, %sb, %v, %o; .reg .pred %p, %add, %first, %warp;
mov.u32 %t, %tid.x; mov.u32 %m, memory; mul.wide.u32 %at, %t, 16; setp.eq.u32 %first, %t, 0;
setp.lt.u32 %warp, %t, 32; ld.param.u64 %g, [image]; ld.param.u64 %end, [bytes];
cvt.u32.u64 %w, %end; add.s32 %bar, %m, %w;
$fill: setp.ge.u64 %p, %at, %end; @%p bra $filled;
add.s64 %x, %g, %at; ld.global.v4.b32 {{%s0, %s1, %s2, %s3}}, [%x]; cvt.u32.u64 %w, %at;
add.s32 %w, %w, %m; st.shared.v4.b32 [%w], {{%s0, %s1, %s2, %s3}}; add.s64 %at, %at, 2048;
bra $fill;
$filled: @%first mbarrier.init.shared::cta.b64 [%bar], 1; fence.proxy.async.shared::cta;
@%warp {ALLOC} [%bar+8], 512; @%warp {RELINQUISH} bar.sync 0;
ld.shared.b32 %tm, [%bar+8]; shr.u32 %lane, %t, 5; shl.b32 %lane, %lane, 21;
ld.param.u64 %da, [a]; ld.param.u64 %db, [b];
ld.param.u64 %sa, [step_a]; ld.param.u64 %sb, [step_b];
shr.u32 %w, %m, 4; cvt.u64.u32 %x, %w; add.s64 %da, %da, %x; add.s64 %db, %db, %x;
ld.param.u64 %v, [values]; mul.wide.u32 %at, %t, 4; add.s64 %v, %v, %at; ld.param.u64 %o, [out];
add.s64 %o, %o, %at; ld.param.u64 %x, [add]; setp.ne.s64 %add, %x, 0; ld.param.u64 %x, [steps];
cvt.u32.u64 %i, %x;
"""
END = f"{BEFORE} bar.sync 0; @%warp {DEALLOC} %tm, 512;"


@dataclass(frozen=True)
class Moved:
    """A form of loads and stores: columns of one row for each thread, or two halves of 16 rows."""

    count: int
    twice: bool = False

    @property
    def opcode(self):
        return f"{'16x32bx2' if self.twice else '32x32b'}.x{self.count}"

    @property
    def columns(self):
        """How many it moves: two halves lie beside each other."""
        return self.count * (1 + self.twice)

    def code(self, way, column, half):
        """Move columns of what begins at `column`; a register after the other to or from global
        memory."""
        registers = [f"%r{i}" for i in range(self.count)]
        braces = f"{{{', '.join(registers)}}}"
        at, apart = "[%own]", f", {self.count}" if self.twice else ""
        lanes = f"add.s32 %own, %tm, {column + (half << 20)}; add.s32 %own, %own, %lane;"
        if way == "ld":
            load = f"tcgen05.ld.sync.aligned.{self.opcode}.b32 {braces}, {at}{apart};"
            yield f"{lanes} {load} {LOADED}"
        for i, x in enumerate(registers):
            yield (
                f"st.global.b32 [%o+{512 * i}], {x};"
                if way == "ld"
                else f"ld.global.b32 {x}, [%v+{512 * i}];"
            )
        pointer = "%o" if way == "ld" else "%v"
        yield f"add.s64 {pointer}, {pointer}, {512 * self.count};"
        if way == "st":
            yield f"{lanes} tcgen05.st.sync.aligned.{self.opcode}.b32 {at}{apart}, {braces};"

    def places(self, rows, half):
        """(row, column) of each thread's registers; row -1 for lanes without a row."""
        layouts = pytest.importorskip("tensor_layouts")
        bits = 32 * self.count
        if self.twice:  # CUTLASS: Shape<Shape<_16, _2>, bits>, Stride<Stride<2 bits, bits>, _1>
            layout, width = layouts.Layout(((16, 2), bits), ((2 * bits, bits), 1)), 2 * bits
        else:  # Shape<_32, bits>, Stride<bits, _1>
            layout, width = layouts.Layout((32, bits), (bits, 1)), bits
        at = np.array([[int(layout(x, 32 * i)) for i in range(self.count)] for x in range(32)])
        lane, column = at // width, at % width // 32
        lanes = np.concatenate([32 * warp + lane + 16 * half for warp in range(4)])
        of = (
            lanes
            if rows == 128
            else np.where(lanes % 32 // 16 == half, lanes // 32 * 16 + lanes % 16, -1)
        )
        return of, np.concatenate([column] * 4)


@dataclass(frozen=True)
class Kind:
    """A kernel: a product of tensor memory."""

    element: str
    rows: int
    columns: int
    a: str
    b: str
    load: Moved  # of D
    store: Moved = Moved(8)  # of A and of D's first values
    signs: tuple = (1, 1)
    add: str = "%add"
    half: int = 0  # of 64 rows: which half of the lanes

    @property
    def name(self):
        minus = "".join("_minus" if x < 0 else "_plus" for x in self.signs if -1 in self.signs)
        moved = f"{self.load.opcode}_{self.store.opcode}".replace(".", "_")
        scale = {"0": "_new", "1": "_added"}.get(self.add, "")
        of = f"{self.element}_{self.rows}x{self.columns}_{self.a}_{self.b}_{moved}{minus}{scale}"
        return of + "_half" * self.half

    @property
    def k(self):
        return 8 if self.element == "tf32" else 16

    @property
    def instruction(self):
        kind = {"f16": 0, "bf16": 1, "tf32": 2}[self.element]
        negated = sum((x < 0) << 13 + i for i, x in enumerate(self.signs))
        lies = sum((x == ACROSS) << 15 + i for i, x in enumerate((self.a, self.b)))
        shape = self.columns // 8 << 17 | self.rows // 16 << 24
        return 1 << 4 | kind << 7 | kind << 10 | negated | lies | shape

    def parts(self, what, moved):
        """Where each piece of D or A begins, of a warp's own lanes or of both halves of them."""
        columns = self.columns if what == "d" else 8
        halves = (0, 1) if moved.twice and self.rows == 128 else (self.half * moved.twice,)
        for half in halves:
            for column in range(0, columns, moved.columns):
                yield COLUMNS[what] + column, half

    def moves(self, way, what, moved):
        for column, half in self.parts(what, moved):
            yield from moved.code(way, column, half)

    def code(self):
        kind = "tf32" if self.element == "tf32" else "f16"
        a = f"[%ta + {COLUMNS['a']}]" if self.a == INSIDE else "%da"
        mma = f"@%first tcgen05.mma.cta_group::1.kind::{kind} [%to], {a}, %db, {self.instruction}"
        filled = list(self.moves("st", "a", self.store)) if self.a == INSIDE else []
        ready = f"{STORED} {BEFORE} bar.sync 0; {AFTER}"
        step = "add.s64 %da, %da, %sa; add.s64 %db, %db, %sb; add.s32 %i, %i, -1;"
        place = f"add.s32 %to, %tm, {COLUMNS['d'] + (self.half << 20)};"
        return [
            BEGIN,
            f"{place} add.s32 %ta, %tm, {self.half << 20};",
            *self.moves("st", "d", self.store),
            *filled,
            f"{ready} {mma}, {self.add}; {step} setp.eq.s32 %p, %i, 0; @%p bra $done;",
            f"$again: {mma}, 1; {step} setp.ne.s32 %p, %i, 0; @%p bra $again;",
            f"$done: @%first {COMMIT} [%bar]; {wait('%bar', 0)} {AFTER}",
            *self.moves("ld", "d", self.load),
            END,
        ]


WHOLE, HALVES = Moved(32), Moved(32, True)
KINDS = [
    *(Kind("bf16", 128, 64, a, b, WHOLE) for a in (ALONG, ACROSS, INSIDE) for b in (ALONG, ACROSS)),
    *(
        Kind("f16", 64, 64, a, b, HALVES, Moved(4, True), half=half)
        for half, a in enumerate((ALONG, INSIDE))
        for b in (ALONG, ACROSS)
    ),
    *(Kind("tf32", rows, 64, ALONG, ALONG, WHOLE if rows == 128 else HALVES) for rows in (64, 128)),
    Kind("tf32", 128, 32, INSIDE, ALONG, Moved(16, True), Moved(4, True)),
    Kind("bf16", 128, 256, ALONG, ACROSS, Moved(128)),
    Kind("bf16", 128, 128, INSIDE, ACROSS, Moved(64, True)),
    Kind("f16", 64, 8, ACROSS, ALONG, Moved(4, True)),
    *(Kind("bf16", 128, 16, ALONG, ALONG, WHOLE if x > 16 else Moved(x)) for x in (1, 2, 4, 8, 16)),
    *(Kind("bf16", 128, 16, ALONG, ALONG, Moved(x, True)) for x in (1, 2, 4, 8)),
    *(Kind("f16", 128, 64, INSIDE, ALONG, Moved(64), Moved(*x)) for x in ((1,), (2,), (4, True))),
]
OTHERS = [
    *(Kind("bf16", 128, 16, ALONG, ALONG, Moved(8), signs=x) for x in ((-1, 1), (1, -1), (-1, -1))),
    *(Kind("bf16", 128, 16, ALONG, ALONG, Moved(8), add=x) for x in ("0", "1")),
]

KERNELS = {x.name: entry(x.name, POINTERS, x.code(), "") for x in KINDS + OTHERS}


def made(emulator):
    return library.Executor(emulator, HEADER + SHARED + "".join(KERNELS.values()))


@pytest.fixture(scope="module")
def executor():
    return made(Emulator())


# --- products -------------------------------------------------------------------------------------


def descriptor(lies):
    """As in Lies, with the bits of sm_100: a constant, and another code of the swizzle."""
    mode = {1: 0, 8: 2, 4: 4, 2: 6}[lies.span]
    return lies.descriptor() & (1 << 46) - 1 | 1 << 46 | mode << 61


def registers_of(kind, what, moved, values):
    """The words of each thread in global memory, register by register."""
    found = []
    for column, half in kind.parts(what, moved):
        rows, columns = moved.places(kind.rows, half if moved.twice else kind.half)
        part = values[np.maximum(rows, 0), column - COLUMNS[what] + columns]
        found.append(np.where(rows < 0, 0, part).T)
    return np.concatenate(found)


def multiply(executor, kind, spans, add=True, loose=True, seed=0, **options):
    """(what the kernel loads of D, what is expected; where it has no row, both are 0)"""
    g = np.random.default_rng(seed)
    steps = 1 if kind.a == INSIDE else min(map(steps_of, (kind.a, kind.b), spans))
    k = kind.k * steps
    a, b = (g.integers(-5, 6, (n, k)).astype(np.float32) for n in (kind.rows, kind.columns))
    d = g.integers(-99, 100, (kind.rows, kind.columns)).astype(np.float32)
    of_a, of_b = bits_of(a, kind.element, g), bits_of(b, kind.element, g)
    image, at, values = np.full(200 << 10, 0xFF, np.uint8), 0, []
    values.append(registers_of(kind, "d", kind.store, d.view(np.uint32)))
    a_lies = Lies(0, 1, 0, 0, False, 0)
    parts = [slice(kind.k * i, kind.k * (i + 1)) for i in range(steps)]
    if kind.a == INSIDE:
        words = np.ascontiguousarray(of_a).view(np.uint32)  # along k, two of 16 bits in each
        values.append(registers_of(kind, "a", kind.store, words))
    else:
        a_lies = lying(kind.a, kind.rows, spans[0], 0, steps, kind.element, loose)
        for i, x in enumerate(parts):
            a_lies.put(image, of_a[:, x], a_lies.step * i)
        at = end(image, 1024)
    b_lies = lying(kind.b, kind.columns, spans[1], at, steps, kind.element, loose)
    for i, x in enumerate(parts):
        b_lies.put(image, of_b[:, x], b_lies.step * i)
    used = end(image, 16)
    expected = kind.signs[0] * kind.signs[1] * a @ b.T
    expected += d if {"0": 0, "1": 1}.get(kind.add, add) else 0
    want = registers_of(kind, "d", kind.load, expected)
    out = aligned(want.size, np.float32)
    steps_of_both = [0 if kind.a == INSIDE else a_lies.step // 16, b_lies.step // 16]
    numbers = [used, descriptor(a_lies), descriptor(b_lies), *steps_of_both, steps, int(add)]
    arrays = [as_aligned(image[:used]), as_aligned(np.concatenate(values).ravel()), out]
    arguments = [*arrays, *(int(x).to_bytes(8, "little") for x in numbers)]
    found = executor.launch(kind.name, (1,), (THREADS,), used + 16, arguments, **options)
    assert not found.count, found.first
    got = out.reshape(want.shape)
    missing = np.concatenate(
        [
            (kind.load.places(kind.rows, half if kind.load.twice else kind.half)[0] < 0).T
            for _, half in kind.parts("d", kind.load)
        ]
    )
    return np.where(missing, 0, got), want


SPANS = [(1, 1), (2, 4), (4, 8), (8, 2), (8, 8)]


@pytest.mark.slow
@named("spans", SPANS, ids=lambda x: "-".join(str(16 * i) for i in x))
@named("kind", KINDS, ids=lambda x: x.name)
def test_products(executor, kind, spans):
    for lazy in (False, True):
        loose = kind.columns <= 64 or spans[1] < 8
        found, expected = multiply(executor, kind, spans, lazy=lazy, loose=loose, add=lazy)
        assert np.array_equal(found, expected)


@named("kind", OTHERS, ids=lambda x: x.name)
def test_signs_and_accumulation(executor, kind):
    for add in (False, True):
        found, expected = multiply(executor, kind, (8, 8), add=add)
        assert np.array_equal(found, expected)


@named("schedule", SCHEDULES)
@named("kind", [KINDS[1], KINDS[4]], ids=lambda x: x.name)
def test_schedules(executor, kind, schedule):
    """Whole numbers are exact with the worst rounding, too."""
    for seed in range(3):
        options = dict(schedule=schedule, seed=seed, pessimistic=seed == 1, lazy=seed != 2)
        found, expected = multiply(executor, kind, (4, 8), **options)
        assert np.array_equal(found, expected)


# --- unknown forms are refused --------------------------------------------------------------------

REGISTERS = ".reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p<3>;"
MMA = "tcgen05.mma.cta_group::1.kind"
REFUSED = [
    (f"{MMA}::f8f6f4 [%r0], %d0, %d1, %r1, %p0;", "is no form"),
    (f"{MMA}::i8 [%r0], %d0, %d1, %r1, %p0;", "is no form"),
    ("tcgen05.mma.cta_group::2.kind::f16 [%r0], %d0, %d1, %r1, %p0;", "is no form"),
    (f"{MMA.replace('mma', 'mma.ws')}::f16 [%r0], %d0, %d1, %r1, %p0;", "is no form"),
    (f"{MMA}::f16 [%r0], %d0, %d1, %r1, %p0, 4;", "6 operands, expected 5"),
    ("tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r0}, [%r1];", "is no form"),
    ("tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {%r0}, [%r1];", "is no form"),
    ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r0}, [%r1];", "1 registers of x2"),
    ("tcgen05.ld.sync.aligned.32x32b.x3.b32 {%r0, %r1, %r2}, [%r3];", "3 registers of x3"),
    ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r0}, [%r1];", "0 offsets of a half"),
    ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], 1, {%r0};", "1 offsets of a half"),
    ("tcgen05.st.sync.aligned.16x32bx2.x1.b32 [%r1], %r2, {%r0};", "%r2, expected a number"),
    ("tcgen05.cp.cta_group::1.128x256b [%r0], %d0;", "is no form"),
    ("tcgen05.shift.cta_group::1.down [%r0];", "is no form"),
    ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%d0];", "is no form"),
    ("add.rz.f32x2 %d0, %d1, %d2;", "is no form"),
    ("redux.sync.max.abs.f32 %r0, %r1, -1;", "is no form"),
]


@named("code, expected", REFUSED)
def test_unsupported_ptx_is_refused_by_name(code, expected):
    module = f"{HEADER}.visible .entry k(.param .u64 n)\n{{ {REGISTERS}\n{code}\nret;\n}}\n"
    with pytest.raises(text.Refused, match=f"line 6: .*{expected}"):
        cpp.source(list(text.kernels(module).values()))
