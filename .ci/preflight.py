"""Say in one sentence each what this machine lacks to build fastattn; silent when nothing.

The status is 1 where the build cannot go on, and 0 where a part of fastattn will not run.

preflight.py            pip will fetch what Python packages are missing
preflight.py --as-is    this Python is used as it is: nothing is fetched
"""

import glob
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig

PYPROJECT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "pyproject.toml")
NEEDED = ("torch", "scikit-build-core", "pytest")  # by any build and its tests
SOURCE = b"#include <omp.h>\n#include <optional>\nint main() { return *std::optional<int>(0); }\n"
FLAGS = ["-std=c++17", "-fopenmp", "-x", "c++", "-fsyntax-only", "-"]
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def compiles(command, flags=FLAGS, source=SOURCE):
    """Whether this command, a list of words, compiles C++17 with OpenMP, or another source. A
    compiler that is killed says nothing of itself: that ends the check."""
    if not command or not shutil.which(command[0]):
        return False
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    compiler = subprocess.Popen([*command, *flags], **pipes)
    said = compiler.communicate(source)[1]
    if compiler.returncode < 0 or b"Killed" in said:
        sys.exit(" ".join(command) + " was killed as it tried its first lines: out of memory?")
    return compiler.returncode == 0


def floors():
    """The oldest version of each package, by name, that pyproject.toml asks for."""
    with open(PYPROJECT, encoding="utf-8") as file:
        return dict(re.findall(r'"([\w-]+)>=([\d.]+)', file.read()))


def numbers(version):
    """(2, 11, 1) of "2.11.1+cu130"."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def found(name):
    """The version that this Python has, or None."""
    from importlib import metadata  # which Pythons too old to build do not have

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def importable(name):
    """Whether it is here without a version, as from its source."""
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def outdated(names):
    """A sentence for each of these packages that is too old, or that is needed and missing."""
    for name in names:
        version, floor = found(name), floors()[name]
        if version is None and (name not in NEEDED or importable(name)):
            continue
        if version is None or numbers(version) < numbers(floor):
            has = "no " + name if version is None else f"{name} {version}"
            yield (
                f"{sys.executable} has {has}, expected {floor} or newer: "
                f"{sys.executable} -m pip install '{name}>={floor}', or run make without VENV= "
                "to have everything installed into .venv."
            )


def lacks(as_is):
    if sys.version_info < (3, 10):  # noqa: UP036 - the one file that an older Python runs
        yield f"fastattn needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}."

    named = os.environ.get("CXX")  # what CMake looks at first, then for these names
    candidates = [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]
    if not any(map(compiles, candidates)):
        tried = f"CXX={named} is not one" if named else "found none"
        yield (
            f"fastattn needs a C++17 compiler with OpenMP and {tried}: install g++ (Debian, "
            "Ubuntu: apt install g++; Fedora: dnf install gcc-c++) or name yours with CXX=."
        )
    if not as_is:
        return

    yield from outdated(NEEDED)
    tools = [t for t in ("cmake", "ninja") if not (shutil.which(t) or importlib.util.find_spec(t))]
    if tools:
        yield f"Neither PATH nor {sys.executable} has {' or '.join(tools)}: install it there."


def remarks(as_is):
    """What a part of fastattn lacks."""
    if as_is:
        yield from outdated(sorted(set(floors()) - set(NEEDED)))
    if sees_gpu():
        yield from without_launcher()


def sees_gpu():
    """Whether there is an NVIDIA GPU, for torch or not."""
    if glob.glob("/proc/driver/nvidia/gpus/*") or os.path.exists("/dev/nvidia0"):
        return True
    try:
        return subprocess.call(["nvidia-smi", "-L"], timeout=60, **QUIET) == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def without_launcher():
    """What Triton lacks to launch kernels. It finds both as the package's toolchain.py does."""
    named = os.environ.get("CC")  # Triton runs it also where it is empty
    compiler = (shutil.which("gcc") or shutil.which("clang")) if named is None else named
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    flags = ["-I" + os.path.dirname(header), "-x", "c", "-fsyntax-only", "-"]
    what = "install gcc (Debian, Ubuntu: apt install gcc libc6-dev; Fedora: dnf install gcc)"
    if compiler is None:
        lacking = "there is no C compiler"
    elif not shutil.which(compiler):
        lacking = f"CC={named} is no C compiler"
        what = f"name one with CC=, or unset it and {what}"
    elif compiles([compiler], flags, b"#include <Python.h>\n"):
        return
    elif os.path.exists(header):
        lacking = f"{compiler} does not compile {header}"
    else:
        lacking = f"there is no {header}"
        what = (
            "install Python's headers (Debian, Ubuntu: apt install python3-dev; Fedora: "
            "dnf install python3-devel)"
        )
    yield f"Triton's kernels will not run on the GPU, because {lacking}: {what}."


as_is = "--as-is" in sys.argv
try:
    fatal = list(lacks(as_is))
    sentences = fatal + list(remarks(as_is))
except KeyboardInterrupt:
    sys.exit("\nThe set-up was interrupted before anything was installed: run it again.")
print(*sentences, sep="\n", end="\n" if sentences else "", file=sys.stderr)
sys.exit(bool(fatal))
