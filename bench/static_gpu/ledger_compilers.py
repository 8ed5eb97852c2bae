"""Compile the kernels of the ledger without a GPU. nvcc gets a file that instantiates one template;
Triton's launcher selects its kernels itself, as in aot.py. `constants` has the parameters of a
call."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import aot, cuda_library, ptxas
from .ledger_cases import OF_PLAIN, Compiled, LedgerCase

FLAGS = ("-std=c++17", "-O3", f"-I{cuda_library.SOURCES}")
FEATURES: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "plain": lambda B, H, N: {},
    "band": lambda B, H, N: dict(causal="top_left"),
    "mask": lambda B, H, N: dict(mask=meta(B, H, N, N)),
    "block mask": lambda B, H, N: dict(mask=meta(1, 1, N, N)),
    "alibi": lambda B, H, N: dict(alibi_slopes=meta(B, H, dtype=torch.float32)),
    "softcap": lambda B, H, N: dict(softcap=30.0),
    "dropout": lambda B, H, N: dict(dropout_p=0.1, seed=meta(1, dtype=torch.int64)),
    "sinks": lambda B, H, N: dict(sinks=meta(H, dtype=torch.float32)),
    "score_mod": lambda B, H, N: aot.programs(
        B, H, N, N, lambda table: lambda s, b, h, i, j: s + table[h, i - j + N]
    ),
}
# nvcc's kernels by pass: traits, template, and the constants of a tile's rows and keys.
CUDA = {
    "forward": ("Forward<Type, {d}, {d}, {general}>", "forward_kernel", "kRows, K::kKeys"),
    "forward mask": ("MaskedForward<Type, {d}, {d}>", "forward_kernel", "kRows, K::kKeys"),
    "dqkv mask": (
        "MaskedBackward<Type, {d}, {d}, kOfAll>",
        "backward_kernel",
        "kPassing, K::kStaying",
    ),
    "decode": ("Decode<Type, {d}, {d}, 1, {general}>", "decode_kernel", "kRows, K::kKeys"),
    "dq": ("Backward<Type, {d}, {d}, kOfQ, {general}>", "backward_kernel", "kStaying, K::kPassing"),
} | {
    name: (f"Backward<Type, {{d}}, {{d}}, {what}, {{general}}>", "backward_kernel", sides)
    for name, what, sides in (
        ("dqkv", "kOfAll", "kPassing, K::kStaying"),
        ("dk", "kOfK", "kPassing, K::kStaying"),
        ("dv", "kOfV", "kPassing, K::kStaying"),
    )
}
# The same of csrc/cuda/sm90: its tiles have constants of the same names.
SM90 = {
    "forward": ("Forward<Type, {d}, {d}, {general}>", "forward_kernel"),
    "dqkv": ("Backward<Type, {d}, {banded}, {general}>", "backward_kernel"),
}
SM90_UNMASKED = {"forward": "UnmaskedForward<Type, {d}, {d}>"}  # general, but for masks
TRITON = {"split": "decode"}  # pass by kernel, where the names differ


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def source(case: LedgerCase) -> str:
    """Source of the one kernel, and of an empty one: its mangled name encodes the tile."""
    plain = case.feature in OF_PLAIN
    banded = not plain or case.feature == "band"  # sm90's general kernels have a band
    general, banded = ("true" if x else "false" for x in (not plain, banded))
    if case.folder == "sm90":
        kind, kernel = SM90[case.name]
        if not plain and case.feature != "mask":
            kind = SM90_UNMASKED.get(case.name, kind)
        file = "forward" if case.name == "forward" else "backward"
        return f"""\
#include "cuda/sm90/{file}.cuh"
namespace fa {{ namespace sm90 {{
using Type = ptx::BF16;
using K = {kind.format(d=case.head_dim, general=general, banded=banded)};
void* const used = (void*)&{kernel}<K>;
}} }}
template <int...> __global__ void tile() {{}}
using fa::sm90::K;
template __global__ void tile<K::kRows, K::kKeys, K::kConsumers / 32, K::kStages, K::kSharedBytes,
                              K::kThreads / 32, K::kFewRegisters, K::kRegisters>();
"""
    kind, kernel, sides = CUDA.get(f"{case.name} {case.feature}") or CUDA[case.name]
    more = {"forward": "bool", "backward": "float*"}.get(kernel.removesuffix("_kernel"), "int")
    stages = "K::kStages" if case.name == "decode" else "2"
    return f"""\
#include "cuda/sm80/backward.cuh"
#include "cuda/sm80/decode.cuh"
#include "cuda/sm80/forward.cuh"
namespace fa {{ namespace sm80 {{
using Type = ptx::BF16;
using K = {kind.format(d=case.head_dim, general=general)};
template __global__ void {kernel}<K>(FaParams, {more});
}} }}
template <int...> __global__ void tile() {{}}
using fa::sm80::K;
template __global__ void tile<K::{sides}, K::kWarps, {stages}, K::kSharedBytes>();
"""


def by_nvcc(cases: list[LedgerCase]) -> list[Compiled]:
    """Raises RuntimeError if a kernel does not compile."""
    return [_by_nvcc(case) for case in cases]


def _by_nvcc(case: LedgerCase) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        code, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        code.write_text(source(case))
        arch = f"sm_{case.arch}" + "a" * (case.folder == "sm90")
        told = ("-Xptxas", "-v")
        command = [ptxas.nvcc(), *FLAGS, *told, f"-arch={arch}", "-cubin", code, "-o", cubin]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{case} does not compile:\n{done.stderr}")
        listing = aot.nvidia_tool("nvdisasm", "-c", str(cubin))
        usage = aot.nvidia_tool("cuobjdump", "--dump-resource-usage", str(cubin))
        parameters = parameters_at(aot.nvidia_tool("cuobjdump", "--dump-elf", str(cubin)))
    tile = re.search(r"\.text\._Z4tileIJ((?:Li\d+E)+)E", listing)
    kernels = SM90 if case.folder == "sm90" else CUDA
    used = re.search(rf"Function \S*{kernels[case.name][1]}\S*:\s+REG:(\d+)", usage)
    if not tile or not used:
        raise RuntimeError(f"{case}: got no tile or no registers from {usage!r}")
    sizes = list(map(int, re.findall(r"Li(\d+)E", tile[1])))
    rows, keys, warps, stages, shared = sizes[:5]
    launched, *declared = sizes[5:] or [warps]
    kernel = Compiled(case, rows, keys, warps, stages, int(used[1]), shared, 0, listing)
    return kernel._replace(
        said=done.stderr, launched=launched, declared=tuple(declared), parameters=parameters
    )


def parameters_at(elf: str) -> int:
    """Where FaParams begins in constant bank 0: its offset from the first parameter is found
    by its size."""
    from fastattn.backends.native.libraries import PARAMS_SIZE

    bank = re.search(r"EIATTR_PARAM_CBANK\s.*?Value:\s+0x\w+ 0x(\w+)", elf, re.DOTALL)
    at = re.search(rf"Offset\s*: 0x(\w+)\s+Size\s*: {PARAMS_SIZE:#x}\b", elf)
    if not bank or not at:
        raise RuntimeError(
            f"got no parameter of {PARAMS_SIZE} bytes in a kernel, expected FaParams"
        )
    return (int(bank[1], 16) & 0xFFFF) + int(at[1], 16)


def described(head_dim: int, feature: str, rows: int | None = None) -> tuple[Any, Any]:
    """Specification and tensors of a call; `rows` limits its queries."""
    from fastattn.call import spec, validation

    B, H, N = 2, 8, 4096
    given = FEATURES[feature](B, H, N)
    names = ("mask", "alibi_slopes", "sinks", "seed", "captured_floats")
    tensors = {x: given.pop(x) for x in names if x in given}
    q, k, v = (meta(B, H, n, head_dim) for n in (rows or N, N, N))
    t = spec.Tensors(q, k, v, **tensors)
    return validation.describe(t, spec.Options(**given)), t


def by_triton(cases: list[LedgerCase]) -> list[Compiled]:
    """Compile passes of one call, through the launcher."""
    from fastattn.backends.triton.backend import Triton

    found, one = {}, cases[0]

    def launched(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        name = aot.name_of(kernel, args)
        case = one._replace(name=TRITON.get(name, name))
        if case not in cases or case in found:
            return
        tile, stages = options["T"], options["num_stages"]
        binary = kernel.warmup(*args, grid=grid, **options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            usage = aot.nvidia_tool("cuobjdump", "--dump-resource-usage", file.name)
            listing = aot.nvidia_tool("nvdisasm", "-c", file.name)
        used = re.search(r"REG:(\d+)", usage)
        columns = getattr(binary.metadata, "tmem_size", None) or 0
        sizes = tile.BM, tile.BN, binary.metadata.num_warps, stages
        registers = int(used[1]) if used else 0
        found[case] = Compiled(case, *sizes, registers, binary.metadata.shared, columns, listing)

    aot.pretend(one.arch, launched)
    spec, t = described(one.head_dim, one.feature)
    backend, normaliser = Triton(), meta(2, *t.q.shape[:3], dtype=torch.float32)
    out = backend.forward(spec, t)
    backend.backward(spec, t, *out, t.q, normaliser[0], ["q", "k", "v"])
    if any(case.name == "decode" for case in cases):
        backend.forward(*described(one.head_dim, one.feature, rows=1))
    return list(found.values())


def constants(case: LedgerCase, first: int) -> dict[int, int]:
    """The parameters of a call of nvcc's kernel, as words of constant bank 0 by address; FaParams
    begins at `first`."""
    if not case.by_nvcc:
        return {}
    from fastattn.backends.native import libraries

    spec, t = described(case.head_dim, case.feature)
    data = bytearray(libraries.form(spec)[: libraries.PARAMS_SIZE])
    shape = tuple(t.q.shape)
    both = {libraries.ARGUMENTS[x].field: y for x, y in t._asdict().items()} | {
        "out": t.q,
        "lse": meta(*shape[:3], 2, dtype=torch.float32),
    }
    both |= {"dq": t.q, "dk": t.k, "dv": t.v, "dout": t.q}
    for place, name in enumerate(libraries.TENSORS):
        if (x := both.get(name)) is not None:
            strides = (*x.stride(), *(0,) * 4)[:4]
            address, at = (place + 1) << 36, libraries.offset(name)
            packed = libraries.TENSOR.pack(address, *strides, libraries.DTYPE[x.dtype])
            data[at : at + len(packed)] = packed
    for place, name in enumerate(libraries.POINTERS):
        if name in ("workspace", "seed" if case.feature == "dropout" else ""):
            address = (place + 64) << 36
            data[libraries.offset(name) : libraries.offset(name) + 8] = libraries.POINTER.pack(
                address
            )
    words = struct.unpack(f"<{len(data) // 4}I", data)
    return {first + 4 * k: word for k, word in enumerate(words)}
