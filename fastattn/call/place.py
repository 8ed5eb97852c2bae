"""Calls that are a part of a larger one."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """State the position of a call in a larger call, of which it is a part.

    Args:
        row: The index in the larger call of this call's first row.
        key: The same for the first key.
        head: The same for the first query head.
        item: The same for the first item of the batch.
        rows: The number of rows of the larger call. None: this call has the last row.
        keys: The number of keys of the larger call. None: this call has the last key.
        bottom_right: If True, the last row of the larger call stands at its last key, as with
            causal="bottom_right", and never with causal=True. Without causal, windows and ALiBi
            count from i' = i + length - M, as in flash-attn.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k, v = torch.randn(3, 1, 2, 10, 16)
        >>> whole = fastattn.attention(q, k, v, causal=True)
        >>> place = fastattn.Place(row=6)  # rows 6 to 9 of the call above
        >>> last = fastattn.attention(q[:, :, 6:], k, v, causal=True, place=place)
        >>> torch.testing.assert_close(last, whole[:, :, 6:])
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
