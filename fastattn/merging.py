"""Combine the results over blocks of keys into the results of the whole call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from .call.sizes import agree
from .call.spec import acc_dtype
from .dispatch.torch_function import is_compiling, is_overridden


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combine attention over blocks of the keys into attention over all keys.

    Gradients flow to every out and lse. 16-bit outputs are rounded before they are merged; if that
    is too coarse, use parts in float32.

    Args:
        parts: Pairs (out, lse) of the same rows, one for each block of keys, as
            `attention(..., return_lse=True)` returns them. If there are sinks, exactly one part
            includes them.

    Shape:
        out: (..., Dv), one shape and dtype for all parts; the result has it too.
        lse: (...), float32, or float64 for float64; the result has it too.

    Returns:
        (out, lse): lse is the log of the sum of exp(lse), and out is the sum of the outputs, each
        weighted by its share of it (FlashAttention-2, Dao 2023, section 3.1). A row that has no
        keys in any part is empty: 0 and -inf.

    Raises:
        ValueError: There are no parts, or their shapes, dtypes or devices differ.
        TypeError: A part is not a pair of tensors.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k, v = torch.randn(3, 1, 2, 10, 16)
        >>> blocks = zip(k.split(4, 2), v.split(4, 2))
        >>> parts = [fastattn.attention(q, *block, return_lse=True) for block in blocks]
        >>> out, lse = fastattn.merge(parts)
        >>> torch.testing.assert_close(out, fastattn.attention(q, k, v))
    """
    parts = list(parts)
    given = [x for part in parts for x in (part if isinstance(part, (tuple, list)) else (part,))]
    if is_overridden(*given) and not is_compiling():
        return handle_torch_function(merge, given, parts)
    _check(parts)
    shares, top, log = weigh(torch.stack([lse for _, lse in parts]))
    out = sum(x.to(share.dtype) * share for (x, _), share in zip(parts, shares))
    return out.to(parts[0][0].dtype), top + log


def weigh(lses: Tensor, lost: Tensor | float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Weigh parts by their LSEs.

    lses: dimension 0 is the part. lost: the rounding error of `lses`.

    Returns the share of each part in the whole, with a last dimension of size 1, so that it
    broadcasts with an output; and two terms that add up to the LSE of the whole: the largest LSE
    (0 if all are -inf), and the log of a sum.
    """
    top = lses.detach().amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)  # or -inf - (-inf) = NaN
    e = torch.exp(lses - top + lost)
    total = e.sum(0)
    safe = torch.where(total == 0, 1.0, total)  # before the division: NaN would reach gradients
    log = torch.where(total == 0, -torch.inf, torch.log(safe))
    return (e / safe).unsqueeze(-1), top, log


def _check(parts: list) -> None:
    if not parts:
        raise ValueError("parts: got none, expected at least one (out, lse)")
    for at, part in enumerate(parts):
        is_pair = isinstance(part, (tuple, list)) and len(part) == 2
        if not is_pair or not all(isinstance(x, Tensor) for x in part):
            raise TypeError(f"parts[{at}]: got {type(part).__name__}, expected tensors (out, lse)")
    first = parts[0][0]
    expected = first.dtype, first.device
    for at, (out, lse) in enumerate(parts):
        if (out.dtype, out.device) != expected or not agree(out.shape, first.shape):
            raise ValueError(f"parts[{at}]: got out {_told(out)}, expected {_told(first)}")
        kind = acc_dtype(out.dtype), out.device
        if (lse.dtype, lse.device) != kind or not agree(lse.shape, out.shape[:-1]):
            raise ValueError(
                f"parts[{at}]: got lse {_told(lse)}, expected {acc_dtype(out.dtype)} "
                f"{tuple(out.shape[:-1])} on {out.device}, as attention(return_lse=True) gives"
            )


def _told(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}"
