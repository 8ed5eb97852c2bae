"""Build the library of CUDA kernels with CMake, without a GPU, and keep the output of ptxas.

    path = build()      in build/cuda; a second call compiles nothing
    objects()           {source: its object}

Run as a program, this file is CMake's compiler launcher: it runs nvcc and writes ptxas's output
to a file beside the object.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
BUILD = SOURCES.parent / "build" / "cuda"
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
SETTINGS = ("FASTATTN_CUDA", "CUDAARCHS")  # environment variables that callers set explicitly
LAUNCHER = f"-DCMAKE_CUDA_COMPILER_LAUNCHER={sys.executable};{Path(__file__).resolve()}"


class NotBuilt(RuntimeError):
    """Something that the build needs is missing; the text names it."""


def cmake(
    *arguments: object, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run CMake with Ninja. Failures are left to the caller."""
    tool = shutil.which("cmake", path=TOOLS)
    if not tool or not shutil.which("ninja", path=TOOLS):
        raise NotBuilt("building needs cmake and ninja")
    env = {x: y for x, y in os.environ.items() if x not in SETTINGS}
    env |= {"PATH": TOOLS} | dict(environment or {})
    return subprocess.run([tool, *map(str, arguments)], env=env, capture_output=True, text=True)


def configure(
    folder: Path, *more: str, sources: Path = SOURCES, **environment: str
) -> subprocess.CompletedProcess:
    return cmake("-S", sources, "-B", folder, "-GNinja", *more, environment=environment)


def build(jobs: int | None = None, files: Iterable[Path] = ()) -> Path:
    """Build the library, or only some files of it, and return its path. `jobs` compilers run at a
    time, by default CMAKE_BUILD_PARALLEL_LEVEL, else two."""
    targets = [str(x.relative_to(BUILD)) for x in files] or ["fastattn_cuda"]
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building
        done = configure(BUILD, LAUNCHER, FASTATTN_CUDA="on")
        if reason := re.search(r"is on, but (.*?)\s+Call Stack", done.stderr, re.DOTALL):
            raise NotBuilt(" ".join(reason[1].split()))
        if done.returncode:  # the folder's tools may be gone, or it was copied from elsewhere
            (BUILD / "CMakeCache.txt").unlink(missing_ok=True)
            done = configure(BUILD, LAUNCHER, FASTATTN_CUDA="on")
        if not done.returncode:
            at_a_time = jobs or os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2")
            done = cmake("--build", BUILD, "--parallel", at_a_time, "--target", *targets)
        if done.returncode:
            raise RuntimeError(f"the CUDA kernels do not build:\n{done.stdout}{done.stderr}")
    return BUILD / "cuda" / "libfastattn_cuda.so"


def objects() -> dict[Path, Path]:
    """The object of each source of kernels, in csrc/cuda/sm80 and sm90. Probes are none."""
    made, cuda = BUILD / "cuda" / "CMakeFiles", SOURCES / "cuda"
    targets = {"sm80": "fastattn_cuda", "sm90": "fastattn_sm90"}
    return {
        source: made / f"{target}.dir" / f"{source.relative_to(cuda)}.o"
        for folder, target in targets.items()
        for source in sorted((cuda / folder).glob("*.cu"))
        if source.stem != "probe"
    }


def ptxas_output(made: Path) -> str:
    return made.with_suffix(".ptxas").read_text()


def launch(command: list[str]) -> int:
    """Run nvcc, and write the output of ptxas beside the object. A failure leaves neither."""
    done = subprocess.run([*command, "-Xptxas", "-v"], capture_output=True, text=True)
    if done.returncode or "-o" not in command:
        print(done.stdout, done.stderr, sep="", end="", file=sys.stderr)
        return done.returncode
    Path(command[command.index("-o") + 1]).with_suffix(".ptxas").write_text(done.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
