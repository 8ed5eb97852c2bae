"""The PTX that nvcc makes of csrc/cuda, one kernel at a time, when a launch asks for it."""

import functools
import subprocess

import pytest

from bench.static_gpu import ptxas
from tests.support.emulator import KERNELS, ROOT

from . import library

FLAGS = ("-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-ptx", "-arch=sm_80")
INCLUDES = "".join(f'#include "{x}"\n' for x in sorted((KERNELS / "sm80").glob("*.cuh")))

needs_nvcc = pytest.mark.skipif(not ptxas.find_nvcc(), reason="compiling CUDA needs nvcc")


@functools.cache
def sources():
    """A digest of the kernels' sources and of the compiler."""
    headers = [
        ROOT / "csrc" / "abi.h",
        *(ROOT / "csrc" / "common").glob("*.h"),
        *KERNELS.glob("*.cuh"),
        *KERNELS.glob("*.h"),
    ]
    headers += (KERNELS / "sm80").glob("*.cuh")
    return library.digest(ptxas.version(), *FLAGS, *sorted(headers))


def ptx(name):
    """The PTX of a kernel with this mangled name, which contains all of its template arguments."""
    signature = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout
    code = f"{INCLUDES}template __global__ {signature.strip()};\n"
    source = library.written(f"instance-{library.digest(code)}.cu", code)
    key = library.digest(sources(), code)
    made = library.made("instance", f"{key}.ptx", [ptxas.nvcc(), *FLAGS, source])
    return made.read_text()
