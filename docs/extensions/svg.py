"""A drawing as SVG text. Colours are classes of static/site.css, so that light and dark pages have
their own; text takes the colour of the page. Units are pixels at the width of a phone.
"""

from html import escape

WIDTH = 360


class Drawing:
    """Shapes in a picture of WIDTH units; the height is that of what is drawn."""

    def __init__(self):
        self.parts, self.bottom = [], 0.0

    def rect(self, x, y, width, height, kind, radius=2.0):
        self._reach(y + height)
        self.parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" rx="{radius}"/>'
        )

    def line(self, x0, y0, x1, y1, kind="rule"):
        self._reach(max(y0, y1))
        self.parts.append(
            f'<line class="{kind}" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"/>'
        )

    def arrow(self, x0, y0, x1, y1):
        """A line that goes down, with a head at (x1, y1)."""
        self.line(x0, y0, x1, y1)
        points = f"{x1:.1f},{y1:.1f} {x1 - 3:.1f},{y1 - 5:.1f} {x1 + 3:.1f},{y1 - 5:.1f}"
        self.parts.append(f'<polygon class="head" points="{points}"/>')

    def text(self, x, y, words, anchor="start", kind=""):
        self._reach(y + 3)
        kind = f' class="{kind}"' if kind else ""
        self.parts.append(
            f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(self, x, y, width, height, lines, kind="box"):
        """A box with lines of text in its middle."""
        self.rect(x, y, width, height, kind, radius=5)
        first = y + height / 2 + 4 - 7 * (len(lines) - 1)
        for n, words in enumerate(lines):
            self.text(x + width / 2, first + 14 * n, words, "middle")

    def _reach(self, y):
        self.bottom = max(self.bottom, y)

    def svg(self, label):
        """The text of the picture; `label` is read out in its place."""
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.bottom + 4:.0f}" role="img" '
            f'aria-label="{escape(label)}">{"".join(self.parts)}</svg>'
        )
