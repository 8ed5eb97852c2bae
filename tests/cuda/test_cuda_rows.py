"""The CUDA kernels on the emulator, with its race checker: calls with every pair of arguments and
properties, from the rows of tests/features."""

import pytest

from tests.features.test_calls import agrees, by_turns, cases
from tests.gpu_emulation import ways
from tests.gpu_emulation.emulator import needs_emulator
from tests.support.marks import parametrize

pytestmark = needs_emulator


def drawn(form, most=None, **fixed):
    """Each call in turn with ordinary rounding and with the worst that hardware may have: tensor
    cores truncate products instead of rounding them, and exp2 has an error of 2 ulp."""
    rows = enumerate(ways.rows(form, most, **ways.OF_CUDA, **fixed))
    return [(form, row, ("emulator", "emulator-worst")[n % 2]) for n, row in rows]


def calls(**fixed):
    return cases(by_turns(*(drawn(form, **fixed) for form in ways.FORMS)))


@parametrize("form, row, way", calls(**ways.NARROW), fast=40)
def test_rows(form, row, way):
    agrees(form, row, way)


@pytest.mark.slow
@pytest.mark.parametrize("form, row, way", calls(most=30, **ways.WIDE))
def test_rows_of_wide_heads(form, row, way):
    agrees(form, row, way)
