"""Bank conflicts in shared memory: our tiles have none, at any head dim.

A warp may take eight cycles instead of one without any finding: only a count shows that.
"""

import numpy as np
import pytest
import torch

import fastattn
from tests.gpu_emulation.emulated import everywhere
from tests.gpu_emulation.emulator import EMULATOR, KERNELS, Emulator, aligned, needs_emulator
from tests.support.cases import FEATURE, Dims, build
from tests.support.marks import parametrize

pytestmark = needs_emulator
SOURCE = EMULATOR / "banks.cu"
COLUMNS = (32, 64, 96, 128, 192, 256)


@pytest.fixture(scope="module")
def emulator():
    return Emulator(SOURCE)


def banks_of_tile(emulator, columns):
    given, out = aligned(32 * columns, np.uint16), aligned(128, np.uint32)
    found = emulator.run("tile_of", columns, given, out, banks=True)
    assert not found.count, found.first
    return found.banks


@pytest.mark.slow
def test_the_swizzle_is_free_of_conflicts(emulator):
    """For copies and for every way to read a tile."""
    for columns in COLUMNS:
        chunks = 32 * columns // 8
        expected = {"cp.async": (chunks // 8, 0), "ldmatrix": (4 * 3 * chunks // 8, 0)}
        assert banks_of_tile(emulator, columns) == expected


@parametrize("columns", COLUMNS, fast=1)
def test_a_tile_without_its_swizzle_is_detected(tmp_path, columns):
    """The sources with one term changed."""
    text = (KERNELS / "tile.cuh").read_text()
    assert text.count("(chunk ^ flip)") == 1
    text = text.replace("(chunk ^ flip)", "(chunk + 0 * flip)")
    (tmp_path / "cuda").mkdir()
    text = text.replace('#include "', '#include "cuda/')  # from the original folder
    (tmp_path / "cuda" / "tile.cuh").write_text(text)
    (tmp_path / "banks.cu").write_text(SOURCE.read_text() + "// no swizzle\n")
    banks = banks_of_tile(Emulator(tmp_path / "banks.cu"), columns)
    assert banks["ldmatrix"][1] > 0


@pytest.mark.parametrize("bytes, step, turns, each", [(4, 1, 1, 0), (8, 1, 2, 0), (4, 2, 1, 1)])
def test_wide_accesses_take_several_steps(emulator, bytes, step, turns, each):
    steps(emulator, bytes, step, turns, each)


def steps(emulator, bytes, step, turns, each):
    found = emulator.run("steps_of", bytes, step, aligned(32, np.uint32), banks=True)
    assert not found.count, found.first
    assert found.banks == dict.fromkeys(("load", "store"), (turns, turns * each))


def test_conflicts_are_counted(emulator):
    """There are 32 banks of words: at a step of 2, two lanes share a bank; at 32, all do."""
    for step, each in ((2, 1), (4, 3), (32, 31), (33, 0)):
        steps(emulator, 4, step, 1, each)
    for step, each in ((1, 0), (2, 1), (16, 15)):
        steps(emulator, 8, step, 2, each)


@parametrize("d", [32, 64, 96, 128, 192, 256], fast=2)  # wide kernels take a minute to build
def test_no_kernel_has_conflicts_in_its_tiles(d):
    """In forward, backward and decode."""
    with everywhere(banks=True) as backend:
        problem = build(Dims(1, 1, 1, 70, 67, d, d), (FEATURE["key_bias_grad"],), torch.bfloat16)
        problem.run(fastattn.attention)
        backend.sm_count = 8
        problem = build(Dims(1, 1, 1, 3, 300, d, d), (), torch.float16)
        problem.run(fastattn.attention, backward=False)
    kinds = ("ldmatrix", "cp.async")
    counted = [x.banks[kind] for x in backend.findings for kind in kinds if kind in x.banks]
    assert sum(turns for turns, _ in counted) > 100
    assert not any(conflicts for _, conflicts in counted)
