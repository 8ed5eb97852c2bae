"""Faults in the emulator's code for bulk copies, setmaxnreg and the host's tensor maps, one line at
a time: some test must fail."""

from functools import partial

import pytest

from tests.gpu_emulation import tensor_maps
from tests.gpu_emulation.emulator import altered, needs_emulator
from tests.gpu_emulation.tests import test_ptx_bulk as bulk
from tests.gpu_emulation.tests import test_ptx_bulk_misuse as misuse
from tests.gpu_emulation.tests import test_ptx_warpgroups as warpgroups
from tests.gpu_emulation.tests import test_tensor_maps as maps
from tests.gpu_emulation.tests.test_emulator import detected

pytestmark = [needs_emulator, pytest.mark.slow]

FAULTS = [
    ("stores ignore swizzles", "bulk", "swizzled(first + i, bulk.span)", "(first + i)"),
    (
        "a swizzle by the offset in its row",
        "bulk",
        "swizzled(first + i, bulk.span)",
        "(first + swizzled(i, bulk.span))",
    ),
    (
        "stores take the bytes before the tensor",
        "bulk",
        "first = row.shared + static_cast<uint32_t>(row.first);\n    for",
        "first = row.shared;\n    for",
    ),
    (
        "stores write rows outside",
        "boxes",
        "inside && end > first ? (end - first) * bytes : 0",
        "end > first ? (end - first) * bytes : 0",
    ),
    ("sums replace", "bulk", "(bulk.adds && !add(bulk.data[i], row)) ||", ""),
    (
        "subnormal operands are kept",
        "bulk",
        "flushed(flushed(x) + flushed(y))",
        "flushed(x + y)",
    ),
    (
        "subnormal sums are kept",
        "bulk",
        "flushed(flushed(x) + flushed(y))",
        "(flushed(x) + flushed(y))",
    ),
    (
        "zeros lose their sign",
        "bulk",
        "std::copysign(0.0f, x) : x",
        "0.0f : x",
    ),
    (
        "reads are not recorded",
        "bulk",
        "note_proxied_read(swizzled(at, bulk.span), static_cast<int>(next - at), reads, known);",
        "",
    ),
    (
        "writes are not recorded",
        "bulk",
        "    if (row.bytes)\n      note_proxied_target",
        "    if (false)\n      note_proxied_target",
    ),
    (
        "no fence of proxies is needed for shared memory",
        "bulk",
        "by.clocks.of_async_proxy(by.clocks.proxied, agents.proxied())",
        "by.clocks",
    ),
    (
        "no fence of proxies is needed for global memory",
        "memory",
        "known = of.of_async_proxy(of.proxied_global, block->agents.proxied());\n"
        "  const auto at = reinterpret_cast<uintptr_t>(to);",
        "known = of;\n  const auto at = reinterpret_cast<uintptr_t>(to);",
    ),
    (
        "a fence of shared memory covers the target",
        "memory",
        "of.of_async_proxy(of.proxied_global, block->agents.proxied());\n"
        "  const auto at = reinterpret_cast<uintptr_t>(to);",
        "of.of_async_proxy(of.proxied, block->agents.proxied());\n"
        "  const auto at = reinterpret_cast<uintptr_t>(to);",
    ),
    ("sums are plain writes", "memory", "  if (adds)\n", "  if (false)\n"),
    (
        "a fence is needed after reads",
        "memory",
        "global.write(at, bytes, step, known, of);",
        "global.write(at, bytes, step, known);",
    ),
    (
        "a wait for the reads is one for all",
        "bulk",
        "  if (reads_only) return;\n",
        "",
    ),
    (
        "a wait for all waits for the reads alone",
        "bulk",
        "reads_only ? read(bulk) : write(bulk)",
        "read(bulk)",
    ),
    (
        "a wait covers one group more",
        "bulk",
        "mine.committed > left ? mine.committed - left : 0",
        "mine.committed",
    ),
    (
        "a wait covers one group less",
        "bulk",
        "mine.committed > left ? mine.committed - left : 0",
        "mine.committed > left + 1 ? mine.committed - left - 1 : 0",
    ),
    (
        "a wait for the reads orders nothing",
        "bulk",
        "fiber.clocks.learn(block->agents.bulk_reads(fiber.id), mine.read);",
        "",
    ),
    (
        "a commit does nothing",
        "bulk",
        "  mine.pending.push_back(std::move(mine.issued));\n",
        "  mine.pending.emplace_back();\n",
    ),
    (
        "a thread may exit at any time",
        "bulk",
        "if (!was_read) fail",
        "if (false) fail",
    ),
    (
        "copies without a group are lost",
        "bulk",
        'if (!mine.issued.empty()) fail("exits with bulk copies that no group holds");',
        "",
    ),
    ("targets may be in shared memory", "bulk", "if (!is_global(to)) fail", "if (false) fail"),
    (
        "boxes are 16-aligned",
        "bulk",
        'if (from % 128) fail("%s: its source',
        'if (from % 16) fail("%s: its source',
    ),
    (
        "sources may be in shared memory",
        "boxes",
        "if (!is_global(from)) fail",
        "if (false) fail",
    ),
    (
        "boxes of a stalled block never land",
        "run",
        "enter(launch.resident[next_random(launch.random_state) % launch.resident.size()]);\n"
        "  if (!block->proxy.boxes.empty()",
        "if (!block->proxy.boxes.empty()",
    ),
    ("random draws of seed 0 are 0", "run", "  if (!state) state = 0x1234567;", "  //"),
    (
        "nobody need wait for a box",
        "boxes",
        "if (std::none_of(block->fibers.begin(), block->fibers.end(), waited))",
        "if (false)",
    ),
    (
        "parameters have no alignment",
        "compiled",
        "offsets.push_back((end + align - 1) / align * align);",
        "offsets.push_back(end);",
    ),
    (
        "the first parameter has any alignment",
        "compiled",
        "(3 * most - begin % (2 * most)) % (2 * most)",
        "(128 - begin % 128) % 128",
    ),
    (
        "all memory is a parameter's",
        "compiled",
        "asked >= first && asked + bytes <= first + space.of->bytes[i]",
        "asked",
    ),
    (
        "a part of a parameter is enough",
        "compiled",
        "asked >= first && asked + bytes <= first + space.of->bytes[i]",
        "asked >= first && asked < first + space.of->bytes[i]",
    ),
    ("any bytes are a map", "maps", "if (map.origin != kOfHost)", "if (false)"),
    (
        "types have the driver's numbers",
        "encode",
        "made.type = number_of(type);",
        "made.type = static_cast<uint8_t>(type);",
    ),
    ("every driver has the function", "encode", "emu::driver_version() >= emu::kKnownSince &&", ""),
    (
        "the driver's failure is lost",
        "encode",
        'if (fails("encode a tensor map")) return static_cast<CUresult>(failure());',
        "",
    ),
    ("registers come from nowhere", "registers", "32 * (count - warp.has) > of.spare", "false"),
    (
        "returned registers are lost",
        "registers",
        "of.spare += 32 * (mine.has - mine.asks);",
        "",
    ),
    (
        "taken registers stay in the pool",
        "registers",
        "  of.spare -= 32 * (count - warp.has);",
        "  //",
    ),
    (
        "nobody is told of returned registers",
        "registers",
        "for (const int thread : of.waiting) wake(thread);",
        "",
    ),
    (
        "warps need not synchronise",
        "registers",
        "steps.size() < done || !current().clocks.know(steps[done - 1])",
        "steps.size() < done",
    ),
    (
        "setmaxnreg works without bounds",
        "registers",
        "if (launch_registers == 0)",
        "if (false)",
    ),
    (
        "bounds are ignored",
        "registers",
        "if (launch_registers > 0) return launch_registers;",
        "",
    ),
    ("a warp may be absent", "registers", "warps[i].steps.size() != all)", "false)"),
    (
        "warps may be at two places",
        "registers",
        "std::strcmp(steps[done].what, change.site)",
        "false",
    ),
]


def checks(emulator):
    """Tests of each kind, the quickest first."""
    for name in maps.ALLOWED:
        yield partial(maps.test_an_allowed_tensor_is_encoded, emulator, name)
    yield partial(maps.test_the_function_is_found_by_name_and_version, emulator)
    for test in (maps.test_an_old_driver_does_not_have_it, maps.test_its_failures_reach_the_caller):
        yield emulator.library.emu_runtime_reset
        yield partial(test, emulator)
    yield emulator.library.emu_runtime_reset
    one = bulk.made(emulator)
    yield partial(bulk.test_sums_round_and_flush, one)
    for name in bulk.RIGHT:
        if name != "sums":
            yield partial(bulk.test_bytes_are_stored, one, name)
    yield partial(bulk.test_boxes_are_stored, one, 2, 2)
    for swizzle in (1, 3):
        yield partial(bulk.test_swizzled_boxes_are_stored, one, swizzle, 2)
    two = warpgroups.made(emulator)
    for name in warpgroups.REGISTERS:
        yield partial(warpgroups.test_registers_of_warpgroups, two, name)
    three = misuse.made(emulator)
    for name in misuse.RIGHT:
        yield partial(misuse.test_correct_copies_pass, three, name)
    for name in misuse.WRONG:
        yield partial(misuse.test_a_misuse_of_copies_is_named, three, name)
    for name in misuse.BOXES:
        yield partial(misuse.test_a_misuse_of_boxes_is_named, three, name)
    yield partial(misuse.test_a_map_that_nobody_encoded_is_named, three)
    yield partial(misuse.test_stores_are_handed_to_another_block, three)
    yield partial(misuse.test_copies_of_a_block_land_while_another_spins, three)
    four = maps.made(emulator)
    yield partial(maps.test_boxes_by_a_parameter, four, 2, 2)
    yield partial(maps.test_a_map_in_a_structure, four)


def made(parts=None):
    return tensor_maps.with_driver(parts=parts)


@pytest.mark.parametrize("part, old, new", [x[1:] for x in FAULTS], ids=[x[0] for x in FAULTS])
def test_a_fault_is_detected(part, old, new, tmp_path):
    assert detected(checks(made(altered(part, old, new, tmp_path)))), "no check failed"


def test_without_a_fault_nothing_is_detected():
    assert not detected(checks(made()))
