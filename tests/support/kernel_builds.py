"""The CPU kernels compiled by a test for the set "generic", which every machine has."""

import subprocess

from tests.gpu_emulation.emulator import compiler

FLAGS = ["-std=gnu++17", "-O0", "-fPIC", "-ffp-contract=fast", "-fno-trapping-math", "-w"]
FLAGS += ["-fvisibility=hidden", "-fopenmp"]
AMX_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
ON_THE_MODEL = [*AMX_FLAGS, "-DFA_AMX", "-DFA_AMX_MODEL"]
ONLY_FLOAT32 = "if (p.q.dtype == FA_F64) return plan_with<Plain<double>>(p, pass);"


def run(*arguments):
    command = [*compiler(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def build(sources, folder, *more):
    """The library of the kernels in `sources`, without float64 and without optimisation."""
    isa = sources / "cpu" / "kernels_for_isa.cpp"
    text = isa.read_text()
    assert ONLY_FLOAT32 in text
    isa.write_text(text.replace(ONLY_FLOAT32, ""))
    objects = [folder / "isa.o", folder / "library.o"]
    run(*FLAGS, *more, "-DFA_ISA=generic", "-c", isa, "-o", objects[0])
    run(*FLAGS, "-c", sources / "cpu" / "runtime" / "library.cpp", "-o", objects[1])
    run("-shared", "-fopenmp", *objects, "-o", folder / "kernels.so")
    return folder / "kernels.so"
