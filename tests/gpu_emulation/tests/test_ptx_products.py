"""Products of warpgroups (wgmma) on the PTX translator.

Tiles have the canonical layouts of CUTLASS's mma_traits_sm90_gmma.hpp in shared memory, built with
the algebra and swizzles of PyPI's tensor-layouts, which also defines the fragments. Numbers are
whole and small, so products are exact.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from tests.gpu_emulation.emulator import SCHEDULES, Emulator, needs_emulator
from tests.gpu_emulation.ptx import library
from tests.gpu_emulation.tests.test_ptx_values import as_aligned, entry

pytestmark = needs_emulator
HEADER = ".version 8.8\n.target sm_90a\n.address_size 64\n"
SHARED = ".extern .shared .align 1024 .b8 memory[];\n"
GROUP = 128  # threads of a warpgroup
K, ACROSS, REGISTERS = "k", "mn", "r"  # layout of a matrix: along k, across it, or in registers

# --- kernels --------------------------------------------------------------------------------------

# All threads copy the given image into shared memory. Then %da and %db are the descriptors of this
# warpgroup's A and of B, %f the address of its fragments of A, %o that of its accumulators.
POINTERS = "image fragments out bytes a b step_a step_b group_a steps add"
BEGIN = """
.reg .b32 %t, %n, %w, %i, %m, %s<4>; .reg .b64 %at, %end, %g, %x, %y; .reg .pred %p, %add;
.reg .b64 %da, %db, %sa, %sb, %f, %o; .reg .f32 %d<128>, %c<8>; .reg .b32 %a<4>;
mov.u32 %t, %tid.x; mov.u32 %n, %ntid.x; mov.u32 %m, memory; mul.wide.u32 %at, %t, 16;
ld.param.u64 %g, [image]; ld.param.u64 %end, [bytes]; mul.wide.u32 %y, %n, 16;
$fill: setp.ge.u64 %p, %at, %end; @%p bra $filled;
add.s64 %x, %g, %at; ld.global.v4.b32 {%s0, %s1, %s2, %s3}, [%x]; cvt.u32.u64 %w, %at;
add.s32 %w, %w, %m; st.shared.v4.b32 [%w], {%s0, %s1, %s2, %s3}; add.s64 %at, %at, %y; bra $fill;
$filled: fence.proxy.async.shared::cta; bar.sync 0;
ld.param.u64 %da, [a]; ld.param.u64 %db, [b];
ld.param.u64 %sa, [step_a]; ld.param.u64 %sb, [step_b];
shr.u32 %w, %m, 4; cvt.u64.u32 %x, %w; add.s64 %da, %da, %x; add.s64 %db, %db, %x;
shr.u32 %w, %t, 7; cvt.u64.u32 %x, %w; ld.param.u64 %y, [group_a]; mul.lo.s64 %x, %x, %y;
add.s64 %da, %da, %x; ld.param.u64 %x, [add]; setp.ne.s64 %add, %x, 0;
mul.wide.u32 %at, %t, 16; ld.param.u64 %f, [fragments]; add.s64 %f, %f, %at;
"""
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


@dataclass(frozen=True)
class Kind:
    """A kernel: its element type, number of columns, and the layouts of A and B."""

    element: str
    columns: int
    a: str
    b: str
    signs: tuple = (1, 1)
    add: str = "%add"

    @property
    def name(self):
        scale = {"0": "_new", "1": "_added"}.get(self.add, "")
        minus = "".join("_minus" if x < 0 else "_plus" for x in self.signs if -1 in self.signs)
        return f"{self.element}_{self.columns}_{self.a}_{self.b}{minus}{scale}"

    @property
    def k(self):
        return 8 if self.element == "tf32" else 16

    def product(self, add, d="%d"):
        registers = ", ".join(f"{d}{i}" for i in range(self.columns // 2))
        a = "{%a0, %a1, %a2, %a3}" if self.a == REGISTERS else "%da"
        lies = [] if self.element == "tf32" else [self.a, self.b][self.a == REGISTERS :]
        last = [*self.signs, *(int(x == ACROSS) for x in lies)]
        shape = f"m64n{self.columns}k{self.k}.f32.{self.element}.{self.element}"
        last = ", ".join(map(str, last))
        return f"wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, {a}, %db, {add}, {last};"

    def accumulators(self, opcode):
        for i in range(0, self.columns // 2, 4):
            four = f"{{{', '.join(f'%d{i + j}' for j in range(4))}}}"
            at = f"[%o+{4 * i}]"
            yield (
                f"ld.global.v4.f32 {four}, {at};"
                if opcode == "ld"
                else (f"st.global.v4.f32 {at}, {four};")
            )

    def code(self):
        """The first product adds to the accumulators if %add is set, later ones always."""
        loads = "ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%f]; mul.wide.u32 %x, %n, 16;"
        loads += f"add.s64 %f, %f, %x; {FENCE}"
        of_step = (loads, f"{COMMIT} {WAIT}") if self.a == REGISTERS else ("", "")
        last = f"{of_step[1]} add.s64 %da, %da, %sa; add.s64 %db, %db, %sb;"
        return [
            BEGIN,
            f"ld.param.u64 %o, [out]; mul.wide.u32 %x, %t, {2 * self.columns};",
            "add.s64 %o, %o, %x; ld.param.u64 %x, [steps]; cvt.u32.u64 %i, %x;",
            *self.accumulators("ld"),
            FENCE,
            *(of_step[0], self.product(self.add), last),
            "$again: add.s32 %i, %i, -1; setp.eq.s32 %p, %i, 0; @%p bra $done;",
            *(of_step[0], self.product("1"), last),
            f"bra.uni $again; $done: {COMMIT} {WAIT}",
            *self.accumulators("st"),
        ]


KINDS = [
    *(Kind("bf16", 64, a, b) for a in (K, ACROSS, REGISTERS) for b in (K, ACROSS)),
    *(Kind("f16", 24, a, b) for a in (K, ACROSS) for b in (K, ACROSS)),
    *(Kind("f16", 200, REGISTERS, b) for b in (K, ACROSS)),
    *(Kind("tf32", n, K, K) for n in (8, 64, 256)),
    *(Kind("tf32", n, REGISTERS, K) for n in (24, 200)),
    Kind("bf16", 200, K, ACROSS),
    Kind("bf16", 256, REGISTERS, ACROSS),
    Kind("f16", 256, K, K),
    Kind("f16", 8, ACROSS, K),
]
OTHERS = [
    *(Kind("bf16", 8, K, K, x) for x in ((-1, 1), (1, -1), (-1, -1))),
    Kind("tf32", 8, REGISTERS, K, (-1, 1)),
    Kind("f16", 8, REGISTERS, ACROSS, (1, -1)),
    *(Kind("bf16", 8, K, K, (1, 1), x) for x in ("0", "1")),
]
# Three groups: C, D, C again. The older of two groups in flight ends first.
SMALL = Kind("bf16", 8, K, K)
IN_FLIGHT = [
    BEGIN,
    "ld.param.u64 %o, [out]; mul.wide.u32 %x, %t, 32; add.s64 %o, %o, %x;",
    *(FENCE, SMALL.product("0", "%c"), COMMIT, "add.s64 %da, %da, %sa; add.s64 %db, %db, %sb;"),
    *(SMALL.product("0"), COMMIT, SMALL.product("1", "%c"), COMMIT),
    "wgmma.wait_group.sync.aligned 1; st.global.v4.f32 [%o], {%d0, %d1, %d2, %d3};",
    WAIT,
    "st.global.v4.f32 [%o+16], {%c0, %c1, %c2, %c3};",
]
KERNELS = {x.name: x.code() for x in KINDS + OTHERS} | {"in_flight": IN_FLIGHT}
KERNELS = {x: entry(x, POINTERS, code, "") for x, code in KERNELS.items()}


def made(emulator):
    return library.Executor(emulator, HEADER + SHARED + "".join(KERNELS.values()))


@pytest.fixture(scope="module")
def executor():
    return made(Emulator())


# --- matrices -------------------------------------------------------------------------------------


@cache
def grid(layout, *shape):
    """The offset of each element of a matrix in a layout."""
    return np.array([[int(layout(i, j)) for j in range(shape[1])] for i in range(shape[0])])


@dataclass(frozen=True)
class Lies:
    """The position of a matrix in shared memory: its first byte, the swizzle's span in chunks of 16
    bytes (1: no swizzle), and the strides of a descriptor."""

    start: int
    span: int
    leading: int
    stride: int
    across: bool
    step: int  # bytes from one product's k to the next

    def descriptor(self):
        mode = {1: 0, 8: 1, 4: 2, 2: 3}[self.span]
        fields = (self.start, 0), (self.leading, 16), (self.stride, 32)
        return sum(x // 16 << bit for x, bit in fields) | mode << 62

    def addresses(self, rows, k):
        """The address of each chunk, by (row, chunk of k), or if across by (chunk of rows, k)."""
        layouts = pytest.importorskip("tensor_layouts")
        w, leading, stride = self.span, self.leading // 16, self.stride // 16
        if self.across:
            n = -(-rows // w)
            strides = ((0, stride), (1, leading)) if w == 1 else ((1, leading), (w, stride))
            layout = layouts.Layout(((w, n), (8, k // 8)), strides)
        else:
            strides = ((1, stride), leading) if w == 1 else ((w, stride), 1)
            layout = layouts.Layout(((8, rows // 8), 2), strides)
        swizzle = layouts.Swizzle({1: 0, 2: 1, 4: 2, 8: 3}[w], 4, 3)
        return swizzle(self.start + 16 * grid(layout, rows, k))

    def put(self, image, values, off=0):
        """Write a matrix of k columns at `off` bytes; that memory must be unused."""
        per_chunk, (rows, k) = 16 // values.itemsize, values.shape
        if self.across:
            chunks = values.reshape(rows // per_chunk, per_chunk, k).transpose(0, 2, 1)
            shape = rows // per_chunk, k
        else:
            chunks = values.reshape(rows, k // per_chunk, per_chunk)
            shape = rows, k // per_chunk
        moved = Lies(self.start + off, self.span, self.leading, self.stride, self.across, 0)
        at = moved.addresses(*shape)[..., None] + np.arange(16)
        assert (image[at] == 0xFF).all()
        image[at] = np.ascontiguousarray(chunks).view(np.uint8).reshape(*shape, 16)


def lying(way, rows, span, start, steps, element, loose=True):
    """A position with strides larger than a packed tile's, except within a swizzle's rows."""
    across, bytes = way == ACROSS, 4 if element == "tf32" else 2
    if span == 1:
        start += 48
        outer = rows * bytes // 16 if across else rows // 8
        stride = 128 + 16 * loose
        leading = outer * stride + 32
        return Lies(start, 1, leading, stride, across, 2 * leading)
    packed = 128 * span
    stride = packed * (1 + loose)
    if across:
        return Lies(start, span, 2 * steps * stride + packed, stride, True, 2 * stride)
    return Lies(start, span, 16, stride, False, 32)


def steps_of(way, span):
    return 4 if way != K or span == 1 else span // 2


def bits_of(values, element, g):
    """The bits of the elements in memory. The unused bits of tf32 are random."""
    if element == "tf32":
        noise = g.integers(0, 1 << 13, values.shape, dtype=np.uint32)
        return values.astype(np.float32).view(np.uint32) | noise
    kind = torch.bfloat16 if element == "bf16" else torch.float16
    return torch.from_numpy(values).to(kind).view(torch.int16).numpy().view(np.uint16)


def fragments_of(kind, a):
    """Four registers per lane, in the layouts of mma.sync; each warp has 16 rows."""
    atoms = pytest.importorskip("tensor_layouts.atoms_nv")
    letters = kind.element.upper()
    layout = getattr(atoms, f"SM80_16x8x{kind.k}_F32{letters}{letters}F32_TN").a_layout
    count = 16 // a.itemsize
    at = grid(layout, 32, count)
    warps = a.reshape(-1, 16, kind.k)
    found = np.stack([x.flatten(order="F")[at] for x in warps])
    return np.ascontiguousarray(found).view(np.uint32).reshape(len(a) * 2, 4)


def accumulators_of(columns, d):
    """The accumulator registers of each thread; each warpgroup has 64 rows."""
    atoms = pytest.importorskip("tensor_layouts.atoms_nv")
    layout = atoms.gmma_c_layout(columns)
    at = grid(layout, GROUP, columns // 2)
    return np.concatenate([x.flatten(order="F")[at] for x in d.reshape(-1, 64, columns)])


def end(image, to):
    """The end of the used part of the image, rounded up to a multiple of `to`."""
    return -(-int(1 + np.flatnonzero(image != 0xFF).max()) // to) * to


def multiply(executor, kind, spans, groups=1, add=True, loose=True, name=None, seed=0, **options):
    """(the kernel's output, the expected output)"""
    g = np.random.default_rng(seed)
    steps = min(map(steps_of, (kind.a, kind.b), spans))
    k = kind.k * steps
    # Small whole numbers: at most 8 bits each.
    a, b = (g.integers(-5, 6, (rows, k)).astype(np.float32) for rows in (64 * groups, kind.columns))
    d = g.integers(-99, 100, (64 * groups, kind.columns)).astype(np.float32)
    of_a, of_b = bits_of(a, kind.element, g), bits_of(b, kind.element, g)
    image, at, group = np.full(200 << 10, 0xFF, np.uint8), 0, 0
    ks = [slice(kind.k * i, kind.k * (i + 1)) for i in range(steps)]
    a_lies, fragments = Lies(0, 1, 0, 0, False, 0), np.zeros((steps, 64 * groups * 2, 4), np.uint32)
    if kind.a == REGISTERS:
        for i, x in enumerate(ks):
            fragments[i] = fragments_of(kind, of_a[:, x])
    else:
        a_lies = lying(kind.a, 64, spans[0], 0, steps, kind.element, loose)
        for i in range(groups):
            for j, x in enumerate(ks):
                a_lies.put(image, of_a[64 * i : 64 * i + 64, x], i * group + a_lies.step * j)
            at = end(image, 1024)
            group = group or at
    b_lies = lying(kind.b, kind.columns, spans[1], at, steps, kind.element, loose)
    for j, x in enumerate(ks):
        b_lies.put(image, of_b[:, x], b_lies.step * j)
    used = end(image, 16)
    out = as_aligned(accumulators_of(kind.columns, d).astype(np.float32).ravel())
    if name:  # room for C and D
        out = as_aligned(np.tile(out, 2))
    numbers = [used, a_lies.descriptor(), b_lies.descriptor(), a_lies.step // 16, b_lies.step // 16]
    numbers += [group // 16, steps, int(add)]
    arrays = [as_aligned(image[:used]), as_aligned(fragments.ravel()), out]
    arguments = [*arrays, *(int(x).to_bytes(8, "little") for x in numbers)]
    threads = GROUP * groups
    found = executor.launch(name or kind.name, (1,), (threads,), used, arguments, **options)
    assert not found.count, found.first
    parts = [kind.signs[0] * kind.signs[1] * a[:, x] @ b[:, x].T for x in ks]
    if name:
        return out.reshape(threads, -1), [accumulators_of(kind.columns, x) for x in parts]
    expected = sum(parts) + (d if {"0": 0, "1": 1}.get(kind.add, add) else 0)
    return out.reshape(threads, -1), accumulators_of(kind.columns, expected)


# --- tests ----------------------------------------------------------------------------------------

SPANS = [(1, 1), (2, 4), (4, 8), (8, 2), (8, 8)]
named = pytest.mark.parametrize
of_spans = named("spans", SPANS, ids=lambda x: "-".join(str(16 * i) for i in x))


@pytest.mark.slow
@of_spans
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
def test_two_warpgroups(executor, kind, schedule):
    for seed in range(3):
        options = dict(schedule=schedule, seed=seed, pessimistic=seed == 1, lazy=seed != 2)
        found, expected = multiply(executor, kind, (4, 8), groups=2, **options)
        assert np.array_equal(found, expected)


@named("lazy", [False, True], ids=["eager", "lazy"])
def test_groups_in_flight(executor, lazy):
    """C = A0 B0, D = A1 B1, C += A1 B1; D is complete before C."""
    for schedule in SCHEDULES:
        found, (first, second, *_) = multiply(
            executor, SMALL, (8, 8), name="in_flight", lazy=lazy, schedule=schedule
        )
        assert np.array_equal(found, np.concatenate([second, first + second], 1))
