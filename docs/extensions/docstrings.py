"""Docstrings as reStructuredText: fastattn's are plain text, with `names` in single backticks.

Characters that reStructuredText reads as markup are escaped, and a name in backticks becomes a link
where the reference has that name. Lines of code (`>>>` and what they print) stay as they are. It
runs before napoleon, which makes fields of the sections.
"""

import re
from pathlib import Path

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
ENTRY = re.compile(r"^\.\. auto\w+:: fastattn\.([\w.]+)$", re.M)
ENTRIES = [name for page in REFERENCE.glob("*.md") for name in ENTRY.findall(page.read_text())]
CODE = re.compile(r"`([^`\n]+)`")
MARKUP = re.compile(r"([*|\\]|_\b)")


def linked(found):
    """A name in backticks: a link to fastattn's own, else code."""
    text = found[1]
    name = text.removeprefix("fastattn.").split("(")[0]
    of_torch = re.search(r"torch(\.\S+|'s )$", found.string[: found.start()])
    if name in ENTRIES and not of_torch:
        return f":py:obj:`{text} <fastattn.{name}>`"
    return f"``{text}``"


def plain(line):
    """A line of prose with its markup escaped and its names linked."""
    parts, at = [], 0
    for found in CODE.finditer(line):
        parts += [MARKUP.sub(r"\\\1", line[at : found.start()]), linked(found)]
        at = found.end()
    return "".join([*parts, MARKUP.sub(r"\\\1", line[at:])])


def converted(lines):
    """The lines of a docstring. Code begins at `>>>` and ends at an empty line."""
    result, code = [], False
    for line in lines:
        code = line.lstrip().startswith(">>>") or (code and bool(line.strip()))
        result.append(line if code else plain(line))
    return result


def on_docstring(app, what, name, obj, options, lines):
    lines[:] = converted(lines)


def setup(app):
    app.connect("autodoc-process-docstring", on_docstring, priority=100)  # napoleon has 500
    return {"parallel_read_safe": True}
