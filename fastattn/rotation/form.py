"""One call of norm_rope as data."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from torch import Tensor

from .. import reference
from ..backends.shared.value_checks import check_order
from ..call.spec import acc_dtype


class Form(NamedTuple):
    """The options of a call, in the order of its operator's arguments."""

    q_norm: Any  # "rms", "layer" or ""
    k_norm: Any
    eps: float
    weight_offset: float
    rotary_dim: int  # 0: no rotation
    rotary_start: int
    interleaved: bool
    deinterleave: bool
    rope_first: bool


class Rows(NamedTuple):
    """The tensors of a call. Those of a packed batch have its rows as those of one item."""

    q: Tensor | None  # (B,H,M,D)
    k: Tensor | None  # (B,Hk,M,D)
    cos: Tensor | None  # (M,R/2) or (B,M,R/2); with cu (N,R/2)
    sin: Tensor | None
    q_weight: Tensor | None  # (D,)
    k_weight: Tensor | None
    cu: Tensor | None  # (sequences + 1,)


def check_offsets(rows: Rows) -> None:
    """Raise unless cu has the offsets of the rows of q, and cos a row for each of a sequence."""
    assert rows.q is not None and rows.cu is not None
    offsets = check_order("cu_q", rows.cu, rows.q.shape[2], "q")
    if rows.cos is None:
        return
    positions = rows.cos.shape[-2]
    for b, (first, end) in enumerate(itertools.pairwise(offsets)):
        if end - first > positions:
            raise ValueError(
                f"cu_q: got {end - first} rows in sequence {b}, expected at most {positions}, the "
                "rows of cos"
            )


def composed(form: Form, rows: Rows) -> tuple[Tensor, ...]:
    """The same by torch's operations, which have all derivatives: in float32 (float64 for float64),
    rounded once."""
    found = []
    for x, weight, norm in (
        (rows.q, rows.q_weight, form.q_norm),
        (rows.k, rows.k_weight, form.k_norm),
    ):
        if x is None:
            continue
        if not norm and rows.cos is None:
            found.append(x.clone())  # a result is never an input
            continue
        wide = acc_dtype(x.dtype)
        pairs = form.rotary_dim // 2
        tables = (t if t is None else t[..., :pairs].to(wide) for t in (rows.cos, rows.sin))
        cos, sin = reference.tables_of_rows(*tables, x.shape[2], rows.cu)
        y = reference.norm_and_rotate(
            x.to(wide),
            cos,
            sin,
            weight if weight is None else weight.to(wide),
            norm or None,
            *(form.eps, form.weight_offset, form.interleaved, form.deinterleave),
            *(form.rotary_start, form.rope_first),
        )
        found.append(y.to(x.dtype))
    return tuple(found)
