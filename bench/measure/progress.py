"""Progress of a benchmark: a bar if there are tqdm and a terminal, else a line for each record; and
a line about what is being measured or compiled."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Record = dict[str, Any]
_bars: list[Any] = []  # the bar on the screen, if any


def show(text: str) -> None:
    """Show the current step."""
    if _bars:
        _bars[-1].set_description_str(text)
    else:
        print(text, file=sys.stderr, flush=True)


def follow(
    records: Iterable[Record], total: int, one_line: Callable[[Record], str]
) -> Iterator[Record]:
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            yield from _bar(tqdm(total=total, unit="cell", leave=False), records, one_line)
            return
    yield from _lines(records, total, one_line)


def _bar(
    bar: Any, records: Iterable[Record], one_line: Callable[[Record], str]
) -> Iterator[Record]:
    _bars.append(bar)
    try:
        with bar:
            for record in records:
                bar.set_description_str(one_line(record))
                bar.update()
                yield record
    finally:
        _bars.remove(bar)


def _lines(
    records: Iterable[Record], total: int, one_line: Callable[[Record], str]
) -> Iterator[Record]:
    start = time.perf_counter()
    for i, record in enumerate(records, 1):
        elapsed = time.perf_counter() - start
        print(f"[{i}/{total} {elapsed:4.0f}s] {one_line(record)}", file=sys.stderr, flush=True)
        yield record
