"""The picture of memory: extra megabytes at the peak against sequence length, a panel per mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..measure.machine import words
from .plot_speed import SMALL, colors_of, length_axis, title

Record = dict[str, Any]
LENGTHS = 2  # fewer show no growth


def draw(result: Record, new: Callable[..., Any]) -> Any:
    """The figure, or None where fewer than LENGTHS lengths were measured."""
    rows = [row for row in result["memory"] if row["extra_bytes"]]
    lengths = sorted({row["N"] for row in rows})
    if len(lengths) < LENGTHS:
        return None
    masks, peers = (list(dict.fromkeys(row[x] for row in rows)) for x in ("mask", "peer"))
    colors = colors_of(peers)
    figure = new(3.1 * max(2, len(masks)) + 0.4, 3.1)
    axes = figure.subplots(1, len(masks), squeeze=False, sharey=True)[0]
    for axis, mask in zip(axes, masks, strict=True):
        for peer in peers:
            points = sorted(
                (row["N"], row["extra_bytes"] / 1e6)
                for row in rows
                if (row["mask"], row["peer"]) == (mask, peer)
            )
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    color=colors[peer],
                    label=peer,
                    marker="o",
                    markersize=4,
                    linewidth=1.8,
                )
        axis.set_yscale("log")
        top = max(row["extra_bytes"] for row in rows) / 1e6
        ticks = [x * 10**i for i in range(6) for x in (1, 3) if x * 10**i < 2 * top]
        axis.set_yticks(ticks, map(str, ticks))
        length_axis(axis, lengths)
        axis.set_title(f"{mask}, {rows[0]['pass']}", fontsize=9.5)
        axis.set_xlabel("sequence length N")
    axes[0].set_ylabel("extra MB at the peak")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, **SMALL)
    machine, version = words(result["machine"]), result["versions"]["torch"]
    sizes = "B{B} H{H} D{D} {dtype}".format(**rows[0])
    title(figure, f"Memory beyond the inputs, {sizes}.\n{machine}, torch {version}")
    return figure
