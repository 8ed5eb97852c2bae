"""Measure peak resident memory, of this process and of a call in a fresh process."""

from __future__ import annotations

import ctypes
import multiprocessing
import re
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

M_MMAP_THRESHOLD = -3  # of <malloc.h>


def reset_peak() -> int:
    """Reset the peak and return the resident bytes. Otherwise the peak could be that of importing
    torch, or of the parent process, because ru_maxrss survives exec. Free memory is first returned
    to the system; a call that reused it would appear to need less."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return peak_bytes()


def release() -> None:
    """Make glibc return large freed blocks to the system at once. Otherwise the peak would count
    the freed memory that glibc keeps."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)


def peak_bytes() -> int:
    """The most bytes that were resident since `reset_peak`."""
    try:
        return _status("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    if not found:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def extra_bytes(
    prepare: Callable[..., Callable[[], Any]], arguments: Sequence[Any], warm: Sequence[Any]
) -> int:
    """Peak bytes that the call returned by `prepare(*arguments)` adds in a fresh process.

    `prepare` is a module-level function. Memory that it allocates itself is not counted. Libraries,
    thread pools and caches are not counted either: a smaller call, the one returned by
    `prepare(*warm)`, runs first and sets them up.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["fastattn"])  # import torch once for all
    with processes.Pool(1) as pool:
        return pool.apply(_extra_bytes, (prepare, tuple(arguments), tuple(warm)))


def _extra_bytes(prepare: Callable[..., Callable[[], Any]], arguments: tuple, warm: tuple) -> int:
    release()
    prepare(*warm)()
    call = prepare(*arguments)
    before = reset_peak()
    kept = call()
    extra = peak_bytes() - before
    del kept
    return max(0, extra)
