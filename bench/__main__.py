"""python -m bench [--full] [--save]: verify, time, print, and keep the numbers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from . import ceilings, claims, machine, memory, overhead, plot, progress, report, run
from .cases import DTYPES, MASKS, PASSES, SWEEPS, Sweep

RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA = 1


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    sweep = _sweep(options)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    result = _prepare(sweep, device)
    _print(report.heading(result))
    try:
        if not options.sweep_only:
            result["overhead"] = overhead.measure(device)
            result["memory"] = memory.measure(device)
        peaks = ceilings.peaks(device, result["ceilings"])
        cells = run.sweep_cells(sweep, device, peaks)
        for record in progress.follow(cells, run.cell_count(sweep, device)):
            result["cells"].append(record)
        result["complete"] = True
    except KeyboardInterrupt:
        print("\ninterrupted: keeping what is done", file=sys.stderr)
    result["seconds"] = round(time.perf_counter() - started, 1)
    result["load"]["end"] = machine.load()
    result["accuracy"] = claims.accuracy(result["cells"])
    result["claims"] = claims.judge(result)
    _print(report.table(result["cells"]))
    _print(report.summary(result))
    if result["cells"]:
        # Half a sweep never replaces a committed file.
        whole = options.save and result["complete"]
        _keep(result, options.output or (RESULTS if whole else RESULTS / "local"))
    return _status(result)


def _prepare(sweep: Sweep, device: str) -> dict[str, Any]:
    """Everything of a result that is known before the first cell."""
    return {
        "schema": SCHEMA,
        "sweep": dataclasses.asdict(sweep),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "complete": False,
        "machine": machine.describe(device),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "load": {"start": machine.load()},
        "ceilings": ceilings.measure(device, sweep.dtypes),
        "overhead": None,
        "memory": None,
        "cells": [],
    }


def _keep(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = machine.slug(result["machine"])
    path, picture = folder / f"{stem}.json", folder / f"{stem}.png"
    unfinished = path.with_suffix(".json.tmp")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(unfinished, path)  # a result file is whole or absent
    print(f"wrote {path}")
    reason = plot.draw(result, picture)
    print(f"no picture: {reason}" if reason else f"wrote {picture}")


def _status(result: dict[str, Any]) -> int:
    """0 when every cell passed, 1 when one failed, 130 when interrupted."""
    if any(cell["status"] != "ok" for cell in result["cells"]):
        return 1
    return 0 if result["complete"] else 130


def _print(lines: Iterable[str]) -> None:
    print(*lines, sep="\n", flush=True)


def _sweep(options: argparse.Namespace) -> Sweep:
    sweep = SWEEPS["full" if options.full else "quick"]
    axes = ("lengths", "dims", "dtypes", "masks", "passes", "seconds")
    given = {axis: getattr(options, axis) for axis in axes if getattr(options, axis)}
    given = {k: v if k == "seconds" else tuple(v) for k, v in given.items()}
    return dataclasses.replace(sweep, **given, name="custom") if given else sweep


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every length and head dim")
    parser.add_argument("--save", action="store_true", help="write bench/results/<device>.json")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write there instead")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if torch sees it")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N")
    parser.add_argument("--dims", type=int, nargs="+", metavar="D")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES))
    parser.add_argument("--masks", nargs="+", choices=MASKS)
    parser.add_argument("--passes", nargs="+", choices=PASSES)
    parser.add_argument("--seconds", type=float, help="timing budget of a cell at a thread count")
    parser.add_argument("--sweep-only", action="store_true", help="no overhead, no memory")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
