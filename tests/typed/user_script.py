"""A program of a user, with the type of every result. It is checked by pyright, and it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import fastattn
from fastattn import distributed
from fastattn.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fastattn.integrations import transformers

Pair = tuple[Tensor, Tensor]


def calls(q: Tensor, k: Tensor, v: Tensor, asked: bool) -> Tensor:
    out = fastattn.attention(q, k, v, causal="bottom_right", window=(256, None), softcap=30.0)
    assert_type(out, Tensor)
    assert_type(fastattn.attention(q, k, v, return_lse=True, dropout_p=0.1, seed=3), Pair)
    assert_type(fastattn.attention(q, k, v, return_lse=asked), Tensor | Pair)
    assert_type(fastattn.attention_weights(q, k, average_heads=True), Tensor)
    assert_type(fastattn.attention_jvp(q, k, v, q, None, None), Pair)
    moved = fastattn.attention_jvp(q, k, v, q, None, None, return_lse=True)
    assert_type(moved, tuple[Tensor, Tensor, Tensor, Tensor])
    assert_type(fastattn.merge([fastattn.attention(q, k, v, return_lse=True)]), Pair)
    assert_type(fastattn.scaled_dot_product_attention(q, k, v, is_causal=True), Tensor)
    assert_type(fastattn.reference.attention(q, k, v, causal=True), Tensor)
    assert_type(fastattn.reference.attention(q, k, v, return_lse=True), Pair)
    both = fastattn.reference.attention(q, k, v, return_lse=True, return_weights=True)
    assert_type(both, tuple[Tensor, Tensor, Tensor])
    print(fastattn.explain(q, k, v, causal=True).backend, fastattn.Place(row=3).row)
    assert_type(transformers.register, Callable[[], None])
    with fastattn.sdpa():
        return out + nn.functional.scaled_dot_product_attention(q, k, v)


def packed(q: Tensor, cu: Tensor) -> Tensor:
    out, lse = fastattn.attention_packed(q, q, q, cu, cu, max_q=5, return_lse=True)
    assert_type(lse, Tensor)
    flash = flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, causal=True)
    assert_type(flash, Tensor)
    return out + fastattn.attention_packed(q, q, q, cu, cu) + flash


def decode(q: Tensor) -> Tensor:
    cache = fastattn.KVCache(q.shape[0], q.shape[1], q.shape[3], capacity=64, storage=torch.int8)
    cache.append(q, q)
    out, lse = cache.attention(q, return_lse=True)
    assert_type(lse, Tensor)
    assert_type(cache.fork().lengths, Tensor)
    small = fastattn.KVCache(1, 2, 64, capacity=8, storage="int4", dtype=torch.bfloat16)
    assert_type(small.storage, torch.dtype | Literal["int4"])
    return out + cache.attention(q, window=(8, 0))


def flash(q: Tensor) -> Tensor:
    out, lse, dropped = flash_attn_func(q, q, q, 0.0, causal=True, return_attn_probs=True)
    assert_type((lse, dropped), tuple[Tensor, Tensor | None])
    assert_type(flash_attn_with_kvcache(q, q, q, return_softmax_lse=True), Pair)
    return out + flash_attn_func(q, q, q, 0.1, None, True) + flash_attn_with_kvcache(q, q, q)


def modules(x: Tensor) -> Tensor:
    heads = fastattn.MultiheadAttention(16, 4, batch_first=True)
    assert_type(heads(x, x, x), Pair)
    assert_type(heads(x, x, x, need_weights=False), tuple[Tensor, None])
    own = fastattn.nn.CausalSelfAttention(16, 16, num_heads=2)
    assert_type(own(x, need_weights=True), Pair)
    layer = fastattn.nn.EncoderLayer(16, 4, 32, activation="gelu", norm_first=True)
    print(fastattn.convert(nn.TransformerEncoderLayer(16, 4)).swapped, fastattn.__version__)
    return fastattn.nn.Encoder(layer, 2)(own(x)) + heads(x, x, x)[0]


def over_ranks(q: Tensor) -> Tensor:
    part = distributed.shard(q, layout="zigzag")
    out, lse = distributed.attention(part, part, part, layout="zigzag", return_lse=True)
    assert_type(lse, Tensor)
    assert_type(distributed.attention(part, part, part, strategy="ring"), Tensor)
    assert_type(fastattn.distributed.explain(part, part, part).strategy, str)
    return distributed.unshard(out, layout="zigzag")


def main() -> None:
    q = torch.randn(2, 4, 5, 8)
    print(calls(q, q, q, True).shape, decode(q).shape, flash(q).shape)
    print(packed(torch.randn(5, 4, 8), torch.tensor([0, 2, 5])).shape)
    print(modules(torch.randn(2, 5, 16)).shape)


if __name__ == "__main__":
    main()
