"""The README's support table matches the backends' declarations."""

import subprocess
import sys

import pytest

from tests.support.checkout import ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"


def lines(text):
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.skipif(not README.exists(), reason="no README.md beside the tests: not a checkout")
def test_support_table_is_fresh():
    text = README.read_text()
    assert text.count(BEGIN) == 1 and text.count(END) == 1, f"README.md: one {BEGIN}, one {END}"
    printed = subprocess.run(
        [sys.executable, "-m", "fastattn", "--support"], capture_output=True, text=True, timeout=60
    )
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.strip().count("\n") >= 3, "a table has a head and rows"
    written = text.split(BEGIN)[1].split(END)[0]
    assert lines(written) == lines(printed.stdout), (
        "README.md's support table is stale: paste what `python -m fastattn --support` prints"
    )
