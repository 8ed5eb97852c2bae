"""Packed sequences of different lengths, and paged caches.

Beside the same work padded, torch's function on padded or jagged tensors, or contiguous keys.
Lengths go from N / 8 to N.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as torchs

import fastattn

from ..cases import BOTH, DTYPES, FORWARD, TRAINING
from .race import Race

N, HEADS, DIM = 1024, 8, 64  # of packed batches: eight sequences
KEYS, BATCH, KEY_HEADS, DECODED = 4096, 32, 8, 128  # of decoding: keys, sequences, heads, head dim
PAGES = (16, 64, 256)


def races(dtypes: Sequence[str] = BOTH, scale: float = 1.0) -> Iterator[Race]:
    """`scale` multiplies all lengths, for tests."""
    for dtype in dtypes:
        for what in (FORWARD, TRAINING):
            yield from packed(dtype, what, int(N * scale))
        yield from paged(dtype, int(KEYS * scale))


def packed(dtype: str, what: str, n: int) -> Iterator[Race]:
    lengths = [n * (x + 1) // 8 for x in range(8)]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    grad = what == TRAINING
    size: dict[str, Any] = dict(dtype=DTYPES[dtype], requires_grad=grad)
    rows = [torch.randn(int(cu[-1]), HEADS, DIM, **size) for _ in range(3)]
    dout = torch.randn(int(cu[-1]), HEADS, DIM, dtype=DTYPES[dtype])
    # The others' inputs are padded in advance: the time of padding is not measured.
    padded = [_padded(x.detach(), lengths).requires_grad_(grad) for x in rows]
    padded_dout = _padded(dout, lengths)
    seen = torch.arange(n) < torch.tensor(lengths)[:, None]

    def of_rows(out: Any, leaves: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad(out, leaves, dout) if grad else []
        return [out, *grads]

    def of_padded(out: Tensor) -> list[Tensor]:
        found = of_rows(out, padded, padded_dout)
        return [x.transpose(1, 2)[seen] for x in found]

    def ours() -> list[Tensor]:
        out = fastattn.attention_packed(*rows, cu, cu, max_q=n, max_k=n)
        return of_rows(out, rows, dout)

    def ours_padded() -> list[Tensor]:
        out = fastattn.attention(*padded)
        return of_rows(out, padded, padded_dout)

    def torchs_padded() -> list[Tensor]:
        return of_padded(torchs(*padded, attn_mask=seen[:, None, None]))

    jagged = functools.partial(_jagged, cu=cu)

    def torchs_jagged() -> list[Tensor]:
        out: Any = torchs(jagged(rows[0]), jagged(rows[1]), jagged(rows[2]))
        return of_rows(out.transpose(1, 2).values(), rows, dout)

    share = sum(x * x for x in lengths) / (8 * n * n)
    every = "packed over the same padded, to visible scores"
    yield Race(every, dtype, what, ours, ours_padded, "at most", 1.15, share, same=False)
    yield Race("torch padded, masked, over packed", dtype, what, ours, torchs_padded)
    yield Race("torch jagged over packed", dtype, what, ours, torchs_jagged)


def paged(dtype: str, n: int) -> Iterator[Race]:
    kind = DTYPES[dtype]
    q = torch.randn(BATCH, HEADS * 4, 1, DECODED, dtype=kind)
    k, v = (torch.randn(BATCH, n, KEY_HEADS, DECODED, dtype=kind) for _ in range(2))
    cu_q, lengths = torch.arange(BATCH + 1), torch.full((BATCH,), n)

    def contiguous() -> list[Any]:
        return [fastattn.attention(q, k.transpose(1, 2), v.transpose(1, 2))]

    def read() -> list[Tensor]:
        return [k.sum(), v.sum()]

    for page in PAGES:
        blocks = -(-n // page)
        order = torch.randperm(BATCH * blocks)
        pools = [_in_pages(x, page, order) for x in (k, v)]
        table = order.view(BATCH, blocks)

        def ours(pools=pools, table=table) -> list[Any]:
            given: Any = dict(block_table=table, key_lengths=lengths, max_q=1)
            out: Any = fastattn.attention_packed(q[:, :, 0], *pools, cu_q, **given)
            return [out[:, :, None]]

        name = f"pages of {page} over contiguous keys"
        yield Race(name, dtype, FORWARD, ours, contiguous, "at most", 1.15)
    yield Race("torch.sum over decoding", dtype, FORWARD, contiguous, read, aim=0.8, same=False)


def _padded(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """(T,H,D) as (B,H,N,D)."""
    n = max(lengths)
    each = [pad(part, (0, 0, 0, 0, 0, n - len(part))) for part in x.split(list(lengths))]
    return torch.stack(each).transpose(1, 2).contiguous()


def _jagged(x: Tensor, cu: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, cu).transpose(1, 2)


def _in_pages(x: Tensor, page: int, order: Tensor) -> Tensor:
    _, n, heads, dim = x.shape
    x = pad(x, (0, 0, 0, 0, 0, -n % page))
    pool = torch.empty(len(order), page, heads, dim, dtype=x.dtype)
    pool[order] = x.reshape(-1, page, heads, dim)
    return pool
