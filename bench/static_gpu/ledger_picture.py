"""The picture of the ledger: instructions per 64 x 64 scores, ours beside the peers'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastattn.examples.common import new_figure

from ..plots import pictures
from ..plots.plot_speed import title
from . import ledger_page

COLORS = {
    "cuda": "#0b6e4f",
    "cuda_sm80": "#a9a9a9",
    "triton": "#6fbf9b",
    "FA2": "#d1495b",
    "FA3": "#d1495b",
}
TICKS = (500, 1000, 2000, 5000, 10_000, 20_000, 40_000)
PASSES = ("forward", "backward")


def draw(rows: Sequence[Any], path: Path) -> Iterator[str]:
    """Write the picture; yield what was written, or why nothing was."""
    figure = new_figure(9.5, 5.6)
    archs = (80, 90)
    axes = figure.subplots(len(PASSES), len(archs), squeeze=False)
    for column, arch in enumerate(archs):
        records = ledger_page.compared(rows, arch)
        for axis, what in zip(axes[:, column], PASSES, strict=True):
            _panel(axis, [x for x in records if x["pass"] == what], arch)
            axis.set_title(f"{what}, sm_{arch}", fontsize=11, loc="left")
    for row in axes:
        row[0].set_ylabel("instructions")
    title(
        figure,
        "Instructions per 64 × 64 scores, fewer is better; above, the percent of the tensor peak "
        "that the busiest unit allows",
    )
    return pictures.written(iter([(figure, path)]))


def _panel(axis: Any, records: Sequence[dict[str, Any]], arch: int) -> None:
    dims = sorted({x["head_dim"] for x in records})
    libraries = list(
        dict.fromkeys(x["who"] for x in sorted(records, key=lambda x: list(COLORS).index(x["who"])))
    )
    width = 0.84 / max(1, len(libraries))
    for k, name in enumerate(libraries):
        own = [x for x in records if x["who"] == name]
        places = [dims.index(x["head_dim"]) + (k - (len(libraries) - 1) / 2) * width for x in own]
        axis.bar(
            places, [x["instructions"] for x in own], width * 0.92, color=COLORS[name], label=name
        )
        for place, x in zip(places, own, strict=True):
            text = f"{ledger_page.peak(x, arch):.0f}%"
            axis.text(place, x["instructions"], text, ha="center", va="bottom", fontsize=7.5)
    axis.set_yscale("log")
    axis.margins(y=0.12)
    low, high = axis.get_ylim()
    ticks = [x for x in TICKS if low <= x <= high]
    axis.set_yticks(ticks, [f"{x:,}" for x in ticks])
    axis.set_xticks(range(len(dims)), [f"D = {d}" for d in dims], fontsize=9)
    axis.tick_params(axis="y", labelsize=8.5)
    axis.minorticks_off()
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8.5)
