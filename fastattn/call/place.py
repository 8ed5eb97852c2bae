"""Calls that are a part of a larger one."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """The position of a call in a larger call, of which it is a part.

    row, key, head, item: the index in the larger call of this call's first one. rows, keys: how
    many the larger call has; None: this call has the last ones. bottom_right: the larger call's
    last row stands at its last key, as with causal="bottom_right" and never with causal=True;
    without causal, windows and ALiBi count i' = i + length - M, as flash-attn does.
    """

    row: int = 0
    key: int = 0
    head: int = 0
    item: int = 0
    rows: int | None = None
    keys: int | None = None
    bottom_right: bool = False


EVERYTHING = Place()  # of a call that is not a part of another
NUMBERS = Place._fields[:-1]
