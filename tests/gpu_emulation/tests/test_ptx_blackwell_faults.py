"""Faults in the emulator's code for sm_100, one line at a time: some test must fail."""

from functools import partial

import pytest

from tests.gpu_emulation.emulator import SCHEDULES, Emulator, altered, needs_emulator
from tests.gpu_emulation.tests import test_ptx_blackwell as blackwell
from tests.gpu_emulation.tests import test_ptx_blackwell_misuse as misuse
from tests.gpu_emulation.tests.test_emulator import detected

pytestmark = [needs_emulator, pytest.mark.slow]

MEMORY, PRODUCTS = "tensor_memory", "tensor_products"
FAULTS = [
    ("the second half of threads has no offset", MEMORY, "column + first.apart}", "column}"),
    (
        "the second half of threads has other lanes",
        MEMORY,
        "static_cast<uint32_t>(thread) - 16, column",
        "static_cast<uint32_t>(thread), column",
    ),
    ("any lane may be loaded", MEMORY, "if (lane != own && ", "if (false && "),
    ("only one half may be loaded", MEMORY, "lane == own + 16", "lane == own + 32"),
    ("stores happen at once", MEMORY, "if (options.lazy)", "if (false)"),
    ("stores never happen", MEMORY, "tensor_memory().cells[cell] = value;", ";"),
    ("loads are not recorded", MEMORY, "memory.shadow->read(at, bytes, step, known);", ";"),
    ("stores are not recorded", MEMORY, "memory.shadow->write(at, bytes, step, known);", ";"),
    ("a wait ends nothing", MEMORY, "  ++mine.over[work];", ""),
    (
        "a wait tells one lane",
        MEMORY,
        "size_t(self->warp) * 32 + lane]",
        "size_t(self->warp) * 32]",
    ),
    ("no fence is needed", MEMORY, "if (!options.tensor_fences) return", "return"),
    ("a fence is always needed", MEMORY, "if (!options.tensor_fences) return", "if (false) return"),
    ("fences before and after are swapped", MEMORY, "(before ? published", "(!before ? published"),
    ("allocations begin at 0", MEMORY, "low ? first : end - asked.columns", "first"),
    (
        "allocations overlap",
        MEMORY,
        "const uint32_t column = low ? first : end - asked.columns;",
        "const uint32_t column = 0;",
    ),
    ("any number of columns is allocated", MEMORY, "columns & (columns - 1)", "false"),
    ("columns are not counted", MEMORY, "if (asked.columns > end - first)", "if (false)"),
    ("relinquishing has no effect", MEMORY, "relinquished = true", "relinquished = false"),
    (
        "a part is given back",
        MEMORY,
        "x.column == given.at && x.columns == given.columns",
        "x.column == given.at",
    ),
    (
        "giving back is not recorded",
        MEMORY,
        "if (options.check)\n    for (uint32_t lane",
        "if (false)\n    for (uint32_t lane",
    ),
    (
        "nothing is left at the end",
        MEMORY,
        "for (const TensorAllocation& each : tensor_memory().allocations)\n    return found",
        "for (const TensorAllocation& each : std::vector<TensorAllocation>())\n    return found",
    ),
    ("accesses past the columns", MEMORY, "column >= each.column &&", "true ||"),
    (
        "A and B have no types",
        PRODUCTS,
        "a ? Element::kBfloat16 : Element::kFloat16",
        "Element::kFloat16",
    ),
    ("columns are half", PRODUCTS, "field(17, 6) * 8", "field(17, 6) * 4"),
    ("A always lies along k", PRODUCTS, "field(15, 1) != 0", "false"),
    ("B always lies along k", PRODUCTS, "field(16, 1) != 0", "false"),
    ("signs of both", PRODUCTS, "field(13, 1) != field(14, 1)", "field(13, 1)"),
    (
        "swizzles of 64 and 32 bytes are swapped",
        PRODUCTS,
        "{1, 0, 8, 0, 4, 0, 2, 0}",
        "{1, 0, 8, 0, 2, 0, 4, 0}",
    ),
    ("D is always added", PRODUCTS, "if (product.add) std::memcpy", "std::memcpy"),
    (
        "A in tensor memory has no lane",
        PRODUCTS,
        "product.a.lane_of(static_cast<uint32_t>(row))",
        "static_cast<uint32_t>(row)",
    ),
    (
        "A in shared memory has the first rows",
        PRODUCTS,
        "values[size_t(k * rows + row)] = value_of(from + k * bytes",
        "values[size_t(k * rows + row)] = value_of(from + k / 2 * bytes",
    ),
    (
        "products are computed at once",
        PRODUCTS,
        "if (!options.lazy) return multiply(product);",
        "return multiply(product);",
    ),
    (
        "commits cover one product",
        PRODUCTS,
        "warp.products.front().clock <= commit.clock; warp",
        "warp.products.front().clock < commit.clock; warp",
    ),
    ("commits land unwaited for", PRODUCTS, "  if (!options.lazy) land(warp);", "  land(warp);"),
    (
        "commits tell nothing",
        PRODUCTS,
        "commit.of.learn(block->agents.tensor(kTensorProducts, self->warp), warp.committed);",
        "",
    ),
    ("another thread may commit", PRODUCTS, "each.lane != self->lane", "false"),
    (
        "products read A unrecorded",
        PRODUCTS,
        "if (!product.a.columns) each_chunk",
        "if (false) each_chunk",
    ),
    (
        "products read B unrecorded",
        PRODUCTS,
        "  each_chunk(product.b, product.element, 0, columns, note_shared);",
        "",
    ),
    (
        "products read tensor memory unrecorded",
        PRODUCTS,
        "if (product.a.columns)\n    for",
        "if (false)\n    for",
    ),
    (
        "products write D unrecorded",
        PRODUCTS,
        "    shadow.write(at, 4 * columns, step, known);",
        "",
    ),
    (
        "products of any shape are in order",
        PRODUCTS,
        "(!same && other.d.overlaps(product.d))",
        "false",
    ),
    ("A may be an accumulator", PRODUCTS, "other.d.overlaps(product.a)", "false"),
    ("D may be in any lane", PRODUCTS, "if (found.lane && ", "if (false && "),
    (
        "D and A may be in two halves",
        PRODUCTS,
        "if (product.a.lane != product.d.lane)",
        "if (false)",
    ),
]


def checks(emulator):
    """Tests of each kind, the quickest first."""
    two = misuse.made(emulator)
    for name in misuse.RIGHT:
        yield partial(misuse.test_correct_code_passes, two, name)
    for name in misuse.WRONG:
        yield partial(misuse.test_a_misuse_is_named, two, name)
    yield partial(misuse.test_an_allocation_begins_at_either_end, two)
    for name in misuse.EARLY:
        yield partial(misuse.test_values_are_late, two, name)
    for name in misuse.OF_FENCES:
        yield partial(misuse.test_without_the_rule_no_fence_is_needed, two, name)
    one = blackwell.made(emulator)
    for kind in blackwell.OTHERS:
        yield partial(blackwell.test_signs_and_accumulation, one, kind)
    for kind in blackwell.KINDS:
        for spans in ((8, 8), (2, 4)):
            yield partial(blackwell.test_products, one, kind, spans)
    for schedule in SCHEDULES:
        yield partial(blackwell.test_schedules, one, blackwell.KINDS[4], schedule)


@pytest.mark.parametrize("part, old, new", [x[1:] for x in FAULTS], ids=[x[0] for x in FAULTS])
def test_a_fault_is_detected(part, old, new, tmp_path):
    assert detected(checks(Emulator(parts=altered(part, old, new, tmp_path)))), "no check failed"


def test_without_a_fault_nothing_is_detected():
    assert not detected(checks(Emulator()))
