"""The library of CUDA kernels as CMake builds it, with no GPU; beside each object what ptxas said.

    path = build()      in build/cuda: the second time there is nothing to compile
    objects()           {source: its object}
    said(an object)     what ptxas said

As a program it is CMake's launcher of nvcc, and keeps what that says.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "csrc"
BUILD = SOURCES.parent / "build" / "cuda"
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
SETTINGS = ("FASTATTN_CUDA", "CUDAARCHS")  # of the environment: a caller gives its own
LAUNCHER = f"-DCMAKE_CUDA_COMPILER_LAUNCHER={sys.executable};{Path(__file__).resolve()}"


class NotBuilt(RuntimeError):
    """What there is not here that building needs."""


def cmake(
    *arguments: object, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess:
    """A run of CMake with Ninja; it may have failed."""
    tool = shutil.which("cmake", path=TOOLS)
    if not tool or not shutil.which("ninja", path=TOOLS):
        raise NotBuilt("building needs cmake and ninja")
    env = {x: y for x, y in os.environ.items() if x not in SETTINGS}
    env |= {"PATH": TOOLS} | dict(environment or {})
    return subprocess.run([tool, *map(str, arguments)], env=env, capture_output=True, text=True)


def configure(folder: Path, *more: str, **environment: str) -> subprocess.CompletedProcess:
    return cmake("-S", SOURCES, "-B", folder, "-GNinja", *more, environment=environment)


def build(jobs: int | None = None) -> Path:
    """The library's path. `jobs` compilers at a time, else as many as the environment says, else
    two."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at the same
        done = configure(BUILD, LAUNCHER, FASTATTN_CUDA="on")
        if reason := re.search(r"is on, but (.*?)\s+Call Stack", done.stderr, re.DOTALL):
            raise NotBuilt(" ".join(reason[1].split()))
        if done.returncode:  # the folder's tools may be gone, or it was copied from elsewhere
            (BUILD / "CMakeCache.txt").unlink(missing_ok=True)
            done = configure(BUILD, LAUNCHER, FASTATTN_CUDA="on")
        if not done.returncode:
            at_a_time = jobs or os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2")
            done = cmake("--build", BUILD, "--target", "fastattn_cuda", "--parallel", at_a_time)
        if done.returncode:
            raise RuntimeError(f"the CUDA kernels do not build:\n{done.stdout}{done.stderr}")
    return BUILD / "cuda" / "libfastattn_cuda.so"


def objects() -> dict[Path, Path]:
    """Of what was built: each source under csrc/cuda, and its object."""
    made = BUILD / "cuda" / "CMakeFiles" / "fastattn_cuda.dir"
    sources = sorted((SOURCES / "cuda").rglob("*.cu"))
    return {x: made / f"{x.relative_to(SOURCES / 'cuda')}.o" for x in sources}


def said(made: Path) -> str:
    return made.with_suffix(".said").read_text()


def launch(command: list[str]) -> int:
    """Run nvcc, and keep what ptxas says beside the object. A failure leaves none of both."""
    done = subprocess.run([*command, "-Xptxas", "-v"], capture_output=True, text=True)
    if done.returncode or "-o" not in command:
        print(done.stdout, done.stderr, sep="", end="", file=sys.stderr)
        return done.returncode
    Path(command[command.index("-o") + 1]).with_suffix(".said").write_text(done.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
