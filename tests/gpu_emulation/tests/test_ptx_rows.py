"""Compiled GPU kernels on the executor: calls with every pair of arguments and properties, from
rows of tests/features. nvcc's kernels of sm_90 decline some calls, which those of sm_80 run."""

import pytest

from tests.features.test_calls import agrees, by_turns, cases
from tests.gpu_emulation import ways
from tests.gpu_emulation.emulator import needs_emulator
from tests.gpu_emulation.ptx import ours
from tests.support.backends import needs_triton

pytestmark = [needs_emulator, pytest.mark.slow]  # a call compiles its kernels


def drawn(names, forms, most, **fixed):
    """The first rows of each form, each on one of the ways, in turn."""
    lists = ([(x, row) for row in ways.rows(x, most, **fixed)] for x in forms)
    rows = enumerate(by_turns(*lists))
    return cases((*x, names[n % len(names)]) for n, x in rows)


@ours.needs_nvcc
@pytest.mark.parametrize(
    "form, row, way",
    drawn(("nvcc-80", "nvcc-90"), ways.FORMS, 16, **ways.OF_CUDA, **ways.NARROW),
)
def test_rows_of_nvcc(form, row, way):
    agrees(form, row, way)


@needs_triton
@pytest.mark.parametrize(
    "form, row, way",
    drawn(
        ("triton-80", "triton-90", "triton-100"),
        (*ways.FORMS, "selected"),
        9,
        **ways.NARROW,
        stored=("own", "int8", "float8_e4m3fn", "float8_e5m2"),
    ),
)
def test_rows_of_triton(form, row, way):
    agrees(form, row, way)
