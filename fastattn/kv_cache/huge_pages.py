"""Huge pages for the memory of a cache, where Linux gives them on request."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

SMALLEST = 4 << 20  # bytes that are worth a request: a huge page has 2 MiB on most machines


def advised(x: Tensor) -> Tensor:
    """x, with huge pages asked for its memory (MADV_HUGEPAGE): for new tensors, before they are
    written. A step of decoding reads all keys once, and small pages would miss the TLB at each.

    Nothing happens to small tensors, on other devices and systems, in compiled code and under
    modes that replace tensors, nor if the system refuses.
    """
    madvise = _madvise()
    if madvise is None or x.device.type != "cpu" or x.nbytes < SMALLEST:
        return x
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return x
    first = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    madvise(first, x.data_ptr() + x.nbytes - first, mmap.MADV_HUGEPAGE)
    return x


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The system's function; None if there is none, or it knows no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return madvise
