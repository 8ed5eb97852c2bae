"""Faults in the emulator's code for sm_90, one line at a time: some test must fail."""

from functools import partial

import pytest

from tests.gpu_emulation.emulator import SCHEDULES, Emulator, altered, needs_emulator
from tests.gpu_emulation.tests import test_ptx_hopper as hopper
from tests.gpu_emulation.tests import test_ptx_hopper_misuse as misuse
from tests.gpu_emulation.tests import test_ptx_products as products
from tests.gpu_emulation.tests.test_emulator import detected

pytestmark = [needs_emulator, pytest.mark.slow]

FAULTS = [
    (
        "SBO is that of a packed tile",
        "operands",
        "row / 8 * stride + chunk * leading",
        "row / 8 * 128 + chunk * leading",
    ),
    (
        "LBO is that of a packed tile",
        "operands",
        "row / 8 * stride + chunk * leading",
        "row / 8 * stride + chunk * 128",
    ),
    (
        "SBO of a swizzle is that of a packed tile",
        "operands",
        "16 * span + row / 8 * stride",
        "16 * span + row / 8 * 128 * span",
    ),
    (
        "LBO of a swizzle is ignored",
        "operands",
        "chunk / span * leading;\n  return",
        "chunk / span * 128;\n  return",
    ),
    (
        "LBO and SBO are swapped across",
        "operands",
        "across ? chunk * stride + row % 8 * 16 + row / 8 * leading",
        "across ? chunk * leading + row % 8 * 16 + row / 8 * stride",
    ),
    ("products ignore swizzles", "operands", "swizzled(start + offset, span)", "start + offset"),
    ("swizzles of 64 and 32 bytes are swapped", "products", "{1, 8, 4, 2}", "{1, 8, 2, 4}"),
    ("tf32 keeps all bits", "operands", "bits & ~0x1FFFu", "bits"),
    ("bfloat16 for float16", "operands", "element == Element::kBfloat16)", "true)"),
    (
        "rows of A in registers are swapped",
        "products",
        "row = lane / 4 + 8 * (i % 2)",
        "row = lane / 4 + 8 * (1 - i % 2)",
    ),
    (
        "columns of A in registers are swapped",
        "products",
        "4 * per_word * (i / 2)",
        "4 * per_word * (1 - i / 2)",
    ),
    (
        "rows of D are swapped",
        "products",
        "j / 8 * 4 + i / 8 * 2 + j % 2",
        "j / 8 * 4 + j % 2 * 2 + i / 8",
    ),
    ("the sign is ignored", "operands", "return sign < 0 ? -x : x", "return x"),
    ("D is always added", "products", "of.add ? register_of(j) : 0.0f", "register_of(j)"),
    (
        "each warp has the first rows",
        "products",
        "of.a_across), of.element, kRows * rank, kRows)",
        "of.a_across), of.element, 0, kRows)",
    ),
    (
        "a wait is one group short",
        "products",
        "committed > pending ? committed - pending : 0",
        "committed > pending + 1 ? committed - pending - 1 : 0",
    ),
    (
        "a wait waits for all groups",
        "products",
        "committed > pending ? committed - pending : 0",
        "committed",
    ),
    ("a wait covers one warp only", "products", "while (committed() < mine.over)", "while (false)"),
    (
        "a wait synchronises with its own warp only",
        "products",
        "    if (!clocks.know({block",
        "    if (warp == self->warp && !clocks.know({block",
    ),
    ("accumulators are not hidden", "products", "    *x = kNan;", "    ;"),
    (
        "a wait orders nothing",
        "products",
        "clocks.learn(agent, mine.over)",
        "clocks.know({})",
    ),
    ("reads are not recorded", "products", "note_proxied_read(address, 16, step, known);", ""),
    (
        "a fence of proxies does nothing",
        "products",
        "fiber.clocks.proxied.assign",
        "if (false) fiber.clocks.proxied.assign",
    ),
    (
        "no fence of proxies is needed",
        "clocks",
        "i < told.size() ? told[i] : 0",
        "known.own[i]",
    ),
    ("every fence of proxies covers global memory", "products", "if (!of_shared_alone) ", ""),
    ("A in registers may change", "products", "*product.a_registers[i] != product.a[i]", "false"),
    (
        "boxes ignore swizzles",
        "boxes",
        "swizzled(of.shared + i, 1u << box.map.swizzle)",
        "(of.shared + i)",
    ),
    (
        "a swizzle by the offset in its box",
        "boxes",
        "swizzled(of.shared + i, 1u << box.map.swizzle)",
        "(box.to + swizzled(of.shared + i - box.to, 1u << box.map.swizzle))",
    ),
    (
        "no zeros outside the tensor",
        "boxes",
        "std::fill(row.begin(), row.end(), 0);",
        "std::fill(row.begin(), row.end(), 1);",
    ),
    (
        "bytes outside the tensor are not counted",
        "boxes",
        "bytes_arrive(box.site, box.arrives, box_bytes(box.map));",
        "bytes_arrive(box.site, box.arrives, box_bytes(box.map) - (box.at[0] < 0));",
    ),
    (
        "negative coordinates are not handled",
        "boxes",
        "std::max<int64_t>(0, -int64_t{at[0]})",
        "0",
    ),
    ("rows past the end", "boxes", "of >= 0 && of < map.dims[i]", "of >= 0"),
    ("rows before the beginning", "boxes", "of >= 0 && of < map.dims[i]", "of < map.dims[i]"),
    ("one stride for all", "boxes", "map.strides[i - 1]", "map.strides[0]"),
    ("no acquisition is needed", "maps", "if (options.check && !acquired)", "if (false)"),
    ("boxes complete at once", "boxes", "if (!options.lazy) return", "return"),
    (
        "a wait for the other parity",
        "mbarrier",
        "while ((mbarrier.phase & 1) == parity)",
        "while ((mbarrier.phase & 1) != parity)",
    ),
    (
        "bytes are not waited for",
        "mbarrier",
        "if (mbarrier.pending || mbarrier.bytes) return;",
        "if (mbarrier.pending) return;",
    ),
    (
        "a phase begins without pending arrivals",
        "mbarrier",
        "  mbarrier.pending = mbarrier.expected;\n",
        "",
    ),
    ("an arrival counts as one", "mbarrier", "mbarrier.pending -= count;", "mbarrier.pending--;"),
    ("a wait does not synchronise", "mbarrier", "current().clocks.join(mbarrier.completed);", ""),
    (
        "writes after an arrival count as synchronised",
        "mbarrier",
        "  fiber.clocks.own[fiber.id]++;\n",
        "",
    ),
    (
        "stmatrix never transposes",
        "lanes",
        "(first.transposed ? m[column][row] : m[row][column]) = x",
        "m[row][column] = x",
    ),
    (
        "the first lane is always elected",
        "lanes",
        "if (options.schedule != kInOrder)",
        "if (false)",
    ),
]


def checks(emulator):
    """Tests of each kind, the quickest first."""
    one = hopper.made(emulator)
    for count, way in hopper.MATRICES:
        yield partial(hopper.test_matrices_are_stored_in_cutlass_layouts, one, count, way)
    yield partial(hopper.test_one_lane_is_elected, one)
    yield partial(hopper.test_phases_of_an_mbarrier, one)
    for name in (x for x in hopper.RIGHT if x.startswith("rounds")):
        yield partial(hopper.test_rounds_of_two_mbarriers, one, name)
    for rank in hopper.RANKS:
        yield partial(hopper.test_boxes_of_tensors, one, rank, 2)
    for swizzle in (1, 2, 3):
        yield partial(hopper.test_swizzled_boxes, one, swizzle, 2)
    two = misuse.made(emulator)
    for name in misuse.RIGHT:
        yield partial(misuse.test_correct_products_pass, two, name)
    for name in misuse.SEVERAL:
        yield partial(misuse.test_correct_boxes_pass, two, name)
    for name in misuse.IN_FLIGHT:
        yield partial(misuse.test_an_accumulator_in_flight_is_nan, two, name)
    for name in misuse.WRONG:
        yield partial(misuse.test_a_misuse_of_products_is_named, two, name)
    for name in misuse.MBARRIERS:
        yield partial(misuse.test_a_misuse_of_mbarriers_is_named, two, name)
    for name in misuse.WRONG_BOXES:
        yield partial(misuse.test_a_misuse_of_boxes_is_named, two, name)
    three = products.made(emulator)
    for spans in products.SPANS:
        for kind in products.KINDS:
            yield partial(products.test_products, three, kind, spans)
    for kind in products.OTHERS:
        yield partial(products.test_signs_and_accumulation, three, kind)
    for schedule in SCHEDULES:
        yield partial(products.test_two_warpgroups, three, products.KINDS[1], schedule)


@pytest.mark.parametrize("part, old, new", [x[1:] for x in FAULTS], ids=[x[0] for x in FAULTS])
def test_a_fault_is_detected(part, old, new, tmp_path):
    assert detected(checks(Emulator(parts=altered(part, old, new, tmp_path)))), "no check failed"


def test_without_a_fault_nothing_is_detected():
    assert not detected(checks(Emulator()))
