"""Compiled GPU kernels on the executor: calls with every pair of arguments and properties, from
rows of tests/features. nvcc's kernels of sm_90 decline some calls, which those of sm_80 run."""

import pytest

from tests.features.test_calls import agrees
from tests.gpu_emulation.emulator import needs_emulator
from tests.gpu_emulation.ptx import ours
from tests.gpu_emulation.ways import FORMS, NARROW, OF_CUDA, calls
from tests.support.backends import needs_triton

pytestmark = [needs_emulator, pytest.mark.slow]  # a call compiles its kernels
NVCC, TRITON = ("nvcc-80", "nvcc-90"), ("triton-75", "triton-80", "triton-90", "triton-100")
STORED = ("own", "int8", "float8_e4m3fn", "float8_e5m2")


@ours.needs_nvcc
@pytest.mark.parametrize("form, row, way", calls(NVCC, most=16, **OF_CUDA, **NARROW))
def test_rows_of_nvcc(form, row, way):
    agrees(form, row, way)


@needs_triton
@pytest.mark.parametrize(
    "form, row, way", calls(TRITON, (*FORMS, "selected"), most=9, **NARROW, stored=STORED)
)
def test_rows_of_triton(form, row, way):
    agrees(form, row, way)
