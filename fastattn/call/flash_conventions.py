"""What flash-attn's functions and torch's varlen_attn share, and `attention` has otherwise."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any


def edges(window_size: Any) -> tuple[int | None, int | None]:
    """(left, right) of a window_size, in which a negative number is no limit."""
    try:
        left, right = (operator.index(x) for x in window_size)
    except (TypeError, ValueError):
        expected = "a pair of ints (left, right), -1 for no limit"
        raise ValueError(f"window_size: got {window_size!r}, expected {expected}") from None
    return None if left < 0 else left, None if right < 0 else right


def in_names(error: Exception, names: Mapping[str, str]) -> Exception:
    """The error with other names for our arguments in its message; itself if it has none."""
    ours = str(error)
    # As in "as q has", "the rows of q", "q's heads".
    places = r"^\w+|\w+_\w+|(?<=as )\w(?= has)|(?<=rows of )\w\b|\b\w(?='s )"
    told = re.sub(places, lambda found: names.get(found[0], found[0]), ours)
    return error if told == ours else type(error)(told)
