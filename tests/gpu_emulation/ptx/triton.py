"""Triton's kernels as it compiles them for a GPU, launched by its own launch path on CPU tensors.

Triton is given a driver for a GPU that is not there. It compiles to PTX and stops; the driver loads
the PTX into the emulator instead of machine code, and launches run there.
"""

import functools
import math
import struct
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from bench.static_gpu.aot import SHARED, Absent
from fastattn.backends.triton import job
from fastattn.backends.triton.backend import Triton
from tests.gpu_emulation import emulator
from tests.gpu_emulation.emulator import Emulator
from tests.support.backends import every_call

from . import library

# The layout in memory of a parameter of each type, as in Triton's launcher.
PACKED = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q"}
PACKED |= {"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
MULTIPROCESSORS = 132
SCRATCH_ALIGN = 128  # of a tensor map
OPTIONS = dict(same_value_stores=True, tensor_fences=False)


class Driver(Absent):
    """Triton's driver of a GPU of `arch`, with `shared` bytes of shared memory for a block; it uses
    the emulator."""

    def __init__(self, arch, shared):
        super().__init__(arch)
        self.executor, self.options, self.launched = library.Executor(Emulator()), {}, []
        self.shared = shared
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": self.shared},
            load_binary=self.load,
        )
        self.launcher_cls = self.launcher

    def get_current_device(self):
        """Triton keeps kernels and limits by device: one for each kind of chip."""
        return self.arch << 20 | self.shared >> 10

    def load(self, name, ptx, shared, device):
        """Many kernels have one name: each is launched by a digest of its PTX."""
        handle = f"{name}_{library.digest(ptx)}"
        self.executor.add(ptx.decode(), {name: handle})
        return handle, handle, 0, 0, 1024  # ptxas would report registers and spills

    def launcher(self, source, metadata):
        types = list(source.signature.values())

        def launch(x, y, z, stream, function, packed, about, enter, leave, *arguments):
            self.launch(function, (x, y, z), metadata, list(flat(types, arguments)))

        return launch

    def launch(self, function, grid, metadata, arguments):
        # Global memory that a kernel asks for, a part for each program; and the profiler's.
        bytes_of_all = metadata.global_scratch_size * math.prod(grid)
        assert SCRATCH_ALIGN % (metadata.global_scratch_align or 1) == 0
        assert not metadata.profile_scratch_size
        assert metadata.shared <= self.shared
        scratch = [emulator.aligned(bytes_of_all, np.uint8, SCRATCH_ALIGN), bytes(8)]
        block = (32 * metadata.num_warps,)
        found = self.executor.launch(
            function, grid, block, metadata.shared, [*arguments, *scratch], **OPTIONS | self.options
        )
        self.launched.append((function.rpartition("_")[0], found))
        found.none(f"{function}: ")


def flat(types, arguments):
    """The bytes of each parameter. Constants are left out, tuples are flattened."""
    for kind, x in zip(types, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from flat(kind, x)
        elif kind.startswith("*"):
            yield struct.pack("Q", 0 if x is None else x.data_ptr())
        elif kind != "constexpr":
            yield struct.pack(PACKED[kind], x)


def until_ptx(backend=None, stages=None, options=None, language=None, capability=None):
    """Triton's hook into its passes: PTX takes the place of machine code."""
    if stages is not None:
        stages["cubin"] = lambda ptx, metadata: ptx.encode()
    return "ptx", "ptx"


# One for each kind of chip: a kernel that Triton compiled is launched by its first driver ever
# after.
driver_of = functools.cache(Driver)


@contextmanager
def compiled(arch=80, multiprocessors=MULTIPROCESSORS, shared=None, **options):
    """Inside, every call runs Triton's kernels of `arch`, as compiled, on the emulator. Yields the
    driver: it takes options of the emulator, and keeps the names of launched kernels and the
    findings. shared: bytes of shared memory of a chip that does not exist."""
    from triton import knobs
    from triton.runtime import driver

    made, backend = driver_of(arch, shared or SHARED[arch]), Triton()
    made.options, made.launched = options, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", made)
        patch.setattr(knobs.runtime, "add_stages_inspection_hook", until_ptx)
        patch.setattr(job, "architecture", lambda device: arch)
        patch.setattr(job, "processors", lambda device: multiprocessors)
        with every_call(backend):
            yield made
