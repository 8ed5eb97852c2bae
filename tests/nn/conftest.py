"""The generator's state, for the tests of this folder."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded(one_thread):
    torch.manual_seed(0)
