"""A run that ends in time: `pytest --minutes=15` skips what it has not come to by then, and says
how much that is.

What it comes to is something of everything: all tests are gone through in so many passes, in each
another part of the cases of every test. Which part comes first is drawn anew for every commit.
"""

import subprocess
import time
from hashlib import sha256
from pathlib import Path

import pytest

PASSES = 8
REASON = "the minutes that --minutes gave are over"


class Deadline:
    def __init__(self, minutes: float):
        self.end = time.monotonic() + 60 * minutes

    @pytest.hookimpl(trylast=True)  # of the items that are chosen
    def pytest_collection_modifyitems(self, items):
        items[:] = in_passes(items, commit())

    @pytest.hookimpl(tryfirst=True)  # before fixtures, some of which compile for minutes
    def pytest_runtest_setup(self):
        if time.monotonic() >= self.end:
            pytest.skip(REASON)


def in_passes(items, seed):
    """The same items, sorted by their pass."""
    return sorted(
        items, key=lambda item: sha256(f"{seed} {item.nodeid}".encode()).digest()[0] % PASSES
    )


def commit():
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return found.stdout.strip()
