"""The page and the picture of a simulation: printed, saved and drawn as the options say."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from fastattn.examples.common import new_figure

from ..plots import pictures
from .results import FOLDER


def show(
    options: argparse.Namespace,
    text: str,
    draw: Callable[..., Any],
    page: str,
    picture: str,
) -> None:
    """Print `text`; with --save or --output write it, with --plot draw the picture. page, picture:
    names in results/ or in the folder of --output."""
    print(text)
    folder = options.output or FOLDER
    if options.save or options.output or options.plot:
        folder.mkdir(parents=True, exist_ok=True)
    if options.save or options.output:
        (folder / page).write_text(text)
    if options.plot:
        for line in pictures.written(iter([(draw(new_figure), folder / picture)])):
            print(line)
