"""The reference: its pages list names, each with a link to the file that defines it, and the
docstring takes the place of the list's item.

fastattn's docstrings are plain text, with `names` in single backticks. For reStructuredText,
characters that it reads as markup are escaped, and a name in backticks becomes a link where the
reference has that name. Lines of code (`>>>` and what they print) stay as they are. It runs before
napoleon, which makes fields of the sections.
"""

import inspect
import re
from pathlib import Path
from pkgutil import resolve_name

import torch

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
ENTRY = re.compile(r"^- \[`fastattn\.([\w.]+)`\]\(([^)]+)\)$", re.M)
FILES = {  # of each name
    name: (page.parent / file).resolve()
    for page in REFERENCE.glob("*.md")
    for name, file in ENTRY.findall(page.read_text("utf-8"))
}
CODE = re.compile(r"`([^`\n]+)`")
MARKUP = re.compile(r"([*|\\]|_\b)")


def linked(found):
    """A name in backticks: a link to fastattn's own, else code."""
    text = found[1]
    name = text.removeprefix("fastattn.").split("(")[0]
    of_torch = re.search(r"torch(\.\S+|'s )$", found.string[: found.start()])
    if name in FILES and not of_torch:
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


def documented(entry):
    """What autodoc reads for an item of a list."""
    name = f"fastattn.{entry[1]}"
    directive = f".. autofunction:: {name}"
    if inspect.isclass(found := resolve_name(name)):
        directive = f".. autoclass:: {name}\n   :members:"
        if issubclass(found, torch.nn.Module):
            directive += "\n   :inherited-members: Module"  # `forward`, but nothing of torch's
    return f"```{{eval-rst}}\n{directive}\n```"


def on_read(app, page, content):
    if page.startswith("reference/"):
        content[0] = ENTRY.sub(documented, content[0])


def on_docstring(app, what, name, obj, options, lines):
    lines[:] = converted(lines)


def setup(app):
    app.connect("source-read", on_read, priority=400)  # before the links (repository.py)
    app.connect("autodoc-process-docstring", on_docstring, priority=100)  # napoleon has 500
    return {"parallel_read_safe": True}
