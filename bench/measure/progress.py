"""Progress of a benchmark, on the standard error: a line for each record and for each step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Record = dict[str, Any]


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def follow(
    records: Iterable[Record], total: int, one_line: Callable[[Record], str]
) -> Iterator[Record]:
    start = time.perf_counter()
    for i, record in enumerate(records, 1):
        show(f"[{i}/{total} {time.perf_counter() - start:4.0f}s] {one_line(record)}")
        yield record
