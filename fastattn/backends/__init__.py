"""The backends. Importing a module registers its backend. No backend imports another one.

native/   the CPU's and the CUDA kernels, behind csrc/abi.h
triton/   Triton's kernels: arguments, tiles, sources of programs, launches
shared/   what several of them need, and no other folder
"""

from . import reference
from .native import cpu, cuda
from .triton import backend as triton_backend

__all__ = ["cpu", "cuda", "reference", "triton_backend"]
