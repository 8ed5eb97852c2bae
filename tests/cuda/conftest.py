"""The emulator, for the tests of this folder."""

import pytest

from tests.gpu_emulation.emulated import everywhere


@pytest.fixture
def emulated():
    """Every call runs on the emulator. A test sets its options."""
    with everywhere() as backend:
        yield backend
