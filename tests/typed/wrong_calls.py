"""Calls that a type checker must refuse. pyright says so where a comment ignores no error."""

import torch

import fastattn
from fastattn import distributed
from fastattn.flash_attn import flash_attn_func


def wrong(q: torch.Tensor, asked: bool) -> None:
    fastattn.attention(q, q, q, causal="left")  # pyright: ignore[reportArgumentType]
    fastattn.attention(q, q, q, masks=q)  # pyright: ignore[reportCallIssue]
    fastattn.attention(q, q)  # pyright: ignore[reportCallIssue]
    fastattn.attention(q, q, q).sum()
    fastattn.attention(q, q, q, return_lse=True).sum()  # pyright: ignore[reportAttributeAccessIssue]
    fastattn.attention(q, q, q, return_lse=asked).sum()  # pyright: ignore[reportAttributeAccessIssue]
    fastattn.attention_packed(q, q, q, q, backends="cpu")  # pyright: ignore[reportCallIssue]
    fastattn.reference.attention(q, q, q, causal="left")  # pyright: ignore[reportCallIssue, reportArgumentType]
    cache = fastattn.KVCache(1, 2, 8, capacity=4)
    cache.attention(q, key_lengths=q)  # pyright: ignore[reportCallIssue]
    cache.attention(q, return_lse=True).sum()  # pyright: ignore[reportAttributeAccessIssue]
    fastattn.MultiheadAttention(512)  # pyright: ignore[reportCallIssue]
    fastattn.MultiheadAttention(512, "8")  # pyright: ignore[reportArgumentType]
    heads = fastattn.MultiheadAttention(512, 8)
    heads(q, q)  # pyright: ignore[reportCallIssue]
    heads(q, q, q).sum()  # pyright: ignore[reportAttributeAccessIssue]
    fastattn.nn.SelfAttention(8)(q, need_weights=True).sum()  # pyright: ignore[reportAttributeAccessIssue]
    fastattn.nn.FeedForward(8, activation="tanh")  # pyright: ignore[reportArgumentType]
    flash_attn_func(q, q, q, return_attn_probs=True).sum()  # pyright: ignore[reportAttributeAccessIssue]
    distributed.attention(q, q, q, strategy="rings")  # pyright: ignore[reportArgumentType]
    distributed.shard(q, layout="zig")  # pyright: ignore[reportArgumentType]
    fastattn.nothing  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
