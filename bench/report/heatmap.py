"""The picture of speed-ups: how many times as fast as torch, a panel for each dtype and pass, a row
for each mask and head dim, a column for each sequence length."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from typing import Any

from ..cases import BACKWARD, FORWARD
from ..masks import MASKS
from ..measure.machine import words
from ..measure.records import first_threads, speedup_of, timing_of

Record = dict[str, Any]

WIDEST = 8.0  # ratio at which the colour is full; its inverse is the other end
CELL_INCHES = (0.56, 0.26)
LEAST_INCHES = 4.0  # of the title
TITLE_POINTS, LETTER_INCHES, LINE_INCHES = 10, 0.085, 0.17  # of a title, with its margins


def draw(result: Record, new: Callable[..., Any]) -> Any:
    """The figure, or None where no ratio was measured."""
    cells = [c for c in result["cells"] if c["M"] == c["N"] and c["pass"] in (FORWARD, BACKWARD)]
    threads = first_threads(cells)
    ratios = {
        (c["dtype"], c["pass"], c["mask"], c["D"], c["N"]): q["median"]
        for c in cells
        if (q := speedup_of(timing_of(c, threads)))
    }
    if not ratios:
        return None
    dtypes, passes = (list(dict.fromkeys(key[i] for key in ratios)) for i in (0, 1))
    order = {mask: i for i, mask in enumerate(MASKS)}
    kinds = sorted({key[:1] + key[2:4] for key in ratios}, key=lambda x: (order[x[1]], x[2]))
    rows = {dtype: [kind[1:] for kind in kinds if kind[0] == dtype] for dtype in dtypes}
    lengths = sorted({key[-1] for key in ratios})
    width, height = CELL_INCHES
    heights = [len(rows[dtype]) for dtype in dtypes]
    figure = new(
        max(LEAST_INCHES, len(passes) * (width * len(lengths) + 1.2) + 0.4),
        height * sum(heights) + 0.6 * len(dtypes) + 0.7,
    )
    axes = figure.subplots(len(dtypes), len(passes), squeeze=False, height_ratios=heights)
    for i, dtype in enumerate(dtypes):
        for j, what in enumerate(passes):
            values = [
                [ratios.get((dtype, what, *row, n), math.nan) for n in lengths]
                for row in rows[dtype]
            ]
            _panel(axes[i][j], values, lengths)
            axes[i][j].set_title(f"{dtype} {what}", fontsize=9.5)
            names = [f"{mask} D={d}" for mask, d in rows[dtype]] if j == 0 else []
            axes[i][j].set_yticks(range(len(names)), names)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length N", fontsize=9)
    title(figure, f"Times as fast as torch.\n{where(result, threads)}")
    return figure


def _panel(axis: Any, values: list[list[float]], lengths: list[int]) -> None:
    logs = [[math.log2(x) for x in row] for row in values]
    limit = math.log2(WIDEST)
    axis.imshow(logs, cmap="PiYG", vmin=-limit, vmax=limit, aspect="auto")
    for i, row in enumerate(values):
        for j, x in enumerate(row):
            if not math.isnan(x):
                strong = abs(math.log2(x)) > 0.75 * limit
                color = "white" if strong else "black"
                text = f"{x:.2f}" if x < 10 else f"{x:.1f}"
                axis.text(j, i, text, ha="center", va="center", fontsize=8.5, color=color)
    axis.set_xticks(range(len(lengths)), map(length_label, lengths))
    axis.tick_params(labelsize=8.5, length=0)
    axis.spines[:].set_visible(False)


def length_label(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


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
