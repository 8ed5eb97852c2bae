"""Tables in pages match what they are made from: the backends' declarations in the README, and the
docstring of `attention` in the reference. `python -m tests.package.test_support_table` writes both.
"""

import inspect

import pytest

import fastattn
from tests.support.checkout import ROOT
from tests.support.fresh_python import python

README = ROOT / "README.md"
REFERENCE = ROOT / "docs" / "reference" / "arguments.md"
BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"
FIRST = "| argument | default | shape | what it is |\n|---|---|---|---|\n"


def entries(section):
    """The texts of the entries of a section in the docstring of `attention`, by name."""
    found, name = {}, ""
    for line in inspect.getdoc(fastattn.attention).split(f"\n{section}:\n")[1].split("\n"):
        if not line:
            return found
        if not line.startswith(" " * 8):
            name, _, line = line.strip().partition(": ")
        found[name] = f"{found.get(name, '')} {line.strip()}".strip()
    return found


def argument_table():
    texts, shapes = entries("Args"), entries("Shape")
    rows = []
    for x in inspect.signature(fastattn.attention).parameters.values():
        if x.kind is x.KEYWORD_ONLY:
            what = texts[x.name].split(". ")[0].rstrip(".").replace("|", "\\|")
            shape = shapes.get(x.name, "").rstrip(".")
            rows.append(f"| `{x.name}` | `{x.default}` | {shape} | {what} |\n")
    return FIRST + "".join(rows)


def lines(text):
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.skipif(not README.exists(), reason="no README.md beside the tests: not a checkout")
def test_support_table_is_fresh():
    text = README.read_text()
    assert text.count(BEGIN) == 1 and text.count(END) == 1, f"README.md: one {BEGIN}, one {END}"
    printed = python("-m", "fastattn", "--support")
    assert printed.stdout.strip().count("\n") >= 3, "a table has a head and rows"
    written = text.split(BEGIN)[1].split(END)[0]
    assert lines(written) == lines(printed.stdout), (
        "README.md's support table is stale: paste what `python -m fastattn --support` prints"
    )


def parts_of_reference():
    """The page before the table, the table, and the page behind it."""
    before, behind = REFERENCE.read_text().split(FIRST[:12], 1)
    table, _, behind = (FIRST[:12] + behind).partition("\n\n")
    return before, table + "\n", "\n" + behind


@pytest.mark.skipif(not README.exists(), reason="no README.md beside the tests: not a checkout")
def test_the_table_of_arguments_is_fresh():
    assert parts_of_reference()[1] == argument_table()


if __name__ == "__main__":
    before, _, behind = parts_of_reference()
    REFERENCE.write_text(before + argument_table() + behind)
    before, behind = README.read_text().split(BEGIN)
    table = fastattn.inspection.explain_call.support_table()
    README.write_text(f"{before}{BEGIN}\n{table}\n{END}{behind.split(END)[1]}")
