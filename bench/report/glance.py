"""The picture of the README, in two panels that a phone can show: training beside torch, a mark for
each machine, and inference beside the nearest engine, where engines were measured. Of these
engines only torch trains."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..cases import TRAINING
from ..cpu_engines.peers import FAMILIES
from ..cpu_engines.report import nearest
from ..masks import DROPOUT_P, WINDOW
from ..measure.machine import words
from ..measure.records import speedup_of, timing_of
from ..peers.registry import BASELINE

Record = dict[str, Any]

SHOWN_DTYPE, SHOWN_D, SHOWN_N = "float32", 64, 2048
NAMES = {
    "full": "plain",
    "causal": "causal",
    "window": f"window of {WINDOW}",
    "padding": "padding",
    "bias": "float mask",
    "dropout": f"dropout {DROPOUT_P}",
}
# Of the rows of bench/cpu_engines.
INFERENCE = {
    "prefill float32 full B1 H4 N2048 D64": "float32",
    "prefill float32 causal B1 H4 N2048 D64": "float32, causal",
    "prefill bfloat16 full B1 H4 N2048 D64": "bfloat16",
    "prefill bfloat16 causal B1 H4 N2048 D64": "bfloat16, causal",
    "decode float32 B1 H32:8 N4096 D128": "float32, one row",
    "decode bfloat16 B1 H32:8 N4096 D128": "bfloat16, one row",
}
# At 400 pixels, the width of a phone, a letter is SIZE * 400 / (72 * WIDTH) pixels high.
WIDTH, HEIGHT, SIZE = 5.6, 3.1, 9.0
TORCHS = "#d1495b"
OTHER_COLORS = ("#30638e", "#edae49", "#6d597a", "#56a3a6", "#8d6a9f", "#b5651d")
OTHERS = (family for family in FAMILIES if family != BASELINE)
SHADES = {BASELINE: TORCHS} | dict(zip(OTHERS, OTHER_COLORS))
PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # the line is behind the text
MOST = 3.0  # of the bars' axis; a longer bar ends there, with its number
MARKS = tuple(zip("oDs^v", OTHER_COLORS))  # one for each machine


def draw(results: Sequence[Record], new: Callable[..., Any]) -> Any:
    """The figure, or None where no sweep has every mask of NAMES at SHOWN_N, or no engine ran."""
    sweeps = {_name(x["machine"]): ratios for x in results if (ratios := speedups(x))}
    engines = next((x for x in results if x["kind"] == "engines" and _inference(x)), None)
    if not sweeps or engines is None:
        return None
    figure = new(WIDTH, HEIGHT)
    figure.get_layout_engine().set(w_pad=0.03, wspace=0.04)
    training, inference = figure.subplots(1, 2)
    _speed(training, sweeps)
    rows = _inference(engines)
    _bars(inference, list(rows.values()), [INFERENCE[x] for x in rows])
    inference.set_title("Inference: times the\nnearest engine's speed", fontsize=SIZE, loc="left")
    inference.set_xlabel(_name(engines["machine"]), fontsize=SIZE)
    figure.legend(
        *training.get_legend_handles_labels(),
        **dict(loc="outside lower left", ncols=2, frameon=False, fontsize=SIZE),
        **dict(handletextpad=0.2, columnspacing=1.0, borderpad=0.0),
    )
    return figure


def _name(machine: Record) -> str:
    """The machine without the width of its units."""
    return re.sub(r", \d+-bit units", "", words(machine))


def speedups(result: Record) -> dict[str, float]:
    """Speed-ups by mask; empty if one is missing."""
    wanted = (TRAINING, SHOWN_DTYPE, SHOWN_D, SHOWN_N, SHOWN_N)
    cells = [
        c for c in result["cells"] if (c["pass"], c["dtype"], c["D"], c["N"], c["M"]) == wanted
    ]
    ratios = {c["mask"]: q["median"] for c in cells if (q := speedup_of(timing_of(c, 1)))}
    return {mask: ratios[mask] for mask in NAMES} if NAMES.keys() <= ratios.keys() else {}


def _inference(result: Record) -> dict[str, Record]:
    """The rows of INFERENCE with a nearest engine."""
    rows = {x["row"]: x for x in result["engines"]}
    return {name: rows[name] for name in INFERENCE if name in rows and nearest(rows[name])}


def _speed(axis: Any, sweeps: dict[str, dict[str, float]]) -> None:
    """A row for each mask, from the least gain: a mark for each machine, and the range."""
    each = {mask: [ratios[mask] for ratios in sweeps.values()] for mask in NAMES}
    rows = sorted(NAMES, key=lambda mask: max(each[mask]))
    for place, mask in enumerate(rows):
        least, most = min(each[mask]), max(each[mask])
        axis.plot([least, most], [place, place], color="#cccccc", linewidth=2, zorder=1)
        text = f"{least:.1f}–{most:.1f}×" if len(sweeps) > 1 else f"{most:.1f}×"
        axis.text(most * 1.35, place, text, va="center", fontsize=SIZE)
    for (name, ratios), (mark, color) in zip(sweeps.items(), MARKS):
        values = [ratios[mask] for mask in rows]
        axis.plot(values, range(len(rows)), mark, color=color, markersize=5, label=name)
    axis.axvline(1, color=TORCHS, linewidth=1.6, zorder=0)
    axis.set_xscale("log")
    axis.set_xlim(0.9, 70)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.set_yticks(range(len(rows)), [NAMES[mask] for mask in rows], fontsize=SIZE)
    axis.set_xticks([])
    axis.minorticks_off()
    axis.tick_params(length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.set_title(f"Training, {SHOWN_DTYPE}:\ntimes torch's speed", fontsize=SIZE, loc="left")
    axis.set_xlabel("torch = 1", fontsize=SIZE, color=TORCHS, loc="left")


def _bars(axis: Any, rows: Sequence[Record], labels: Sequence[str]) -> None:
    """A bar for each row, the first on top, in the color of its nearest engine, which is named."""
    places = range(len(rows))[::-1]
    for place, record in zip(places, rows, strict=True):
        found = nearest(record)
        if found is None:
            continue
        name, ratio = found
        axis.barh(place, min(ratio, MOST), 0.74, color=SHADES[name.split()[0]])
        text = f"{ratio:.2f}× {name}"
        axis.text(min(ratio, MOST) + 0.03, place, text, va="center", fontsize=SIZE, bbox=PLAIN)
    axis.axvline(1, color="#444444", linewidth=1, zorder=1)
    axis.set_yticks(places, labels, fontsize=SIZE)
    axis.set_xticks([])
    axis.set_xlim(0, MOST + 1.1)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.tick_params(length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
