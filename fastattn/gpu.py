"""The GPUs that torch sees: whether kernels can run on them, and what launches ask about one."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

OLDEST_CAPABILITY = (8, 0)
LONGEST = 1 << 29  # queries or keys: positions and their differences are 32 bits wide


def unavailable() -> str | None:
    """Why no kernel of ours runs on the GPUs here, or None."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    capability = min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count())))
    if capability < OLDEST_CAPABILITY:
        return f"needs compute capability 8.0 or newer, and a GPU here has {capability}"
    return None


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` current, where it is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def architecture(device: torch.device) -> int:
    """90 for compute capability 9.0; 0 where a GPU is interpreted."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors; a few where a GPU is interpreted, so that it splits keys too."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count
