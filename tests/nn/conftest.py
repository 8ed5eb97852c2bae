"""The generator's state, for the tests of this folder."""

import pytest
import torch


@pytest.fixture
def seeded():
    torch.manual_seed(0)
