"""The Python side of csrc/abi.h: arguments as bytes, and the library that reads them.

FASTATTN_LIBRARY names another build of libfastattn_cpu.so to load, for development.
FASTATTN_CPU_ISA forces one of the instruction sets that `cpu_isas` lists.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from pathlib import Path

import torch
from torch import Tensor

from .spec import AttentionSpec

FORWARD, BACKWARD, WEIGHTS, WEIGHTS_BACKWARD = range(4)  # FaPass
OK, BAD_LENGTH, NO_MEMORY = range(3)  # FaStatus
DTYPE = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.bool: 4,
}

# FaParams field by field; every field is 8 bytes, so packing one is packing them all.
TENSORS = (
    *("q", "k", "v", "out", "lse", "mask", "slopes", "sinks", "dout", "dlse"),
    *("dq", "dk", "dv", "dmask", "dsinks", "weights", "dweights"),
)
TENSOR = struct.Struct("=Q4qq")  # data, stride[4], dtype
POINTERS = struct.Struct("=5Q")  # lengths, seed, cu_q, cu_k, workspace
SCALARS = struct.Struct("=13q3d")  # B .. threads, scale, softcap, dropout_p
ABSENT = bytes(TENSOR.size)
WORKSPACE = len(TENSORS) * TENSOR.size + 4 * 8  # where that pointer lies
SIZE = len(TENSORS) * TENSOR.size + POINTERS.size + SCALARS.size

pack_tensor = TENSOR.pack
pack_pointers = POINTERS.pack


@functools.lru_cache(maxsize=4096)
def scalars(spec: AttentionSpec, threads: int) -> bytes:
    """The end of FaParams, from B on."""
    return SCALARS.pack(
        *(spec.B, spec.H, spec.Hk, spec.M, spec.N, spec.D, spec.Dv),
        *(spec.left, spec.right, spec.bottom_right),
        *(spec.average_heads, spec.constant_lse, threads),
        *(spec.scale, spec.softcap, spec.dropout_p),
    )


def broadcast(x: Tensor | None) -> bytes:
    """FaTensor of `x` aligned to the right of (B,H,M,N); what it is broadcast over has stride 0."""
    if x is None:
        return ABSENT
    strides = [0 if n == 1 else s for n, s in zip(x.shape, x.stride())]
    return pack_tensor(x.data_ptr(), *[0] * (4 - len(strides)), *strides, DTYPE[x.dtype])


def column(x: Tensor | None) -> bytes:
    """FaTensor of (H,), (B,H) or (B,H,M), which the kernels see with trailing sizes of 1."""
    if x is None:
        return ABSENT
    strides = x.stride() if x.ndim > 1 else (0, *x.stride())
    strides = (*strides, 0, 0)[:4] if len(strides) < 3 else (*strides, 0)
    return pack_tensor(x.data_ptr(), *strides, DTYPE[x.dtype])


class Library:
    """libfastattn_cpu.so, loaded."""

    def __init__(self, path: Path):
        # CDLL, not PyDLL: the GIL is released while a kernel runs.
        self.path, self.dll = path, ctypes.CDLL(str(path))
        integer, params, text = ctypes.c_int64, ctypes.c_char_p, ctypes.c_char_p
        self.abi_size = self._entry("fa_abi_size", integer)
        self.workspace = self._entry("fa_cpu_workspace", integer, params, integer)
        self.run = self._entry("fa_cpu_run", integer, params, integer)
        self.isas = self._entry("fa_cpu_isas", text)
        self.isa = self._entry("fa_cpu_isa", text)
        self.select = self._entry("fa_cpu_select", integer, text)
        self.poison = self._entry("fa_cpu_poison", None, integer)
        if self.abi_size() != SIZE:
            raise OSError(
                f"{path} was built from another version of csrc/abi.h: FaParams has "
                f"{self.abi_size()} bytes there and {SIZE} in fastattn/native.py; build it again"
            )

    def _entry(self, name: str, result, *arguments):
        entry = getattr(self.dll, name)
        entry.restype, entry.argtypes = result, arguments
        return entry


def _candidates() -> list[Path]:
    if named := os.environ.get("FASTATTN_LIBRARY"):
        return [Path(named)]
    import fastattn  # an editable install spreads the package over two folders

    return [Path(folder) / "lib" / "libfastattn_cpu.so" for folder in fastattn.__path__]


@functools.cache
def _load() -> Library | str:
    """The library, or the reason there is none."""
    candidates = _candidates()
    path = next((p for p in candidates if p.exists()), None)
    if path is None:
        where = ", ".join(map(str, candidates))
        return f"the native library was not built: no {where} (install with `pip install .`)"
    try:
        library = Library(path)
    except (OSError, AttributeError) as error:
        return f"the native library does not load: {error}"
    wanted = os.environ.get("FASTATTN_CPU_ISA")
    if wanted and library.select(wanted.encode()):
        have = library.isas().decode()
        return f"FASTATTN_CPU_ISA: got {wanted!r}, expected one that this machine runs: {have}"
    return library


def cpu_unavailable() -> str | None:
    """Why the CPU kernels cannot run here, or None."""
    found = _load()
    return found if isinstance(found, str) else None


@functools.cache
def cpu() -> Library:
    """The CPU kernels. Raises RuntimeError with the reason if they cannot run here."""
    found = _load()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def cpu_isas() -> list[str]:
    """The instruction sets that kernels exist for and this machine has, best first."""
    return cpu().isas().decode().split(",")


def cpu_isa() -> str:
    """The instruction set in use."""
    return cpu().isa().decode()


def select_cpu_isa(name: str) -> None:
    """Use the kernels compiled for `name`, in the whole process."""
    if cpu().select(name.encode()):
        raise ValueError(f"name: got {name!r}, expected one of {cpu_isas()}")


def poison(on: bool) -> None:
    """For tests: let the kernels fill their scratch memory with NaN before they use it."""
    cpu().poison(int(on))
