"""The picture: useful GF/s against sequence length, a panel for each head dim, dtype and mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .cases import FORWARD, TRAINING
from .ceilings import peaks
from .peers import BASELINE, PEERS, SUBJECT
from .report import first_threads, timing_of

COLORS = {SUBJECT: "#0b6e4f", BASELINE: "#d1495b"}
SMALL = {"fontsize": 9, "columnspacing": 1.2, "handlelength": 1.8}
STYLES = {FORWARD: "-", TRAINING: ":"}
PANEL_INCHES = (2.35, 2.0)  # four panels side by side fill a README's width


def draw(result: dict[str, Any], path: Path) -> str:
    """Write the picture; return why there is none, or ""."""
    cells = [cell for cell in result["cells"] if cell["timings"]]
    if not cells:
        return "no cell was timed"
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"matplotlib is not installed ({error})"
    columns = list(dict.fromkeys((cell["dtype"], cell["mask"]) for cell in cells))
    rows = list(dict.fromkeys(cell["D"] for cell in cells))
    width, height = PANEL_INCHES
    size = (width * max(2, len(columns)) + 0.6, height * len(rows) + 1.1)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True)
    limits = peaks(result["machine"]["device"], result["ceilings"])
    for i, d in enumerate(rows):
        for j, (dtype, mask) in enumerate(columns):
            chosen = [c for c in cells if (c["dtype"], c["mask"], c["D"]) == (dtype, mask, d)]
            _panel(axes[i][j], chosen, limits[dtype])
            axes[i][j].set_title(f"{dtype}, {mask}, D={d}", fontsize=9.5)
        axes[i][0].set_ylabel("GF/s")
    _share_scales(axes, columns)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length N")
    _legend(figure, axes, result, first_threads(cells))
    figure.savefig(path, dpi=170)
    return ""


def _panel(axis: Any, cells: list[dict[str, Any]], limit: float | None) -> None:
    threads = first_threads(cells)
    lengths = sorted({cell["N"] for cell in cells})
    for peer in PEERS:
        for what, style in STYLES.items():
            points = []
            for cell in sorted(cells, key=lambda c: c["N"]):
                if cell["pass"] == what:
                    measured = timing_of(cell, what, threads)["peers"].get(peer)
                    points += [(cell["N"], measured["gflops"])] if measured else []
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    style,
                    color=COLORS.get(peer, "#666666"),
                    label=f"{peer} {what}",
                    marker="o",
                    markersize=3.5,
                    linewidth=1.8,
                )
    if limit:
        axis.axhline(limit, color="#888888", linewidth=1, linestyle="--", label="peak")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=8.5)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _share_scales(axes: Any, columns: list[tuple[str, str]]) -> None:
    """One scale a dtype, so that panels compare by eye."""
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


def _legend(figure: Any, axes: Any, result: dict[str, Any], threads: int | None) -> None:
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    machine, version = result["machine"], result["versions"]["torch"]
    limit = "matmul" if machine["device"] == "cuda" else "register-loop peak"
    labels = [limit if label == "peak" else label for label in entries]
    figure.legend(
        entries.values(), labels, loc="outside lower center", ncols=5, frameon=False, **SMALL
    )
    where = f"{machine['name']}, " + ("one thread" if threads == 1 else "device time")
    if machine["device"] == "cpu":
        where += f", ISA {machine['cpu']['isa'] or 'none'}, MKL path {machine['mkl']['path']}"
    figure.suptitle(f"Useful GF/s, more is better. {where}, torch {version}", fontsize=10)
