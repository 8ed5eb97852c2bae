"""What the examples share: options, a progress bar, times, claims that are checked, pictures."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def parser(name: str, doc: str) -> argparse.ArgumentParser:
    """The parser of `python -m fastattn.examples.<name>`, with --plot; doc describes it."""
    made = argparse.ArgumentParser(
        prog=f"python -m fastattn.examples.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--plot",
        nargs="?",
        type=Path,
        const=Path(f"{name}.png"),
        metavar="PNG",
        help=f"save a picture, as {name}.png unless named (needs matplotlib)",
    )
    return made


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options. Exits at once, not minutes later, if --plot is given without matplotlib."""
    options = made.parse_args(arguments)
    if options.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            made.error("--plot needs matplotlib: pip install matplotlib")
    return options


class Claims:
    """The claims of an example. Each is printed with its measured numbers and whether it holds.
    The first line of one that other work on the machine can spoil has ": time "."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def prove(self, claim: str, holds: bool) -> None:
        print(f"{'proved' if holds else 'FAILED'}  {claim}", flush=True)
        if not holds:
            self.failed.append(claim)

    def status(self) -> int:
        """The exit status of the program."""
        return 1 if self.failed else 0


def progress(items: Sequence[T] | range, what: str) -> Iterator[T]:
    """Iterate over items with a tqdm bar on a terminal, if tqdm is installed; else ten lines of
    output show the progress."""
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            yield from tqdm(items, desc=what, leave=False, dynamic_ncols=True)
            return
    yield from _lines(items, what)


def _lines(items: Any, what: str) -> Iterator[Any]:
    total = len(items) if isinstance(items, Sized) else 0
    tenths = {max(1, round(total * tenth / 10)) for tenth in range(1, 11)}
    for i, item in enumerate(items, 1):
        yield item
        if i in tenths:
            print(f"{what}: {i}/{total}", file=sys.stderr, flush=True)


ATTEMPTS = 4  # of times that contradict what is expected


def least_seconds(
    calls: Mapping[T, Callable[[], Any]],
    rounds: int,
    expected: Callable[[dict[T, float]], bool],
    what: str,
) -> dict[T, float]:
    """The CPU seconds of each call on one thread: the least of some rounds, which other work of
    the machine disturbs least. Every round makes every call, in the order of the last one reversed.
    While the times are not as expected, there are more rounds, ATTEMPTS times as many at most."""
    threads, least = torch.get_num_threads(), dict.fromkeys(calls, float("inf"))
    order = list(calls)
    torch.set_num_threads(1)
    try:
        for _ in range(ATTEMPTS):
            for _ in progress(range(rounds), what):
                for name in order:
                    start = time.thread_time()
                    calls[name]()
                    least[name] = min(least[name], time.thread_time() - start)
                order.reverse()
            if expected(least):
                break
    finally:
        torch.set_num_threads(threads)
    return least


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure, in inches, that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")
