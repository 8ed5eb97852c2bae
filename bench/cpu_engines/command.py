"""The command: its options, and the measurement that it prints row by row."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from . import cases, measure, peers, report
from .environments import ENVIRONMENTS


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--install",
        nargs="*",
        choices=tuple(ENVIRONMENTS),
        help="make these environments in build/engines, by default those that are absent; "
        "measure nothing",
    )
    parser.add_argument("--rows", nargs="+", default=[], metavar="TEXT", help="rows with TEXT")
    parser.add_argument("--engines", nargs="+", default=[], metavar="NAME", help="beside these")
    parser.add_argument("--quick", action="store_true", help="a row of each class")
    parser.add_argument("--threads", type=int, default=1, help="of every engine (default: 1)")


def chosen(options: argparse.Namespace) -> tuple[list[cases.Row], dict[str, peers.Peer]]:
    """Rows and peers of these options. A part of them is named in the file's name, so that it
    never replaces the whole (`results.stem`). Raises ValueError."""
    part = [*options.rows, *options.engines, *["quick"] * options.quick]
    if options.threads != 1:
        part.append(f"{options.threads} threads")
    options.only = part
    return cases.selected(options.rows, options.quick), peers.selected(options.engines)


def measured(
    rows: Sequence[cases.Row],
    chosen_peers: dict[str, peers.Peer],
    options: argparse.Namespace,
    result: dict[str, Any],
) -> Iterator[str]:
    """Fill the result; yield what is absent, then the lines of each row."""
    with measure.Workers(chosen_peers, options.threads) as workers:
        for name, reason in workers.absent.items():
            yield f"{name}: {reason}"
        for row in rows:
            record = measure.measure(row, workers, options.seconds or measure.SECONDS)
            result["engines"].append(record)
            result["versions"] |= workers.versions
            yield from report.lines(record)
