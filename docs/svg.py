"""A drawing as SVG text, for a file that a page shows as an image. It has its own ground and style,
for light and dark screens. Units are pixels at the width of a phone.
"""

from html import escape

WIDTH = 360
SHOWN = 480  # pixels, where there is room
LIGHT = (
    "--ground: #fff; --ink: #24292f; --line: #667; --hidden: #e4e7eb; --faint: #c3c9d0;"
    " --whole: #5b9bd5; --edge: #f0b35a; --third: #7fbf7b; --fourth: #c48ac9"
)
DARK = (
    "--ground: #131416; --ink: #d8dbe0; --line: #99a; --hidden: #2c3138; --faint: #454c55;"
    " --whole: #2a5785; --edge: #6f4814; --third: #4d8a49; --fourth: #87518c"
)
STYLE = f"""
svg {{ {LIGHT} }}
@media (prefers-color-scheme: dark) {{ svg {{ {DARK} }} }}
text {{ fill: var(--ink); font: 12px sans-serif; }}
.strong {{ font-weight: 600; }}
.small {{ font-size: 10.5px; }}
.ground {{ fill: var(--ground); }}
.whole {{ fill: var(--whole); }}
.edge {{ fill: var(--edge); }}
.third {{ fill: var(--third); }}
.fourth {{ fill: var(--fourth); }}
.hidden {{ fill: var(--hidden); stroke: var(--faint); }}
.box {{ fill: none; stroke: var(--line); }}
.outline {{ fill: none; stroke: var(--ink); stroke-width: 1.5; }}
.rule {{ stroke: var(--line); }}
.dashed {{ stroke: var(--ink); stroke-dasharray: 4 3; }}
.head {{ fill: var(--line); }}
"""


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

    def svg(self):
        """The text of the file: a line for each shape."""
        height = self.bottom + 8
        shown = f'width="{SHOWN}" height="{height * SHOWN / WIDTH:.0f}"'
        ground = f'<rect class="ground" width="{WIDTH}" height="{height:.0f}" rx="6"/>'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" {shown}>'
        )
        return "\n".join([head, f"<style>{STYLE}</style>", ground, *self.parts, "</svg>\n"])
