"""Translate flash-attn's arguments and row positions to fastattn's.

flash-attn puts row i at i' = i + N - M, causal or not. For a causal call causal="bottom_right"
requests that, for any other `Place(bottom_right=True)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..api import attention, attention_packed, attention_weights, draw_seed
from ..call.flash_conventions import edges
from ..call.spec import Place
from .checks import need_shape, refuse_int4, within

Arguments = dict[str, Any]  # keyword arguments of `fastattn.attention`
Pages = tuple[Tensor, Tensor]  # a table (B,pages), and how many keys each sequence has there (B,)
Results = tuple[Tensor, Tensor, Tensor | None]  # out, LSE, S_dmask


def arguments_of(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
) -> Arguments:
    window = edges(window_size)
    return dict(
        place=Place(bottom_right=True),
        dropout_p=dropout_p,
        scale=softmax_scale,
        causal="bottom_right" if causal else False,
        window=None if window == (None, None) else window,
        softcap=softcap if softcap is not None and softcap > 0 else None,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
        deterministic=True if deterministic else None,
    )


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: Arguments,
    with_S_dmask: bool = False,
    qv: Tensor | None = None,
) -> Results:
    """Attend q (B,M,H,D), and qv (B,M,H,Dv), to k (B,N,Hk,D), v (B,N,Hk,Dv): out, LSE (B,H,M),
    S_dmask."""
    for name, x in (("q", q), ("k", k), ("v", v), ("qv", q if qv is None else qv)):
        need_shape(name, x, ("batch", "seqlen", "heads", "head_dim"))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    more = {} if qv is None else dict(qv=qv.transpose(1, 2))
    arguments = _settled(arguments, q)
    out, lse = attention(q, k, v, return_lse=True, **arguments, **more)
    S_dmask = _signed_weights(q, k, arguments) if with_S_dmask and arguments["dropout_p"] else None
    return out.transpose(1, 2), lse, S_dmask


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    where: Tensor | Pages,
    max_q: int,
    max_k: int,
    arguments: Arguments,
    with_S_dmask: bool = False,
) -> Results:
    """Attend q (T,H,D) to k (S,Hk,D), v (S,Hk,Dv): out, LSE (H,T), S_dmask. `where` is cu_k (B+1,)
    if keys are packed one after the other, or Pages if k and v are paged, (P,page,Hk,·)."""
    need_shape("q", q, ("total", "heads", "head_dim"))
    lie = ("blocks", "page") if isinstance(where, tuple) else ("total",)
    for name, x in (("k", k), ("v", v)):
        need_shape(name, x, (*lie, "heads", "head_dim"))
        refuse_int4(name, x)
    arguments = _settled(arguments, q)
    wants_S_dmask = with_S_dmask and arguments["dropout_p"]
    if isinstance(where, tuple) and wants_S_dmask:
        k, v, where = _in_a_row(k, v, *where)
    given: Arguments = arguments | dict(max_q=max_q, max_k=max_k, return_lse=True)
    if isinstance(where, tuple):
        given |= dict(block_table=where[0], key_lengths=where[1])
        out, lse = attention_packed(q, k, v, cu_q, **given)
        return out, lse.transpose(0, 1), None
    out, lse = attention_packed(q, k, v, cu_q, where, **given)
    S_dmask = None
    if wants_S_dmask:
        S_dmask = q.new_zeros(len(cu_q) - 1, q.shape[1], max_q, max_k)
        for into, (rows, keys, own) in zip(S_dmask, _sequences(cu_q, where, arguments)):
            one = _signed_weights(_item(q, rows), _item(k, keys), own)[0]
            into[:, : one.shape[1], : one.shape[2]] = one
    return out, lse.transpose(0, 1), S_dmask


def _in_a_row(
    k: Tensor, v: Tensor, table: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy keys and values (P,page,Hk,·) out of their pages into packed tensors, and return them
    with cu_k (B+1,). S_dmask needs this: it is computed sequence by sequence."""
    page = k.shape[1]
    lengths = within("key_lengths", lengths, page * table.shape[1], "what the pages hold")
    j = torch.arange(page * table.shape[1], device=table.device)
    b, j = (j < lengths[:, None]).nonzero().unbind(1)
    at = within("block_table", table[b, j // page], len(k) - 1), j % page
    return k[at], v[at], torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _settled(arguments: Arguments, q: Tensor) -> Arguments:
    """Fix the seed, so that the weights of S_dmask repeat the dropout of the output."""
    if arguments.get("seed") is not None:
        return arguments
    return arguments | dict(seed=draw_seed(q.device) if arguments["dropout_p"] else None)


def _sequences(
    cu_q: Tensor, cu_k: Tensor, arguments: Arguments
) -> Iterator[tuple[slice, slice, Arguments]]:
    """Each sequence's rows, keys and arguments; its Place makes dropout draw as in the batch."""
    slopes, place = arguments["alibi_slopes"], arguments["place"]
    rows, keys = ([slice(*x) for x in pairwise(c)] for c in (cu_q.tolist(), cu_k.tolist()))
    for b, (i, j) in enumerate(zip(rows, keys)):
        own = slopes if slopes is None or slopes.ndim == 1 else slopes[b : b + 1]
        yield i, j, arguments | dict(alibi_slopes=own, place=place._replace(item=b))


def _item(x: Tensor, rows: slice) -> Tensor:
    """(1,H,M,D): one sequence of a packed batch."""
    return x[rows].transpose(0, 1)[None]


@torch.no_grad()
def _signed_weights(q: Tensor, k: Tensor, arguments: Arguments) -> Tensor:
    """S_dmask (B,H,M,N): probabilities before dropout, negative where they were dropped."""
    kept = attention_weights(q, k, **arguments)
    undropped: Arguments = arguments | dict(dropout_p=0.0, seed=None)
    p = attention_weights(q, k, **undropped)
    return torch.where(kept == 0, -p, p)
