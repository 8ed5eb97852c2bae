"""PTX made into libraries that the emulator runs: compiled once for each content, in build/ptx."""

import ctypes
import hashlib
import os
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.gpu_emulation import emulator
from tests.support.checkout import ROOT

from . import cpp, text

HERE = Path(__file__).resolve().parent
CACHE = ROOT / "build" / "ptx"
# A kernel is thousands of small statements: more optimisation would cost more than it saves. No
# contraction: what PTX does not fuse is not fused.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off")
FLAGS += tuple(f"-I{folder}" for folder in (HERE, emulator.EMULATOR))
MOST_SHARED = max(cpp.LIMITS.values()) << 10
one_at_a_time = threading.Lock()  # compilers in this process


def digest(*parts):
    found = hashlib.sha256()
    for x in parts:
        found.update(x.read_bytes() if isinstance(x, Path) else str(x).encode() + b"\0")
    return found.hexdigest()[:16]


def made(name, key, command):
    """The file that a command makes, from the cache if there is one of this key."""
    with one_at_a_time:
        return emulator.made(CACHE / f"{name}-{key}", command)


def written(name, code):
    """The file of this name in the cache. It is written as a whole, because others may read it."""
    path = CACHE / name
    with emulator.build_lock.alone(name):
        if not path.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(code)
            part.replace(path)
    return path


def machine():
    # The emulator takes its return address for the place in the program. Here that must be one for
    # all instructions of a kind, which have separate names: g++ may make two of one.
    command = [*emulator.compiler(), *emulator.FLAGS, "-fno-optimize-sibling-calls"]
    headers = sorted([*emulator.EMULATOR.glob("*.h"), HERE / "machine.h"])
    key = digest(*command, HERE / "machine.cpp", *headers)
    return made("machine", f"{key}.o", [*command, "-c", HERE / "machine.cpp"])


def translated(kernels):
    """The object file of these kernels."""
    code = cpp.source(kernels)
    command = [*emulator.compiler(), *FLAGS]
    headers = [
        HERE / "machine.h",
        *(emulator.EMULATOR / f"{x}.h" for x in ("compiled", "hopper", "blackwell")),
    ]
    key = digest(*command, code, *headers)
    source = written(f"kernels-{key}.cpp", code)
    return made("kernels", f"{key}.o", [*command, "-c", source])


class Executor:
    """Runs PTX on an emulator: this text, and what is added later."""

    def __init__(self, on, ptx=""):
        self.emulator, self.there = on, set()
        on.library.emu_compiled_launches.restype = ctypes.c_long
        if ptx:
            self.add(ptx)

    def add(self, ptx, names=None):
        """Make the kernels of a text of PTX ready to launch; with `names`, only those in it, each
        under the name that it maps to."""
        kernels = list(text.kernels(ptx).values())
        if names:
            kernels = [x for x in kernels if x.name in names]
            for x in kernels:
                x.name = names[x.name]
        objects = [translated(kernels), machine()]
        path = self.emulator.path
        # It refers by path to the emulator that it is linked with, which is already in memory:
        # another file with the same contents will not do.
        key = digest(*objects, path, str(path))
        command = [*emulator.compiler(), "-shared", *objects, path]
        ctypes.CDLL(str(made("library", f"{key}.so", command)))
        self.there.update(x.name for x in kernels)

    def launch(self, name, grid, block, shared, arguments, **options):
        """Run one kernel; return the findings. Arguments are bytes, or arrays for their
        addresses."""
        options = dict(shared_limit=MOST_SHARED) | options  # the kernel checks its own limit
        packed = [packed_argument(x) for x in arguments]
        count = len(packed)
        return self.emulator.run(
            "emu_launch",
            ctypes.c_char_p(name.encode()),
            *((ctypes.c_uint * 3)(*x, *(1,) * (3 - len(x))) for x in (grid, block)),
            ctypes.c_size_t(shared),
            (ctypes.c_void_p * count)(*(x.ctypes.data for x in packed)),
            (ctypes.c_size_t * count)(*(len(x) for x in packed)),
            count,
            **options,
        )

    @contextmanager
    def instead(self, find):
        """Inside, launches from C++ run the PTX of their kernel. For a kernel that is not there
        yet, `find` is called with the mangled name, and returns the text."""
        failed = []

        def option_of(name):
            try:
                self.add(find(name.decode()))
            except BaseException as error:  # C++ cannot pass it on
                failed.append(error)

        callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(option_of)
        self.emulator.library.emu_compiled(callback)
        try:
            yield
        finally:
            self.emulator.library.emu_compiled(None)
            if failed:
                raise failed[0]

    def launches(self):
        """How many kernels ran as PTX since the last run began."""
        return self.emulator.library.emu_compiled_launches()


def packed_argument(x):
    """The bytes of a parameter; for an array, its address."""
    given = x if isinstance(x, bytes) else x.ctypes.data.to_bytes(8, "little")
    memory = emulator.aligned(len(given), np.uint8)
    memory[:] = np.frombuffer(given, np.uint8)
    return memory
