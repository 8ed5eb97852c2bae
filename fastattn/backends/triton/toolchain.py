"""The C compiler and Python's headers that Triton needs at run time, found as Triton finds them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

NO_COMPILER = "install gcc (Debian, Ubuntu: apt install gcc libc6-dev; Fedora: dnf install gcc)"
NO_HEADER = (
    "install it (Debian, Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)"
)
SECONDS = 60


def unavailable() -> str:
    """Why C code that includes Python.h does not compile here, and what to do; "" if it does.

    It takes one run of the compiler, some 40 ms.
    """
    named = os.environ.get("CC")  # Triton uses it even if it is empty
    compiler = (shutil.which("gcc") or shutil.which("clang")) if named is None else named
    if compiler is None:
        return f"there is no C compiler on PATH: {NO_COMPILER}, or name yours with CC="
    if not shutil.which(compiler):
        return (
            f"CC={named} is no program: name a C compiler with CC=, or unset it and {NO_COMPILER}"
        )
    header = _include() / "Python.h"
    command = [compiler, f"-I{header.parent}", "-x", "c", "-fsyntax-only", "-"]
    source = b"#include <Python.h>\n"
    try:
        done = subprocess.run(command, input=source, capture_output=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} does not run: {error}"
    if not done.returncode:
        return ""
    if not header.exists():
        return f"there is no {header}: {NO_HEADER}"
    lines = done.stderr.decode(errors="replace").splitlines()
    said = next((line for line in lines if "error" in line), f"status {done.returncode}")
    return f"{compiler} does not compile {header} ({said}): {NO_COMPILER}"


def _include() -> Path:
    """The folder of Python.h. Debian's default scheme names a folder without the headers."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_paths(scheme=scheme)["include"])
