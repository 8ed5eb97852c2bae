"""The PTX that nvcc makes of csrc/cuda, one kernel at a time, when a launch asks for it."""

import functools
import re
import subprocess

import pytest

from bench.static_gpu import ptxas
from tests.gpu_emulation.emulator import KERNELS, ROOT

from . import library

FLAGS = ("-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", "-ptx")
# {namespace of a kernel, and folder of its headers: what it is compiled for}. The headers of sm80
# include those of kernels in neither.
ARCHITECTURES = {"sm80": "sm_80", "sm90": "sm_90a"}

needs_nvcc = pytest.mark.skipif(not ptxas.find_nvcc(), reason="compiling CUDA needs nvcc")


@functools.cache
def sources(folder):
    """A digest of the sources of the kernels in this folder and of the compiler."""
    folders = {folder, folder.parent / "sm80"}  # the headers of sm90 include some of these
    headers = [
        ROOT / "csrc" / "abi.h",
        *(ROOT / "csrc" / "common").glob("*.h"),
        *KERNELS.glob("*.cuh"),
        *KERNELS.glob("*.h"),
        *(x for folder in folders for x in folder.glob("*.cuh")),
        *(x for folder in folders for x in folder.glob("*.h")),
    ]
    return library.digest(ptxas.version(), *FLAGS, *sorted(headers))


def ptx(*names, kernels=KERNELS):
    """The PTX of kernels with these mangled names, which contain all template arguments. They have
    one architecture."""
    command = ["c++filt", *names]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    (name,) = {namespace(x) for x in found}
    folder, flags = kernels / name, (*FLAGS, f"-arch={ARCHITECTURES[name]}")
    includes = "".join(f'#include "{x}"\n' for x in sorted(folder.glob("*.cuh")))
    # A use, no explicit instantiation: that would have to repeat __grid_constant__, which a mangled
    # name does not have.
    used = ", ".join(f"(void*)&{instance(x)}" for x in found)
    code = f"{includes}void* const used[] = {{{used}}};\n"
    source = library.written(f"instance-{library.digest(code)}.cu", code)
    key = library.digest(sources(folder), *flags, code)
    return library.made("instance", f"{key}.ptx", [ptxas.nvcc(), *flags, source]).read_text()


def namespace(signature):
    found = re.match(r"void fa::(sm\d+)::", signature)
    return found[1] if found else "sm80"


def instance(signature):
    """The kernel with its template arguments: what is before the last parentheses."""
    end = len(signature) - 1
    depth = 0
    while (depth := depth + (signature[end] == ")") - (signature[end] == "(")) > 0:
        end -= 1
    return signature[:end].removeprefix("void ")
