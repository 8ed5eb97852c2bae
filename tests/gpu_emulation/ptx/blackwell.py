"""Instructions of sm_100: tensor memory and its products (tcgen05), and pairs of float32.

The meaning of each is in emu/blackwell.h; here are their operands. As in memory.py, a form
is (name, kinds, function).
"""

from .hopper import call, number, shared
from .text import refuse

SHAPES = {"32x32b": "k32x32", "16x32bx2": "kTwice16x32"}
MOST = 128  # registers of a load or a store
FLAG = {True: "true", False: "false"}


def transferred(write, groups, registers):
    """The registers of a load or a store."""
    found, count = write.vector(registers), int(groups["count"])
    if count & (count - 1) or not 1 <= count <= MOST or len(found) != count:
        refuse(write.line, f"{len(found)} registers of x{count}, expected a power of two up to 128")
    return found


def place_of(write, groups, at, apart):
    """Shape, address, and for two halves how many columns they are apart."""
    if (groups["shape"] == "16x32bx2") != len(apart):
        refuse(write.line, f"{len(apart)} offsets of a half for .{groups['shape']}")
    apart = write.constant(apart[0]) if apart else 0
    return f"emu::TensorShape::{SHAPES[groups['shape']]}, {shared(write, at)}, {apart}"


def load(write, groups, operands, place):
    registers, at, *apart = operands
    names = transferred(write, groups, registers)
    results = " ".join(write.result(r, "b32", f"x[{i}]") for i, r in enumerate(names))
    where = place_of(write, groups, at, apart)
    call = f"emu::tensor_load({place}, x, {len(names)}, {where});"
    return f"{{ u32 x[{len(names)}]; {call} {results} }}"


def store(write, groups, operands, place):
    at, *apart, registers = operands
    names = transferred(write, groups, registers)
    values = ", ".join(write.value(x, "b32") for x in names)
    where = place_of(write, groups, at, apart)
    call = f"emu::tensor_store({place}, x, {len(names)}, {where});"
    return f"{{ const u32 x[] = {{{values}}}; {call} }}"


def multiply(write, groups, operands, place):
    """[D], A's descriptor or [A], B's descriptor, the instruction's, and whether D is added to."""
    d, a, b, instruction, add = operands
    inside = a.startswith("[")
    fields = [
        FLAG[groups["kind"] == "tf32"],
        shared(write, d),
        FLAG[inside],
        shared(write, a) if inside else write.value(a, "u64"),
        write.value(b, "u64"),
        number(write, instruction),
        write.value(add, "pred"),
    ]
    return f"emu::tensor_multiply({place}, {{{', '.join(fields)}}});"


def wait(write, groups, operands, place):
    return f"emu::tensor_wait({place}, {FLAG[groups['what'] == 'ld']});"


def fence(write, groups, operands, place):
    return f"emu::tensor_fence({place}, {FLAG[groups['side'] == 'before']});"


def pair(operation):
    """Of the low and the high half of registers of 64 bits."""

    def code(write, groups, operands, place):
        flush = bool(groups.get("ftz"))
        values = ", ".join(write.value(x, "b64") for x in operands[1:])
        halves = []
        for i in range(2):
            names = {x: f"BITS(f32, u32(x[{j}] >> {32 * i}))" for j, x in enumerate("abc")}
            if flush:
                names = {x: f"ftz({y})" for x, y in names.items()}
            half = operation.format(**names)
            halves.append(f"u64(BITS(u32, f32({f'ftz({half})' if flush else half}))) << {32 * i}")
        result = write.result(operands[0], "b64", " | ".join(halves))
        return f"{{ const u64 x[] = {{{values}}}; {result} }}"

    return code


def reduced(write, groups, operands, place):
    """redux.sync of float32: every lane gets the greatest or the least of all."""
    value, mask = write.value(operands[1], "f32"), number(write, operands[2])
    greatest = FLAG[groups["what"] == "max"]
    return write.result(operands[0], "f32", f"reduced({value}, {mask}, {greatest}, {place})")


GROUP = "cta_group::1"
FORMS = [
    (
        f"tcgen05.alloc.{GROUP}.sync.aligned.shared::cta.b32",
        "_ _",
        call("tensor_allocate", shared, number),
    ),
    (f"tcgen05.dealloc.{GROUP}.sync.aligned.b32", "_ _", call("tensor_deallocate", number, number)),
    (f"tcgen05.relinquish_alloc_permit.{GROUP}.sync.aligned", "", call("tensor_relinquish")),
    (r"tcgen05.ld.sync.aligned.<shape:32x32b|16x32bx2>.x<count:\d+>.b32", "_ _ *", load),
    (r"tcgen05.st.sync.aligned.<shape:32x32b|16x32bx2>.x<count:\d+>.b32", "_ _ *", store),
    ("tcgen05.wait::<what:ld|st>.sync.aligned", "", wait),
    ("tcgen05.fence::<side:before|after>_thread_sync", "", fence),
    (f"tcgen05.mma.{GROUP}.kind::<kind:f16|tf32>", "_ _ _ _ _", multiply),
    # A cluster has one block here.
    (
        f"tcgen05.commit.{GROUP}.mbarrier::arrive::one.shared::cluster.b64",
        "_",
        call("tensor_commit", shared),
    ),
    ("add[.rn][.ftz].f32x2", "_ _ _", pair("{a} + {b}")),
    ("sub[.rn][.ftz].f32x2", "_ _ _", pair("{a} - {b}")),
    ("mul[.rn][.ftz].f32x2", "_ _ _", pair("{a} * {b}")),
    ("fma.rn[.ftz].f32x2", "_ _ _ _", pair("fused({a}, {b}, {c})")),
    ("redux.sync.<what:max|min>.f32", "_ _ _", reduced),
]
