"""End a run in time: `pytest --minutes=15` skips the tests that remain after that, and reports how
many they are.

Each pass over the suite runs another part of the cases of every test, so that a run that is cut
short has run some cases of everything. Which part comes first is drawn anew for every commit.
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

    @pytest.hookimpl(trylast=True)  # after deselection
    def pytest_collection_modifyitems(self, items):
        items[:] = in_passes(items, commit())

    @pytest.hookimpl(tryfirst=True)  # before fixtures, some of which compile for minutes
    def pytest_runtest_setup(self):
        if time.monotonic() >= self.end:
            pytest.skip(REASON)


def in_passes(items, seed):
    """The items, sorted by pass."""
    return sorted(
        items, key=lambda item: sha256(f"{seed} {item.nodeid}".encode()).digest()[0] % PASSES
    )


def commit():
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return found.stdout.strip()
