"""torch's scaled_dot_product_attention. Packed sequences are padded beforehand, with a mask."""

import torch
import torch_tensors
from protocol import Prepared, Sizes, Tensors, decline_quantised
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence


def version() -> str:
    return torch.__version__


def prepare(sizes: Sizes, tensors: Tensors, threads: int, variant: str) -> Prepared:
    decline_quantised(sizes)
    torch.set_num_threads(threads)
    q, k, v = torch_tensors.read(tensors)
    given = {"is_causal": sizes["causal"], "enable_gqa": sizes["H"] != sizes["Hk"]}
    lengths = sizes["lengths"]
    if lengths:
        seen = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        q, k, v = (_padded(x, lengths) for x in (q, k, v))
        mask = seen[:, None, None]
        if sizes["causal"]:
            mask = mask & torch.ones(max(lengths), max(lengths), dtype=torch.bool).tril()
        given |= {"attn_mask": mask, "is_causal": False}

    def call():
        return scaled_dot_product_attention(q, k, v, **given)

    def write(path: str) -> None:
        out = call()
        torch_tensors.write(out.transpose(1, 2)[seen] if lengths else out, path)

    return Prepared(call, write, sizes["dtype"])


def _padded(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2).contiguous()
