"""The CUDA backend for CPU tensors, with the emulator behind it: for tests alone."""

import ctypes
import functools
from contextlib import contextmanager, nullcontext

from emulator import KERNELS, Emulator
from ptx import library, ours
from runners import every_call

from fastattn import native
from fastattn.backends.cuda import Cuda

DTYPES = ("bfloat16", "float16")
NARROW = 64


@functools.cache
def emulator(wide=False):
    """Kernels of head dims up to NARROW, or of those above: they take more than twice as long to
    compile, and few tests run them."""
    sources = KERNELS / "library.cu", *sorted((KERNELS / "sm80").glob("*.cu"))
    has = ">" if wide else "<="
    return Emulator(*sources, flags=[f"-DFA_CUDA_HAS_DIM(d)=(d {has} {NARROW})"])


@functools.cache
def executor(wide=False):
    """Runs the PTX of the same kernels, as nvcc makes it."""
    return library.Executor(emulator(wide))


@functools.cache
def binary(wide=False):
    """The same, as any library of CUDA kernels. CPU tensors are on no device: on the first one."""
    library = native.CudaLibrary(emulator(wide).path)
    run = library.run
    library.run = lambda params, which, device, *more: run(params, which, max(device, 0), *more)
    library.run_at = 0  # what is called at once has the number of a device
    return library


def decode_splits(params, multiprocessors):
    """Among how many blocks decode splits the keys."""
    splits = binary().entry("fa_cuda_splits", ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)
    return splits(params, multiprocessors)


class Watched:
    """What native.CudaLibrary is to the backend; every call is watched, and must be faultless."""

    run_at = 0  # nothing is called at once, unseen

    def __init__(self, backend):
        self.backend = backend
        self.workspace = binary(backend.wide).workspace

    def run(self, params, which, device, multiprocessors, stream):
        if which == native.FORWARD:
            self.backend.splits = decode_splits(params, multiprocessors)
        device = max(device, 0)  # CPU tensors have none
        numbers = (ctypes.c_int64(x) for x in (which, device, multiprocessors))
        wide = self.backend.wide
        with executor(wide).instead(ours.ptx) if self.backend.ptx else nullcontext():
            found = emulator(wide).run(
                "fa_cuda_run", ctypes.c_char_p(params), *numbers, stream, **self.backend.options
            )
        self.backend.launches += executor(wide).launches()
        self.backend.findings.append(found)
        found.none()
        return 0


class Emulated(Cuda):
    """With a number of multiprocessors, calls of few rows go to decode. With `ptx` the kernels run
    as nvcc compiled them; `launches` counts those. `options` go to the emulator; `findings` holds
    what it told of each call; `splits` are those of the last forward."""

    name = "emulated"

    def __init__(self, sm_count=0, ptx=False, **options):
        self.sm_count, self.options, self.findings, self.splits = sm_count, options, [], None
        self.ptx, self.launches, self.wide = ptx, 0, False

    @property
    def library(self):
        return Watched(self)

    def workspace(self, which, params, t):  # the first that is asked of a call
        self.wide = max(x.shape[-1] for x in (t.q, t.v) if x is not None) > NARROW
        return super().workspace(which, params, t)

    def run(self, which, params, spec, t):
        assert t.q.dtype in self.support.dtypes
        return super().run(which, params, spec, t)

    def multiprocessors(self, x):
        return self.sm_count

    def stream(self, x):
        return None


@contextmanager
def everywhere(**options):
    """Every call inside runs on the emulator, whatever backend it asks for."""
    with every_call(Emulated(**options)) as backend:
        yield backend


def survivors(run, **options):
    """The sites of the synchronisations in `run` that can be deleted without a finding. One run
    with the checker is enough, whatever the values turn out to be."""
    with everywhere(**options) as backend:
        run()
    found = set()
    for site in sorted({site for x in backend.findings for site in x.sites}):
        with everywhere(**options, disabled=site):
            try:
                run()
            except AssertionError as caught:
                assert "findings" in str(caught)
            else:
                found.add(site)
    return found
