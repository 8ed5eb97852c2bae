"""Attention on torch's jagged tensors, which store sequences packed, without padding."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..api import attention_packed, attention_weights


def is_jagged(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged


def attend(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """`scaled_dot_product_attention` of jagged (B,H,L*,E), (B,Hk,S*,E) and (B,Hk,S*,Ev), each
    sequence by itself; returns (B,H,L*,Ev), jagged as query is.

    Raises RuntimeError for tensors of another form, or with holes.
    """
    q, k, v = (
        _heads_last(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    return as_jagged(attend_rows(q, k, v, **arguments), q).transpose(1, 2)


class JaggedRows(NamedTuple):
    """The parts of a jagged (B,L*,...): its rows (T,...), the offsets of sequences (B+1,), and
    bounds on lengths if torch has them cached: computing them would wait for a GPU."""

    rows: Tensor
    cu: Tensor
    shortest: int | None
    longest: int | None


def rows_of(name: str, x: Tensor) -> JaggedRows:
    """The parts of x. Raises RuntimeError if sequences are not in dimension 1, or have holes."""
    jagged: Any = x  # type checkers do not know a jagged tensor's methods
    if getattr(jagged, "_ragged_idx", 1) != 1:
        raise RuntimeError(f"{name}: got {x.shape}, expected (B, L*, ...) with the sequences there")
    if jagged.lengths() is not None:
        raise RuntimeError(f"{name}: got a jagged tensor with holes, expected x.contiguous()")
    bounds = (getattr(x, f"_maybe_{which}_seqlen", None) for which in ("min", "max"))
    return JaggedRows(jagged.values(), jagged.offsets(), *bounds)


def attend_rows(q: JaggedRows, k: JaggedRows, v: JaggedRows, **arguments: Any) -> Tensor:
    """Attention of rows (T,H,E), (S,Hk,E) and (S,Hk,Ev). Returns rows (T,H,Ev)."""
    if v.cu is not k.cu and not torch.equal(v.cu, k.cu):
        raise RuntimeError(
            f"value: got sequences at {v.cu.tolist()}, expected {k.cu.tolist()}, as key has"
        )
    given: dict[str, Any] = dict(max_q=q.longest, max_k=k.longest) | arguments
    return cast("Tensor", attention_packed(q.rows, k.rows, v.rows, q.cu, k.cu, **given))


def weights_of(q: JaggedRows, k: JaggedRows, average: bool, **arguments: Any) -> Tensor:
    """The probabilities (B,H,L,S), or (B,L,S) averaged over heads, padded with zeros."""
    padded = (torch.nested.to_padded_tensor(as_jagged(x.rows, x), 0.0) for x in (q, k))
    heads_first = (x.transpose(1, 2) for x in padded)
    given: dict[str, Any] = dict(average_heads=average, key_lengths=k.cu.diff()) | arguments
    weights = attention_weights(*heads_first, **given)
    return without_rows_past(weights, q.cu.diff())


def without_rows_past(weights: Tensor, lengths: Tensor) -> Tensor:
    """The weights with zeros in rows at or past each length, as torch's have."""
    past = torch.arange(weights.shape[-2], device=lengths.device) >= lengths[:, None]
    past = past[:, :, None] if weights.ndim == 3 else past[:, None, :, None]
    return weights.masked_fill(past, 0.0)


def as_jagged(rows: Tensor, like: JaggedRows) -> Tensor:
    """Rows (T,...) as a jagged tensor with the sequences of `like`."""
    return torch.nested.nested_tensor_from_jagged(
        rows, offsets=like.cu, min_seqlen=like.shortest, max_seqlen=like.longest
    )


def _heads_last(name: str, x: Tensor) -> JaggedRows:
    if x.ndim != 4:
        raise RuntimeError(f"{name}: got {x.ndim} dimensions, expected 4 (B, H, L*, E) of jagged")
    return rows_of(name, x.transpose(1, 2))
