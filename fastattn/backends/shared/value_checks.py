"""Checks of values that kernels rely on: key lengths, and offsets and pages of packed batches."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ...call.environment import setting
from ...call.spec import AttentionSpec, Tensors


def checks_values(device: torch.device) -> bool:
    """True if kernels look at the values of lengths, offsets and indices before they run."""
    return device.type == "cpu" or setting("FASTATTN_CHECK") == "1"


def check_values(spec: AttentionSpec, t: Tensors) -> None:
    """Raise if key lengths, or offsets or pages of a packed batch, are out of range.

    On a GPU this runs only if FASTATTN_CHECK=1, because reading values waits for the device. GPU
    kernels clamp these values.
    """
    if not checks_values(t.q.device):
        return
    if spec.packed:
        _check_offsets("cu_q", t.given("cu_q"), spec.T, "max_q", spec.M)
    if spec.paged:
        return _check_pages(spec, t.given("block_table"), t.given("key_lengths"))
    if spec.packed:
        _check_offsets("cu_k", t.given("cu_k"), spec.S, "max_k", spec.N)
    if t.key_lengths is None:
        return
    if not spec.packed:
        return check_lengths(t.key_lengths, spec.keys)
    for b, (length, keys) in enumerate(
        zip(t.key_lengths.tolist(), t.given("cu_k").diff().tolist())
    ):
        if not 0 <= length <= keys:
            raise ValueError(
                f"key_lengths: got {length} of sequence {b}, expected a value in [0, {keys}], its "
                "keys by cu_k"
            )


def check_lengths(key_lengths: Tensor, keys: int) -> None:
    """Raise ValueError for a length that is not in [0, keys]."""
    wrong = key_lengths[(key_lengths < 0) | (key_lengths > keys)].tolist()
    if wrong:
        expected = f"values in [0, N] = [0, {keys}]"
        raise ValueError(f"key_lengths: got {wrong[0]}, expected {expected}")


def _check_pages(spec: AttentionSpec, pages: Tensor, lengths: Tensor) -> None:
    room = min(spec.N, spec.blocks * spec.page)
    for b, (row, length) in enumerate(zip(pages.tolist(), lengths.tolist())):
        if not 0 <= length <= room:
            raise ValueError(
                f"key_lengths: got {length} of sequence {b}, expected a value in [0, {room}], what "
                f"{spec.blocks} pages of {spec.page} keys and max_k = {spec.N} allow"
            )
        for at in row[: -(-length // spec.page)]:
            if not 0 <= at < spec.P:
                raise ValueError(
                    f"block_table: got page {at} of sequence {b}, expected one of the {spec.P} "
                    f"pages of k, for every {spec.page} of its {length} keys"
                )


def _check_offsets(name: str, cu: Tensor, total: int, most_name: str, most: int) -> None:
    rows, what = {"cu_q": ("q", "rows"), "cu_k": ("k", "keys")}[name]
    for b, (first, end) in enumerate(itertools.pairwise(check_order(name, cu, total, rows))):
        if end - first > most:
            raise ValueError(
                f"{name}: got {end - first} {what} in sequence {b}, expected at most {most_name} = "
                f"{most}; {most_name}=None finds the longest"
            )


def check_order(name: str, cu: Tensor, total: int, rows: str) -> list[int]:
    """The offsets of sequences of a tensor `rows`, which has this many in total; raise ValueError
    unless they begin with 0, never fall, and end with `total`."""
    offsets = cu.tolist()
    if offsets[0] != 0:
        raise ValueError(f"{name}: got {offsets[0]} first, expected 0")
    if offsets[-1] != total:
        raise ValueError(
            f"{name}: got {offsets[-1]} last, expected {total}, the rows of {rows}; B sequences "
            "have B + 1 offsets"
        )
    for first, end in itertools.pairwise(offsets):
        if end < first:
            raise ValueError(f"{name}: got {end} after {first}, expected offsets that never fall")
    return offsets
