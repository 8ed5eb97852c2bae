"""Kernels of csrc/cuda on the emulator in emu: built by the C++ compiler, run on the CPU."""

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support import build_lock
from tests.support.backends import INTERPRETED
from tests.support.checkout import ROOT

EMULATOR, KERNELS = ROOT / "tests" / "gpu_emulation" / "emu", ROOT / "csrc" / "cuda"
PARTS = ("clocks", "shadow", "memory", "atomics", "banks", "run", "meet", "copy", "matrix", "hooks")
PARTS = (*PARTS, "control", "compiled", "runtime", "mbarrier", "maps", "boxes", "bulk")
PARTS = (*PARTS, "products", "registers", "lanes", "encode")
PARTS = (*PARTS, "operands", "tensor_memory", "tensor_products")
FLAGS = [
    "-std=c++17",
    "-O2",
    "-g1",  # line numbers without types: a fifth of the time
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-fno-strict-aliasing",
    "-fno-semantic-interposition",
    "-Wno-unknown-pragmas",
]
FLAGS += ["-DFA_EMULATED", *(f"-I{folder}" for folder in (EMULATOR, ROOT / "csrc"))]
# With FASTATTN_EMULATOR=address the kernels run under AddressSanitizer, which checks global memory.
# Otherwise they run under the emulator's own memory checker, which uses only the hooks that the
# thread sanitizer inserts at loads and stores (hooks.cpp).
WATCHED = os.environ.get("FASTATTN_EMULATOR", "thread")
# The checker identifies instructions by their addresses. Optimisations that duplicate or merge
# blocks of code would give one instruction two addresses, or two instructions one.
PLACES = ["-fno-thread-jumps", "-freorder-blocks-algorithm=simple", "-fno-crossjumping"]
PLACES += ["-fno-tree-tail-merge", "-fno-code-hoisting"]
KERNEL_FLAGS = [f"-fsanitize={WATCHED},alignment", *PLACES]
KERNEL_FLAGS += ["-include", str(EMULATOR / "emu.h"), "-x", "c++"]
CACHE = ROOT / "build" / "emu"

IN_ORDER, RANDOM, DEPTH_FIRST, WARP_PRIORITIES = range(4)
SCHEDULES = (IN_ORDER, RANDOM, DEPTH_FIRST, WARP_PRIORITIES)
TEXT_BYTES = 1 << 16


def compiler():
    named = shlex.split(os.environ.get("CXX", ""))
    found = named or next(([x] for x in ("g++", "c++") if shutil.which(x)), None)
    if not found:
        pytest.skip("the emulator needs a C++ compiler")
    return found


def compiled(source, *flags):
    """The object file of a source, from the cache if no file that it includes has changed."""
    command = [*compiler(), *FLAGS, *flags]
    digest = hashlib.sha256("\n".join(command).encode())
    for file in sorted({*EMULATOR.glob("*.h"), *included(Path(source))}):
        digest.update(file.read_bytes())
    target = CACHE / f"{Path(source).stem}-{digest.hexdigest()[:16]}.o"
    return made(target, [*command, "-c", source])


def included(source):
    """The source, and the files of csrc that it includes, directly or not."""
    found, left = set(), [source.resolve()]
    while left:
        file = left.pop()
        found.add(file)
        for name in re.findall(r'^#include "(.+)"', file.read_text(), re.MULTILINE):
            places = (folder / name for folder in (file.parent, ROOT / "csrc", KERNELS, EMULATOR))
            left += {x.resolve() for x in places if x.exists()} - found
    return found


def linked(objects):
    digest = hashlib.sha256("\n".join(map(str, objects)).encode()).hexdigest()[:16]
    return made(CACHE / f"emulator-{digest}.so", [*compiler(), "-shared", *objects])


def sequence(kernel):
    """A source, or a tuple of a source and flags of its own, as a tuple."""
    return kernel if isinstance(kernel, tuple) else (kernel,)


def made(target, command):
    """Run the command to make the target. A process that makes the same target waits for the other.
    The target appears only when it is complete."""
    with build_lock.alone(target.name):
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(f".{os.getpid()}")
            command = [*map(str, command), "-o", str(part)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            part.replace(target)
    return target


class Options(ctypes.Structure):
    """The struct of control.cpp; block.h documents the fields."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("shared_limit", ctypes.c_int64),
        ("schedule", ctypes.c_int32),
        ("lazy", ctypes.c_int32),
        ("check", ctypes.c_int32),
        ("same_value_stores", ctypes.c_int32),
        ("pessimistic", ctypes.c_int32),
        ("banks", ctypes.c_int32),
        ("tensor_fences", ctypes.c_int32),
        ("disabled", ctypes.c_char_p),
    ]


DEFAULTS = dict(seed=1, schedule=RANDOM, lazy=True, check=True, shared_limit=99 << 10)
DEFAULTS |= dict(tensor_fences=True)


@dataclass(frozen=True)
class Findings:
    """What the checker found in a launch."""

    count: int
    first: str
    sites: tuple[str, ...]  # of the synchronisations that ran
    multiplies: int
    banks: dict[str, tuple[int, int]]  # accesses to shared memory: turns, and bank conflicts

    def none(self, of=""):
        """Fails if there is any finding."""
        assert not self.count, f"{of}{self.count} findings: {self.first}"


class Emulator:
    """A library of kernels, compiled with `flags`: sources, or tuples of a source and flags of its
    own."""

    def __init__(self, *kernels, flags=()):
        own = [EMULATOR / f"{x}.cpp" for x in PARTS]
        flagged = [(x, *KERNEL_FLAGS, *flags, *more) for x, *more in map(sequence, kernels)]
        # Two at a time: another worker waits for the same files. Kernels take longest. The linker
        # takes the first of equal functions, which must not be one with the checker's hooks.
        with ThreadPoolExecutor(2) as pool:
            made_kernels = pool.map(lambda given: compiled(*given), flagged)
            objects = [*pool.map(compiled, own), *made_kernels]
        self.load(linked(objects))

    def load(self, path):
        self.path, self.library = path, ctypes.CDLL(str(path))
        self.library.emu_findings.restype = ctypes.c_long
        self.library.emu_multiplies.restype = ctypes.c_long

    def run(self, entry, *arguments, **options):
        """Call an entry with numbers and arrays, and return the findings."""
        code, found = self.call(entry, *arguments, **options)
        assert code == 0, f"{entry} returns {code}"
        return found

    def call(self, entry, *arguments, disabled="", **options):
        """As `run`, for an entry that may return an error code: (code, findings)."""
        options = Options(**DEFAULTS | options, disabled=disabled.encode())
        options.check &= WATCHED == "thread"
        self.library.emu_reset(ctypes.byref(options))
        converted = [pointer(x) if isinstance(x, np.ndarray) else x for x in arguments]
        code = getattr(self.library, entry)(*converted)
        first, sites, banks = (ctypes.create_string_buffer(TEXT_BYTES) for _ in range(3))
        count = self.library.emu_findings(first, sites, banks, ctypes.c_size_t(TEXT_BYTES))
        first, sites, banks = (x.value.decode() for x in (first, sites, banks))
        lines = (line.split("\t") for line in banks.splitlines())
        banks = {what: (int(turns), int(conflicts)) for what, turns, conflicts in lines}
        multiplies = self.library.emu_multiplies()
        return code, Findings(count, first, tuple(sites.splitlines()), multiplies, banks)


def pointer(array):
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def aligned(size, dtype, to=16):
    """Zeros at an address that is a multiple of `to` bytes, like a GPU's allocations."""
    raw = np.zeros(size * np.dtype(dtype).itemsize + to, np.uint8)
    start = -raw.ctypes.data % to
    return raw[start : start + size * np.dtype(dtype).itemsize].view(dtype)


HERE = sys.platform == "linux" and os.uname().machine == "x86_64"
needs_emulator = pytest.mark.skipif(
    INTERPRETED or not HERE,
    reason="no test of Triton" if HERE else "it switches fibers by x86-64 assembly, on Linux",
)
