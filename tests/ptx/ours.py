"""The PTX that nvcc makes of csrc/cuda, one kernel at a time, when a launch asks for it."""

import functools
import re
import subprocess

import pytest

from bench.static_gpu import ptxas
from tests.support.emulator import KERNELS, ROOT

from . import library

FLAGS = ("-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-ptx")
# By namespace: the architecture that its kernels are compiled for.
ARCHS = {"sm80": "sm_80", "sm90": "sm_90a"}

needs_nvcc = pytest.mark.skipif(not ptxas.find_nvcc(), reason="compiling CUDA needs nvcc")


@functools.cache
def sources(folder):
    """A digest of the sources of the kernels in this folder, and of the compiler."""
    headers = [
        ROOT / "csrc" / "abi.h",
        *(ROOT / "csrc" / "common").glob("*.h"),
        *KERNELS.glob("*.cuh"),
        *KERNELS.glob("*.h"),
        *(KERNELS / folder).glob("*.cuh"),
        *(KERNELS / folder).glob("*.h"),
    ]
    return library.digest(ptxas.version(), *FLAGS, *sorted(headers))


def ptx(name):
    """The PTX of a kernel with this mangled name, which contains all of its template arguments."""
    signature = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout
    folder = next((x for x in ARCHS if f"fa::{x}::" in signature), "sm80")
    includes = "".join(f'#include "{x}"\n' for x in sorted((KERNELS / folder).glob("*.cuh")))
    # Its address makes an instance. An explicit one would have to repeat what it says of parameters.
    kernel = re.fullmatch(r"void (.*>)\(.*\)", signature.strip())[1]
    code = f"{includes}const auto kernel = &{kernel};\n"
    source = library.written(f"instance-{library.digest(code)}.cu", code)
    key = library.digest(sources(folder), code)
    command = [ptxas.nvcc(), *FLAGS, f"-arch={ARCHS[folder]}", source]
    return library.made("instance", f"{key}.ptx", command).read_text()
