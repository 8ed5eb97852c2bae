"""Say in one sentence each what this machine lacks to build fastattn; silent when nothing.

preflight.py            pip will fetch what Python packages are missing
preflight.py --as-is    this Python is used as it is: nothing is fetched
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys

SOURCE = b"#include <omp.h>\n#include <optional>\nint main() { return *std::optional<int>(0); }\n"
FLAGS = ["-std=c++17", "-fopenmp", "-x", "c++", "-fsyntax-only", "-"]


def compiles(command):
    """Whether this command, a list of words, compiles C++17 with OpenMP."""
    if not command or not shutil.which(command[0]):
        return False
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    compiler = subprocess.Popen([*command, *FLAGS], stdin=subprocess.PIPE, **quiet)
    compiler.communicate(SOURCE)
    return compiler.returncode == 0


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

    modules = ["torch", "scikit_build_core", "pytest"]
    missing = [name.replace("_", "-") for name in modules if not importlib.util.find_spec(name)]
    if missing:
        yield (
            f"{sys.executable} has no {', '.join(missing)}: install what is missing, or run make "
            "without VENV= to have everything installed into .venv."
        )
    tools = [t for t in ("cmake", "ninja") if not (shutil.which(t) or importlib.util.find_spec(t))]
    if tools:
        yield f"Neither PATH nor {sys.executable} has {' or '.join(tools)}: install it there."


sentences = list(lacks("--as-is" in sys.argv))
print(*sentences, sep="\n", end="\n" if sentences else "", file=sys.stderr)
sys.exit(bool(sentences))
