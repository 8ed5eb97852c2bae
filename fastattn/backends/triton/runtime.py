"""Triton at run time: whether it can run here, the modules of kernels, a launch, its duration."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch

from ...namespace import PACKAGE
from ..shared import cuda_errors, gpu
from . import launch_cache, tile_configs
from .launch_cache import interpreted, version

OLDEST = 3, 4


@functools.cache
def unavailable() -> str | None:
    installed = version()
    if installed is None:
        return "Triton is not installed (pip install triton)"
    if installed < OLDEST:
        return f"Triton {tile_configs.triton_version()} is older than {OLDEST[0]}.{OLDEST[1]}"
    if interpreted():
        return None
    missing = gpu.unavailable(min(tile_configs.TABLES))
    if missing and not torch.cuda.is_available():
        missing += " (TRITON_INTERPRET=1 runs it on CPU tensors, slowly)"
    return missing or launch_cache.launcher_unavailable() or None


@functools.lru_cache(maxsize=1)
def kernels() -> SimpleNamespace:
    """The modules of kernels. The first call imports Triton, which nothing does earlier."""
    if not interpreted():
        launch_cache.find_cache()
    names = ("tile", "score", "block_mask", "forward", "backward", "decode", "weights")
    names += ("tangent", "jvp", "backward_jvp", "index_check")
    modules = {x: importlib.import_module(f"{PACKAGE}.kernels.{x}") for x in names}
    # NamedTuple._make without its check of the length.
    operand = functools.partial(tuple.__new__, modules["tile"].Operand)
    return SimpleNamespace(**modules, operand=operand)


def run(kernel: Any, grid: tuple[int], *args: Any, **kwargs: Any) -> Any:
    """Launch through Triton. Returns the compiled kernel, or None in the interpreter."""
    if interpreted():
        return kernel[grid](*args, **kwargs)
    try:
        return launch_cache.with_workspace(kernel[grid], *args, **kwargs)
    except RuntimeError as error:  # from the driver, when it loads or launches a kernel
        if what := cuda_errors.advice(str(error)):
            raise RuntimeError(f"Triton failed at {kernel.__name__}: {error}: {what}") from error
        raise


def shared_memory() -> int:
    """Bytes of shared memory that a block may have on the current GPU, as Triton reads it; 0 in the
    interpreter, which has no limit."""
    if interpreted():
        return 0
    from triton.runtime import driver

    active: Any = driver.active
    return active.utils.get_device_properties(active.get_current_device())["max_shared_mem"]


def fits(room: int, kernel: Any, grid: tuple[int], *args: Any, **kwargs: Any) -> bool:
    """True if a kernel, compiled for these arguments and not launched, needs at most `room` bytes
    of shared memory."""
    made = launch_cache.with_workspace(kernel.warmup, *args, grid=grid, **kwargs)
    return made is None or made.metadata.shared <= room
