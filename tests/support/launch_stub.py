"""A stub of a GPU's driver: calls run up to the driver's launch, on CPU tensors.

Triton gets the stub as its driver, compiles only to its own IR, and calls the stub for each launch.
The CUDA backend gets a library that launches nothing (launch_stub.cpp).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from bench.static_gpu.aot import SHARED, Absent
from fastattn.backends.native.libraries import CudaLibrary
from fastattn.backends.triton import launch_cache
from fastattn.backends.triton.launch_cache import interpreted, version

STAGES = ("ttgir", "llir", "ptx", "cubin")  # the stages after Triton's own IR, which are skipped
# Metadata that those stages would set; `shared` is the bytes of shared memory.
METADATA = dict(shared=0, tmem_size=None, global_scratch_size=0, global_scratch_align=1)
METADATA |= dict(profile_scratch_size=0, profile_scratch_align=1)
_devices = itertools.count(1000)  # Triton caches kernels per device: each stub is a new one


class Stub(Absent):
    """A Triton driver for a GPU of `arch` that does nothing. If `launched` is set, it is called at
    each launch, with the compiled kernel's metadata and the arguments of Triton's launcher.
    """

    def __init__(self, arch: int):
        super().__init__(arch)
        self.device, self.stream = next(_devices), 0
        self.launched: Callable[..., None] | None = None
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED[arch]},
            load_binary=lambda name, *rest: (name, object(), 0, 0, 1024),
            unload_module=lambda module: None,
        )
        self.launcher_cls = self.launcher

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return self.stream

    def launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            if self.launched:
                self.launched(metadata, *args)

        return launch


def _stages(backend: Any = None, stages: Any = None, *rest: Any) -> tuple[str, str]:
    """Triton's hook into its stages: replace those after its own IR by `skip`."""

    def skip(name: str, code: Any, metadata: dict[str, Any]) -> Any:
        metadata.update(METADATA | {"name": "kernel"} | metadata)
        return code if name == "ttgir" else b"" if name == "cubin" else ""

    if stages is not None:
        stages.update({name: functools.partial(skip, name) for name in STAGES})
    return "stub", "stub"


@contextlib.contextmanager
def stubbed(arch: int) -> Generator[Stub]:
    """Inside the block, the Triton backend treats CPU tensors as tensors of a stub GPU."""
    from triton import knobs
    from triton.runtime import driver

    from fastattn.backends.triton import job as launcher

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        # A separate cache: these kernels are only partly compiled.
        undo.enter_context(mock.patch.dict("os.environ", TRITON_CACHE_DIR=folder))
        stub = Stub(arch)
        for where, name, value in (
            (driver, "_active", stub),
            (knobs.runtime, "add_stages_inspection_hook", _stages),
            (launcher, "architecture", lambda device: arch),
            (launcher, "processors", lambda device: 132),
        ):
            undo.enter_context(mock.patch.object(where, name, value))
        yield stub


def laid(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    row: int = 0,
    first: int = 0,
    column: int = 1,
) -> torch.Tensor:
    """A view: it starts at element `first`, rows have `row` extra elements, and columns have stride
    `column`."""
    *outer, D = shape
    wide = torch.zeros(*outer, D * column + row, dtype=dtype)
    room = torch.zeros(first + wide.numel(), dtype=dtype)
    return room[first:].view(wide.shape)[..., : D * column : column]


def compiled_stub(folder: Path) -> CudaLibrary:
    """Compile the stub. Raises OSError or CalledProcessError without a C++ compiler."""
    path = folder / "libfastattn_cuda_stub.so"
    compiler = os.environ.get("CXX", "c++").split()
    source = Path(__file__).with_name("launch_stub.cpp")
    flags = ("-std=c++17", "-O2", "-fPIC", "-shared")
    subprocess.run([*compiler, *flags, str(source), "-o", str(path)], check=True)
    return CudaLibrary(path)


def cuda_backend(library: CudaLibrary, stream: int = 0) -> Any:
    """The CUDA backend over a stub library; it treats CPU tensors as GPU tensors."""
    from fastattn.backends.native.cuda import Cuda

    class Stubbed(Cuda):
        @property
        def library(self) -> CudaLibrary:
            return library

        def stream(self, x: torch.Tensor) -> int:
            return stream

    return Stubbed()


def why_no_triton() -> str | None:
    """Why launches of Triton's kernels cannot be measured here, or None."""
    found, (major, minor) = version(), launch_cache.OLDEST
    if found is None or interpreted():
        return "Triton is not installed, or its interpreter is on"
    if found < launch_cache.OLDEST:
        return f"Triton is older than {major}.{minor}, whose launches are kept"
    return None
