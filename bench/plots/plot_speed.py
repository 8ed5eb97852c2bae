"""The picture of speed: useful GF/s against sequence length, a panel for each head dim, dtype and
mask."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from ..cases import FORWARD, PLAIN, TRAINING
from ..measure.machine import words
from ..measure.roofline import Limits
from ..peers.registry import BASELINE, SUBJECT
from ..reporting.console import first_threads, timing_of

Record = dict[str, Any]

COLORS = {SUBJECT: "#0b6e4f", BASELINE: "#d1495b"}
OTHER_COLORS = ("#30638e", "#edae49", "#6d597a", "#56a3a6", "#8d6a9f", "#b5651d")  # then repeated
SMALL = {"fontsize": 9, "columnspacing": 1.2, "handlelength": 1.8}
STYLES = {FORWARD: "-", TRAINING: ":"}
PANEL_INCHES = (2.35, 2.0)  # four panels side by side fill a README's width
LABEL_INCHES = 2.1  # of an entry of the legend
TITLE_POINTS, LETTER_INCHES, LINE_INCHES = 10, 0.085, 0.17  # of a title, with its margins
POINTS = 3  # fewer lengths make no line


def draw(result: Record, new: Callable[..., Any]) -> Any:
    """The figure, or None where no dtype and mask has POINTS lengths."""
    cells = [c for c in result["cells"] if c["timings"] and c["mask"] in PLAIN and c["M"] == c["N"]]
    kinds = list(dict.fromkeys((c["dtype"], c["mask"]) for c in cells))
    columns = [
        kind
        for kind in kinds
        if len({c["N"] for c in cells if (c["dtype"], c["mask"]) == kind}) >= POINTS
    ]
    if not columns:
        return None
    rows = list(dict.fromkeys(cell["D"] for cell in cells))
    peers = dict.fromkeys(peer for c in cells for t in c["timings"] for peer in t["peers"])
    colors = colors_of(peers)
    width, height = PANEL_INCHES
    figure = new(width * max(2, len(columns)) + 0.6, height * len(rows) + 1.1)
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True)
    limits = Limits(**result["ceilings"])
    threads = first_threads(cells)
    lengths = sorted({c["N"] for c in cells if (c["dtype"], c["mask"]) in columns})
    for i, d in enumerate(rows):
        for j, (dtype, mask) in enumerate(columns):
            chosen = [c for c in cells if (c["dtype"], c["mask"], c["D"]) == (dtype, mask, d)]
            _panel(axes[i][j], chosen, limits.gflops(dtype, threads), colors)
            length_axis(axes[i][j], lengths)
            axes[i][j].set_title(f"{dtype}, {mask}, D={d}", fontsize=9.5)
        axes[i][0].set_ylabel("GF/s")
    _share_scales(axes, columns)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length N")
    _legend(figure, axes, result, threads)
    return figure


def _panel(axis: Any, cells: list[Record], limit: float | None, colors: dict[str, str]) -> None:
    threads = first_threads(cells)
    for peer, color in colors.items():
        for what, style in STYLES.items():
            points = []
            for cell in sorted(cells, key=lambda c: c["N"]):
                if cell["pass"] == what:
                    measured = timing_of(cell, threads)["peers"].get(peer)
                    points += [(cell["N"], measured["gflops"])] if measured else []
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    style,
                    color=color,
                    label=f"{peer} {what}",
                    marker="o",
                    markersize=3.5,
                    linewidth=1.8,
                )
    if limit:
        axis.axhline(limit, color="#888888", linewidth=1, linestyle="--", label="peak")
    axis.set_ylim(bottom=0)


def colors_of(peers: Iterable[str]) -> dict[str, str]:
    others = [peer for peer in peers if peer not in COLORS]
    return COLORS | dict(zip(others, itertools.cycle(OTHER_COLORS)))


def length_axis(axis: Any, lengths: list[int]) -> None:
    """N on a scale of powers of two, in the style that the pictures share."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [length_label(n) for n in lengths])
    axis.minorticks_off()
    axis.tick_params(labelsize=8.5)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def length_label(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _share_scales(axes: Any, columns: list[tuple[str, str]]) -> None:
    """One scale per dtype, so that panels can be compared by eye."""
    for dtype in {dtype for dtype, _ in columns}:
        alike = [
            axis
            for row in axes
            for axis, (name, _) in zip(row, columns, strict=True)
            if name == dtype
        ]
        top = max(axis.get_ylim()[1] for axis in alike)
        for axis in alike:
            axis.set_ylim(0, top)


def _legend(figure: Any, axes: Any, result: Record, threads: int | None) -> None:
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    limit = "matmul" if result["machine"]["device"] == "cuda" else "register-loop peak"
    labels = [limit if label == "peak" else label for label in entries]
    columns = min(5, int(figure.get_figwidth() / LABEL_INCHES))
    figure.legend(
        entries.values(), labels, loc="outside lower center", ncols=columns, frameon=False, **SMALL
    )
    title(figure, f"Useful GF/s, more is better.\n{where(result, threads)}")


def title(figure: Any, text: str) -> None:
    """A title of the whole figure, in lines no wider than it. Lines beyond two make it higher."""
    width = int(figure.get_figwidth() / LETTER_INCHES)
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width)]
    figure.suptitle("\n".join(lines), fontsize=TITLE_POINTS)
    figure.set_figheight(figure.get_figheight() + LINE_INCHES * max(0, len(lines) - 2))


def where(result: Record, threads: int | None) -> str:
    """The machine and the software, for a title."""
    machine, version = result["machine"], result["versions"]["torch"]
    clock = {1: "one thread", None: "device time"}.get(threads, f"{threads} threads")
    text = f"{words(machine)}, {clock}"
    if machine["device"] == "cpu":
        text += f", ISA {machine['cpu']['isa'] or 'none'}, MKL path {machine['mkl']['path']}"
    return f"{text}, torch {version}"
