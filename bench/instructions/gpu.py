"""Count what the main loops of the GPU kernels issue, with no GPU: `make ledger`.

For each kernel, the instructions of one iteration (static_gpu/sass.py): of the CUDA kernels of
csrc/cuda/sm90 in bfloat16, from the objects in build/cuda, and of Triton's for plain calls and
some features. `ptxas.py` lists those of the other CUDA kernels. The record, gpu.json, has a line
for each compiler and chip. What `ptxas.py` calls a fault is one here, too: spills of plain kernels,
and the order of products and exponentials on sm_90. Nothing here is timed: latency, memory and what
runs side by side are not in a count.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from fastattn.backends.triton import tile_configs

from ..static_gpu import aot, budgets, ptxas
from . import x86

RECORD = Path(__file__).with_name("gpu.json")
VARIANTS = ("plain", "mask", "alibi", "softcap", "dropout")


def cases() -> Iterator[aot.KernelCase]:
    """Triton's: plain calls on every chip with tensor cores, features on sm_80 and sm_90."""
    for case in aot.cases(dtypes=("bfloat16",), variants=VARIANTS):
        if case.arch < tile_configs.TENSOR_CORES or case.head_dim > 128:
            continue
        if case.arch <= 90 or case.variant == "plain":
            yield case


def of_triton() -> x86.Counts:
    import triton

    kernels = [k for found in aot.compile_all(cases()) for k in found]
    if wrong := [f"{k}: {k.error}" for k in kernels if k.error]:
        raise ValueError("; ".join(wrong))
    return x86.Counts(f"triton {triton.__version__}", {str(k): k.loop for k in kernels if k.loop})


def of_cuda(kernels: list[ptxas.Kernel]) -> x86.Counts:
    loops = {
        f"{k.arch} {k.name}": k.loops[0].instructions
        for k in kernels
        if k.loops and "BF16" in k.name
    }
    return x86.Counts(ptxas.version(), loops)


def check(accepted: bool = False) -> int:
    """Status 1 for a fault. Raises ValueError if nothing can be compiled here."""
    missing = [] if importlib.util.find_spec("triton") else ["triton"]
    missing += [] if ptxas.find_nvcc() else ["nvcc"]
    if missing:
        raise ValueError(f"instructions --gpu: not found: {', '.join(missing)}")
    kernels = ptxas.compile_all("sm90")
    wrong = ptxas.faults(kernels, budgets.read(ptxas.BUDGET))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return x86.judged([of_cuda(kernels), of_triton()], RECORD, accepted) or int(bool(wrong))
