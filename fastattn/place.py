"""Calls that are a part of a larger one."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where a call lies in a larger one, of which it is a part.

    row, key, head, item: the larger call's index of this one's first. rows, keys: how many the
    larger has; None: its last are this one's. bottom_right: the larger call's last row stands at
    its last key, as causal="bottom_right" says and causal=True denies; where nothing is causal,
    windows and ALiBi count i' = i + length - M, as flash-attn does.
    """

    row: int = 0
    key: int = 0
    head: int = 0
    item: int = 0
    rows: int | None = None
    keys: int | None = None
    bottom_right: bool = False


EVERYTHING = Place()  # of a call that is no part
NUMBERS = Place._fields[:-1]
