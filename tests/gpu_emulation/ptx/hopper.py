"""Instructions of sm_90: mbarriers, bulk copies, boxes of tensors, products of warpgroups.

The meaning of each is in emu/hopper.h; here are their operands. As in memory.py, a form is
(name, kinds, function).
"""

from .text import refuse

SHARED = "<space:shared|shared::cta>"
FIELDS = {
    "global_address": "kAddress",
    "rank": "kRank",
    "box_dim": "kBox",
    "global_dim": "kDims",
    "global_stride": "kStride",
    "element_stride": "kElementStride",
    "elemtype": "kType",
    "interleave_layout": "kInterleave",
    "swizzle_mode": "kSwizzle",
    "fill_mode": "kFill",
}
OF_ALL = ("rank", "global_address", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode")
ELEMENTS = {"bf16": "kBfloat16", "f16": "kFloat16", "tf32": "kTf32"}
PER_CHUNK = 8  # the number of columns of a product is a multiple of 8


def call(name, *shapes):
    """A statement: the function of hopper.h with the place, and operands as they are written."""

    def code(write, groups, operands, place):
        values = (shape(write, x) for shape, x in zip(shapes, operands))
        return f"emu::{name}({', '.join([place, *map(str, values)])});"

    return code


def shared(write, operand):
    return write.address(operand, "u32")


def number(write, operand):
    return write.value(operand, "u32")


def constant(write, operand):
    return write.constant(operand)


# --- mbarriers ------------------------------------------------------------------------------------


def arrive(write, groups, operands, place):
    """Also with bytes to expect. The result, the state of a phase, must be unused."""
    if operands[0] != "_":
        refuse(write.line, f"{operands[0]}, expected _: a state of an mbarrier is not known here")
    at, expects = shared(write, operands[1]), "expect_tx" in groups["way"]
    last = number(write, operands[2]) if len(operands) > 2 else None
    if expects and last is None:
        refuse(write.line, "2 operands, expected the number of bytes")
    before = f"emu::mbarrier_expect({place}, {at}, {last}); " if expects else ""
    count = 1 if expects or last is None else last
    return f"{{ {before}emu::mbarrier_arrive({place}, {at}, {count}); }}"


def test(write, groups, operands, place):
    """Test or await a parity. The limit of the wait is ignored."""
    at, parity = shared(write, operands[1]), number(write, operands[2])
    patient = "true" if groups["way"] == "try_wait" else "false"
    code = f"emu::mbarrier_test({place}, {at}, {parity}, {patient})"
    return write.result(operands[0], "pred", code)


# --- tensors --------------------------------------------------------------------------------------


def whole_map(write, operand):
    if write.constant(operand) != 128:
        refuse(write.line, f"{operand} bytes of a tensor map, expected 128")


def replace(write, groups, operands, place):
    field, kind = groups["field"], groups["T"]
    if len(operands) != (2 if field in OF_ALL else 3):
        refuse(write.line, f"{len(operands)} operands for {field}")
    if kind != ("b64" if field in ("global_address", "global_stride") else "b32"):
        refuse(write.line, f"{field} of .{kind}")
    ordinal = write.constant(operands[1]) if len(operands) > 2 else 0
    at, value = shared(write, operands[0]), write.value(operands[-1], kind)
    return f"emu::map_replace({place}, {at}, emu::MapField::{FIELDS[field]}, {ordinal}, {value});"


def of_map(write, operand, place):
    return f"memory({write.address(operand, 'u64')}, 64, {place})"


def publish(write, groups, operands, place):
    whole_map(write, operands[2])
    to, source = of_map(write, operands[0], place), shared(write, operands[1])
    return f"emu::map_publish({place}, {to}, {source});"


def acquire(write, groups, operands, place):
    whole_map(write, operands[1])
    return f"emu::map_acquire({place}, {of_map(write, operands[0], place)});"


def fence(write, groups, operands, place):
    """Between the proxies: of all memory, or of shared memory alone."""
    of_shared_alone = "true" if groups["sharedcta"] else "false"
    return f"emu::async_proxy_fence({place}, {of_shared_alone});"


def box(write, operand, rank, place):
    """[map, {coordinates}]: the map, and a declaration of `at`."""
    map, _, rest = operand.strip("[] ").partition(",")
    at = write.vector(rest.strip())
    if len(at) != rank:
        refuse(write.line, f"{len(at)} coordinates of {rank}")
    values = ", ".join(write.value(x, "s32") for x in at)
    return of_map(write, f"[{map}]", place), f"const s32 at[] = {{{values}}};"


def load_box(write, groups, operands, place):
    """cp.async.bulk.tensor [to], [map, {coordinates}], [mbarrier]."""
    map, at = box(write, operands[1], rank := int(groups["rank"]), place)
    to, mbarrier = shared(write, operands[0]), shared(write, operands[2])
    return f"{{ {at} emu::load_box({place}, {to}, {map}, {rank}, at, {mbarrier}); }}"


def store_box(write, groups, operands, place):
    """cp.async.bulk.tensor [map, {coordinates}], [from]."""
    map, at = box(write, operands[0], rank := int(groups["rank"]), place)
    return f"{{ {at} emu::bulk_box({place}, {map}, {rank}, at, {shared(write, operands[1])}); }}"


def of_bytes(write, operand, place):
    return f"memory({write.address(operand, 'u64')}, 16, {place})"


def load_bytes(write, groups, operands, place):
    """cp.async.bulk [to], [from], bytes, [mbarrier]."""
    to, source = shared(write, operands[0]), of_bytes(write, operands[1], place)
    bytes, mbarrier = number(write, operands[2]), shared(write, operands[3])
    return f"emu::load_bytes({place}, {to}, {source}, {bytes}, {mbarrier});"


def store_bytes(adds):
    def code(write, groups, operands, place):
        """cp.async.bulk [to], [from], bytes."""
        to, source = of_bytes(write, operands[0], place), shared(write, operands[1])
        return f"emu::bulk_bytes({place}, {to}, {source}, {number(write, operands[2])}, {adds});"

    return code


def wait_for_groups(write, groups, operands, place):
    reads_only = "true" if groups["read"] else "false"
    return f"emu::bulk_wait({place}, {write.constant(operands[0])}, {reads_only});"


def set_registers(write, groups, operands, place):
    more = "true" if groups["way"] == "inc" else "false"
    return f"emu::set_registers({place}, {write.constant(operands[0])}, {more});"


# --- products -------------------------------------------------------------------------------------


def wgmma_registers(each):
    """The registers that an instruction uses in flight: accumulators, and those of A."""
    if not each.opcode.startswith("wgmma.mma_async"):
        return []
    lists = [x.strip("{}").split(",") for x in each.operands[:2] if x.startswith("{")]
    return [[x.strip() for x in names] for names in lists]


def pointers(write, operand, count, name):
    found = write.vector(operand)
    if len(found) != count:
        refuse(write.line, f"{len(found)} registers, expected {count}")
    at = ", ".join(f"(u32*)&{write.four_bytes(x)}" for x in found)
    return f"u32* const {name}[] = {{{at}}}; "


def sign(write, operand):
    if (found := write.constant(operand)) not in (1, -1):
        refuse(write.line, f"scale {operand}, expected 1 or -1")
    return found


def product(write, groups, operands, place):
    """D, A, B, the scale of D, signs of A and B, and for 16 bits whether they are transposed."""
    kind, columns = groups["A"], int(groups["N"])
    if kind != groups["B"] or int(groups["K"]) != (8 if kind == "tf32" else 16):
        refuse(write.line, f"a product of {kind} and {groups['B']} with k = {groups['K']}")
    if columns % PER_CHUNK or not 8 <= columns <= 256:
        refuse(write.line, f"{columns} columns, expected a multiple of 8 up to 256")
    d, a, b, scale, *rest = operands
    in_registers = a.startswith("{")
    if len(rest) != 2 + (0 if kind == "tf32" else 1 if in_registers else 2):
        refuse(write.line, f"{len(operands)} operands")
    code = pointers(write, d, columns // 2, "d")
    whole = [x[0] for x in wgmma_registers(write.each)]
    ordered, remember = write.ordered(zip(whole, (columns, 1)))
    if in_registers:
        code += pointers(write, a, 4, "a")
    across = ["true" if write.constant(x) else "false" for x in rest[2:]]
    of_a, of_b = [*["false"] * (2 - len(across)), *across]
    fields = [
        *(f"emu::Element::{ELEMENTS[kind]}", columns, "d", "a" if in_registers else "nullptr"),
        *("0" if in_registers else write.value(a, "u64"), write.value(b, "u64")),
        *(write.value(scale, "pred"), ordered),
        *(sign(write, rest[0]), sign(write, rest[1]), of_a, of_b),
    ]
    fields = ", ".join(map(str, fields))
    return f"{{ {code}emu::products_begin({place}, {{{fields}}});{remember} }}"


# --- lanes ----------------------------------------------------------------------------------------


def elect(write, groups, operands, place):
    lane, _, leads = operands[0].partition("|")
    mask = number(write, operands[1])
    code = "" if lane == "_" else write.result(lane, "b32", "leader")
    code += write.result(leads, "pred", "leader == int(S.laneid)") if leads else ""
    return f"{{ const int leader = emu::elected({place}, {mask}); {code} }}"


def store_matrices(write, groups, operands, place):
    registers, count = write.vector(operands[1]), int(groups["count"])
    if len(registers) != count:
        refuse(write.line, f"{len(registers)} registers for {count} matrices")
    values = ", ".join(write.value(x, "b32") for x in registers)
    across = "true" if groups["trans"] else "false"
    call = f"emu::store_matrices(x, {count}, {across}, {shared(write, operands[0])}, {place});"
    return f"{{ const u32 x[] = {{{values}}}; {call} }}"


def nothing(write, groups, operands, place):
    return ";"


FORMS = [
    (f"mbarrier.init.{SHARED}.b64", "_ _", call("mbarrier_init", shared, number)),
    (f"mbarrier.inval.{SHARED}.b64", "_", call("mbarrier_inval", shared)),
    (
        f"mbarrier.expect_tx.relaxed.cta.{SHARED}.b64",
        "_ _",
        call("mbarrier_expect", shared, number),
    ),
    (f"mbarrier.<way:arrive|arrive.expect_tx>[.release.cta].{SHARED}.b64", "_ _ *", arrive),
    (f"mbarrier.<way:try_wait|test_wait>.parity[.acquire.cta].{SHARED}.b64", "_ _ _ *", test),
    ("fence.proxy.async[.shared::cta]", "", fence),
    # A cluster has one block here.
    ("fence.mbarrier_init.release.cluster", "", nothing),
    (
        f"tensormap.replace.tile.<field:{'|'.join(FIELDS)}>.shared::cta.b1024.<T:b32|b64>",
        "_ _ *",
        replace,
    ),
    (
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned",
        "_ _ _",
        publish,
    ),
    ("fence.proxy.tensormap::generic.acquire.gpu", "_ _", acquire),
    (
        "cp.async.bulk.tensor.<rank:1|2|3|4|5>d.<to:shared::cta|shared::cluster>.global[.tile]"
        ".mbarrier::complete_tx::bytes",
        "_ _ _",
        load_box,
    ),
    (
        "cp.async.bulk.<to:shared::cta|shared::cluster>.global.mbarrier::complete_tx::bytes",
        "_ _ _ _",
        load_bytes,
    ),
    (
        "cp.async.bulk.tensor.<rank:1|2|3|4|5>d.global.shared::cta[.tile].bulk_group",
        "_ _",
        store_box,
    ),
    ("cp.async.bulk.global.shared::cta.bulk_group", "_ _ _", store_bytes("false")),
    (
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
        "_ _ _",
        store_bytes("true"),
    ),
    ("cp.async.bulk.commit_group", "", call("bulk_commit")),
    ("cp.async.bulk.wait_group[.read]", "_", wait_for_groups),
    ("setmaxnreg.<way:inc|dec>.sync.aligned.u32", "_", set_registers),
    (
        "wgmma.fence.sync.aligned",
        "",
        lambda w, g, o, place: f"fenced += emu::products_fence({place});",
    ),
    ("wgmma.commit_group.sync.aligned", "", call("products_commit")),
    ("wgmma.wait_group.sync.aligned", "_", call("products_wait", constant)),
    (
        r"wgmma.mma_async.sync.aligned.m64n<N:\d+>k<K:8|16>.f32.<A:bf16|f16|tf32>.<B:bf16|f16|tf32>",
        "_ _ _ _ _ _ * *",
        product,
    ),
    ("elect.sync", "_ _", elect),
    (f"stmatrix.sync.aligned.m8n8.x<count:1|2|4>[.trans].{SHARED}.b16", "_ _", store_matrices),
]
