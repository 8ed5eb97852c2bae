"""Ranks for the tests of this folder."""

import pytest

from tests.support import ranks


@pytest.fixture(scope="module")
def four():
    """Four ranks, which a module's tests share: they take seconds to start."""
    with ranks.ranks(4) as found:
        yield found
