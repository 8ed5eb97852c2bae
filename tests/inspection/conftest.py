"""A profiler that takes little time, for the tests of this folder."""

import pytest

from fastattn.dropin import patching
from fastattn.inspection import profiling


@pytest.fixture
def quick(threads, monkeypatch):
    threads(1)
    monkeypatch.setattr(profiling, "SECONDS", 0.02)
    monkeypatch.setattr(patching, "SMALL", 0)
