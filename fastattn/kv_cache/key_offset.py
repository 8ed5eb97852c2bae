"""Keys that are stored in few bits less an offset: how it is found, and what scores lack then.

Keys of many models have channels that are far from 0 in every token, by a bias of the layer above
all. Such a constant adds one number to all scores of a row, which softmax does not see; but a row's
scale has to reach it, and the steps between its numbers grow. So keys are stored less an offset of
each head (Hk,D). Where a result depends on the number itself, scale q . offset, it is added again:
before a score_mod and a softcap, and to the LSE, with which sinks are compared. Before a score_mod
and a softcap a score_mod adds it, if the kernels run one, and it is small enough to be captured;
else keys are restored.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..api import attention_packed
from ..call.quantisation import dequantised
from ..call.sizes import known
from ..call.spec import EVERYTHING, PUBLIC, acc_dtype
from ..call.validation import DTYPES, check_alone
from ..merging import merge
from ..score_mods.lowering import MOST_COPIED

FEWEST = 16  # tokens that tell an offset from chance
OF_SCORES = [name for name, x in PUBLIC.items() if x.stage == "score"]


def offset_of(k: Tensor, value_dim: int = 0) -> Tensor | None:
    """The offset (Hk,D) of keys (B,Hk,n,D) or (T,Hk,D); None if there is none.

    It is the mean of a channel, where that is larger than the deviation, with a margin for chance;
    else 0. So keys without an offset keep their bits, and few tokens that differ from all others do
    no harm. value_dim: the first columns of a key that are values, too, which keep theirs. Only on
    a CPU does it look whether any channel has an offset: elsewhere that would wait for the device.
    """
    dims = (0, 2) if k.ndim == 4 else (0,)
    n, dtype = math.prod(k.shape[dim] for dim in dims), acc_dtype(k.dtype)
    if n < FEWEST:
        return None
    mean = k.mean(dims, dtype=dtype)
    square = torch.linalg.vector_norm(k, 2, dims, dtype=dtype).square() / n
    margin = (1 + 4 / math.sqrt(n)) ** 2
    far = mean.square() > margin * (square - mean.square())  # False for NaN and infinity
    far[:, :value_dim] = False
    if k.device.type == "cpu" and not far.any():
        return None
    return torch.where(far, mean, 0)


def attend(q: Tensor, offset: Tensor, given: dict[str, Any]) -> Any:
    """`attention_packed` of q (T,H,D) over keys that are stored less `offset` (Hk,D)."""
    sinks, with_lse = given.get("sinks"), given.get("return_lse")
    inside = any(given.get(name) is not None for name in OF_SCORES)
    if not (inside or sinks is not None or with_lse) or not _fit(q, offset):
        return attention_packed(q, **given)  # and raises if q does not fit
    removed = _removed(q, offset, given.get("scale"))
    if inside:
        few = not known(removed.numel() > MOST_COPIED)
        if few and not given.get("row_invariant"):  # which path runs may depend on the rows
            try:
                whole: Any = given | dict(score_mod=_restoring(removed, given))
                return attention_packed(q, **whole)
            except NotImplementedError:  # no kernel runs that score_mod
                pass
        return _over_restored_keys(q, offset, given)
    bare: Any = given | dict(sinks=None, return_lse=True)
    out, lse = attention_packed(q, **bare)
    lse = torch.where(lse == -torch.inf, lse, lse + removed)
    if sinks is not None:  # a part without a value
        check_alone("sinks", sinks, q.dtype, H=q.shape[1])
        out, lse = merge([(out, lse), (torch.zeros_like(out), sinks.to(lse.dtype).expand_as(lse))])
    return (out, lse) if with_lse else out


def _fit(q: Any, offset: Tensor) -> bool:
    heads, D = offset.shape
    fits = isinstance(q, Tensor) and q.dtype in DTYPES and q.ndim == 3
    return fits and q.shape[2] == D and q.shape[1] % heads == 0


def _removed(q: Tensor, offset: Tensor, scale: float | None) -> Tensor:
    """What the scores of each row lack, (T,H). A row has the same bits among any others."""
    heads, D = offset.shape
    product = q.unflatten(1, (heads, q.shape[1] // heads)).to(offset.dtype) * offset[:, None]
    return product.sum(-1).flatten(1) * (1 / math.sqrt(D) if scale is None else float(scale))


def _restoring(removed: Tensor, given: dict[str, Any]) -> Any:
    """The call's score_mod, of the whole score."""
    mod, first, place = given.get("score_mod"), given["cu_q"], given.get("place") or EVERYTHING
    last = removed.shape[0] - 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = (first[b - place.item] + i).clamp(max=last)  # of padding: any
        score = score + removed[row, h - place.head]
        return score if mod is None else mod(score, b, h, i, j)

    return score_mod


def _over_restored_keys(q: Tensor, offset: Tensor, given: dict[str, Any]) -> Any:
    """The call with the items' keys and values in q's dtype, float32 at least: in 16 bits, keys
    would lose in the offset what their storage has kept."""
    exact, table, mask = acc_dtype(q.dtype), given["block_table"], given.get("mask")

    def gathered(name: str) -> Tensor:
        x, scale = given[name], given.get(f"{name}_scale")
        x = x.view(torch.int8)[table].view(x.dtype)  # torch before 2.10 indexes no float8
        return dequantised(x, None if scale is None else scale[table], exact).flatten(0, 1)

    pages = torch.arange(table.numel(), dtype=table.dtype, device=table.device)
    own: Any = given | dict(
        k=gathered("k") + offset.to(exact),
        v=gathered("v"),
        k_scale=None,
        v_scale=None,
        block_table=pages.view(table.shape),
        mask=mask.to(exact) if isinstance(mask, Tensor) and mask.dtype == q.dtype else mask,
    )
    result = attention_packed(q.to(exact), **own)
    return (result[0].to(q.dtype), result[1]) if given.get("return_lse") else result.to(q.dtype)
