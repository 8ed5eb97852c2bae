"""README.md as a package index shows it: its relative links are made absolute.

scikit-build-core calls `dynamic_metadata` when it builds the package (pyproject.toml).
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def dynamic_metadata(field, settings=None):
    """The readme (PEP 621: text and its type)."""
    if field != "readme" or settings:
        raise ValueError(f"got field {field!r} and settings {settings!r}, expected 'readme', none")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return {"content-type": "text/markdown", "text": absolute(text, home())}


def home():
    """The address of the repository."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^Homepage = "(.+)"$', text, re.M).group(1)


def absolute(text, address):
    """text with each relative link below `address`; pictures lead to the file itself."""

    def replaced(found):
        mark, words, path = found.groups()
        return f"{mark}[{words}]({address}/{'raw' if mark else 'blob'}/main/{path})"

    return LINK.sub(replaced, text)
