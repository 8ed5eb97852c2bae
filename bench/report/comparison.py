"""Compare two result files cell by cell: the second's speed over the first's, lowest first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..measure.run import IDENTITY
from ..peers.registry import BASELINE, SUBJECT

Result = dict[str, Any]
Milliseconds = dict[str, float]  # by peer


class Change(NamedTuple):
    """`ratio` is the second file's speed over the first's, 0 if the second failed. `baseline` is
    that ratio for torch, which shows how much the machine's own speed changed."""

    ratio: float
    cell: str
    baseline: float | None


def changes(first: Result, second: Result) -> list[Change]:
    """The cells that the first file timed and the second has, regressions first."""
    before, after = _timings(first), _timings(second)
    failed = {_name(cell) for cell in second["cells"] if cell["status"] != "ok"}
    found = [
        Change(0.0, f"{name}{_on(threads)}", None) for name, threads in before if name in failed
    ]
    for key in before.keys() & after.keys():
        ratio = _ratio(before[key], after[key], SUBJECT)
        if ratio is not None:
            name, threads = key
            baseline = _ratio(before[key], after[key], BASELINE)
            found.append(Change(ratio, f"{name}{_on(threads)}", baseline))
    return sorted(found, key=lambda change: (change.ratio, change.cell))


def lines(found: list[Change], fail_under: float | None) -> Iterator[str]:
    """The table, slowest first, and the summary."""
    if not found:
        yield "the two files have no timed cell in common"
        return
    yield f"{'ratio':>7}{'torch':>7}  cell (speed of the second file over the first)"
    for change in found:
        baseline = "-" if change.baseline is None else f"{change.baseline:.2f}"
        note = "  FAILED in the second" if change.ratio == 0 else ""
        yield f"{change.ratio:7.2f}{baseline:>7}  {change.cell}{note}"
    logs = [math.log(change.ratio) for change in found if change.ratio]
    mean = f", geometric mean {math.exp(sum(logs) / len(logs)):.3f}" if logs else ""
    slower = sum(change.ratio < 1 for change in found)
    yield f"{len(found)} cells, {slower} slower{mean}"
    if fail_under is not None:
        under = len(regressions(found, fail_under))
        yield f"{under} under {fail_under:g}" + (": FAILED" if under else "")


def regressions(found: list[Change], fail_under: float) -> list[Change]:
    """Changes under `fail_under`; if torch became slower too, its slowdown is divided out."""
    return [x for x in found if x.ratio / min(1.0, x.baseline or 1.0) < fail_under]


def _timings(result: Result) -> dict[tuple[str, int | None], Milliseconds]:
    return {
        (_name(cell), entry["threads"]): {
            peer: row["median_ms"] for peer, row in entry["peers"].items()
        }
        for cell in result["cells"]
        for entry in cell["timings"]
    }


def _name(cell: dict[str, Any]) -> str:
    words = [str(cell[x]) if isinstance(cell[x], str) else f"{x}{cell[x]}" for x in IDENTITY]
    return " ".join([*words, cell["pass"]])


def _on(threads: int | None) -> str:
    return "" if threads is None else f", {threads} thread{'s' * (threads > 1)}"


def _ratio(before: Milliseconds, after: Milliseconds, peer: str) -> float | None:
    return before[peer] / after[peer] if peer in before and peer in after else None
