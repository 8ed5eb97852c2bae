"""The rules for keys and values that are stored in eight or four bits."""

from __future__ import annotations

from torch import Tensor

from .int4 import BLOCK, BLOCK_BYTES, INT4, row_bytes
from .need import need, shape_of
from .spec import Tensors


def check_storage(t: Tensors) -> None:
    """k_scale and v_scale must come together, with k and v of the same dtype. Rows in four bits,
    too, are those of both k and v, in a packed batch, and have no scales beside them."""
    given = [name for name in ("k_scale", "v_scale") if getattr(t, name) is not None]
    if t.k.dtype == INT4:
        expected = f"{t.q.dtype}, as q has; attention_packed takes rows in four bits ({INT4})"
        need(t.cu_q is not None, "k.dtype", INT4, expected)
        expected = f"None, because rows in four bits ({INT4}) contain their scales"
        need(not given, "".join(given[:1]), "a tensor", expected)
        if t.v is not None:
            need(t.v.dtype == INT4, "v.dtype", t.v.dtype, f"{INT4}, as k has")
    elif t.v is not None and t.cu_q is not None:
        need(t.v.dtype != INT4, "k.dtype", t.k.dtype, f"{INT4}, as v has")
    if not given:
        return
    need(len(given) == 2, "k_scale and v_scale", f"{given[0]} alone", "both, or neither")
    need(t.cu_q is not None, "k_scale", "a tensor", "None, because cu_q is None")
    if t.v is not None:
        need(t.v.dtype == t.k.dtype, "v.dtype", t.v.dtype, f"{t.k.dtype}, as k has")


def check_int4_rows(q: Tensor, k: Tensor, v: Tensor | None) -> None:
    D = q.shape[3]
    expected = f"a head dim that is a multiple of {BLOCK}, because k has rows in four bits ({INT4})"
    need(D % BLOCK == 0, "q", shape_of(q), expected)
    expected = f"rows of {row_bytes(D)} bytes, {BLOCK_BYTES} for {BLOCK} numbers of q's {D}"
    need(k.shape[3] == row_bytes(D), "k", shape_of(k), expected)
    if v is not None:
        expected = f"rows of a multiple of {BLOCK_BYTES} bytes, which have {BLOCK} numbers"
        need(v.shape[3] % BLOCK_BYTES == 0, "v", shape_of(v), expected)
