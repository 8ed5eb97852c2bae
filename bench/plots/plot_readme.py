"""The picture of the README: the training speed of each feature relative to torch, a pair of bars
each, in a panel per machine; inference beside the nearest engine, where engines were measured; and
the extra memory of a call. Of these engines only torch trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..cases import BOTH, TRAINING
from ..cpu_engines.report import nearest
from ..masks import DROPOUT_P, WINDOW
from ..measure.machine import words
from ..peers.registry import BASELINE, SUBJECT
from ..reporting.console import speedup_of, timing_of
from . import plot_engines
from .plot_speed import COLORS

Record = dict[str, Any]

SHOWN_D, SHOWN_N = 64, 2048
NAMES = {
    "full": "plain",
    "causal": "causal",
    "window": f"causal, window of {WINDOW}",
    "padding": "padding, ¼ of the keys",
    "bias": "float mask",
    "dropout": f"dropout {DROPOUT_P}",
}
SHADES = dict(zip(BOTH, ("#0b6e4f", "#6fbf9b")))
# Of the rows of bench/cpu_engines.
INFERENCE = {
    "prefill float32 full B1 H4 N2048 D64": "float32, N = 2048",
    "prefill float32 causal B1 H4 N2048 D64": "float32, causal",
    "prefill bfloat16 full B1 H4 N2048 D64": "bfloat16",
    "prefill bfloat16 causal B1 H4 N2048 D64": "bfloat16, causal",
    "decode float32 B1 H32:8 N4096 D128": "float32, decoding",
    "decode bfloat16 B1 H32:8 N4096 D128": "bfloat16, decoding",
}
BAR = 0.36  # height in rows: a row has a bar for each of two dtypes


def draw(results: Sequence[Record], new: Callable[..., Any]) -> Any:
    """The figure, or None where no sweep has every cell of SHOWN_N in both dtypes."""
    sweeps = {words(x["machine"]): ratios for x in results if (ratios := _ratios(x))}
    if not sweeps:
        return None
    tables = [{x["peer"]: x for x in result["memory"] if x["extra_bytes"]} for result in results]
    memory = next((x for x in tables if {SUBJECT, BASELINE} <= x.keys()), None)
    engines = [x for x in results if x["kind"] == "engines" and _inference(x)]
    widths = [3] * (len(sweeps) + len(engines)) + [1.4] * bool(memory)
    figure = new(2.0 + 1.15 * sum(widths), 3.8)
    figure.get_layout_engine().set(w_pad=0.12, wspace=0.08)
    axes = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    rows = sorted(NAMES, key=lambda mask: sum(x[mask, BOTH[1]] for x in sweeps.values()))
    longest = max(max(ratios.values()) for ratios in sweeps.values())
    for axis, (name, ratios) in zip(axes, sweeps.items()):
        _speed(axis, ratios, rows)
        axis.set_xlim(0, longest * 1.14)
        axis.set_title(name, fontsize=11, loc="left")
        if axis is not axes[0]:
            axis.set_yticklabels([])
    axes[0].legend(loc="lower right", frameon=False, fontsize=9.5)
    for axis, result in zip(axes[len(sweeps) :], engines):
        rows_of = _inference(result)
        plot_engines.bars(axis, list(rows_of.values()), [INFERENCE[x] for x in rows_of], 9)
        title = f"{words(result['machine'])}:\ninference, nearest engine = 1"
        axis.set_title(title, fontsize=11, loc="left")
    if memory:
        _memory(axes[-1], memory)
    below = (
        f"Times as fast as torch, forward and backward; N = {SHOWN_N}, D = {SHOWN_D}, one thread"
    )
    figure.supxlabel(below, fontsize=9.5, color="#666666")
    return figure


def _ratios(result: Record) -> dict[tuple[str, str], float]:
    """Speed-ups by mask and dtype; empty if one is missing."""
    cells = [
        c
        for c in result["cells"]
        if (c["pass"], c["D"], c["N"], c["M"]) == (TRAINING, SHOWN_D, SHOWN_N, SHOWN_N)
    ]
    ratios = {
        (c["mask"], c["dtype"]): q["median"] for c in cells if (q := speedup_of(timing_of(c, 1)))
    }
    return ratios if all((mask, x) in ratios for mask in NAMES for x in BOTH) else {}


def _inference(result: Record) -> dict[str, Record]:
    """The rows of INFERENCE with a nearest engine."""
    rows = {x["row"]: x for x in result["engines"]}
    return {name: rows[name] for name in INFERENCE if name in rows and nearest(rows[name])}


def _speed(axis: Any, ratios: dict[tuple[str, str], float], rows: Sequence[str]) -> None:
    for k, dtype in enumerate(BOTH):
        values = [ratios[mask, dtype] for mask in rows]
        places = [i + (0.5 - k) * BAR for i in range(len(rows))]
        axis.barh(places, values, BAR * 0.92, color=SHADES[dtype], label=dtype)
        for place, value in zip(places, values, strict=True):
            axis.text(value + 0.12, place, f"{value:.1f}×", va="center", fontsize=9)
    axis.axvline(1, color=COLORS[BASELINE], linewidth=1.6)
    axis.text(1.12, len(rows) - 0.42, "torch = 1", color=COLORS[BASELINE], fontsize=9.5)
    axis.set_ylim(-0.6, len(rows) - 0.1)
    axis.set_yticks(range(len(rows)), [NAMES[mask] for mask in rows], fontsize=10)
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)


def _memory(axis: Any, memory: dict[str, Record]) -> None:
    peers = (SUBJECT, BASELINE)
    values = [memory[peer]["extra_bytes"] / 1e6 for peer in peers]
    axis.bar(peers, values, 0.62, color=[COLORS[peer] for peer in peers])
    for i, value in enumerate(values):
        axis.text(i, value + max(values) * 0.015, f"{value:.0f} MB", ha="center", fontsize=10)
    axis.set_yticks([])
    axis.tick_params(length=0, labelsize=10)
    axis.spines[["top", "right", "left"]].set_visible(False)
    row = memory[SUBJECT]
    axis.set_title(f"Extra memory,\n{row['mask']}, N = {row['N']}", fontsize=11)
