"""Additions of sm_90 in the PTX translator: mbarriers, boxes of tensors, stmatrix, elect.sync.

Products are in test_ptx_products.py, misuses in test_ptx_hopper_misuse.py. mbarriers are checked
against the PTX ISA, boxes against numpy and the swizzles of PyPI's tensor-layouts, matrices against
the atoms of tensor-layouts.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from tests.gpu_emulation.emulator import SCHEDULES, Emulator, aligned, needs_emulator
from tests.gpu_emulation.ptx import cpp, library, text
from tests.gpu_emulation.tests.test_ptx_products import HEADER, SHARED
from tests.gpu_emulation.tests.test_ptx_values import as_aligned, entry

pytestmark = needs_emulator
LANES = 64
named = pytest.mark.parametrize

# Each thread has 16 bytes of the input at %a, of the output at %o, and of shared memory at %w.
# From %bar on there is room for mbarriers.
BEGIN = """
.reg .b32 %t, %m, %w, %bar, %i, %q, %s<8>; .reg .b64 %at, %a, %o, %d<4>; .reg .pred %p<4>, %first;
mov.u32 %t, %tid.x; mov.u32 %m, memory; mul.wide.u32 %at, %t, 16; mad.lo.s32 %w, %t, 16, %m;
ld.param.u64 %a, [given]; add.s64 %a, %a, %at; ld.param.u64 %o, [out]; add.s64 %o, %o, %at;
add.s32 %bar, %m, 1024; setp.eq.u32 %first, %t, 0; mov.b32 %s0, 0; mov.b32 %s1, 0;
"""
INIT = "mbarrier.init.shared::cta.b64"
KEEP = "st.global.v4.b32 [%o], {%s0, %s1, %s2, %s3};"


def wait(at, parity, way="try_wait"):
    """The loop that compilers emit for a wait, with a label in a nested scope."""
    test = f"mbarrier.{way}.parity.shared::cta.b64"
    return f"""{{ .reg .pred complete; waitLoop: {test} complete, [{at}], {parity};
    @!complete bra.uni waitLoop; }}"""


def ask(parity):
    """Append a bit to %s0: 1 if the phase of this parity is over."""
    return f"""mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p0, [%bar], {parity};
    selp.b32 %s7, 1, 0, %p0; shl.b32 %s0, %s0, 1; or.b32 %s0, %s0, %s7;"""


def rounds(way, count):
    """Five times, each lane of warp 0 passes a number to a lane of warp 1. Each arrival counts
    `count` times."""
    arrive = "mbarrier.arrive.release.cta.shared::cta.b64 _,"
    return f"""
    @%first {INIT} [%bar], {32 * count}; @%first mbarrier.init.shared.b64 [%bar+8], 32; bar.sync 0;
    mov.u32 %i, 0; setp.gt.u32 %p0, %t, 31; mov.u32 %q, 1; xor.b32 %s7, %t, 63;
    mad.lo.s32 %s6, %s7, 16, %m; @%p0 bra $takes; $gives: {wait("%bar+8", "%q", way)}
    ld.global.b32 %s2, [%a]; mad.lo.s32 %s2, %i, 1000, %s2; st.shared.b32 [%w], %s2;
    {arrive} [%bar], {count}; xor.b32 %q, %q, 1; add.s32 %i, %i, 1; setp.lt.u32 %p1, %i, 5;
    @%p1 bra $gives; ret; $takes: xor.b32 %q, %q, 1; {wait("%bar", "%q", way)}
    ld.shared.b32 %s2, [%s6]; mad.lo.s32 %s0, %s0, 3, %s2;
    mbarrier.arrive.shared.b64 _, [%bar+8]; add.s32 %i, %i, 1;
    setp.lt.u32 %p1, %i, 5; @%p1 bra $takes; {KEEP}"""


def stored(count, way):
    """Store rows of matrices to shared memory, 48 bytes apart."""
    registers = ", ".join(f"%s{2 + i}" for i in range(count))
    return f"""
    ld.global.v4.b32 {{%s2, %s3, %s4, %s5}}, [%a]; mov.b32 %s6, 0;
    st.shared.v4.b32 [%w], {{%s6, %s6, %s6, %s6}}; bar.sync 0; setp.gt.u32 %p0, %t, 31;
    @%p0 bra $end; mul.lo.s32 %s6, %t, 48; and.b32 %s6, %s6, 1023; add.s32 %s6, %s6, %m;
    stmatrix.sync.aligned.m8n8.x{count}{way}.shared.b16 [%s6], {{{registers}}};
    $end: bar.sync 0; ld.shared.v4.b32 {{%s0, %s1, %s2, %s3}}, [%w]; {KEEP}"""


MATRICES = [(count, way) for count in (1, 2, 4) for way in ("", ".trans")]
SOME = 0x0F03F0FC
RIGHT = {
    "phases": f"""
        @!%first bra $end; {INIT} [%bar], 2; fence.mbarrier_init.release.cluster;
        {ask(0)} {ask(1)} mbarrier.arrive.shared::cta.b64 _, [%bar];
        {ask(0)} {ask(1)} mbarrier.arrive.shared::cta.b64 _, [%bar], 1;
        {ask(0)} {ask(1)} mbarrier.arrive.shared::cta.b64 _, [%bar], 2;
        {ask(0)} {ask(1)} mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%bar], 16;
        mbarrier.arrive.shared::cta.b64 _, [%bar], 2; {ask(0)} {ask(1)} $end: {KEEP}""",
    **{f"rounds_{way}_{n}": rounds(way, n) for way in ("try_wait", "test_wait") for n in (1, 2)},
    "again": f"""
        @%first {INIT} [%bar], 1; bar.sync 0; @!%first bra $wait; st.shared.b32 [%m], 7;
        mbarrier.arrive.shared::cta.b64 _, [%bar]; $wait: {wait("%bar", 0)}
        ld.shared.b32 %s0, [%m]; bar.sync 0; @%first mbarrier.inval.shared::cta.b64 [%bar];
        @%first {INIT} [%bar], 64; bar.sync 0; st.shared.b32 [%w+2048], %t;
        mbarrier.arrive.shared::cta.b64 _, [%bar]; {wait("%bar", 0)} xor.b32 %s2, %t, 63;
        mad.lo.s32 %s2, %s2, 16, %m; ld.shared.b32 %s1, [%s2+2048]; {KEEP}""",
    "elected": f"""
        elect.sync %s0|%p0, -1; elect.sync %s1|%p1, 0xffffffff; selp.b32 %s2, 1, 0, %p0;
        and.b32 %s6, %t, 31; mov.b32 %s7, {SOME}; shr.u32 %s7, %s7, %s6; and.b32 %s7, %s7, 1;
        setp.eq.s32 %p2, %s7, 0; mov.b32 %s3, 99; @%p2 bra $end; elect.sync %s3|%p2, {SOME};
        elect.sync _|%p3, {SOME}; selp.b32 %s4, 32, 0, %p3; or.b32 %s2, %s2, %s4;
        selp.b32 %s4, 64, 0, %p2; or.b32 %s2, %s2, %s4; $end: {KEEP}""",
    "labels": f"""
        .pragma "used_bytes_mask 0xfff"; ld.global.v4.b32 {{%s1, %s1, %s1, %s1}}, [%a];
        mov.b32 %s1, 0; mov.b32 %s2, 0; {{ .reg .pred more; waitLoop: add.s32 %s1, %s1, 1;
        setp.lt.s32 more, %s1, 5; @more bra waitLoop; }} {{ .reg .pred more; waitLoop:
        add.s32 %s2, %s2, 2; setp.lt.s32 more, %s2, %s1; @more bra.uni waitLoop; }} {KEEP}""",
    **{f"stored_{n}{way.replace('.', '_')}": stored(n, way) for n, way in MATRICES},
}

# --- kernels that load boxes ----------------------------------------------------------------------

# Fields of a tensor map; the kernel gets each as 64 bits.
OF_ALL = ["global_address", "rank", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode"]
OF_EACH = [("box_dim", 5), ("global_dim", 5), ("element_stride", 5), ("global_stride", 4)]
NAMES = [*((x, ()) for x in OF_ALL), *((x, (i,)) for x, n in OF_EACH for i in range(n))]
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%map], 128;"
PUBLISH = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
# Warp 0 makes a map of zeros, its first lane replaces all fields, and the warp publishes the map.
MAKE = """
.reg .b64 %map, %f, %c; .reg .b32 %to, %bytes, %total; .reg .b64 %x; .reg .b32 %at<5>;
ld.param.u64 %map, [map]; ld.param.u64 %f, [fields]; ld.param.u64 %c, [at];
ld.param.u64 %x, [bytes]; cvt.u32.u64 %bytes, %x; ld.param.u64 %x, [skip]; cvt.u32.u64 %to, %x;
add.s32 %to, %to, %m; add.s32 %to, %to, 2048; ld.param.u64 %x, [count]; cvt.u32.u64 %i, %x;
ld.param.u64 %x, [total]; cvt.u32.u64 %total, %x; @%first INIT [%bar], 1;
setp.gt.u32 %p0, %t, 31; @%p0 bra $made; mad.lo.s32 %s6, %t, 4, %m; st.shared.b32 [%s6], 0;
bar.warp.sync -1; @!%first bra $publish;
REPLACE
$publish: bar.warp.sync -1; PUBLISH [%map], [%m], 128;
$made: bar.sync 0;
""".replace("INIT", INIT).replace("PUBLISH", PUBLISH)


def replaced(i, name, ordinal):
    """Replace a field by the i-th argument, in a register of the field's size."""
    kind, x = ("b64", "%d0") if name in ("global_address", "global_stride") else ("b32", "%s5")
    to = f"tensormap.replace.tile.{name}.shared::cta.b1024.{kind}"
    return f"ld.global.{kind} {x}, [%f+{8 * i}]; {to} [%m], {', '.join([*map(str, ordinal), x])};\n"


MAKE = MAKE.replace("REPLACE", "".join(replaced(i, *x) for i, x in enumerate(NAMES)))
COPY_OUT = """
mov.u32 %s7, %t; $out: mul.lo.s32 %s6, %s7, 16; setp.ge.u32 %p0, %s6, %bytes; @%p0 bra $end;
ld.param.u64 %x, [skip]; cvt.u32.u64 %s5, %x; add.s32 %s5, %s5, %m; add.s32 %s5, %s5, %s6;
ld.shared.v4.b32 {%s0, %s1, %s2, %s3}, [%s5+2048]; ld.param.u64 %x, [out];
cvt.u64.u32 %d0, %s6; add.s64 %x, %x, %d0; st.global.v4.b32 [%x], {%s0, %s1, %s2, %s3};
add.s32 %s7, %s7, 64; bra $out; $end:
"""
BOXED = "given out fields map at bytes skip count total"


def load(rank, to="%to", bar="%bar", space="shared::cta"):
    at = ", ".join(f"%at{i}" for i in range(rank))
    load = f"cp.async.bulk.tensor.{rank}d.{space}.global.mbarrier::complete_tx::bytes"
    return f"{load} [{to}], [%map, {{{at}}}], [{bar}];"


def boxes(rank, before=True):
    """A kernel that loads boxes with one mbarrier; it expects their bytes before or after it issues
    the loads."""
    expect = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], %total;"
    coordinates = "".join(f"ld.global.b32 %at{i}, [%c+{4 * i}];" for i in range(rank))
    each = "add.s32 %to, %to, %s4; add.s64 %c, %c, 32; add.s32 %i, %i, -1;"
    space = "shared::cta" if before else "shared::cluster"
    return f"""{MAKE} @!%first bra $wait; {ACQUIRE} {expect if before else ""}
    ld.param.u64 %x, [given]; cvt.u32.u64 %s4, %x;
    $next: {coordinates} {load(rank, space=space)} {each}
    setp.ne.s32 %p0, %i, 0; @%p0 bra $next; {"" if before else expect}
    $wait: {wait("%bar", 0)} {COPY_OUT}"""


RANKS = (1, 2, 3, 4, 5)
BOXES = {f"boxes_{rank}": boxes(rank) for rank in RANKS} | {"expected_after": boxes(2, False)}
# These instructions have no effect here, but must be accepted.
BOXES["groups"] = "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; fence.proxy.async;"
KERNELS = {
    **{x: entry(x, "given out", [BEGIN, code], "") for x, code in RIGHT.items()},
    **{x: entry(x, BOXED, [BEGIN, code], "") for x, code in BOXES.items()},
}


def made(emulator):
    return library.Executor(emulator, HEADER + SHARED + "".join(KERNELS.values()))


@pytest.fixture(scope="module")
def executor():
    return made(Emulator())


def words(seed=0):
    g = np.random.default_rng(seed)
    return as_aligned(g.integers(0, 2**32, LANES * 4, dtype=np.uint32))


def run(executor, name, given=None, **options):
    out = aligned(LANES * 4, np.uint32)
    given = words() if given is None else given
    found = executor.launch(name, (1,), (LANES,), 4096, [given, out], **options)
    assert not found.count, found.first
    return out.reshape(LANES, 4)


# --- mbarriers ------------------------------------------------------------------------------------


def test_phases_of_an_mbarrier(executor):
    """Two arrivals end a phase. The phase of the other parity counts as over at first."""
    of = {"first": [0, 1], "second": [1, 0]}  # whether the phases of parity 0 and 1 are over
    bits = of["first"] * 2 + of["second"] + of["first"]
    bits += of["first"]  # bytes are still expected
    assert run(executor, "phases")[0, 0] == int("".join(map(str, bits)), 2)


@named("name", [x for x in RIGHT if x.startswith("rounds")])
def test_rounds_of_two_mbarriers(executor, name):
    given = words() >> 16
    numbers = given.reshape(LANES, 4)[31::-1, 0].astype(np.uint64)
    expected = 0
    for i in range(5):
        expected = 3 * expected + numbers + 1000 * i
    for schedule in SCHEDULES:
        for seed in range(4):
            found = run(executor, name, as_aligned(given), schedule=schedule, seed=seed)
            assert np.array_equal(found[32:, 0], expected.astype(np.uint32))


def test_an_mbarrier_can_be_reinitialised(executor):
    for schedule in SCHEDULES:
        found = run(executor, "again", schedule=schedule)
        assert (found[:, 0] == 7).all() and np.array_equal(found[:, 1], np.arange(LANES) ^ 63)


# --- boxes ----------------------------------------------------------------------------------------

TYPES = {1: 0, 2: 10, 4: 7, 8: 9}  # {bytes: number in tensormap.replace}: u8, bf16, f32, f64


@dataclass
class Tensor:
    """A tensor of random bytes with gaps between rows. Dimensions start with the innermost, as in a
    tensor map."""

    dims: tuple
    box: tuple
    size: int
    swizzle: int
    g: np.random.Generator

    def __post_init__(self):
        self.strides, row = [], -(-self.dims[0] * self.size // 16) * 16
        for n in (1, *self.dims[1:-1]):
            row = row * n + 16
            self.strides.append(row)
        self.strides = self.strides[: len(self.dims) - 1]
        bytes = row * self.dims[-1] + 16
        self.memory = as_aligned(self.g.integers(1, 256, bytes, dtype=np.uint8))

    def fields(self, **other):
        rank = len(self.dims)
        values = {
            "global_address": self.memory.ctypes.data,
            "rank": rank - 1,
            "elemtype": TYPES[self.size],
            "swizzle_mode": self.swizzle,
            **{f"box_dim{i}": x for i, x in enumerate(self.box)},
            **{f"global_dim{i}": x for i, x in enumerate(self.dims)},
            **{f"element_stride{i}": 1 for i in range(rank)},
            **{f"global_stride{i}": x for i, x in enumerate(self.strides)},
            **other,
        }
        names = [name + "".join(map(str, ordinal)) for name, ordinal in NAMES]
        return as_aligned(np.array([values.get(x, 0) for x in names], np.uint64))

    def bytes(self):
        return int(np.prod(self.box)) * self.size

    def at(self, coordinates):
        """The bytes of a box, with zeros outside of the tensor."""
        strides = [self.size, *self.strides][::-1]
        whole = np.lib.stride_tricks.as_strided(
            self.memory, (*self.dims[::-1], self.size), (*strides, 1)
        )
        found = np.zeros((*self.box[::-1], self.size), np.uint8)
        inside, of = [], []
        for at, box, dim in zip(coordinates[::-1], self.box[::-1], self.dims[::-1]):
            first, end = max(0, at), min(dim, at + box)
            if end <= first:
                return found.ravel()
            inside.append(slice(first - at, end - at))
            of.append(slice(first, end))
        found[tuple(inside)] = whole[tuple(of)]
        return found.ravel()


def load_boxes(executor, name, tensor, coordinates, skip=0, fields=None, **options):
    """(the kernel's output, the expected output)"""
    layouts = pytest.importorskip("tensor_layouts")
    each = tensor.bytes()  # a multiple of 128
    bytes = each * len(coordinates)
    at = aligned(8 * len(coordinates), np.int32)
    for i, x in enumerate(coordinates):
        at[8 * i : 8 * i + len(x)] = x
    out, map = aligned(bytes, np.uint8), aligned(128, np.uint8, to=64)
    numbers = bytes, skip, len(coordinates), bytes
    fields = tensor.fields() if fields is None else fields
    arguments = [each.to_bytes(8, "little"), out, fields, map, at]
    arguments += [x.to_bytes(8, "little") for x in numbers]
    found = executor.launch(name, (1,), (LANES,), 2048 + skip + bytes, arguments, **options)
    assert not found.count, found.first
    swizzle = layouts.Swizzle(tensor.swizzle, 4, 3)
    first, expected = 2048 + skip, np.zeros(bytes, np.uint8)
    for i, x in enumerate(coordinates):
        expected[swizzle(first + i * each + np.arange(each)) - first] = tensor.at(x)
    return out, expected


def coordinates_of(tensor, count):
    """Coordinates inside, past ends, before the beginning, and entirely outside."""
    g = tensor.g
    yield tuple(0 for _ in tensor.dims)
    for _ in range(count - 2):
        yield tuple(int(g.integers(-b + 1, n)) for b, n in zip(tensor.box, tensor.dims))
    yield tuple(int(g.integers(n, n + 3)) for n in tensor.dims)


SHAPES = {1: [(137,), (128,)], 2: [(19, 7), (16, 8)], 3: [(21, 5, 3), (32, 2, 2)]}
SHAPES |= {4: [(17, 3, 2, 5), (16, 2, 2, 2)], 5: [(18, 3, 2, 2, 3), (16, 2, 2, 1, 2)]}


@named("size", TYPES)
@named("rank", RANKS)
def test_boxes_of_tensors(executor, rank, size):
    for seed, lazy in enumerate((False, True)):
        tensor = Tensor(*SHAPES[rank], size, 0, np.random.default_rng(seed))
        at = [*coordinates_of(tensor, 6)]
        out, expected = load_boxes(executor, f"boxes_{rank}", tensor, at, seed=seed, lazy=lazy)
        assert np.array_equal(out, expected)


@named("size", TYPES)
@named("swizzle", [1, 2, 3], ids=lambda x: f"{16 << x}")
def test_swizzled_boxes(executor, swizzle, size):
    """The swizzle depends on the shared address, also if that is no multiple of the pattern."""
    row = (16 << swizzle) // size
    for skip in (0, 128, 384):
        tensor = Tensor((row + 3, 21), (row, 8), size, swizzle, np.random.default_rng(skip))
        at = [*coordinates_of(tensor, 4)]
        out, expected = load_boxes(executor, "boxes_2", tensor, at, skip)
        assert np.array_equal(out, expected)


@named("name", ["boxes_2", "expected_after"])
@named("lazy", [False, True], ids=["eager", "lazy"])
def test_boxes_on_every_schedule(executor, name, lazy):
    for schedule in SCHEDULES:
        for seed in range(4):
            tensor = Tensor((64, 9), (64, 4), 2, 3, np.random.default_rng(seed))
            at = [(0, 0), (-3, 5), (7, -1), (0, 8)]
            options = dict(schedule=schedule, seed=seed, lazy=lazy)
            out, expected = load_boxes(executor, name, tensor, at, **options)
            assert np.array_equal(out, expected)


def test_a_box_over_4_gigabytes_is_refused(executor):
    tensor = Tensor(*SHAPES[4], 1, 0, np.random.default_rng(0))
    fields = tensor.fields(**{f"box_dim{i}": 256 for i in range(4)})
    with pytest.raises(AssertionError, match="bytes of a box 4294967296, expected no more than"):
        load_boxes(executor, "boxes_4", tensor, [(0, 0, 0, 0)], fields=fields)


def test_groups_of_nothing(executor):
    found = executor.launch("groups", (1,), (LANES,), 4096, [bytes(8)] * 9)
    assert not found.count, found.first


# --- lanes ----------------------------------------------------------------------------------------


@named("count, way", MATRICES, ids=[f"x{n}{way}" for n, way in MATRICES])
def test_matrices_are_stored_in_cutlass_layouts(executor, count, way):
    atoms = pytest.importorskip("tensor_layouts.atoms_nv")
    atom = getattr(atoms, f"SM90_U16x{2 * count}_STSM_T" if way else f"SM90_U32x{count}_STSM_N")
    given = words()
    mine = given.reshape(LANES, 4)[:32, :count].copy().view(np.uint16)
    at = {
        int(atom.src_layout_bits(lane, 16 * i)): mine[lane, i]
        for lane in range(32)
        for i in range(2 * count)
    }
    expected = np.zeros((LANES, 8), np.uint16)
    for lane in range(8 * count):
        row = [at[int(atom.dst_layout_bits(lane, 16 * i))] for i in range(8)]
        expected[lane * 48 % 1024 // 16] = row
    out = run(executor, f"stored_{count}{way.replace('.', '_')}", given)
    assert np.array_equal(out.view(np.uint16), expected)


def test_one_lane_is_elected(executor):
    leaders = set()
    for schedule in SCHEDULES:
        for seed in range(8):
            out = run(executor, "elected", schedule=schedule, seed=seed)
            for warp in out.reshape(2, 32, 4):
                (leader,), lanes = set(warp[:, :2].ravel().tolist()), np.arange(32)
                assert np.array_equal(warp[:, 2] & 1, lanes == leader)
                inside = SOME >> lanes & 1 == 1
                (other,) = set(warp[inside, 3].tolist())
                assert SOME >> other & 1 and (warp[~inside, 3] == 99).all()
                assert np.array_equal(warp[:, 2] >> 5, 3 * (lanes == other))
                leaders.add((leader, other))
    assert len(leaders) > 4


def test_labels_of_a_scope_are_its_own(executor):
    assert (run(executor, "labels")[:, 1:3] == [5, 6]).all()


# --- unknown forms are refused --------------------------------------------------------------------

REGISTERS = ".reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p<3>; .reg .f32 %f<9>;"
OPERANDS = "{%f0, %f1, %f2, %f3}, %d0, %d1, %p0, 1, 1"


def wgmma(shape, operands=OPERANDS + ", 0, 0"):
    return f"wgmma.mma_async.sync.aligned.{shape} {operands};"


BULK, TO_END = "cp.async.bulk.tensor.2d", "mbarrier::complete_tx::bytes"
REFUSED = [
    ("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 %f0;", "is no form that is known"),
    (wgmma("m64n8k16.f16.f16.f16"), "m64n8k16.f16.f16.f16 is no form"),
    (wgmma("m64n8k32.s32.s8.s8"), "is no form"),
    (wgmma("m64n8k32.f32.e4m3.e4m3"), "is no form"),
    (wgmma("m64n12k16.f32.bf16.bf16"), "12 columns, expected a multiple of 8 up to 256"),
    (wgmma("m64n264k16.f32.bf16.bf16"), "264 columns"),
    (wgmma("m64n8k16.f32.bf16.f16"), "a product of bf16 and f16 with k = 16"),
    (wgmma("m64n8k16.f32.tf32.tf32"), "a product of tf32 and tf32 with k = 16"),
    (wgmma("m64n8k8.f32.bf16.bf16"), "a product of bf16 and bf16 with k = 8"),
    (wgmma("m64n8k8.f32.tf32.tf32"), "8 operands"),
    (wgmma("m64n8k16.f32.bf16.bf16", OPERANDS), "6 operands"),
    (wgmma("m64n8k16.f32.bf16.bf16", OPERANDS.replace("1, 1", "2, 1, 0, 0")), "scale 2"),
    (wgmma("m64n16k16.f32.bf16.bf16"), "4 registers, expected 8"),
    (wgmma("m64n8k16.f32.bf16.bf16", "{%f0, %f1, %f2, %d3}, %d0, %d1, 1, 1, 1, 0, 0"), "%d3, exp"),
    ("wgmma.wait_group.sync.aligned %r0;", "operand %r0, expected a number"),
    (f"cp.async.bulk.shared::cluster.global.{TO_END}.multicast::cluster [%r0];", "is no form"),
    ("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r0];", "is no form"),
    ("cp.async.bulk.prefetch.L2.global [%d0], 16;", "is no form"),
    (f"{BULK}.shared::cta.global.im2col.{TO_END} [%r0], [%d0, {{%r1, %r2}}], [%r3];", "is no form"),
    (f"{BULK}.shared::cluster.global.{TO_END}.multicast::cluster [%r0];", "cluster is no form"),
    (f"{BULK}.global.shared::cta.bulk_group.L2::cache_hint [%d0, {{%r1}}], [%r3];", "is no form"),
    (f"{BULK}.global.shared::cta.bulk_group [%d0, {{%r1}}], [%r3];", "1 coordinates of 2"),
    ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%d0];", "is no form"),
    (f"{BULK}.shared::cta.global.{TO_END} [%r0], [%d0, {{%r1}}], [%r3];", "1 coordinates of 2"),
    ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f64 [%d0], [%r1], 16;", "is no form"),
    ("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.s32 [%d0], [%r1], 16;", "is no form"),
    ("mbarrier.arrive.shared::cta.b64 %d0, [%r0];", "%d0, expected _: a state"),
    ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0];", "expected the number of bytes"),
    ("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r0];", "is no form"),
    ("mbarrier.arrive.noComplete.shared::cta.b64 _, [%r0], 1;", "is no form"),
    ("mbarrier.try_wait.shared::cta.b64 %p0, [%r0], %d0;", "is no form"),
    ("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r0], 16;", "is no form"),
    ("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r0], 0, 1;", "3 operands for rank"),
    ("tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r0], 1;", "2 operands for box_dim"),
    ("tensormap.replace.tile.box_dim.shared::cta.b1024.b64 [%r0], 0, 1;", "box_dim of .b64"),
    ("tensormap.replace.tile.rank.global.b1024.b32 [%d0], 1;", "is no form"),
    (f"{PUBLISH} [%d0], [%r0], 64;", "64 bytes of a tensor map, expected 128"),
    ("fence.proxy.tensormap::generic.acquire.gpu [%d0], 64;", "64 bytes of a tensor map"),
    ("fence.proxy.tensormap::generic.release.gpu;", "is no form"),
    ("fence.proxy.alias;", "is no form"),
    ("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r0], {%r1};", "1 registers for 2 matrices"),
    ("stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r0], {%r1};", "is no form"),
    ("mapa.shared::cluster.u32 %r0, %r1, 0;", "mapa.shared::cluster.u32 is no form"),
    ("setmaxnreg.inc.sync.aligned.u32 %r0;", "operand %r0, expected a number"),
    ("griddepcontrol.wait;", "griddepcontrol.wait is no form"),
    ("barrier.cluster.arrive.aligned;", "barrier.cluster.* is no form"),
    ("mov.u32 %r0, %cluster_ctarank;", "operand %cluster_ctarank"),
]


@named("code, expected", REFUSED)
def test_unsupported_ptx_is_refused_by_name(code, expected):
    module = f"{HEADER}.visible .entry k(.param .u64 n)\n{{ {REGISTERS}\n{code}\nret;\n}}\n"
    with pytest.raises(text.Refused, match=f"line 6: .*{expected}"):
        cpp.source(list(text.kernels(module).values()))


@named("directive", ["reqnctapercluster 2, 1, 1", "explicitcluster", "maxclusterrank 8"])
def test_clusters_are_refused(directive):
    module = f"{HEADER}.visible .entry k()\n.{directive}\n{{ ret; }}\n"
    with pytest.raises(text.Refused, match=f"directive .{directive.split()[0]}"):
        text.kernels(module)
