"""Draw and save the pictures of a result, without a display."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastattn.examples.common import new_figure

from . import engine_bars, glance, heatmap

Result = dict[str, Any]
DPI = 170
COLORS = 128

# suffix of the file: draws a result on a new figure, or returns None without the data
PICTURES: dict[str, Callable[[Result, Callable[..., Any]], Any]] = {
    "-speedup": heatmap.draw,
    "-engines": engine_bars.draw,
}


def draw_all(result: Result, stem: Path) -> Iterator[str]:
    """Write <stem><suffix>.png for each picture that the result has data for; yield what was
    written, or why nothing was."""

    def draws() -> Iterator[tuple[Any, Path]]:
        for suffix, draw in PICTURES.items():
            name = f"{stem.name.removesuffix(suffix)}{suffix}.png"
            yield draw(result, new_figure), stem.with_name(name)

    return written(draws())


def draw_glance(results: Sequence[Result], path: Path) -> Iterator[str]:
    """Write the picture of the README, which has a mark for each machine."""
    return written((glance.draw(x, new_figure), path) for x in [results])


def written(figures: Iterator[tuple[Any, Path]]) -> Iterator[str]:
    """Save each figure; yield what was written, or why nothing was."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        yield f"no picture: matplotlib is not installed ({error})"
        return
    for figure, path in figures:
        if figure is not None:
            drawn = io.BytesIO()
            figure.savefig(drawn, dpi=DPI, format="png")
            with_palette(drawn).save(path, optimize=True)
            yield f"wrote {path}"


def with_palette(file: Any) -> Any:
    """The picture in a file with at most COLORS colors: a third of the bytes."""
    from PIL import Image  # which matplotlib imports

    picture = Image.open(file).convert("RGB")
    # Dither would be noise on areas of one color.
    return picture.quantize(
        COLORS, method=Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE
    )
