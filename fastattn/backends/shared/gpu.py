"""The GPUs that torch sees: whether kernels can run on them, and properties that launches need."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch

OLDEST_CAPABILITY = (8, 0)
MAX_LENGTH = 1 << 29  # queries or keys: positions and their differences are 32 bits wide


class Chip(NamedTuple):
    """The numbers of a device that the CUDA library asks for, in the order of csrc/abi.h."""

    multiprocessors: int
    architecture: int


def unavailable() -> str | None:
    """Why fastattn's kernels cannot run on the GPUs here, or None."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    capability = min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())))
    if capability < OLDEST_CAPABILITY:
        return f"needs compute capability 8.0 or newer, and a GPU here has {capability}"
    return None


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
