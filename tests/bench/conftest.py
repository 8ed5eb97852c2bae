"""Limits of a machine that need no measurement, for the tests of this folder."""

import pytest

from tests.support.bench_helpers import hurry, know_ceilings


@pytest.fixture
def known_ceilings(monkeypatch):
    know_ceilings(monkeypatch)
    hurry(monkeypatch)
