"""The picture of `complexity`: curves of the costs, and the table below them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .common import new_figure, save
from .layers import ATTENTION, CONVOLUTION, DILATED, PLAIN, RECURRENT, RESTRICTED, Curve

COLOURS = {
    ATTENTION: "#0b6e99",
    PLAIN: "#7fb8d1",
    RECURRENT: "#d1495b",
    CONVOLUTION: "#c98a00",
    DILATED: "#c98a00",
    RESTRICTED: "#3a9d6e",
}
GREY = "#666666"
COLUMNS = (0.01, 0.15, 0.25, 0.43, 0.545, 0.635, 0.765, 0.865)  # left edges in the table
NOTE = (
    "Powers: slopes over the three largest sizes. Time: CPU time of a forward pass on one thread. "
    "Memory: what forward and backward add at their peak.\n"
    "In sequence: the longest chain of operations that wait for one another. Longest path: layers, "
    "or recurrent steps, from the first token to the last; k = 3, r = 9."
)
HEADINGS = 2


class Panel(NamedTuple):
    """Curves by (layer, letter). Those of `letter` are drawn, with values multiplied by `scale`."""

    title: str
    letter: str
    unit: str
    scale: float
    curves: Mapping[tuple[str, str], Curve]
    mark: float = math.nan  # a size where two curves meet


def draw(panels: Sequence[Panel], rows: Sequence[Sequence[str]], path: Path) -> None:
    """Save a picture: the panels side by side, then a table of the rows; the first two are
    headings."""
    figure = new_figure(15, 9.2)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    above, below = figure.subfigures(2, 1, height_ratios=[1.65, 1])
    for ax, panel in zip(above.subplots(1, len(panels)), panels):
        _draw_panel(ax, panel)
    _draw_table(below.subplots(), rows)
    figure.suptitle('Table 1 of "Attention Is All You Need", measured', fontsize=16, weight="bold")
    save(figure, path)


def _draw_panel(ax: Any, panel: Panel) -> None:
    curves = {layer: c for (layer, letter), c in panel.curves.items() if letter == panel.letter}
    for layer, curve in curves.items():
        ax.plot(
            curve.sizes,
            [value * panel.scale for value in curve.values],
            "o--" if layer == RESTRICTED else "o-",  # dashed: curves below it stay visible
            color=COLOURS[layer],
            linewidth=3 if layer == ATTENTION else 2,
            label=f"{layer}  ${panel.letter}^{{{curve.slope():.2f}}}$",
        )
        ax.set_xticks(curve.sizes)
    if not math.isnan(panel.mark):
        ax.axvline(panel.mark, color=GREY, linewidth=1, linestyle=":")
        at = {"xytext": (4, 6), "textcoords": "offset points", "color": GREY}
        ax.annotate(
            f"$n$ = {panel.mark:.0f}", (panel.mark, 0), xycoords=("data", "axes fraction"), **at
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_title(panel.title)
    ax.set_xlabel(f"${panel.letter}$")
    ax.set_ylabel(panel.unit)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)


def _draw_table(ax: Any, rows: Sequence[Sequence[str]]) -> None:
    ax.set_axis_off()
    ax.set_xlim(0, 1)
    ax.set_ylim(len(rows) + 0.8, -0.5)
    ax.hlines((HEADINGS - 0.5, len(rows) - 0.5), 0, 1, color=GREY, linewidth=0.8)
    ax.text(COLUMNS[0], len(rows) - 0.25, NOTE, va="top", fontsize=10, color=GREY)
    for y, row in enumerate(rows):
        for x, cell in zip(COLUMNS, row):
            style: dict[str, Any] = {"va": "center", "fontsize": 12.5}
            if y < HEADINGS:
                style |= {"color": GREY} if y else {"weight": "bold"}
            elif cell in COLOURS:
                style |= {"color": COLOURS[cell], "weight": "bold"}
                x += 0.012 * (cell in (PLAIN, DILATED))
            else:
                cell = _tex(cell)
            ax.text(x, y, cell, **style)


def _tex(cell: str) -> str:
    """Convert "O(log_k n)" and "n^1.97 d^0.96" to mathtext."""
    powers = re.sub(r"\^([\d.]+)", r"^{\1}", cell)
    return f"${powers}$".replace("log", r"\log").replace(" ", r"\ ") if cell else ""
