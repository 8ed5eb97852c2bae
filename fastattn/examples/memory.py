"""Resident memory of this process at its peak, and of work done in a fresh one."""

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
    """Forget the peak so far and return the resident bytes. Without this the peak is that of
    importing torch, or even of the parent process, which ru_maxrss keeps across exec. What is free
    goes back to the system first, or a call that takes it would seem to need less."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return peak_bytes()


def release() -> None:
    """From now on what is freed goes back to the system, where glibc may keep it: then the peak
    would count that, too."""
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
    """What the call that `prepare(*arguments)` returns adds, at its peak, to a fresh process.

    `prepare` is a function of a module's top level. What it makes does not count, nor do libraries,
    thread pools and caches: the call of `prepare(*warm)`, a small one, has set those up before.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["fastattn"])  # else each would import torch again
    with processes.Pool(1) as pool:
        return pool.apply(_extra_bytes, (prepare, tuple(arguments), tuple(warm)))


def _extra_bytes(prepare: Callable[..., Callable[[], Any]], arguments: tuple, warm: tuple) -> int:
    release()
    prepare(*warm)()
    call = prepare(*arguments)
    before = reset_peak()
    kept = call()
    found = peak_bytes() - before
    del kept
    return max(0, found)
