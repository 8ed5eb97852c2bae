"""What this package claims, held against what a run measured."""

from __future__ import annotations

import math
from typing import Any

from .cases import FORWARD, TRAINING
from .peers import BASELINE, SUBJECT
from .report import timing_of

Record = dict[str, Any]
D, N = 64, 2048

# (dtype, mask, phase, at least): speed-ups over torch on one thread at this D and N, on a CPU with
# AVX-512 where MKL takes its AVX2 path.
SPEEDUPS = (
    ("float32", "full", FORWARD, 1.8),
    ("float32", "causal", FORWARD, 2.0),
    ("bfloat16", "full", FORWARD, 3.0),
    ("bfloat16", "causal", FORWARD, 3.0),
    ("float32", "full", "backward", 1.7),
    ("float32", "causal", "backward", 1.7),
)
OVERHEAD_US = 12.0
EXTRA_MB = 20.0


def judge(result: dict[str, Any]) -> list[Record]:
    """Each claim with its measurement; met is None where this run measured nothing, and possible is
    what a kernel at 100% of the peak would measure here. The claims are about CPUs."""
    if result["machine"]["device"] != "cpu":
        return []
    claims = [_speedup(result["cells"], *claim) for claim in SPEEDUPS]
    if overhead := result["overhead"]:
        us = overhead["timings"][0]["peers"].get(SUBJECT, {}).get("median_us")
        claims.append(_at_most("a tiny call, one thread", us, "us", OVERHEAD_US))
    if memory := result["memory"]:
        extra = memory["extra_bytes"][SUBJECT]
        mb = None if extra is None else extra / 1e6
        claims.append(_at_most(f"extra memory, {memory['case']}", mb, "MB", EXTRA_MB))
    return claims


def _speedup(cells: list[Record], dtype: str, mask: str, phase: str, least: float) -> Record:
    what = FORWARD if phase == FORWARD else TRAINING
    wanted = {"dtype": dtype, "mask": mask, "pass": what, "D": D, "N": N}
    ratio = percent = None
    for cell in cells:
        entry = timing_of(cell, phase, 1) if wanted.items() <= cell.items() else {}
        if entry.get("speedup"):
            ratio = entry["speedup"]["median"]
            percent = entry["peers"][SUBJECT]["percent_of_peak"]
    return {
        "claim": f"{dtype} {phase} {mask}, D={D}, N={N}, one thread",
        "measured": ratio,
        "unit": "x torch",
        "rule": "at least",
        "target": least,
        "met": None if ratio is None else ratio >= least,
        "percent_of_peak": percent,
        "possible": 100 * ratio / percent if ratio and percent else None,
    }


def _at_most(claim: str, measured: float | None, unit: str, most: float) -> Record:
    return {
        "claim": claim,
        "measured": measured,
        "unit": unit,
        "rule": "at most",
        "target": most,
        "met": None if measured is None else measured <= most,
        "percent_of_peak": None,
        "possible": None,
    }


def accuracy(cells: list[Record]) -> dict[str, dict[str, float]]:
    """dtype -> peer -> geometric mean over cells and tensors of the error against float64."""
    means: dict[str, dict[str, float]] = {}
    for dtype in dict.fromkeys(cell["dtype"] for cell in cells):
        alike = [cell for cell in cells if cell["dtype"] == dtype]
        means[dtype] = {}
        for peer in (SUBJECT, BASELINE):
            found = (error for cell in alike for error in cell["peers"][peer]["errors"].values())
            logs = [math.log(error) for error in found if 0 < error < math.inf]
            if logs:
                means[dtype][peer] = math.exp(sum(logs) / len(logs))
    return means
