"""Builds of the native libraries with sanitizers, and the environment that they run in."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support.checkout import ROOT

FOLDER = ROOT / "build" / "sanitize"
JOBS = 2
ADDRESS, THREAD = "address,undefined", "thread"
RUNTIMES = {ADDRESS: ("libasan.so", "libubsan.so"), THREAD: ("libtsan.so",)}
# How they stop at the first finding. Fibers of the emulator have stacks of their own, and Python
# does not free its memory at its end.
OPTIONS = {
    ADDRESS: {
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    },
    THREAD: {
        "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1:report_signal_unsafe=0"
    },
}
# The emulator's threads are not the system's. One emulator is compiled for each width of heads.
EMULATOR = "from tests.gpu_emulation.emulated import emulator; emulator({wide})"


class Failed(Exception):
    """A failed build, with the output of the compiler."""


def tool(name):
    """A program of the virtual environment, or of the path."""
    beside = Path(sys.executable).parent
    found = shutil.which(name, path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise Failed(f"got no {name}, expected one in {beside} or on PATH: make setup installs it")
    return found


def run(*command, **more):
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )
    if done.returncode:
        raise Failed(done.stdout[-4000:])


def libraries(sanitizers):
    """The folder of libfastattn_cpu.so and of the extension, built with these sanitizers."""
    folder = FOLDER / sanitizers.replace(",", "-")
    options = {
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "FA_SANITIZE": sanitizers,
        "SKBUILD_SABI_VERSION": "3.10",
        "Python_INCLUDE_DIR": sysconfig.get_path("include"),
    }
    defined = (f"-D{name}={value}" for name, value in options.items())
    without = os.environ | {"FASTATTN_CUDA": "off"}
    run(tool("cmake"), "-S", ROOT / "csrc", "-B", folder, "-G", "Ninja", *defined, env=without)
    run(tool("cmake"), "--build", folder, "--parallel", JOBS, env=without)
    return folder


def emulators():
    """The CUDA kernels and their host side, compiled for the emulator with sanitizers."""
    found = [
        subprocess.Popen(
            [sys.executable, "-c", EMULATOR.format(wide=wide)],
            cwd=ROOT,
            env=environment(ADDRESS) | {"LD_PRELOAD": preloaded(ADDRESS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for wide in (False, True)
    ]
    outputs = [x.communicate()[0] for x in found]
    for process, text in zip(found, outputs, strict=True):
        if process.returncode:
            raise Failed(text[-4000:])


def preloaded(sanitizers):
    """The runtimes of sanitizers, which must be loaded before Python."""
    compiler = os.environ.get("CXX", "g++").split()
    found = []
    for name in RUNTIMES[sanitizers]:
        done = subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True
        )
        path = Path(done.stdout.strip())
        if not path.is_absolute():
            raise Failed(f"got a compiler without {name}, expected GCC with its sanitizers")
        found.append(str(path.resolve()))
    return os.pathsep.join(found)


def environment(sanitizers):
    """The environment of a worker, without preloads: these would slow its make and compilers
    down."""
    return (
        os.environ
        | OPTIONS[sanitizers]
        | {"FASTATTN_EMULATOR": ADDRESS, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    )


def without_random_addresses():
    """A prefix of commands, if it is needed: ThreadSanitizer of older compilers does not start if
    addresses have more random bits than these."""
    bits = Path("/proc/sys/vm/mmap_rnd_bits")
    many = bits.exists() and os.access(bits, os.R_OK) and int(bits.read_text()) > 28
    return ["setarch", "-R"] if many and shutil.which("setarch") else []
