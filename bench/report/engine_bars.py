"""The picture of other engines: in each row the time of the nearest over ours, with its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..cpu_engines.peers import FAMILIES
from ..cpu_engines.report import nearest
from ..measure.machine import words
from ..peers.registry import BASELINE, SUBJECT

Record = dict[str, Any]
COLORS = {SUBJECT: "#0b6e4f", BASELINE: "#d1495b"}
OTHER_COLORS = ("#30638e", "#edae49", "#6d597a", "#56a3a6", "#8d6a9f", "#b5651d")
OTHERS = (family for family in FAMILIES if family != BASELINE)
SHADES = {BASELINE: COLORS[BASELINE]} | dict(zip(OTHERS, OTHER_COLORS))
PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # the line is behind the text
MOST = 3.0  # of the axis; a longer bar ends there, with its number


def draw(result: Record, new: Callable[..., Any]) -> Any:
    """The figure, or None where no row has a ratio."""
    rows = [x for x in result.get("engines", ()) if nearest(x)]
    if not rows:
        return None
    figure = new(8.4, 1.2 + 0.21 * len(rows))
    axis = figure.subplots()
    bars(axis, rows, [x["row"] for x in rows], 8)
    axis.set_title(f"{words(result['machine'])}: time of the nearest engine over ours", fontsize=10)
    below = "Of engines with at most the error of the row's width. Below 1 the engine is faster."
    figure.supxlabel(below, fontsize=9, color="#666666")
    return figure


def bars(axis: Any, rows: Sequence[Record], labels: Sequence[str], size: float) -> None:
    """A bar for each row, the first on top, in the color of its nearest engine, which is named."""
    places = range(len(rows))[::-1]
    for place, record in zip(places, rows, strict=True):
        found = nearest(record)
        if found is None:
            continue
        name, ratio = found
        axis.barh(place, min(ratio, MOST), 0.74, color=SHADES[name.split()[0]])
        text = f"{ratio:.2f}× {name}"
        axis.text(min(ratio, MOST) + 0.03, place, text, va="center", fontsize=size, bbox=PLAIN)
    axis.axvline(1, color="#444444", linewidth=1, zorder=1)
    axis.set_yticks(places, labels, fontsize=size)
    axis.set_xticks([])
    axis.set_xlim(0, MOST + 0.9)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.tick_params(length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
