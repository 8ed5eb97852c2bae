"""The directive `gallery`: the examples, in the order in which fastattn.examples lists them.

Each has its docstring, its command, and the picture that it made: docs/update.py runs them.
"""

import ast
import re
from pathlib import Path

from sphinx.util.docutils import SphinxDirective

DOCS = Path(__file__).resolve().parents[1]
EXAMPLES = DOCS.parent / "fastattn" / "examples"
PICTURES = DOCS / "pictures"


def names():
    """The examples with a picture, as fastattn.examples lists them."""
    listed = docstring("__init__")
    return re.findall(r"python -m fastattn\.examples\.(\w+)", listed)


def docstring(name):
    return ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text("utf-8"))) or ""


def entry(name):
    """The text of one example, in Markdown."""
    first, _, rest = docstring(name).partition("\n")
    command = f"python -m fastattn.examples.{name} --plot"
    rest = "\n".join(line for line in rest.split("\n") if not line.startswith("    python -m"))
    return (
        f"## {name}\n\n{first}\n\n![What {name} plots](pictures/{name}.png)\n\n"
        f"{rest.strip()}\n\n```sh\n{command}\n```\n"
    )


class Gallery(SphinxDirective):
    def run(self):
        for name in names():
            self.env.note_dependency(str(EXAMPLES / f"{name}.py"))
        text = "\n".join(entry(name) for name in names())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app):
    app.add_directive("gallery", Gallery)
    return {"parallel_read_safe": True}
