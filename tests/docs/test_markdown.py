"""The pages are plain Markdown, which a hub shows without Sphinx: each is listed, and what is
made of the sources is current."""

from __future__ import annotations

import re
import runpy

import pytest

from tests.support.checkout import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
MAKES = r"^(?:(?:def|class) {0}\b|{0} = \w+|\s*from torch\..+ import \w+ as {0}$)"
LISTS = DOCS / "index.md", DOCS / "reference" / "index.md"

pytestmark = pytest.mark.skipif(not PAGES, reason="no docs: not a checkout")


def test_every_page_is_listed():
    """In a list of links: the table of contents is made of those."""
    files = runpy.run_path(str(DOCS / "extensions" / "repository.py"))["files"]()
    listed = set(LISTS[:1])
    for page in LISTS:
        items = re.findall(r"^- \[[^\]]*\]\(([^)#]+)\)", page.read_text("utf-8"), re.M)
        listed |= {(page.parent / item).resolve() for item in items}
    assert {files.get(page, page) for page in PAGES} | set(DOCS.glob("notebooks/*.ipynb")) == listed


def test_pages_made_of_sources_are_current():
    """`python docs/update.py pages` writes them."""
    made = runpy.run_path(str(DOCS / "update.py"))["pages"]()
    kept = {path: path.read_text("utf-8") if path.exists() else "" for path in made}
    assert [str(path.relative_to(DOCS)) for path, text in made.items() if text != kept[path]] == []
    assert set(DOCS.glob("drawings/*")) <= made.keys()


def test_the_gallery_keeps_indentation():
    """Commands and formulas of a docstring are indented: else a hub shows them as prose."""
    update = runpy.run_path(str(DOCS / "update.py"))
    for name in update["examples"]():
        lines = update["docstring"](name).split("\n")
        lost = set(lines) - set(update["entry"](name).split("\n"))
        assert all(x.startswith("    python -m fastattn.examples.") for x in lost), name


def test_a_name_of_the_reference_links_to_the_file_that_has_it():
    """That defines it, or imports it from another library."""
    files = runpy.run_path(str(DOCS / "extensions" / "docstrings.py"))["FILES"]
    wrong = {
        name: file
        for name, file in files.items()
        if not re.search(MAKES.format(name.split(".")[-1]), file.read_text("utf-8"), re.M)
    }
    assert wrong == {}
