"""The GPUs that torch sees: whether kernels can run on them, and properties that launches need."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch

MAX_LENGTH = 1 << 29  # queries or keys: positions and their differences are 32 bits wide


class Chip(NamedTuple):
    """The numbers of a device that the CUDA library asks for, in the order of csrc/abi.h."""

    multiprocessors: int
    architecture: int


def unavailable(oldest: int = 0) -> str | None:
    """Why kernels for GPUs of the architecture `oldest` or newer cannot run here, or None if one
    GPU is such. Which one runs a call is asked for each device: `Support.why_not`."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    each = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return too_old(max(map(architecture, each), default=0), oldest)


def too_old(architecture: int, oldest: int) -> str | None:
    """Why a GPU of this architecture has no kernels, or None."""
    if architecture >= oldest:
        return None
    return (
        f"needs compute capability {capability(oldest)} or newer, got a GPU of "
        f"{capability(architecture)}"
    )


def capability(architecture: int) -> str:
    """7.5 for 75, 12.0 for 120."""
    return f"{architecture // 10}.{architecture % 10}"


def found(device: torch.device | None) -> int | None:
    """The architecture of a GPU; None for another device, or if torch sees none."""
    if device is None or device.type != "cuda" or unavailable():
        return None
    return architecture(device)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` the current GPU in the block, unless it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def architecture(device: torch.device) -> int:
    """90 for compute capability 9.0; 0 for a CPU, which runs Triton's interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors; 8 in Triton's interpreter, so that it splits keys, too."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
