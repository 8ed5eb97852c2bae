"""The CPU kernels compiled by a test for the set "generic", which every machine has."""

import subprocess

import pytest

from fastattn.backends.native import libraries
from fastattn.dispatch import operation
from tests.gpu_emulation.emulator import compiler

FLAGS = ["-std=gnu++17", "-O0", "-fPIC", "-ffp-contract=fast", "-fno-trapping-math", "-w"]
FLAGS += ["-fvisibility=hidden", "-fopenmp"]
AMX_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
ON_THE_MODEL = [*AMX_FLAGS, "-DFA_AMX", "-DFA_AMX_MODEL"]
ONLY_FLOAT32 = "-DFA_WITHOUT_F64"


def run(*arguments):
    command = [*compiler(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def build(sources, folder, *more):
    """The library of the kernels in `sources`, without float64 and without optimisation."""
    cpu, kernels = sources / "cpu", folder / "kernels.o"
    runtime = [cpu / "runtime" / f"{x}.cpp" for x in ("library", "kernel_choice")]
    of_set = [*more, ONLY_FLOAT32, "-DFA_ISA=generic"]
    run(*FLAGS, *of_set, "-c", cpu / "unit.cpp", "-o", kernels)
    run(*FLAGS, "-shared", *runtime, kernels, "-o", folder / "kernels.so")
    return folder / "kernels.so"


@pytest.fixture
def use_library(monkeypatch):
    """A function: calls then run on this CpuLibrary. Plans have the addresses of its functions."""

    def use(library):
        monkeypatch.setattr(libraries, "cpu", lambda: library)
        operation.forget_plans()

    yield use
    monkeypatch.undo()
    operation.forget_plans()
