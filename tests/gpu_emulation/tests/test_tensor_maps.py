"""Tensor maps of the host: the driver's function in the emulator's runtime, what it refuses by the
documentation in cuda.h, and kernels that get a map as a parameter.
"""

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bench.static_gpu import ptxas
from tests.gpu_emulation import tensor_maps
from tests.gpu_emulation.emulator import EMULATOR, aligned, compiler, needs_emulator
from tests.gpu_emulation.ptx import library, ours
from tests.gpu_emulation.tensor_maps import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, UINT8
from tests.gpu_emulation.tests.test_ptx_bulk import OF_MAP, of_map
from tests.gpu_emulation.tests.test_ptx_hopper import (
    BEGIN,
    COPY_OUT,
    INIT,
    SHAPES,
    Tensor,
    coordinates_of,
    load,
    wait,
)
from tests.gpu_emulation.tests.test_ptx_products import HEADER, SHARED

pytestmark = needs_emulator
named = pytest.mark.parametrize
LANES = 64
SUCCESS, INVALID_VALUE = 0, 1
NO_DRIVER, OLD_DRIVER = 11080, 12000  # before the function, and the first with it


@pytest.fixture(scope="module")
def emulator():
    return tensor_maps.with_driver()


@pytest.fixture(autouse=True)
def fresh(emulator):
    emulator.library.emu_runtime_reset()
    yield
    emulator.library.emu_runtime_reset()


# --- the header -----------------------------------------------------------------------------------


@pytest.mark.slow
@ours.needs_nvcc
def test_names_and_values_are_those_of_cuda(tmp_path):
    """Every name of the emulator's cuda.h and of its entry points has CUDA's value, and the map its
    size and alignment."""
    text = (EMULATOR / "cuda.h").read_text() + (EMULATOR / "cuda_runtime.h").read_text()
    names = re.findall(r"^  ((?:CU|cuda)\w+) = \d+,", text, re.M)
    assert len(names) >= 50
    lines = "".join(f'  printf("{x} %d\\n", int({x}));\n' for x in [*names, *SIZES])
    code = "#include <cuda.h>\n#include <cuda_runtime.h>\n#include <cstdio>\nint main() {\n"
    (tmp_path / "values.cpp").write_text(f"{code}{lines}}}\n")
    includes = Path(ptxas.nvcc()).resolve().parents[1] / "include"
    real = includes if (includes / "cuda.h").exists() else Path("/usr/local/cuda/include")
    found = [
        values(tmp_path, "ours", f"-I{EMULATOR}", "-include", EMULATOR / "emu.h"),
        values(tmp_path, "cuda", f"-I{real}"),
    ]
    assert found[0] == found[1]


SIZES = ["sizeof(CUtensorMap)", "alignof(CUtensorMap)", "CU_TENSOR_MAP_NUM_QWORDS"]


def values(folder, name, *flags):
    command = [*compiler(), "-std=c++17", *flags, folder / "values.cpp", "-o", folder / name]
    subprocess.run(command, check=True, capture_output=True)
    return subprocess.run([folder / name], check=True, capture_output=True, text=True).stdout


# --- the function ---------------------------------------------------------------------------------


def entry_point(emulator, name, version):
    """(the runtime's code, the status, whether there is a function)"""
    status, found = ctypes.c_int(-1), ctypes.c_int(-1)
    code, _ = emulator.call(
        "entry_point",
        ctypes.c_char_p(name),
        version,
        *(ctypes.byref(x) for x in (status, found)),
    )
    return code, status.value, found.value


FOUND, NOT_FOUND, NOT_SUFFICIENT = 0, 1, 2


def test_the_function_is_found_by_name_and_version(emulator):
    name = b"cuTensorMapEncodeTiled"
    assert entry_point(emulator, name, 12000) == (0, FOUND, True)
    assert entry_point(emulator, name, 13000) == (0, FOUND, True)
    assert entry_point(emulator, name, 11080) == (0, NOT_SUFFICIENT, False)
    assert entry_point(emulator, b"cuTensorMapEncodeTiles", 12000) == (0, NOT_FOUND, False)
    assert entry_point(emulator, None, 12000)[0] == INVALID_VALUE


def test_an_old_driver_does_not_have_it(emulator):
    for version, status in ((NO_DRIVER, NOT_FOUND), (OLD_DRIVER, FOUND)):
        emulator.library.emu_runtime_driver(version, 80)
        found = entry_point(emulator, b"cuTensorMapEncodeTiled", 12000)
        assert found == (0, status, status == FOUND)
    emulator.library.emu_runtime_driver(NO_DRIVER, 80)
    assert encode(emulator)[0] == -1


def test_its_failures_reach_the_caller(emulator):
    """The runtime's call, then the driver's."""
    emulator.library.emu_runtime_fail(ctypes.c_long(0), 101)
    assert entry_point(emulator, b"cuTensorMapEncodeTiled", 12000)[0] == 101
    emulator.library.emu_runtime_fail(ctypes.c_long(1), 201)
    assert encode(emulator)[0] == 201


ADDRESS = 1 << 20
VALID = dict(address=ADDRESS, dims=[64, 8, 4, 2, 3], strides=[128, 1024, 4096, 8192])
VALID |= dict(box=[64, 8, 1, 1, 1])


def encode(emulator, **other):
    return tensor_maps.encode(emulator, **VALID | other)


ALLOWED = {
    "swizzled": dict(swizzle=3),
    "one_dimension": dict(dims=[64], strides=None, box=[64]),
    "two_dimensions": dict(dims=[64, 8], strides=[128], box=[64, 8]),
    "longest": dict(dims=[1 << 32, 1 << 32, 1, 1, 1]),
    "largest_stride": dict(strides=[(1 << 40) - 16] * 4),
    "largest_box": dict(box=[256] * 5),
    "row_below_a_swizzle": dict(swizzle=3, box=[8, 1, 1, 1, 1]),
    "element_strides": dict(element_strides=[1, 8, 8, 8, 8]),
    "bytes": dict(type=UINT8, box=[16, 1, 1, 1, 1]),
    "wide": dict(type=FLOAT64, box=[2, 1, 1, 1, 1]),
    "nan_outside": dict(fill=1),
    "promoted": dict(promotion=3),
    "interleaved": dict(interleave=1, box=[3, 1, 1, 1, 1]),
    "interleaved_by_32": dict(interleave=2, swizzle=1),
    "half_aligned_map": dict(map_at=64),
}
REFUSED = {
    "no_map": dict(map_at=None),
    "misaligned_map": dict(map_at=32),
    "no_address": dict(address=0),
    "misaligned_address": dict(address=ADDRESS + 8),
    "address_of_interleaved": dict(address=ADDRESS + 16, interleave=2, swizzle=1),
    "no_dimensions": dict(dims=None, rank=5),
    "no_strides": dict(strides=None),
    "no_box": dict(box=None),
    "no_element_strides": dict(element_strides=[]),
    "rank_0": dict(rank=0),
    "rank_6": dict(rank=6),
    "rank_of_interleaved": dict(rank=2, interleave=1),
    "dimension_0": dict(dims=[64, 8, 0, 2, 3]),
    "dimension_too_long": dict(dims=[64, (1 << 32) + 1, 4, 2, 3]),
    "stride_0": dict(strides=[128, 1024, 0, 8192]),
    "misaligned_stride": dict(strides=[128, 1032, 4096, 8192]),
    "stride_too_large": dict(strides=[128, 1024, 4096, 1 << 40]),
    "stride_of_interleaved": dict(strides=[128, 1024, 4112, 8192], interleave=2, swizzle=1),
    "box_0": dict(box=[64, 0, 1, 1, 1]),
    "box_too_long": dict(box=[64, 257, 1, 1, 1]),
    "row_of_box": dict(box=[4, 8, 1, 1, 1]),
    "row_above_a_swizzle": dict(swizzle=3, box=[72, 8, 1, 1, 1]),
    "row_above_64": dict(swizzle=2, box=[40, 8, 1, 1, 1]),
    "row_above_32": dict(swizzle=1, box=[24, 8, 1, 1, 1]),
    "element_stride_0": dict(element_strides=[1, 0, 1, 1, 1]),
    "element_stride_9": dict(element_strides=[1, 1, 9, 1, 1]),
    "type": dict(type=16),
    "type_below_a_byte": dict(type=13),
    "interleave": dict(interleave=3),
    "swizzle": dict(swizzle=7),
    "swizzle_of_larger_atoms": dict(swizzle=4),
    "swizzle_of_interleaved": dict(interleave=2, swizzle=3),
    "promotion": dict(promotion=4),
    "fill": dict(fill=2),
    "nan_among_whole_numbers": dict(fill=1, type=UINT8),
}


@named("name", ALLOWED)
def test_an_allowed_tensor_is_encoded(emulator, name):
    code, map = encode(emulator, **ALLOWED[name])
    assert code == SUCCESS and any(map)


@named("name", REFUSED)
def test_a_wrong_tensor_is_refused(emulator, name):
    assert encode(emulator)[0] == SUCCESS
    code, map = encode(emulator, **REFUSED[name])
    assert code == INVALID_VALUE and not any(map)


# --- kernels that get a map -----------------------------------------------------------------------

NAMES = "map given out at bytes skip count"


def boxes(rank):
    coordinates = "".join(f"ld.global.b32 %at{i}, [%c+{4 * i}];" for i in range(rank))
    return f"""{OF_MAP} @%first {INIT} [%bar], 1; bar.sync 0; @!%first bra $wait; {coordinates}
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], %bytes; add.s32 %to, %m, 2048;
    {load(rank)} $wait: {wait("%bar", 0)} {COPY_OUT}"""


def of_struct(name, lines):
    """The same with the map in a structure, after a number, and the number after it."""
    code = of_map(name, lines, NAMES).replace(
        ".param .align 64 .b8 map[128]", ".param .u64 first, .param .align 128 .b8 map[384]"
    )
    return code.replace("mov.b64 %map, map;", "mov.b64 %map, map; add.s64 %map, %map, 128;")


def made(emulator):
    kernels = [of_map(f"boxes_{x}", [BEGIN, boxes(x)], NAMES) for x in SHAPES]
    kernels.append(of_struct("in_a_structure", [BEGIN, boxes(2)]))
    return library.Executor(emulator, HEADER + SHARED + "".join(kernels))


@pytest.fixture(scope="module")
def executor(emulator):
    return made(emulator)


def load_box(executor, name, tensor, at, lead=(), pack=bytes, **fields):
    """(the findings, the kernel's output, the expected bytes)"""
    layouts = pytest.importorskip("tensor_layouts")
    bytes = tensor.bytes()
    map = tensor_maps.of_tensor(executor.emulator, tensor, **fields)
    out, coordinates = aligned(bytes, np.uint8), aligned(8, np.int32)
    coordinates[: len(at)] = at
    numbers = [x.to_bytes(8, "little") for x in (bytes, 0, 1)]
    arguments = [*lead, pack(map), b"\0" * 8, out, coordinates, *numbers]
    found = executor.launch(name, (1,), (LANES,), 2048 + bytes, arguments)
    expected = np.zeros(bytes, np.uint8)
    expected[layouts.Swizzle(tensor.swizzle, 4, 3)(2048 + np.arange(bytes)) - 2048] = tensor.at(at)
    return found, out, expected


# A box's bytes do not depend on the type, but for its size.
NUMBERS = {1: [0], 2: [1, FLOAT16, BFLOAT16], 4: [2, 3, FLOAT32, 10, 11, 12], 8: [4, 5, FLOAT64]}


@named("size", NUMBERS)
@named("rank", SHAPES)
def test_boxes_by_a_parameter(executor, rank, size):
    for seed, type in enumerate(NUMBERS[size]):
        tensor = Tensor(*SHAPES[rank], size, 0, np.random.default_rng(seed))
        for at in coordinates_of(tensor, 3):
            found, out, expected = load_box(executor, f"boxes_{rank}", tensor, at, type=type)
            found.none()
            assert np.array_equal(out, expected)


def test_a_map_in_a_structure(executor):
    tensor = Tensor((64, 9), (64, 4), 2, 3, np.random.default_rng(0))
    found, out, expected = load_box(
        executor,
        "in_a_structure",
        tensor,
        (3, 1),
        lead=[bytes(8)],
        pack=lambda map: bytes(128) + map + bytes(128),
    )
    found.none()
    assert np.array_equal(out, expected)


# What the driver allows, and this emulator does not know.
UNKNOWN = {
    "nan_outside": (dict(fill=1), "an interleaved layout or a fill with NaN"),
    "element_stride": (dict(element_strides=[1, 2]), "element stride 2, expected 1"),
    "row_below_a_swizzle": (dict(swizzle=3), "bytes of a row of a swizzled box 32"),
}


@named("name", UNKNOWN)
def test_what_is_unknown_is_named_at_its_use(executor, name):
    fields, expected = UNKNOWN[name]
    tensor = Tensor((19, 11), (16, 8), 2, 0, np.random.default_rng(0))
    found, *_ = load_box(executor, "boxes_2", tensor, (0, 0), **fields)
    assert f"its tensor map has {expected}" in found.first


def test_a_tensor_that_is_no_memory_is_named(executor):
    tensor = Tensor((64, 9), (64, 4), 2, 3, np.random.default_rng(0))
    found, *_ = load_box(executor, "boxes_2", tensor, (0, 1), strides=[1 << 39])
    assert "bytes that are no memory" in found.first
