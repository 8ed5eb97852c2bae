"""The pictures of a result: what each needs, and how a figure is made without a display."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastattn.examples.common import new_figure

from . import glance, growth, heatmap, lines

Result = dict[str, Any]

# suffix of the file: draws a result on a new figure, or returns why it cannot
PICTURES: dict[str, Callable[[Result, Callable[..., Any]], Any]] = {
    "": lines.draw,
    "-glance": glance.draw,
    "-speedup": heatmap.draw,
    "-memory": growth.draw,
}


def draw_all(result: Result, stem: Path) -> Iterator[str]:
    """Write <stem><suffix>.png for each picture that the result has data for; yield what was
    written, or why nothing could be."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        yield f"no picture: matplotlib is not installed ({error})"
        return

    for suffix, draw in PICTURES.items():
        figure = draw(result, new_figure)
        if figure is not None:
            path = stem.with_name(f"{stem.name.removesuffix(suffix)}{suffix}.png")
            figure.savefig(path, dpi=170)
            yield f"wrote {path}"
