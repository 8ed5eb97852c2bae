"""Attention on torch's jagged tensors, which store sequences packed, without padding.

In shapes L* and S* are the lengths of the sequences of query and of key, which differ between the
items of the batch. T and S are their sums: the packed rows of query and of key. A jagged tensor
has holes if its sequences do not fill its storage, as after torch.nested.narrow; `contiguous()`
makes one without holes.
"""

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

    Raises RuntimeError for tensors with other dimensions, or with holes.
    """
    q, k, v = (
        _rows_of_heads(name, x) for name, x in (("query", query), ("key", key), ("value", value))
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
    """The parts of x, a jagged (B,L*,...). Raises RuntimeError if the dimension of varying length
    is not 1, or if x has holes."""
    jagged: Any = x  # type checkers do not know a jagged tensor's methods
    if getattr(jagged, "_ragged_idx", 1) != 1:
        raise RuntimeError(
            f"{name}: got {tuple(x.shape)}, expected (B, L*, ...): the dimension of varying length "
            "must be 1; transpose the tensor"
        )
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
    """The probabilities (B,H,L,S), or (B,L,S) averaged over heads, padded with zeros. Here L and S
    are the lengths of the longest sequences."""
    padded = (torch.nested.to_padded_tensor(as_jagged(x.rows, x), 0.0) for x in (q, k))
    heads_first = (x.transpose(1, 2) for x in padded)
    given: dict[str, Any] = dict(average_heads=average, key_lengths=k.cu.diff()) | arguments
    weights = attention_weights(*heads_first, **given)
    return without_rows_past(weights, q.cu.diff())


def without_rows_past(weights: Tensor, lengths: Tensor) -> Tensor:
    """The weights with zeros in each sequence's rows at or past its length. Torch's padded weights
    have zeros there, too."""
    past = torch.arange(weights.shape[-2], device=lengths.device) >= lengths[:, None]
    past = past[:, :, None] if weights.ndim == 3 else past[:, None, :, None]
    return weights.masked_fill(past, 0.0)


def as_jagged(rows: Tensor, like: JaggedRows) -> Tensor:
    """Rows (T,...) as a jagged tensor with the sequences of `like`."""
    return torch.nested.nested_tensor_from_jagged(
        rows, offsets=like.cu, min_seqlen=like.shortest, max_seqlen=like.longest
    )


def _rows_of_heads(name: str, x: Tensor) -> JaggedRows:
    """The parts of a jagged (B,H,L*,E). Its rows have the shape (T,H,E)."""
    if x.ndim != 4:
        raise RuntimeError(f"{name}: got {x.ndim} dimensions, expected 4 (B, H, L*, E) of jagged")
    if getattr(x, "_ragged_idx", 2) != 2:  # checked here: errors give the shape before transpose
        raise RuntimeError(
            f"{name}: got {tuple(x.shape)}, expected (B, H, L*, E): the dimension of varying "
            "length must be 2; transpose the tensor"
        )
    return rows_of(name, x.transpose(1, 2))
