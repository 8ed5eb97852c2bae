"""Draw and save the pictures of a result, without a display."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastattn.examples.common import new_figure

from . import glance, heatmap

Result = dict[str, Any]
DPI = 170
COLORS = 128


def draw_all(result: Result, stem: Path) -> Iterator[str]:
    """Write <stem>-speedup.png if the result has data for it; yield what was written, or why
    nothing was."""
    name = f"{stem.name.removesuffix('-speedup')}-speedup.png"
    return _written(heatmap.draw, result, stem.with_name(name))


def draw_glance(results: Sequence[Result], path: Path) -> Iterator[str]:
    """Write the picture of the README, which has a mark for each machine."""
    return _written(glance.draw, results, path)


def _written(draw: Callable[..., Any], data: Any, path: Path) -> Iterator[str]:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        yield f"no picture: matplotlib is not installed ({error})"
        return
    figure = draw(data, new_figure)
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
