"""A run with a deadline ends in time, has some cases of every test, and reports what it omitted."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import deadline

HERE = Path(__file__).parent
ITEMS = [SimpleNamespace(nodeid=f"test_{x}[{y}]", of=x) for x in range(10) for y in range(80)]


def run(minutes):
    given = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--minutes={minutes}"]
    few = "tests/package/test_tiers.py", "-k", "alternating or nth_case"
    return subprocess.run([*given, *few], cwd=HERE.parents[1], capture_output=True, text=True)


def test_all_tests_run_before_the_deadline():
    found = run(10)
    assert found.returncode == 0, found.stdout
    assert re.search(r"^\d+ passed", found.stdout, re.M), found.stdout


def test_no_test_starts_after_the_deadline_and_the_count_is_printed():
    found = run(0)
    assert found.returncode == 0, found.stdout
    assert re.search(r"^\d+ skipped", found.stdout, re.M), found.stdout
    assert re.search(rf"^not run: \d+ of: {deadline.REASON}", found.stdout, re.M), found.stdout


def test_every_item_occurs_once():
    found = deadline.in_passes(ITEMS, "a")
    assert sorted(map(id, found)) == sorted(map(id, ITEMS))


@pytest.mark.parametrize("seed", ["a", "b"])
def test_a_quarter_of_the_run_has_some_of_every_test(seed):
    first = Counter(item.of for item in deadline.in_passes(ITEMS, seed)[: len(ITEMS) // 4])
    assert all(first[x] > 0 for x in range(10)), first


def test_another_commit_starts_with_other_cases():
    first, second = (
        {item.nodeid for item in deadline.in_passes(ITEMS, seed)[:100]} for seed in "ab"
    )
    assert len(first & second) < 50
