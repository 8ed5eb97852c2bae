"""SGLang's CPU kernels, which vLLM's library has: decode_attention_cpu, and extend_attention_cpu
for causal prompts without a prefix."""

import torch
import torch_tensors
import vllm_kernels
from protocol import Declined, Prepared, Sizes, Tensors, decline, decline_quantised

SPLITS = 8  # of the keys: SGLang's default on CPUs
version = vllm_kernels.version


def prepare(sizes: Sizes, tensors: Tensors, threads: int, variant: str) -> Prepared:
    decline_quantised(sizes)
    decline(sizes, dtype=("bfloat16", "float16"))
    decode, packed = sizes["M"] == 1, sizes["lengths"]
    if not (decode or sizes["causal"]):
        raise Declined("prompts are causal")
    if not decode and not _multiplies(sizes["dtype"]):
        raise Declined("prompts need instructions for products in this dtype")
    if not hasattr(torch.ops._C, "decode_attention_cpu"):
        vllm_kernels.load("_C")  # the others lack these operators
    torch.set_num_threads(threads)
    q, k, v = torch_tensors.read(tensors)
    if not packed:
        q, k, v = map(torch_tensors.tokens, (q, k, v))
    lengths = torch.tensor(packed or [sizes["N"]] * sizes["B"])
    starts = (lengths.cumsum(0) - lengths).int()
    places = starts[:, None] + torch.arange(int(lengths.max()), dtype=torch.int32)
    places.clamp_(max=len(k) - 1)
    items, scale, out = torch.arange(len(lengths)), sizes["D"] ** -0.5, torch.empty_like(q)
    if decode:
        partial = torch.zeros(len(lengths), sizes["H"], SPLITS, sizes["D"] + 1)

        def call() -> None:
            torch.ops._C.decode_attention_cpu(
                *(q, k, v, out, None, None, None, partial, places, items, lengths, scale, 0.0),
                *(False, -1, None, None),
            )

    else:

        def call() -> None:
            torch.ops._C.extend_attention_cpu(
                *(q, k, v, out, k, v, places, items, lengths, lengths.int(), starts),
                *(int(lengths.max()), scale, 0.0, False, -1, None, None, None),
            )

    def write(path: str) -> None:
        torch_tensors.write(out if packed else torch_tensors.heads(out, sizes["B"]), path)

    return Prepared(call, write, sizes["dtype"])


def _multiplies(dtype: str) -> bool:
    """Whether oneDNN has a kernel for products of packed tiles on this CPU."""
    if dtype == "float16":
        return torch.cpu._is_amx_fp16_supported()
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
