"""A cache of compiled Triton kernels, stored with the spec of a call, for cheaper launches.

At every launch Triton derives the key of its compiled kernel: the type of each argument, which
numbers are 1 or multiples of 16, which pointers are multiples of 16, the constants and the options.
The key of a `Launch` has at least that: the numbers themselves, and Triton's driver and knobs. A
hit then only passes the call's tensors to the compiled kernel.
"""

from __future__ import annotations

import contextvars
import functools
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native.marshalling import specialization_key
from ..shared.cuda_errors import why_unwritable
from . import tile_configs, toolchain

# Outside of these versions Triton's own launch runs: a later one may derive kernels from more, an
# earlier one has another launcher.
OLDEST, NEWEST = (3, 6), (3, 9)
MOST = 256  # cached launches of one spec


def interpreted() -> bool:
    """True if kernels run on CPU tensors in Triton's interpreter. Fixed when one is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def version() -> tuple[int, ...] | None:
    """Triton's version as (major, minor); None without Triton."""
    text = tile_configs.triton_version()
    return None if text is None else tuple(map(int, re.findall(r"\d+", text)[:2]))


@functools.cache
def _known() -> bool:
    return not interpreted() and OLDEST <= (version() or NEWEST) <= NEWEST


@functools.cache
def _triton() -> tuple[Any, Any]:
    """Triton's knobs, and the object with its active driver."""
    from triton import knobs
    from triton.runtime import driver

    return knobs, driver


@functools.cache
def find_cache() -> None:
    """Give Triton a temporary cache folder if its own cannot be written: without one it compiles
    nothing. Call it before Triton's first kernel. The folder is deleted when the process ends."""
    from triton import knobs

    wanted = knobs.cache.dir
    if not (why := why_unwritable(Path(wanted))):
        return
    folder = tempfile.TemporaryDirectory(prefix="fastattn-triton-")
    _kept.append(folder)
    knobs.cache.dir = folder.name
    warnings.warn(
        f"Triton's cache {wanted} cannot be written ({why}): this process compiles its kernels in "
        f"{folder.name}, for seconds each, and so will every other. TRITON_CACHE_DIR names a "
        "folder that can be written and is kept",
        stacklevel=2,
    )


_kept: list[tempfile.TemporaryDirectory] = []


def launcher_unavailable() -> str:
    """Why Triton cannot launch kernels on this machine's GPU, and what to do; "" if it can.

    Triton calls the driver through C code, which it compiles at its first launch and caches. This
    imports Triton only if that code cannot be compiled, to look for it in the cache.
    """
    why = toolchain.unavailable()
    if not why or _has_launcher():
        return ""
    return f"Triton compiles C code to call the driver, and {why}"


def _has_launcher() -> bool:
    """True if Triton can launch every kernel without a C compiler."""
    from triton import knobs
    from triton.backends.nvidia import driver as nvidia

    if knobs.build.impl:  # the user supplies another way to compile
        return True
    if hasattr(nvidia, "make_launcher"):  # an older Triton compiles code for each kernel
        return False
    find_cache()
    with knobs.build.scope():
        knobs.build.impl = _refuse
        try:
            return bool(_triton()[1].active.utils)
        except Exception:  # any error means that the code is not in the cache
            return False


def _refuse(*about: Any) -> str:
    raise RuntimeError("nothing is compiled here")


class Launch(NamedTuple):
    """A compiled kernel with all of its arguments except tensors."""

    compiled: Any  # Triton's CompiledKernel
    programs: int
    sizes: tuple[Any, ...]  # the spec's numbers
    constants: tuple[Any, ...]

    def __call__(self, args: tuple[Any, ...], extras: tuple[Any, ...]) -> None:
        active, compiled = _triton()[1].active, self.compiled
        stream = active.get_current_stream(active.get_current_device())
        given = (self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata)
        hooks = (None, None, None)  # their metadata, on entry, on exit
        rest = (*given, *hooks, *args, *self.sizes, extras, *self.constants)
        if compiled.metadata.global_scratch_size:
            with_workspace(compiled.run, *rest)
        else:
            compiled.run(*rest)


def alike(args: tuple[Any, ...], *about: Any) -> tuple[Any, ...] | None:
    """The key by which calls of one spec share launches; None if Triton's own launch must run.

    It must run if launch hooks are set, in the interpreter, and with a Triton before OLDEST or
    after NEWEST.
    args: the arguments that all kernels of the call draw from.
    """
    if not _known():
        return None
    knobs, driver = _triton()
    runtime, compilation = knobs.runtime, knobs.compilation
    if _calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook):
        return None
    inspect, active = runtime.add_stages_inspection_hook, driver.active
    return (
        *about,
        active,
        active.get_current_device(),
        runtime.debug,
        compilation.instrumentation_mode,
        getattr(compilation, "fpsan_homomorphic_casts", None),
        inspect and inspect(),
        specialization_key(args),
    )


def _calls(hook: Any) -> bool:
    """True if `hook` calls anything: Triton's chain of hooks may be empty."""
    return hook is not None and bool(getattr(hook, "calls", True))


def keep(where: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> Any:
    if len(where) >= MOST:
        where.clear()
    where[key] = value
    return value


def with_workspace(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` with an allocator for tensor descriptors, set for this call only."""
    return contextvars.copy_context().run(_with_allocator, function, args, kwargs)


def _with_allocator(function: Callable, args: tuple, kwargs: dict) -> Any:
    import triton

    triton.set_allocator(_workspace)
    return function(*args, **kwargs)


def _workspace(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
