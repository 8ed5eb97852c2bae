"""The emulator of CUDA kernels computes what the PTX ISA specifies, and reports misuse.

Expected results come from independent sources, never from the emulator's own formulas: the layouts
of PyPI's tensor-layouts (CuTe's algebra), numpy's float16 and float64, torch's bfloat16. The inputs
are those of probe.py. test_emulator_misuse.py tests that it finds errors in kernels.
"""

import re

import numpy as np
import pytest
import torch

from tests.gpu_emulation import probe
from tests.gpu_emulation.emulator import KERNELS, Emulator, needs_emulator

pytestmark = [needs_emulator, pytest.mark.slow]


@pytest.fixture(scope="module")
def emulator():
    return Emulator(probe.SOURCE)


# --- conformance --------------------------------------------------------------------------------


def loaded(case):
    """The layout maps bits to registers of lanes."""
    layouts = pytest.importorskip("tensor_layouts.atoms_nv")
    transposed = case.what == probe.LOAD_TRANSPOSED
    atom = layouts.SM75_U16x8_LDSM_T if transposed else layouts.SM75_U32x4_LDSM_N
    source = case.inputs["words"].view(np.uint16).reshape(256, 8)[case.inputs["address"] // 16]
    bits = range(0, 128, 16)  # the layout maps (lane, bit) of source and of destination
    at = {int(atom.src_layout_bits(x, y)): source[x, y // 16] for x in range(32) for y in bits}
    found = [[at[int(atom.dst_layout_bits(x, y))] for y in bits] for x in range(32)]
    return np.array(found, np.uint16).view(np.uint32)


def copied(case):
    """Even lanes' 16 bytes arrive; odd lanes' bytes, which are marked invalid, become zeros."""
    expected = case.inputs["words"].reshape(256, 4)[case.inputs["address"] // 16]
    expected[1::2] = 0
    return expected


def multiplied(case):
    layouts = pytest.importorskip("tensor_layouts.atoms_nv")
    bfloat16 = case.what == probe.MULTIPLY_BF16
    kind = "BF16BF16" if bfloat16 else "F16F16"
    atom = getattr(layouts, f"SM80_16x8x16_F32{kind}F32_TN")

    def lanes(layout, count):
        return [[int(layout(x, y)) for y in range(count)] for x in range(32)]

    def matrix(name, layout, rows, columns):
        bits = case.inputs[name]
        if bits.dtype == np.uint32:
            bits = bits.view(np.uint16)
            bits = (bits.astype(np.uint32) << 16).view("f4") if bfloat16 else bits.view("f2")
        flat = np.empty(rows * columns)  # in float64, column by column
        flat[lanes(layout, len(flat) // 32)] = bits.reshape(32, -1)
        return flat.reshape(rows, columns, order="F")

    a, b = matrix("a", atom.a_layout, 16, 16), matrix("b", atom.b_layout, 8, 16)
    with np.errstate(invalid="ignore"):  # 0 times infinity
        d = (a[:, None] * b).sum(-1) + matrix("d", atom.c_layout, 16, 8)
    return d.flatten("F")[lanes(atom.c_layout, 4)].astype(np.float32).view(np.uint32)


def packed(case):
    """Each element packed with its neighbour: as the low half, then as the next high half."""
    x = case.inputs["d"].reshape(32, 4)
    if case.what == probe.PACK_F16:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            low = x.astype(np.float16).view(np.uint16)
    else:
        low = torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return np.stack([low, low[:, [1, 0, 3, 2]]], -1).reshape(32, 8).view(np.uint32)


def widened(case):
    halves = (case.inputs["a"] & 0xFFFF).astype(np.uint16).reshape(32, 4)
    if case.what == probe.WIDEN_F16:
        with np.errstate(invalid="ignore"):
            return halves.view(np.float16).astype(np.float32).view(np.uint32)
    return torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16).float().numpy().view("u4")


def shuffled(case):
    lanes = np.arange(32) ^ case.inputs["b"][0]
    return case.inputs["d"].view(np.uint32).reshape(32, 4)[lanes]


def multiplied_whole(case):
    b = np.asarray(case.inputs["b"], np.uint64).reshape(32, 2)[:, :1]
    wide = case.inputs["a"].astype(np.uint64).reshape(32, 4) * b
    return (wide >> np.uint64(32 * (case.what == probe.PRODUCT_HIGH))).astype(np.uint32)


def added(case):
    b = np.asarray(case.inputs["b"], np.uint32).reshape(32, 2)[:, :1]
    return case.inputs["a"].astype(np.uint32).reshape(32, 4) + b


EXPECTED = {
    probe.FETCH_ADD: added,
    **dict.fromkeys([probe.PRODUCT_LOW, probe.PRODUCT_HIGH], multiplied_whole),
    **dict.fromkeys([probe.LOAD, probe.LOAD_TRANSPOSED], loaded),
    **dict.fromkeys([probe.MULTIPLY_BF16, probe.MULTIPLY_F16], multiplied),
    **dict.fromkeys([probe.PACK_BF16, probe.PACK_F16], packed),
    **dict.fromkeys([probe.WIDEN_BF16, probe.WIDEN_F16], widened),
    probe.COPY: copied,
    probe.SHUFFLE: shuffled,
}
# Computed in float64.
APPROXIMATED = {probe.EXP2: np.exp2, probe.LOG2: np.log2, probe.RECIPROCAL: np.reciprocal}


def flushed(x):
    """Instructions with .ftz flush subnormal inputs and outputs to zero."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


def check(emulator, name, **options):
    case = probe.CASES[name]
    found = probe.on_emulator(emulator, case, **options)
    if case.what in APPROXIMATED:
        x = case.inputs["d"].reshape(32, 4)
        with np.errstate(all="ignore"):
            exact = APPROXIMATED[case.what](flushed(x).astype(np.float64))
            expected = flushed(exact.astype(np.float32))
        wrong = probe.ulps(found.view(np.float32), expected) > 2
        if options.get("pessimistic") and case.what == probe.LOG2:  # near 1 the bound is absolute
            with np.errstate(invalid="ignore"):
                wrong &= np.abs(found.view(np.float32) - exact) > 2.0**-22.6
        assert not wrong.any(), f"{name} of {x[wrong]}"
    else:
        wrong = probe.complaints(name, found, EXPECTED[case.what](case))
        assert not wrong, wrong[0]


@pytest.mark.parametrize("name", probe.CASES)
def test_an_instruction_by_an_independent_source(emulator, name):
    check(emulator, name)


def test_copies_and_their_zeros_when_they_land_at_once(emulator):
    check(emulator, "copy16", lazy=False)


ONES = np.full(128, 0x3F803F80, np.uint32)  # in bfloat16


@pytest.mark.parametrize(
    "before, exact, worst",
    [(1.0, 17.0, 17.0), (2.0**24, 2.0**24, 2.0**24 + 16), (2.0**25, 2.0**25, 2.0**25)],
)
def test_tensor_cores_that_round_worst(emulator, before, exact, worst):
    """Add 16 products of 1 to a larger term. Tensor cores keep products of at least half the last
    bit of that term, and drop smaller ones. Sums that are rounded one by one lose them earlier."""
    inputs = {"a": ONES, "b": ONES[:64], "d": np.full(128, before, np.float32)}
    case = probe.Case(probe.MULTIPLY_BF16, inputs)
    for pessimistic, sum in ((False, exact), (True, worst)):
        found = probe.on_emulator(emulator, case, pessimistic=pessimistic)
        assert (found.view(np.float32) == sum).all()


@pytest.mark.parametrize("name", ["exp2", "log2", "multiply_bf16_infinite", "multiply_f16_whole"])
def test_the_worst_rounding_is_within_its_bounds(emulator, name):
    check(emulator, name, pessimistic=True)


def test_every_instruction_with_a_result_is_probed():
    """Instructions that only synchronise have a Site parameter instead."""
    wrappers = re.findall(r"FA_DEVICE \w+ (\w+)\((\w+)", probe.INSTRUCTIONS.read_text())
    probed = re.findall(r"ptx::(\w+)", probe.SOURCE.read_text())
    assert {name for name, first in wrappers if first != "Site"} <= set(probed)


def test_files_of_one_name_have_inline_assembly():
    with_assembly = {
        str(file.relative_to(KERNELS))
        for file in KERNELS.rglob("*")
        if file.suffix in (".cu", ".cuh", ".h") and re.search(r"\basm\b|__asm", file.read_text())
    }
    assert with_assembly == {"ptx.cuh", "sm90/ptx.cuh"}
