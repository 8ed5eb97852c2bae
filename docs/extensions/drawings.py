"""The directive `drawing`: a picture of figures.py, with its caption, inside the page."""

from html import escape

import figures
from docutils import nodes
from docutils.parsers.rst import Directive


class DrawingDirective(Directive):
    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        if name not in figures.FIGURES:
            raise self.error(f"got drawing {name!r}, expected one of {', '.join(figures.FIGURES)}")
        make = figures.FIGURES[name]
        caption = " ".join((make.__doc__ or "").replace("`", "").split())
        svg = make().svg(caption)
        text = f'<figure class="drawing">{svg}<figcaption>{escape(caption)}</figcaption></figure>'
        return [nodes.raw("", text, format="html")]


def setup(app):
    app.add_directive("drawing", DrawingDirective)
    return {"parallel_read_safe": True}
