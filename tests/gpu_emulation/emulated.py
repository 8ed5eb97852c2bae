"""The CUDA backend on CPU tensors, run by the emulator: for tests only."""

import ctypes
import functools
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from fastattn.backends.native import libraries
from fastattn.backends.native.cuda import Cuda
from fastattn.backends.shared import gpu
from tests.gpu_emulation.emulator import KERNELS, Emulator
from tests.gpu_emulation.ptx import library, ours
from tests.support.backends import every_call

DTYPES = ("bfloat16", "float16")
NARROW = 64
SHARED_LIMITS = {80: 99 << 10, 90: 227 << 10}  # bytes of a block; for 80 the least, of sm_86


@functools.cache
def emulator(wide=False, architecture=80, ptx=False):
    """The emulator with the kernels of head dims up to NARROW or, if `wide`, of those above. Wide
    kernels take more than twice as long to compile, and few tests run them. Those of sm90 are there
    for this architecture. g++ takes minutes for them: with `ptx` their bodies are left out."""
    sources = [KERNELS / "library.cu", *sorted((KERNELS / "sm80").glob("*.cu"))]
    if architecture == 90:
        sources += sorted((KERNELS / "sm90").glob("*.cu"))
    else:
        sources.append(KERNELS / "sm90_absent.cu")
    flags = [f"-DFA_CUDA_HAS_DIM(d)=(d {'>' if wide else '<='} {NARROW})"]
    if ptx:
        sources = [x if x.parent.name != "sm90" else (x, "-DFA_WITHOUT_BODIES") for x in sources]
    return Emulator(*sources, flags=flags)


@functools.cache
def executor(*which):
    """Runs the PTX that nvcc makes of the same kernels."""
    return library.Executor(emulator(*which))


@functools.cache
def binary(*which):
    """The same emulator as a library of CUDA kernels. CPU tensors are assigned to device 0."""
    library = libraries.CudaLibrary(emulator(*which).path)
    run = library.run
    library.run = lambda params, which, device, *more: run(params, which, max(device, 0), *more)
    library.run_at = 0  # disable direct calls, which pass the tensors' device number
    return library


def decode_splits(params, multiprocessors, architecture=80, which=()):
    """The number of blocks among which decode splits the keys, as this emulator's library says."""
    integer = ctypes.c_int64
    splits = binary(*which).entry("fa_cuda_splits", integer, ctypes.c_char_p, integer, integer)
    return splits(params, multiprocessors, architecture)


class Watched:
    """Replaces native.CudaLibrary: it records the findings of every call, and fails on any."""

    run_at = 0  # no direct calls, which would bypass `run`

    def __init__(self, backend):
        self.backend = backend
        self.which = backend.wide, backend.architecture, backend.ptx and backend.architecture == 90
        self.workspace = binary(*self.which).workspace

    def run(self, params, which, device, multiprocessors, architecture, stream):
        chip = multiprocessors, architecture
        if which == libraries.FORWARD:
            self.backend.splits = decode_splits(params, *chip, self.which)
        named = binary(*self.which).kernels(params, which, architecture).decode()
        self.backend.kernels.append(named)
        device = max(device, 0)  # -1 for CPU tensors
        numbers = (ctypes.c_int64(x) for x in (which, device, *chip))
        executes = executor(*self.which)
        with executes.instead(ours.ptx) if self.backend.ptx else nullcontext():
            found = emulator(*self.which).run(
                "fa_cuda_run", ctypes.c_char_p(params), *numbers, stream, **self.backend.options
            )
        self.backend.launches += executes.launches()
        self.backend.findings.append(found)
        found.none()
        return 0


class Emulated(Cuda):
    """With `sm_count` multiprocessors, calls of few rows use decode. Kernels are chosen for a chip
    of `architecture`. With `ptx` they run as nvcc compiled them; `launches` counts those. `options`
    go to the emulator; `findings` holds its findings for each call, `kernels` what the library says
    of the class that runs it; `splits` are those of the last forward."""

    name = "emulated"

    def __init__(self, sm_count=0, ptx=False, architecture=80, **options):
        self.sm_count, self.architecture = sm_count, architecture
        options = {"shared_limit": SHARED_LIMITS[architecture], **options}
        self.options, self.findings, self.kernels, self.splits = options, [], [], None
        self.ptx, self.launches, self.wide = ptx, 0, False

    @property
    def library(self):
        return Watched(self)

    def workspace(self, which, params, t):  # the first method that runs in a call
        self.wide = max(x.shape[-1] for x in (t.q, t.v) if x is not None) > NARROW
        return super().workspace(which, params, t)

    def run(self, which, params, spec, t):
        assert not replace(self.support, devices=None).why_not(spec)
        return super().run(which, params, spec, t)

    def chip(self, x):
        return gpu.Chip(self.sm_count, self.architecture)

    def stream(self, x):
        return None


@contextmanager
def everywhere(**options):
    """Every call inside runs on the emulator, whichever backend it asks for."""
    with every_call(Emulated(**options)) as backend:
        yield backend


def survivors(run, **options):
    """The sites of the synchronisations in `run` that can be deleted without a finding. One run
    with the checker decides, whatever the values turn out to be."""
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
