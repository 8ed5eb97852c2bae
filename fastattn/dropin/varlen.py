"""torch.nn.attention.varlen's functions, argument for argument, with gradients on every device.

`attention_packed` computes them. torch's flash kernel puts row i of M at i + N - M of N keys,
causal or not, so every call is aligned at the bottom right.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..api import attention_packed, may_autocast
from ..call.flash_conventions import edges
from ..call.need import flag, need, need_a_tensor, whole
from ..call.sizes import agree, divides, holds
from ..call.spec import Place

# Our names of arguments, and torch's.
NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "cu_q": "cu_seq_q",
    "cu_k": "cu_seq_k",
    "key_lengths": "seqused_k",
    "window": "window_size",
}


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: Any = None,
    enable_gqa: bool = True,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of sequences of different lengths, as torch's function of the same name.

    Its arguments are those of all versions of torch that have it. A version without enable_gqa
    takes fewer key heads as they are. Like torch's operator, it does not heed autocast.

    Args:
        query: Queries of all sequences.
        key: Keys of all sequences, or pages of keys with block_table.
        value: Values, laid out as key.
        cu_seq_q: Offsets of the sequences in query.
        cu_seq_k: The same for key. It is not read with block_table, and may then be None.
        max_q: The largest number of rows of a sequence, or more.
        max_k: The same for keys. On a CPU it is not read with seqused_k, because callers may count
            all keys or only those that are used.
        is_causal: Whether row i sees only the keys to i + N - M; window_size=(-1, 0) is the same.
        return_aux: torch's AuxRequest; with lse, also return the LSE, which has a gradient, too.
        scale: The factor of query key^T; 1 / sqrt(D) by default.
        window_size: (left, right): row i sees keys i + N - M - left to i + N - M + right. A
            negative number, and None for the pair, is no limit.
        enable_gqa: If False, query and key must have the same number of heads.
        seqused_k: How many keys of each sequence are used; N is this number.
        block_table: The pages of each sequence, in order; it needs seqused_k.
        num_splits: 1 makes the bits of a sequence independent of the others, which they are on a
            CPU. Any other number is a hint how to split keys, and is ignored.

    Shape:
        query: (T, H, D), float32, float64, bfloat16 or float16.
        key: (S, Hk, D), or (P, page, Hk, D) with block_table.
        value: (S, Hk, Dv), or (P, page, Hk, Dv).
        cu_seq_q: (B + 1,), int32 or int64.
        cu_seq_k: As cu_seq_q.
        seqused_k: (B,).
        block_table: (B, blocks), int32 or int64.
        out: (T, H, Dv), query's dtype.
        lse: (H, T), float32 (float64 for float64), as torch's kernels return it; torch's
            documentation has (T, H). -inf for a row that sees no key.

    Returns:
        out, or (out, lse). A row that sees no key gives 0.

    Raises:
        ValueError, TypeError, NotImplementedError: As `fastattn.attention_packed`, with these
            names.
    """
    _check(query, key, value, block_table, seqused_k, cu_seq_k, enable_gqa)
    with_lse = _wants_lse(return_aux)
    left, right = (None, None) if window_size is None else edges(window_size)
    if flag("is_causal", is_causal):
        right = 0
    on_cpu = query.device.type == "cpu"
    alone = num_splits is not None and whole("num_splits", num_splits, "an int or None") == 1
    arguments: dict[str, Any] = dict(
        scale=scale,
        causal="bottom_right" if right == 0 else False,
        window=None if left is None and not right else (left, right),
        place=Place(bottom_right=True),
        key_lengths=seqused_k,
        row_invariant=alone and not on_cpu,
    )
    if block_table is not None:
        cu_seq_k = None
    elif seqused_k is not None and on_cpu:
        max_k = None  # ty: ignore
    casts = may_autocast() and torch.is_autocast_enabled(query.device.type)
    with torch.autocast(query.device.type, enabled=False) if casts else nullcontext():
        out, lse = attention_packed(
            *(query, key, value, cu_seq_q, cu_seq_k),
            block_table=block_table,
            max_q=max_q,
            max_k=max_k,
            return_lse=True,
            **arguments,
        )
    return (out, lse.transpose(0, 1)) if with_lse else out


def varlen_attn_out(
    out: Tensor, query: Tensor, *args: Any, **kwargs: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`varlen_attn` that writes the output into `out`, and returns that in its place.

    Autograd records the write: gradients reach query, key and value through `out`, where torch's
    function drops them.

    Args:
        out: Where to write.
        query: Queries of all sequences.
        *args: As in `varlen_attn`.
        **kwargs: As in `varlen_attn`.

    Shape:
        out: (T, H, Dv), query's dtype.

    Returns:
        out, or (out, lse).

    Raises:
        ValueError, TypeError, NotImplementedError: As `varlen_attn`.
    """
    need_a_tensor("out", out)
    result = varlen_attn(query, *args, **kwargs)
    found = result[0] if isinstance(result, tuple) else result
    same = out.ndim == found.ndim and agree(tuple(out.shape), tuple(found.shape))
    need(same, "out", f"shape {tuple(out.shape)}", f"{tuple(found.shape)}")
    need(out.dtype == found.dtype, "out.dtype", out.dtype, f"query's {found.dtype}")
    need(out.device == found.device, "out.device", out.device, f"query's {found.device}")
    out.copy_(found)
    return (out, result[1]) if isinstance(result, tuple) else out


def _wants_lse(return_aux: Any) -> bool:
    """Whether an AuxRequest asks for the LSE. Another request of a newer torch raises."""
    if return_aux is None:
        return False
    for name in getattr(return_aux, "_fields", ()):
        if name != "lse" and getattr(return_aux, name) not in (None, False):
            raise NotImplementedError(
                f"return_aux.{name}: got {getattr(return_aux, name)!r}, expected None or False: "
                "fastattn returns the LSE alone"
            )
    return bool(return_aux.lse)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor | None,
    seqused_k: Tensor | None,
    cu_seq_k: Tensor | None,
    enable_gqa: bool,
) -> None:
    """Apply torch's rules that `attention_packed` does not have."""
    flag("enable_gqa", enable_gqa)
    paged = block_table is not None
    lie = "(P, page, heads, head_dim) with block_table" if paged else "(tokens, heads, head_dim)"
    for name, x in (("query", query), ("key", key), ("value", value)):
        need_a_tensor(name, x)
        expected = "(tokens, heads, head_dim)" if x is query else lie
        ndim = 4 if paged and x is not query else 3
        need(x.ndim == ndim, name, f"shape {tuple(x.shape)}", expected)
    if paged and seqused_k is None:
        raise ValueError(
            "seqused_k: got None beside block_table, expected the number of keys of each sequence"
        )
    if not paged and cu_seq_k is None:
        raise ValueError("cu_seq_k: got None without block_table, expected the offsets of keys")
    heads, of_keys = query.shape[1], key.shape[-2]
    if not enable_gqa and not holds(heads == of_keys):
        raise ValueError(
            "Expect query and key/value to have the same number of heads but got "
            f"Hq={heads} and Hkv={of_keys}. Try setting enable_gqa=True for GQA."
        )
    if enable_gqa and not divides(of_keys, heads):
        raise ValueError(
            "Expect number of query heads to be a multiple of kv heads for GQA but got "
            f"Hq={heads} and Hkv={of_keys}."
        )
