"""The CUDA kernels on the emulator, with its race checker: calls with every pair of arguments and
properties, from the rows of tests/features."""

import pytest

from tests.features.test_calls import agrees
from tests.gpu_emulation.emulator import needs_emulator
from tests.gpu_emulation.ways import MIDDLE, NARROW, OF_CUDA, WIDE, calls
from tests.support.marks import parametrize

pytestmark = needs_emulator
# With ordinary rounding, and with the worst that hardware may have: tensor cores truncate products
# instead of rounding them, and exp2 has an error of 2 ulp. For many columns that is no budget's.
BOTH = ("emulator", "emulator-worst")


@parametrize("form, row, way", calls(BOTH, **OF_CUDA, **NARROW), fast=40)
def test_rows(form, row, way):
    agrees(form, row, way)


@parametrize("form, row, way", calls(BOTH, most=40, **OF_CUDA, **MIDDLE), fast=8)
def test_rows_of_heads_of_64(form, row, way):
    agrees(form, row, way)


@pytest.mark.slow
@pytest.mark.parametrize("form, row, way", calls(BOTH[:1], most=30, **OF_CUDA, **WIDE))
def test_rows_of_wide_heads(form, row, way):
    agrees(form, row, way)
