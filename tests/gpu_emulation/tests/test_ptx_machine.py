"""The PTX translator: memory, cooperating lanes, launches and errors.

Fragments come from the layouts of PyPI's tensor-layouts. Errors must be specific: a run-time fault
names thread and place.
"""

import re

import numpy as np
import pytest
import torch

from tests.gpu_emulation.emulator import SCHEDULES, Emulator, aligned, needs_emulator
from tests.gpu_emulation.ptx import blackwell as ptx_blackwell
from tests.gpu_emulation.ptx import forms, library
from tests.gpu_emulation.ptx import hopper as ptx_hopper
from tests.gpu_emulation.tests.test_ptx_values import HEADER, as_aligned, bits, entry, opcodes

pytestmark = [needs_emulator, pytest.mark.slow]
LANES = 64
SHARED = ".extern .shared .align 16 .b8 memory[];\n"

# The start of every kernel: %w, %a and %o are the addresses of this thread's 32 bytes in shared
# memory, in the input and in the output.
BEGIN = """
.reg .b32 %t, %w, %s<9>; .reg .b64 %at, %a, %o, %g, %d<9>; .reg .f32 %f<5>; .reg .f64 %e<5>;
.reg .b16 %h<5>; .reg .pred %p<3>;
mov.u32 %t, %tid.x; mul.wide.u32 %at, %t, 32; mov.u32 %w, memory; mad.lo.s32 %w, %t, 32, %w;
ld.param.u64 %a, [given]; add.s64 %a, %a, %at; ld.param.u64 %o, [out]; add.s64 %o, %o, %at;
"""


def kernel(name, code, directives=".maxntid 64, 1, 1"):
    return entry(name, "given out", [BEGIN, code], directives)


# --- loads and stores -----------------------------------------------------------------------------


def shape_of(names):
    """(type, count, registers) of the elements; integers use the widest registers."""
    kind, count = names["T"], int(names.get("count", 1))
    register = {"f32": "%f", "f64": "%e"}.get(kind, "%d")
    return kind, count, [f"{register}{i}" for i in range(count)]


def space_of(opcode):
    """The state space in an opcode, or "" for a generic address."""
    parts = {x.partition("::")[0] for x in opcode.split(".")}
    return next((x for x in ("global", "shared", "local", "param") if x in parts), "")


def braces(registers):
    return f"{{{', '.join(registers)}}}" if len(registers) > 1 else registers[0]


FILL = """
ld.global.v4.b32 {%s0, %s1, %s2, %s3}, [%a]; ld.global.v4.b32 {%s4, %s5, %s6, %s7}, [%a+16];
"""
KEEP = """
ST.v4.b32 [AT], {%s0, %s1, %s2, %s3}; ST.v4.b32 [AT+16], {%s4, %s5, %s6, %s7};
"""


def keep(space, at):
    return FILL + KEEP.replace("ST", f"st.{space}".rstrip(".")).replace("AT", at)


def load_kernel(name, opcode, names):
    """Copy the thread's 32 bytes to the state space, load with the opcode, store 64 bits each."""
    kind, _, registers = shape_of(names)
    space = space_of(opcode)
    if space == "param":
        return parameter_kernel(name, opcode, names)
    if space == "shared":
        code, at = keep("shared", "%w"), "%w"
    elif space == "local":
        code = ".local .align 16 .b8 depot[32];" + keep("local", "depot")
        code, at = code + "mov.u64 %g, depot; add.s64 %g, %g, -8;", "%g"
    elif space == "global":
        code, at = "", "%a"
    else:  # generic addresses are tested in shared memory
        code, at = keep("shared", "%w") + "cvt.u64.u32 %g, %w; cvta.shared.u64 %g, %g;", "%g"
    code += f"{opcode} {braces(registers)}, [{at}{'+8' * (at == '%g' and space == 'local')}];"
    return kernel(name, code + out_of(registers, kind))


def out_of(registers, kind):
    size = 32 if kind == "f32" else 64
    return "".join(f"st.global.b{size} [%o+{8 * i}], {x};" for i, x in enumerate(registers))


def parameter_kernel(name, opcode, names):
    """Half the threads load from a parameter by name, half from a computed address."""
    kind, _, registers = shape_of(names)
    to = braces(registers)
    code = f"""
    .reg .b64 %g, %o, %d<9>; .reg .f32 %f<5>; .reg .f64 %e<5>; .reg .b32 %t; .reg .pred %p;
    ld.param.u64 %o, [out]; mov.b64 %g, given; mov.u32 %t, %tid.x; mul.wide.u32 %d0, %t, 32;
    add.s64 %o, %o, %d0; setp.lt.u32 %p, %t, 32; add.s64 %g, %g, 16;
    @%p {opcode} {to}, [given+16]; @!%p {opcode} {to}, [%g];
    """
    return (
        f".visible .entry {name}(.param .align 16 .b8 given[32], .param .u64 out)\n"
        f"{{\n{code}{out_of(registers, kind)}\nret;\n}}\n"
    )


def store_kernel(name, opcode, names):
    """Store input elements, 64 bits each, with the opcode; output that memory unchanged."""
    kind, _, registers = shape_of(names)
    space = space_of(opcode)
    size = 32 if kind == "f32" else 64
    code = "".join(f"ld.global.b{size} {x}, [%a+{8 * i}];" for i, x in enumerate(registers))
    zeros = "".join(f"mov.b32 %s{i}, 0;" for i in range(8))
    load = "LD.v4.b32 {%s0, %s1, %s2, %s3}, [AT]; LD.v4.b32 {%s4, %s5, %s6, %s7}, [AT+16];"
    at, back = {
        "shared": ("%w", "ld.shared"),
        "global": ("%o", "ld.global"),
        "local": ("depot", "ld.local"),
    }.get(space, ("%g", "ld"))
    if space == "local":
        code += ".local .align 16 .b8 depot[32];"
    if at == "%g":
        code += "cvt.u64.u32 %g, %w; cvta.shared.u64 %g, %g;"
    code += zeros + KEEP.replace("ST", back.replace("ld", "st")).replace("AT", at)
    code += f"{opcode} [{at}], {braces(registers)};"
    code += load.replace("LD", back).replace("AT", at) + KEEP.replace("ST", "st.global").replace(
        "AT", "%o"
    )
    return kernel(name, code)


def plan():
    found = {}
    for form in forms.FORMS:
        base = form.name.partition(".")[0]
        for opcode, names in opcodes(form) if base in ("ld", "st") else ():
            if bits(names["T"]) * int(names.get("count", 1)) <= 128:
                name, make = f"m{len(found)}", load_kernel if base == "ld" else store_kernel
                found[name] = (make(name, opcode, names), form, opcode, names)
    return found


PLAN = plan()
MEMORY = [x for x in forms.FORMS if x.name.startswith(("ld.", "st."))]


def element(kind):
    return {"b": "u", "u": "u", "s": "i", "f": "f"}[kind[0]] + str(bits(kind) // 8)


def words(seed=0):
    g = np.random.default_rng(seed)
    return as_aligned(g.integers(0, 2**64, LANES * 4, dtype=np.uint64))


def run(executor, name, given, threads=LANES, shared=32 * LANES, **options):
    """The output of a kernel, which must have no findings."""
    out = aligned(LANES * 4, np.uint64)
    found = executor.launch(name, (1,), (threads,), shared, [given, out], **options)
    assert not found.count, found.first
    return out


@pytest.mark.parametrize("form", MEMORY, ids=lambda form: form.name)
def test_loads_and_stores_of_every_type(executor, form):
    mine = {name: x for name, x in PLAN.items() if x[1] is form}
    assert mine
    for name, (_, _, opcode, names) in mine.items():
        kind, count, _ = shape_of(names)
        given, size = words(), bits(kind) // 8
        if opcode.startswith("ld.param"):
            out = run(executor, name, given[:4].tobytes())
            given = np.tile(given[[2, 3, 0, 1]], LANES)  # the kernel loads the second half
        else:
            out = run(executor, name, given)
        out = out.reshape(LANES, 4)
        if opcode.startswith("ld"):
            whole = given.view(element(kind)).reshape(LANES, -1)[:, :count]
            wide = whole.view(f"u{size}") if kind[0] == "f" else whole.astype("i8").view("u8")
            assert np.array_equal(out[:, :count], wide), opcode
        else:
            expected = np.zeros((LANES, 32), np.uint8)
            lowest = given.view(np.uint8).reshape(LANES, 4, 8)[:, :count, :size]
            expected[:, : count * size] = lowest.reshape(LANES, -1)
            assert np.array_equal(out.view(np.uint8), expected), opcode


# --- other forms ----------------------------------------------------------------------------------

PRODUCTS = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}
WAYS = ("up", "down", "bfly", "idx")
MATRICES = [(count, way) for count in (1, 2, 4) for way in ("", ".trans")]
SIZES = [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)]
LOAD_THREE = "ld.global.b32 %s0, [%a]; ld.global.b32 %s1, [%a+4]; ld.global.b32 %s2, [%a+8];"
RIGHT = {
    "moves": """
        ld.global.b64 %d0, [%a]; mov.b64 {%s0, %s1}, %d0; mov.b32 {%h0, %h1}, %s1;
        mov.b32 %s2, {%h1, %h0}; mov.b64 %d1, {%s2, %s0}; st.global.b64 [%o], %d1;
        mov.b64 {%s3, _}, %d0; mov.f32 %f0, 0f3FC00000; mov.b32 %s4, %f0; xor.b32 %s3, %s3, %s4;
        st.global.b32 [%o+8], %s3; mov.pred %p0, 0; mov.pred %p1, -1; mov.u32 %s5, 1;
        @%p0 mov.u32 %s5, 2; @!%p1 mov.u32 %s5, 3; @%p1 add.s32 %s5, %s5, 0x10U;
        st.global.b32 [%o+12], %s5; mov.f64 %e0, 0d3FF8000000000000; st.global.f64 [%o+16], %e0;
        mov.b16 %h2, -2; mov.b16 %h3, 010; st.global.v2.b16 [%o+24], {%h2, %h3};""",
    "pairs": """
        setp.gt.u32 %p0, %t, 40; setp.lt.u32 %p1|%p2, %t, 20; selp.b32 %s0, 1, 0, %p1;
        selp.b32 %s1, 1, 0, %p2; setp.lt.or.u32 %p1|%p2, %t, 20, %p0; selp.b32 %s2, 1, 0, %p1;
        selp.b32 %s3, 1, 0, %p2; st.global.v4.b32 [%o], {%s0, %s1, %s2, %s3};""",
    "specials": """
        mov.u32 %s0, %ntid.x; mov.u32 %s1, %tid.y; mov.u32 %s2, %ctaid.z; mov.u32 %s3, %nctaid.x;
        mov.u32 %s4, %laneid; mov.u32 %s5, %tid.x; mov.u32 %s6, %nctaid.y; mov.u32 %s7, %ntid.z;
        """
    + KEEP.replace("ST", "st.global").replace("AT", "%o"),
    "scopes": """
        mov.u32 %s0, 1; { .reg .b32 %s0; mov.u32 %s0, 2; { .reg .b32 inner<2>; mov.u32 inner1, 3;
        st.global.b32 [%o+4], inner1; } st.global.b32 [%o], %s0; } st.global.b32 [%o+8], %s0;""",
    "loop": """
        mov.u32 %s0, 0; mov.u32 %s1, 0; $again: setp.ge.u32 %p0, %s0, %t; @%p0 bra $done;
        add.s32 %s1, %s1, %s0; add.s32 %s0, %s0, 1; bra.uni $again; $done:
        st.global.b32 [%o], %s1; setp.lt.u32 %p1, %t, 32; @%p1 exit; st.global.b32 [%o+4], 7;
        @!%p1 ret.uni; st.global.b32 [%o+4], 8;""",
    "addresses": """
        cvt.u64.u32 %d0, %w; cvta.shared.u64 %d0, %d0; cvta.to.shared.u64 %d1, %d0;
        cvt.u32.u64 %s0, %d1; sub.s32 %s0, %s0, %w; st.global.b32 [%o], %s0; st.b32 [%d0], 5;
        ld.shared.b32 %s1, [%w]; st.global.b32 [%o+4], %s1; cvta.to.global.u64 %d2, %o;
        cvta.global.u64 %d2, %d2; st.global.b32 [%d2+8], 6; .local .align 8 .b8 mine[8];
        mov.u64 %d3, mine; cvta.local.u64 %d3, %d3; st.local.b32 [%d3+4], 9;
        mov.b64 %d4, out; cvta.param.u64 %d4, %d4; ld.b64 %d5, [%d4]; ld.param.u64 %d4, [out];
        sub.s64 %d5, %d5, %d4; cvt.u32.u64 %s3, %d5;
        ld.local.b32 %s2, [mine+4]; add.s32 %s2, %s2, %s3; st.global.b32 [%o+12], %s2;""",
    "poison": """
        st.global.b32 [%o], %s8; st.global.b64 [%o+8], %d8; selp.b32 %s0, 1, 2, %p2;
        st.global.b32 [%o+16], %s0; .local .align 4 .b8 mine[4]; ld.local.b32 %s1, [mine];
        st.global.b32 [%o+20], %s1;""",
    "barriers": """
        ld.global.b32 %s0, [%a]; st.shared.b32 [%w], %s0; bar.sync 0; xor.b32 %s1, %t, 63;
        mov.u32 %s2, memory; mad.lo.s32 %s2, %s1, 32, %s2; ld.shared.b32 %s3, [%s2];
        barrier.sync 1, 64; st.shared.b32 [%w], %s3; bar.warp.sync -1; xor.b32 %s1, %t, 1;
        mov.u32 %s2, memory; mad.lo.s32 %s2, %s1, 32, %s2; ld.shared.b32 %s4, [%s2];
        st.global.b32 [%o], %s4;""",
    "banks": """
        and.b32 %s0, %t, 1; setp.eq.b32 %p0, %s0, 0; shl.b32 %s1, %t, 2; mov.u32 %s2, memory;
        add.s32 %s1, %s1, %s2; @%p0 st.shared.b32 [%s1], 0;
        @!%p0 st.shared.b32 [%s1+380], 1; and.b32 %s0, %t, 3; shl.b32 %s1, %t, 4;
        add.s32 %s1, %s1, %s2; bar.sync 0;
        cp.async.cg.shared.global [%s1], [%a], 16; cp.async.commit_group; cp.async.wait_group 0;""",
    "handed_over": """
        setp.lt.u32 %p0, %t, 32; @%p0 bra $gives; bar.sync 2, 64; add.s32 %s0, %w, -1024;
        ld.shared.b32 %s1, [%s0]; st.global.b32 [%o], %s1; ret; $gives: ld.global.b32 %s1, [%a];
        st.shared.b32 [%w], %s1; bar.arrive 2, 64;""",
    "tickets": """
        ld.param.u64 %g, [given]; atom.relaxed.gpu.global.add.u32 %s0, [%g], 2;
        st.global.b32 [%o], %s0;""",
    "sums": """
        ld.global.b64 %d0, [%a]; and.b32 %s0, %t, 1; mul.wide.u32 %d1, %s0, 32;
        sub.s64 %d2, %o, %d1; red.global.gpu.relaxed.add.u64 [%d2], %d0;""",
    "in_turn": """
        setp.lt.u32 %p0, %t, 32; and.b32 %s0, %t, 31; ld.param.u64 %g, [given];
        mul.wide.u32 %d0, %s0, 4; add.s64 %g, %g, %d0; @%p0 bra $first;
        $again: ld.acquire.gpu.global.u32 %s1, [%g]; setp.ne.u32 %p1, %s1, 1; @%p1 bra $again;
        ld.global.b32 %s2, [%o+-1024]; st.global.b32 [%o], %s2; ret;
        $first: add.s32 %s3, %t, 7; st.global.b32 [%o], %s3;
        st.release.gpu.global.u32 [%g], 1;""",
    "two_places": """
        setp.lt.u32 %p0, %t, 16; st.shared.b32 [%w], %t; @%p0 bra $here; bar.warp.sync -1; bra $end;
        $here: bar.warp.sync -1; $end: xor.b32 %s0, %t, 31; mov.u32 %s1, memory;
        mad.lo.s32 %s1, %s0, 32, %s1; ld.shared.b32 %s2, [%s1]; st.global.b32 [%o], %s2;""",
    "two_shuffles": """
        and.b32 %s0, %t, 1; setp.eq.b32 %p0, %s0, 0; @%p0 shfl.sync.bfly.b32 %s1, %t, 31, 31, -1;
        @!%p0 shfl.sync.bfly.b32 %s1, %t, 31, 31, -1; st.global.b32 [%o], %s1;""",
    **{
        f"shuffle_{way}": LOAD_THREE
        + f"shfl.sync.{way}.b32 %s3|%p0, %s0, %s1, %s2, -1; selp.b32 %s4, 1, 0, %p0;"
        + f"shfl.sync.{way}.b32 %s5, %s0, %s1, %s2, 0xffffffff;"
        + "st.global.v2.b32 [%o], {%s3, %s4}; st.global.b32 [%o+8], %s5;"
        for way in WAYS
    },
    **{
        f"matrices_{count}{way.replace('.', '_')}": keep("shared", "%w")
        + "bar.sync 0; and.b32 %s0, %t, 31; mul.lo.s32 %s0, %s0, 48; and.b32 %s0, %s0, 1023;"
        + "mov.u32 %s1, memory; add.s32 %s0, %s0, %s1; mov.b32 %s2, 0; mov.b32 %s3, 0;"
        + "mov.b32 %s4, 0; mov.b32 %s5, 0; "
        + f"ldmatrix.sync.aligned.m8n8.x{count}{way}.shared.b16 "
        + f"{{{', '.join(f'%s{2 + i}' for i in range(count))}}}, [%s0];"
        + "st.global.v4.b32 [%o], {%s2, %s3, %s4, %s5};"
        for count, way in MATRICES
    },
    **{
        f"product_{kind}": f"""
        .reg .b32 %x<6>; ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%a];
        ld.global.v2.b32 {{%x4, %x5}}, [%a+16]; cvt.rn.f32.u32 %f0, %t;
        mma.sync.aligned.m16n8k{8 if kind == "tf32" else 16}.row.col.f32.{kind}.{kind}.f32
        {{%f1, %f2, %f3, %f4}},
        {{%x0, %x1, %x2, %x3}}, {{%x4, %x5}}, {{%f0, 0f3F800000, %f0, %f0}};
        st.global.v4.f32 [%o], {{%f1, %f2, %f3, %f4}};"""
        for kind in PRODUCTS
    },
    **{
        f"copy_{way}_{size}": f"""
        and.b32 %s0, %t, 3; mul.lo.s32 %s0, %s0, 4; min.u32 %s0, %s0, {size};
        cp.async.{way}.shared.global [%w], [%a], {size}; cp.async.commit_group;
        cp.async.{way}.shared.global.L2::128B [%w+16], [%a+16], {hex(size)}, %s0;
        cp.async.commit_group; cp.async.wait_group 1; ld.shared.b32 %s1, [%w];
        cp.async.wait_group 0; ld.shared.b32 %s2, [%w+16]; ld.shared.b32 %s3, [%w+{size - 4}];
        ld.shared.b32 %s4, [%w+{16 + size - 4}]; st.global.v4.b32 [%o], {{%s1, %s2, %s3, %s4}};"""
        for way, size in SIZES
    },
}


@pytest.fixture(scope="module")
def executor():
    named = [kernel(x, code) for x, code in (RIGHT | WRONG).items()]
    code = [HEADER, SHARED, *(x[0] for x in PLAN.values()), *named, LAUNCHED]
    return library.Executor(Emulator(), "".join(code))


def lanes32(out):
    return out.view(np.uint32).reshape(LANES, 8)


def test_moves_take_vectors_apart_and_put_them_together(executor):
    given = words()
    found = lanes32(run(executor, "moves", given))
    low, high = lanes32(given)[:, 0], lanes32(given)[:, 1]
    swapped = (high << 16 | high >> 16).astype(np.uint32)
    assert np.array_equal(found[:, 0], swapped) and np.array_equal(found[:, 1], low)
    assert np.array_equal(found[:, 2], low ^ np.float32(1.5).view(np.uint32))
    assert (found[:, 3] == 17).all() and (found[:, 4:6].copy().view(np.float64) == 1.5).all()
    assert (found[:, 6] == (8 << 16 | 0xFFFE)).all()


def test_a_comparison_and_its_opposite(executor):
    out, lane = lanes32(run(executor, "pairs", words())), np.arange(LANES)
    less, more = lane < 20, lane > 40
    expected = np.stack([less, ~less, less | more, ~less | more], 1)
    assert np.array_equal(out[:, :4], expected)


def test_special_registers(executor):
    out = lanes32(run(executor, "specials", words()))
    lane = np.arange(LANES)
    assert out.T.tolist() == [
        *([64] * 64, [0] * 64, [0] * 64, [1] * 64),
        *((lane % 32).tolist(), lane.tolist(), [1] * 64, [1] * 64),
    ]


def test_blocks_of_three_dimensions(executor):
    out = aligned(2 * 3 * 2 * 32, np.uint32)
    found = executor.launch("places", (2, 3, 2), (4, 4, 2), 0, [out])
    assert not found.count, found.first
    x, y, z = np.meshgrid(range(4), range(4), range(2), indexing="ij")
    thread = (x + 4 * y + 16 * z).transpose(2, 1, 0).ravel()
    expected = [
        [1000 * (i + 2 * j + 6 * k) + thread] for k in range(2) for j in range(3) for i in range(2)
    ]
    assert out.tolist() == np.concatenate(expected, 1)[0].tolist()


def test_registers_of_a_scope_are_its_own(executor):
    assert (lanes32(run(executor, "scopes", words()))[:, :3] == [2, 3, 1]).all()


def test_branches_and_exits(executor):
    out, lane = lanes32(run(executor, "loop", words())), np.arange(LANES)
    assert np.array_equal(out[:, 0], lane * (lane - 1) // 2)
    assert np.array_equal(out[:, 1], np.where(lane < 32, 0, 7))


def test_addresses_of_each_space(executor):
    assert (lanes32(run(executor, "addresses", words()))[:, :4] == [0, 5, 6, 9]).all()


def test_unwritten_registers_and_local_memory_are_poison(executor):
    out = lanes32(run(executor, "poison", words()))[:, [0, 2, 3, 4, 5]]
    assert (out == [2**32 - 1] * 3 + [1, 2**32 - 1]).all()


def test_barriers(executor):
    given = words()
    for schedule in SCHEDULES:
        out = lanes32(run(executor, "barriers", given, schedule=schedule))[:, 0]
        assert np.array_equal(out, lanes32(given)[np.arange(LANES) ^ 63 ^ 1, 0])
        out = lanes32(run(executor, "handed_over", given, schedule=schedule))[32:, 0]
        assert np.array_equal(out, lanes32(given)[:32, 0])


def test_tickets_are_drawn_once(executor):
    out = run(executor, "tickets", aligned(LANES * 4, np.uint64))
    assert sorted(lanes32(out)[:, 0]) == list(range(0, 2 * LANES, 2))


def test_sums_of_two_lanes(executor):
    given = words()
    for schedule in SCHEDULES:
        out = run(executor, "sums", given, schedule=schedule).reshape(LANES, 4)[:, 0]
        with np.errstate(over="ignore"):
            pairs = given.reshape(LANES // 2, 2, 4)[..., 0].sum(1)
        assert np.array_equal(out[::2], pairs) and not out[1::2].any()


def test_an_acquire_reads_released_writes(executor):
    """One warp spins until the other is done, whichever runs first."""
    for schedule in SCHEDULES:
        out = run(executor, "in_turn", aligned(LANES * 4, np.uint64), schedule=schedule)
        assert np.array_equal(lanes32(out)[:, 0], np.arange(LANES) % 32 + 7)


def test_banks_are_counted_for_each_instruction(executor):
    """Two stores, by half of the lanes each, are separate; together they would conflict."""
    arrays = [words(), aligned(LANES * 4, np.uint64)]
    found = executor.launch("banks", (1,), (LANES,), 2048, arrays, banks=True)
    assert not found.count, found.first
    stores = [x for what, x in found.banks.items() if what.startswith("st.shared")]
    assert stores == [(2, 0), (2, 0)] and found.banks["cp.async"] == (8, 0)


@pytest.mark.parametrize("name", ["two_places", "two_shuffles"])
def test_lanes_at_two_instructions_reconverge(executor, name):
    """Barriers and shuffles of a warp are not .aligned: lanes match by opcode and mask."""
    for schedule in SCHEDULES:
        out = lanes32(run(executor, name, words(), schedule=schedule))[:, 0]
        assert np.array_equal(out, np.arange(LANES) ^ 31)


@pytest.mark.parametrize("width", [32, 16, 4])
@pytest.mark.parametrize("way", WAYS)
def test_shuffles(executor, way, width):
    """Shuffles follow the CUDA guide's __shfl_sync functions, with segments of several widths."""
    given = words()
    table = lanes32(given)
    table[:, 1] %= 40
    table[:, 2] = (32 - width) << 8 | (0 if way == "up" else 31)
    out = lanes32(run(executor, f"shuffle_{way}", given))
    for thread in range(LANES):
        lane, by = thread % 32, int(table[thread, 1]) % 32
        first = lane // width * width
        there = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first + by % width}
        source = there[way]
        valid = source >= first if way == "up" else source < first + width
        source = source if valid else lane
        value = table[thread - lane + source, 0]
        assert out[thread, :3].tolist() == [value, valid, value], (thread, by)


@pytest.mark.parametrize("count, way", MATRICES, ids=[f"x{n}{way}" for n, way in MATRICES])
def test_matrices_are_loaded_in_cutlass_layouts(executor, count, way):
    layouts = pytest.importorskip("tensor_layouts.atoms_nv")
    kind = f"U16x{2 * count}_LDSM_T" if way else f"U32x{count}_LDSM_N"
    atom = getattr(layouts, f"SM75_{kind}")
    given = words()
    rows = given.view(np.uint16)[: 32 * 64].reshape(-1, 8)
    address = np.arange(32) * 48 % 1024 // 16
    at = {
        int(atom.src_layout_bits(lane, bit)): rows[address[lane], bit // 16]
        for lane in range(32)
        for bit in range(0, 128, 16)
        if lane < 8 * count
    }
    expected = [
        [at[int(atom.dst_layout_bits(lane, bit))] for bit in range(0, 32 * count, 16)]
        for lane in range(32)
    ]
    out = lanes32(run(executor, f"matrices_{count}{way.replace('.', '_')}", given))
    expected = np.array(expected, np.uint16).view(np.uint32)
    assert np.array_equal(out[:32, :count], expected) and not out[:32, count:4].any()


def matrix(layout, of, rows):
    flat = np.empty(of.size)
    for lane in range(32):
        for i in range(of.shape[1]):
            flat[int(layout(lane, i))] = of[lane, i]
    return flat.reshape(rows, -1, order="F")


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_of_fragments_follow_cutlass_layouts(executor, kind):
    layouts = pytest.importorskip("tensor_layouts.atoms_nv")
    letters = kind.upper()
    atom = getattr(layouts, f"SM80_16x8x{8 if kind == 'tf32' else 16}_F32{letters}{letters}F32_TN")
    values = torch.randn(LANES, 32, generator=torch.Generator().manual_seed(0)).to(PRODUCTS[kind])
    values = values[:, : 32 // values.itemsize]  # a in the first half of 32 bytes, then b
    given = as_aligned(values.contiguous().view(torch.int64).numpy().view(np.uint64).ravel())
    if kind == "tf32":  # tf32 drops the low 13 bits
        values = (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    out = run(executor, f"product_{kind}", given).view(np.float32).reshape(LANES, 8)
    half = values.shape[1] // 2
    for warp in (0, 32):
        mine = values[warp : warp + 32].double().numpy()
        a = matrix(atom.a_layout, mine[:, :half], 16)
        b = matrix(atom.b_layout, mine[:, half : half + half // 2], 8)
        c = np.repeat(np.arange(warp, warp + 32.0)[:, None], 4, 1)
        c[:, 1] = 1
        d = (a @ b.T + matrix(atom.c_layout, c, 16)).flatten("F")
        expected = np.array([[d[int(atom.c_layout(x, i))] for i in range(4)] for x in range(32)])
        np.testing.assert_allclose(out[warp : warp + 32, :4], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("way, size", SIZES)
def test_copies(executor, way, size, lazy):
    """The second copy of each thread has a source size, and fills the rest with zeros."""
    given = words()
    out, source = lanes32(run(executor, f"copy_{way}_{size}", given, lazy=lazy)), lanes32(given)
    expected = np.minimum(np.arange(LANES) % 4 * 4, size)
    last = source[:, 4 + size // 4 - 1]
    assert np.array_equal(out[:, 0], source[:, 0])
    assert np.array_equal(out[:, 1], np.where(expected > 0, source[:, 4], 0))
    assert np.array_equal(out[:, 2], source[:, size // 4 - 1])
    assert np.array_equal(out[:, 3], np.where(expected == size, last, 0))


TESTED = (*RIGHT.values(), *(x[0] for x in PLAN.values()))


def test_every_form_is_tested():
    """test_ptx_values.py tests values, test_ptx_hopper.py forms of sm_90, test_ptx_blackwell.py
    and test_ptx_blackwell_values.py forms of sm_100; all other opcodes are in a kernel here."""
    newer = {name for name, *_ in (*ptx_hopper.FORMS, *ptx_blackwell.FORMS)}
    others = [x for x in forms.FORMS if x.name.startswith("cvta") or callable(x.code)]
    others = [x for x in others if x.name not in newer]
    for form in others:
        if not form.name.startswith("setp"):
            pattern = re.compile(rf"(?<![\w.]){form.pattern.pattern}(?=[\s;])")
            assert any(pattern.search(code) for code in TESTED), form.name


# --- errors are specific --------------------------------------------------------------------------

WRONG = {
    "not_released": RIGHT["in_turn"].replace("st.release", "st.relaxed"),
    "not_acquired": RIGHT["in_turn"].replace("ld.acquire", "ld.relaxed"),
    "two_kinds": """
        and.b32 %s0, %t, 1; setp.eq.b32 %p0, %s0, 0; @%p0 shfl.sync.bfly.b32 %s1, %t, 1, 31, -1;
        @!%p0 shfl.sync.idx.b32 %s1, %t, 1, 31, -1; st.global.b32 [%o], %s1;""",
    "two_masks": """
        and.b32 %s0, %t, 1; setp.eq.b32 %p0, %s0, 0; @%p0 bar.warp.sync -1;
        @!%p0 bar.warp.sync 0xaaaaaaaa;""",
    "some_lanes_load": """
        setp.lt.u32 %p0, %t, 8; mov.u32 %s4, memory;
        @%p0 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%s0}, [%s4];""",
    "not_in_its_mask": "shfl.sync.idx.b32 %s0, %t, 0, 31, 0xffff;",
    "race": """
        st.shared.b32 [%w], %t; xor.b32 %s0, %t, 33; mov.u32 %s1, memory;
        mad.lo.s32 %s1, %s0, 32, %s1; ld.shared.b32 %s2, [%s1]; st.global.b32 [%o], %s2;""",
    "not_waited_for": """
        cp.async.cg.shared.global [%w], [%a], 16; cp.async.commit_group; ld.shared.b32 %s0, [%w];
        cp.async.wait_group 0;""",
    "misaligned_global": "ld.global.b32 %s0, [%a+2];",
    "misaligned_vector": "st.global.v4.b32 [%o+8], {%s0, %s1, %s2, %s3};",
    "misaligned_shared": "st.shared.v2.b32 [%w+4], {%s0, %s1};",
    "past_shared": "ld.shared.b32 %s0, [%w+2048];",
    "before_shared": "add.s32 %s1, %w, -4096; st.shared.b32 [%s1], 1;",
    "null": "mov.u64 %d0, 0; ld.global.b32 %s0, [%d0+8];",
    "null_copy": "mov.u64 %d0, 0; cp.async.cg.shared.global [%s0], [%d0+16], 16;",
    "global_that_is_shared": """
        cvt.u64.u32 %d0, %w; cvta.shared.u64 %d0, %d0; st.global.b32 [%d0], 1;""",
    "global_that_is_local": """
        .local .align 4 .b8 mine[4]; mov.u64 %d0, mine; ld.global.b32 %s0, [%d0];""",
    "never_written_address": "ld.global.b8 %s0, [%d8];",
    "past_its_parameters": "mov.b64 %d0, given; ld.param.u64 %d1, [%d0+8];",
    "past_local": ".local .align 4 .b8 mine[4]; mov.u64 %d0, mine; st.local.b32 [%d0+4], %t;",
    "too_many_bytes": "mov.u32 %s0, 17; cp.async.cg.shared.global [%w], [%a], 16, %s0;",
    "no_such_barrier": "bar.sync 16;",
}
EXPECTED = {
    "not_released": r"RACE write/read.*st.global.b32 in line \d+.*ld.global.b32 in line \d+",
    "not_acquired": r"RACE write/read.*st.global.b32 in line \d+.*ld.global.b32 in line \d+",
    "two_kinds": r"warp \d has diverged.*shfl.sync.\w+.b32 in line \d+.*shfl.sync.\w+.b32 in line",
    "two_masks": r"warp \d has diverged.*bar.warp.sync in line \d+ of.*bar.warp.sync in line \d+",
    "some_lanes_load": "DEADLOCK.*8 at ldmatrix.sync.aligned.m8n8.x1.shared.b16 in line",
    "not_in_its_mask": "is not in its own mask 0xffff",
    "race": r"(RACE|UNINITIALISED).*ld.shared.b32 in line \d+",
    "not_waited_for": r"READ IN FLIGHT.*ld.shared.b32 in line \d+",
    "misaligned_global": r"ld.global.b32 in line \d+ of \w+: 4 bytes at .* misaligned",
    "misaligned_vector": r"st.global.v4.b32 in line \d+ of \w+: 16 bytes at .* misaligned",
    "misaligned_shared": "8 bytes at .* misaligned",
    "past_shared": r"4 bytes at \d{4}, of 2048",
    "before_shared": r"4 bytes at -\d+, of 2048",
    "null": r"ld.global.b32 in line \d+ of \w+: 4 bytes at 0x8, which is no memory",
    "null_copy": r"16 bytes at 0x10, which is no memory",
    "global_that_is_shared": r"st.global.b32 in line \d+ of \w+: .* not in global memory",
    "global_that_is_local": r"ld.global.b32 in line \d+ of \w+: .* not in global memory",
    "never_written_address": r"1 bytes at 0xf{16}, which is no memory",
    "past_its_parameters": r"ld.param.u64 in line \d+ of \w+: 8 bytes beside the parameters",
    "past_local": r"st.local.b32 in line \d+ of \w+: 4 bytes at 4, of 4",
    "too_many_bytes": r"cp.async.cg.shared.global in line \d+ of \w+: 17 bytes of 16",
    "no_such_barrier": r"bar.sync in line \d+ of \w+: barrier 16",
}


@pytest.mark.parametrize("name", WRONG)
def test_faults_are_named(executor, name):
    for schedule in SCHEDULES:
        arrays = [words(), aligned(LANES * 4, np.uint64)]
        found = executor.launch(name, (1,), (LANES,), 2048, arrays, schedule=schedule)
        assert found.count and re.search(EXPECTED[name], found.first), found.first


# --- launches -------------------------------------------------------------------------------------

NOTHING = ".visible .entry {}({})\n{}\n{{\n{}\nret;\n}}\n"
LAUNCHED = "".join(
    [
        NOTHING.format("at_most_64", "", ".maxntid 64, 1, 1", ""),
        NOTHING.format("exactly_64", "", ".reqntid 64", ""),
        NOTHING.format("static_16", "", "", ".shared .align 16 .b8 own[16];"),
        NOTHING.format("one_word", ".param .u32 n, .param .align 8 .b8 s[24]", "", ""),
        entry(
            "places",
            "out",
            [
                ".reg .b32 %n<20>; .reg .b64 %o, %at; ld.param.u64 %o, [out];",
                "mov.u32 %n0, %tid.x; mov.u32 %n1, %tid.y; mov.u32 %n2, %tid.z;",
                "mad.lo.s32 %n3, %n1, 4, %n0; mad.lo.s32 %n3, %n2, 16, %n3;",
                "mov.u32 %n4, %ctaid.x; mov.u32 %n5, %ctaid.y; mov.u32 %n6, %ctaid.z;",
                "mov.u32 %n7, %nctaid.x; mov.u32 %n8, %nctaid.y; mad.lo.s32 %n9, %n6, %n8, %n5;",
                "mad.lo.s32 %n9, %n9, %n7, %n4; mad.lo.s32 %n10, %n9, 32, %n3;",
                "mad.lo.s32 %n11, %n9, 1000, %n3; mul.wide.u32 %at, %n10, 4;",
                "add.s64 %o, %o, %at; st.global.b32 [%o], %n11;",
            ],
        ),
    ]
)


@pytest.mark.parametrize(
    "name, block, shared, arguments, expected",
    [
        ("at_most_64", (96,), 0, [], "96 x 1 x 1 threads, its .maxntid are 64 x 1 x 1"),
        ("at_most_64", (32, 2, 2), 0, [], "32 x 2 x 2 threads, its .maxntid are 64 x 1 x 1"),
        ("at_most_64", (32, 2), 0, [], ""),
        ("exactly_64", (32,), 0, [], "32 x 1 x 1 threads, its .reqntid are 64 x 1 x 1"),
        ("exactly_64", (64,), 0, [], ""),
        ("static_16", (32,), 163 << 10, [], "166928 bytes of shared memory, its arch.* 166912"),
        ("static_16", (32,), (163 << 10) - 16, [], ""),
        ("one_word", (32,), 0, [bytes(4)], "1 parameters, expected 2"),
        ("one_word", (32,), 0, [bytes(8), bytes(24)], "parameter 0 has 8 bytes, expected 4"),
        ("one_word", (32,), 0, [bytes(4), bytes(32)], "parameter 1 has 32 bytes, expected 24"),
        ("one_word", (32,), 0, [bytes(4), bytes(24)], ""),
        ("absent", (32,), 0, [], "launch of absent: it was not compiled"),
    ],
)
def test_launches_are_checked_against_the_kernels_directives(
    executor, name, block, shared, arguments, expected
):
    found = executor.launch(name, (1,), block, shared, arguments)
    assert bool(found.count) == bool(expected) and re.search(expected, found.first), found.first
    assert executor.launches() == (not expected)
