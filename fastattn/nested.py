"""torch's jagged tensors, whose sequences lie packed: attention without padding."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .api import attention_packed


def is_jagged(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged


def attend(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """`scaled_dot_product_attention` of jagged (B,H,L*,E), (B,Hk,S*,E) and (B,Hk,S*,Ev), each
    sequence by itself; returns (B,H,L*,Ev), jagged as query is.

    Raises RuntimeError for what is not of that form, or has holes.
    """
    (q, cu_q, max_q), (k, cu_k, max_k), (v, cu_v, _) = (
        _packed(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    if cu_v is not cu_k and not torch.equal(cu_v, cu_k):
        raise RuntimeError(
            f"value: got sequences at {cu_v.tolist()}, expected {cu_k.tolist()}, as key has"
        )
    out = attention_packed(q, k, v, cu_q, cu_k, max_q=max_q, max_k=max_k, **arguments)
    made = torch.nested.nested_tensor_from_jagged(
        cast("Tensor", out), offsets=cu_q, min_seqlen=_known(query, "min"), max_seqlen=max_q
    )
    return made.transpose(1, 2)


def _packed(name: str, x: Tensor) -> tuple[Tensor, Tensor, int | None]:
    """Its rows (T,H,E), their offsets, and the length of the longest where that is known."""
    if x.ndim != 4:
        raise RuntimeError(f"{name}: got {x.ndim} dimensions, expected 4 (B, H, L*, E) of jagged")
    rows: Any = x.transpose(1, 2)  # of what a jagged one has, type checkers know nothing
    if getattr(rows, "_ragged_idx", 1) != 1:
        raise RuntimeError(f"{name}: got {x.shape}, expected its sequences in dimension 2 of 4")
    if rows.lengths() is not None:
        raise RuntimeError(f"{name}: got a jagged tensor with holes, expected x.contiguous()")
    return rows.values(), rows.offsets(), _known(x, "max")


def _known(x: Tensor, which: str) -> int | None:
    """A bound on lengths that somebody found before: looking for it waits for a GPU."""
    return getattr(x, f"_maybe_{which}_seqlen", None)
