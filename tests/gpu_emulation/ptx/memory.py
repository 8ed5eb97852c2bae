"""Instructions that are more than a value: moves of several registers, memory, control, and what
lanes do together. Each is (form, kinds, function); the function takes the writer, the opcode's
named groups, the operands and the place in the program, and returns a statement.
"""

from .text import SIZES, refuse

SHARED = ("shared", "shared::cta")
LOADED = "b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64"


def move(write, groups, operands, place):
    """Between registers; a vector of them is one number, the first in the low bits."""
    kind, (to, source) = groups["T"], operands
    if to.startswith("{"):
        parts = write.vector(to)
        bits = 8 * SIZES[kind] // len(parts)
        value = write.value(source, f"u{8 * SIZES[kind]}")
        code = (
            write.result(x, f"b{bits}", f"x >> {bits * i}") for i, x in enumerate(parts) if x != "_"
        )
        return f"{{ const u{8 * SIZES[kind]} x = {value}; {' '.join(code)} }}"
    if source.startswith("{"):
        parts = write.vector(source)
        bits, whole = 8 * SIZES[kind] // len(parts), f"u{8 * SIZES[kind]}"
        values = (
            f"{whole}({write.value(x, f'u{bits}')}) << {bits * i}" for i, x in enumerate(parts)
        )
        return write.result(to, kind, " | ".join(values))
    return write.result(to, kind, write.value(source, kind))


def accessed(write, groups, operand):
    """The kind of a load's or a store's elements, their registers, and their bytes."""
    kind = groups["T"]
    registers = write.registers(operand, groups.get("count"), kind)
    return kind, registers, SIZES[kind] * len(registers)


def load(write, groups, operands, place):
    kind, registers, bytes = accessed(write, groups, operands[0])
    space = groups.get("space")
    name = "load_shared" if space in SHARED else "load_global" if space else "load"
    at = write.address(operands[1], "u32" if space in SHARED else "u64")
    return received(write, registers, kind, f"{name}(x, {at}, {bytes}, {place});")


def received(write, registers, kind, code):
    """`code` fills x; its elements are assigned to registers, which may be wider."""
    values = (
        write.result(r, kind, f"x[{i}]", wider=True) for i, r in enumerate(registers) if r != "_"
    )
    aligned = f"alignas({SIZES[kind] * len(registers)}) "
    return f"{{ {aligned}{write.type(kind)} x[{len(registers)}]; {code} {' '.join(values)} }}"


def store(write, groups, operands, place):
    kind, registers, bytes = accessed(write, groups, operands[1])
    space = groups.get("space")
    name = "store_shared" if space in SHARED else "store_global" if space else "store"
    at = write.address(operands[0], "u32" if space in SHARED else "u64")
    return given(write, registers, kind, f"{name}({at}, x, {bytes}, {place});")


def given(write, registers, kind, code):
    """Fill x with the registers' elements, for `code` to use."""
    values = ", ".join(write.value(x, kind, wider=True) for x in registers)
    return f"{{ const {write.type(kind)} x[{len(registers)}] = {{{values}}}; {code} }}"


def load_in_order(write, groups, operands, place):
    kind, registers, bytes = accessed(write, groups, operands[0])
    at, acquires = write.address(operands[1], "u64"), int(groups["order"] == "acquire")
    code = f"load_in_order(x, {at}, {bytes}, {acquires}, {place});"
    return received(write, registers, kind, code)


def store_in_order(write, groups, operands, place):
    kind, registers, bytes = accessed(write, groups, operands[1])
    at, releases = write.address(operands[0], "u64"), int(groups["order"] == "release")
    code = f"store_in_order({at}, x, {bytes}, {releases}, {place});"
    return given(write, registers, kind, code)


def fetch_add(write, groups, operands, place):
    at, x = write.address(operands[1], "u64"), write.value(operands[2], "u32")
    return write.result(operands[0], "u32", f"fetch_add({at}, {x}, {place})")


def reduce_add(write, groups, operands, place):
    at, x = write.address(operands[0], "u64"), write.value(operands[1], "u64")
    return f"reduce_add({at}, {x}, {place});"


def load_parameter(write, groups, operands, place):
    kind, registers, bytes = accessed(write, groups, operands[0])
    base, offset = write.base(operands[1])
    parameters = list(write.kernel.parameters)
    if base not in parameters:
        at = write.address(operands[1], "u64")
        code = f"load_parameter(x, {at}, {bytes}, kernel, P, {place});"
    else:
        if offset < 0 or offset % bytes or offset + bytes > write.kernel.parameters[base]:
            refuse(write.line, f"{bytes} bytes at {offset} of {base}")
        code = f"__builtin_memcpy(x, P[{parameters.index(base)}] + {offset}, {bytes});"
    return received(write, registers, kind, code)


def local(write, operand, bytes, place):
    """Local memory is private to a thread: the emulator does not check these accesses."""
    if len(write.kernel.local) != 1:
        refuse(write.line, f"{len(write.kernel.local)} variables in local memory, expected one")
    ((name, variable),) = write.kernel.local.items()
    at = write.address(operand, "u64")
    return f"local({at}, {bytes}, {write.plain(name)}, {variable.bytes}, {place})"


def load_local(write, groups, operands, place):
    kind, registers, bytes = accessed(write, groups, operands[0])
    at = local(write, operands[1], bytes, place)
    return received(write, registers, kind, f"__builtin_memcpy(x, {at}, {bytes});")


def store_local(write, groups, operands, place):
    kind, registers, bytes = accessed(write, groups, operands[1])
    at = local(write, operands[0], bytes, place)
    return given(write, registers, kind, f"__builtin_memcpy({at}, x, {bytes});")


def copy(write, groups, operands, place):
    """cp.async. Hints for the caches are ignored."""
    to, source = write.address(operands[0], "u32"), write.address(operands[1], "u64")
    size = write.constant(operands[2])
    if size not in ((16,) if groups["way"] == "cg" else (4, 8, 16)):
        refuse(write.line, f"a copy of {size} bytes")
    given = write.value(operands[3], "u32") if len(operands) > 3 else size
    return f"copy({to}, {source}, {size}, {given}, {place});"


def barrier(wait):
    def code(write, groups, operands, place):
        threads = f"s32({write.value(operands[1], 'u32')})" if len(operands) > 1 else "-1"
        return f"barrier({write.value(operands[0], 'u32')}, {threads}, {wait}, {place});"

    return code


def shuffle(write, groups, operands, place):
    to, *rest = operands
    value, by, clamp, mask = (write.value(x, "u32") for x in rest)
    way = {"up": "kUp", "down": "kDown", "bfly": "kFlip", "idx": "kIndex"}[groups["way"]]
    names = to.split("|")
    valid = write.result(names[1], "pred", "valid") if len(names) > 1 else ""
    call = f"shuffle({way}, {value}, {by}, {clamp}, {mask}, valid, {place})"
    return f"{{ bool valid; const u32 x = {call}; {write.result(names[0], 'b32', 'x')} {valid} }}"


def load_matrices(write, groups, operands, place):
    registers, count = write.vector(operands[0]), int(groups["count"])
    if len(registers) != count:
        refuse(write.line, f"{len(registers)} registers for {count} matrices")
    transposed = "true" if groups["trans"] else "false"
    at = write.address(operands[1], "u32")
    return received(
        write, registers, "b32", f"load_matrices(x, {count}, {transposed}, {at}, {place});"
    )


def multiply(write, groups, operands, place):
    kind = groups["A"]
    if kind != groups["B"]:
        refuse(write.line, f"a product of {kind} and {groups['B']}")
    d, a, b, c = map(write.vector, operands)
    if [len(x) for x in (d, a, b, c)] != [4, 4, 2, 4]:
        refuse(write.line, "fragments of the wrong size")
    of = [
        ", ".join(write.value(x, kind) for x in y)
        for y, kind in ((a, "b32"), (b, "b32"), (c, "f32"))
    ]
    code = f"const u32 a[4] = {{{of[0]}}}, b[2] = {{{of[1]}}}; f32 x[4] = {{{of[2]}}}; "
    name, which = "multiply16816", f"{'true' if kind == 'bf16' else 'false'}, "
    if kind == "tf32":
        name, which = "multiply1688", ""
    code += f"{name}(x, a, b, {which}{place});"
    return f"{{ {code} {' '.join(write.result(r, 'f32', f'x[{i}]') for i, r in enumerate(d))} }}"


def branch(write, groups, operands, place):
    return f"goto {write.label(operands[0])};"


FORMS = [
    ("mov.<T:b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64|pred>", "_ _", move),
    (f"ld.<space:global|shared|shared::cta>.v<count:2|4>.<T:{LOADED}>", "_ _", load),
    (f"ld.<space:global|shared|shared::cta>.<T:{LOADED}>", "_ _", load),
    ("ld.<order:relaxed|acquire>.gpu.global.<T:u32>", "_ _", load_in_order),
    ("st.<order:relaxed|release>.gpu.global.<T:u32>", "_ _", store_in_order),
    ("atom.relaxed.gpu.global.add.u32", "_ _ _", fetch_add),
    ("red.global.gpu.relaxed.add.u64", "_ _", reduce_add),
    (f"ld.v<count:2|4>.<T:{LOADED}>", "_ _", load),
    (f"ld.<T:{LOADED}>", "_ _", load),
    (f"ld.local.v<count:2|4>.<T:{LOADED}>", "_ _", load_local),
    (f"ld.local.<T:{LOADED}>", "_ _", load_local),
    (f"ld.param.v<count:2|4>.<T:{LOADED}>", "_ _", load_parameter),
    (f"ld.param.<T:{LOADED}>", "_ _", load_parameter),
    (f"st.<space:global|shared|shared::cta>.v<count:2|4>.<T:{LOADED}>", "_ _", store),
    (f"st.<space:global|shared|shared::cta>.<T:{LOADED}>", "_ _", store),
    (f"st.v<count:2|4>.<T:{LOADED}>", "_ _", store),
    (f"st.<T:{LOADED}>", "_ _", store),
    (f"st.local.v<count:2|4>.<T:{LOADED}>", "_ _", store_local),
    (f"st.local.<T:{LOADED}>", "_ _", store_local),
    ("cp.async.<way:ca|cg>.shared.global[.L2::128B]", "_ _ _ *", copy),
    ("cp.async.commit_group", "", lambda w, g, o, place: f"commit({place});"),
    ("cp.async.wait_group", "_", lambda w, g, o, place: f"wait({w.constant(o[0])}, {place});"),
    ("bar.sync", "_ *", barrier("true")),
    # Lanes may come to this one at different instructions; that is reported here, as of bar.sync.
    ("barrier.sync", "_ *", barrier("true")),
    ("bar.arrive", "_ _", barrier("false")),
    ("bar.warp.sync", "_", lambda w, g, o, place: f"warp_sync({w.value(o[0], 'u32')}, {place});"),
    ("shfl.sync.<way:up|down|bfly|idx>.b32", "_ _ _ _ _", shuffle),
    ("ldmatrix.sync.aligned.m8n8.x<count:1|2|4>[.trans].shared.b16", "_ _", load_matrices),
    ("mma.sync.aligned.m16n8k8.row.col.f32.<A:tf32>.<B:tf32>.f32", "_ _ _ _", multiply),
    (
        "mma.sync.aligned.m16n8k16.row.col.f32.<A:bf16|f16>.<B:bf16|f16>.f32",
        "_ _ _ _",
        multiply,
    ),
    ("bra[.uni]", "_", branch),
    ("ret[.uni]", "", lambda w, g, o, place: "return;"),
    ("exit", "", lambda w, g, o, place: "return;"),
]
