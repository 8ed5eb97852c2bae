"""Attention to selected keys: each row names the blocks of keys that it attends to."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Unpack  # torch depends on it

from ..api import attention_packed
from ..call.need import alignment, flag, whole
from ..call.signatures import refuse_unknown, with_arguments
from ..call.sizes import agree, divides, holds
from ..call.spec import ScoreArguments
from ..dispatch.torch_function import is_compiling, is_overridden
from ..merging import weigh
from .key_lists import key_lists
from .seen import need_integers, need_lengths, need_tensor

BLOCKS = (1, 4, 16, 32, 64, 128)


@overload
def attention_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block: int = 1,
    key_lengths: Tensor | None = None,
    causal: bool | Literal["top_left", "bottom_right"] = False,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    **arguments: Unpack[ScoreArguments],
) -> Tensor: ...
@overload
def attention_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block: int = 1,
    key_lengths: Tensor | None = None,
    causal: bool | Literal["top_left", "bottom_right"] = False,
    return_lse: Literal[True],
    backend: str | None = None,
    **arguments: Unpack[ScoreArguments],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block: int = 1,
    key_lengths: Tensor | None = None,
    causal: bool | Literal["top_left", "bottom_right"] = False,
    return_lse: bool,
    backend: str | None = None,
    **arguments: Unpack[ScoreArguments],
) -> Tensor | tuple[Tensor, Tensor]: ...
@functools.partial(with_arguments, kind=ScoreArguments)
def attention_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block: int = 1,
    key_lengths: Tensor | None = None,
    causal: bool | Literal["top_left", "bottom_right"] = False,
    return_lse: bool = False,
    backend: str | None = None,
    **arguments: Unpack[ScoreArguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `attention` of each row to the blocks of keys that `indices` names for it.

    Row i of group g attends to the keys indices[b, g, i, s] * block + [0, block) for each s, unless
    causal or key_lengths hides them. Sparse attention by index in DeepSeek-V3.2 (block 1), NSA and
    MoBA (blocks) has this form. Time and memory are in proportion to the keys that are named.

    Each row is a sequence of `attention_packed`, and its blocks are pages. Gradients reach q, k, v
    and sinks. Those of k and v are sums over rows in the order of rows: they have the same bits in
    every run and with any number of threads. There is no forward mode and no second derivative.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        indices: The blocks of each row, in any order; a block that is named twice counts once. -1
            is none. The last block may be partial. Other values out of range raise, on a GPU only
            if FASTATTN_CHECK=1; else they count as none.
        block: The number of keys of a block.
        key_lengths: As in `attention`. Named keys at or past an item's length are hidden.
        causal: As in `attention`.
        return_lse: If True, also return the LSE. It has a gradient, so `fastattn.merge` can combine
            selected keys with a local window in one softmax.
        backend: As in `attention`. The backward pass runs on the first backend that has it, if this
            one has none.
        **arguments: softcap, sinks, dropout_p, seed and scale of `attention`. Draws of dropout
            count the keys that a row sees, in ascending order: row i of item b draws what
            `attention_packed` draws for sequence (b G + g) M + i.

    Shape:
        q: (B, H, M, D), float32, float64, bfloat16 or float16.
        k: (B, Hk, N, D), q's dtype and device.
        v: (B, Hk, N, Dv), q's dtype and device.
        indices: (B, G, M, S), int32 or int64, on q's device. G is 1, Hk or H: heads h with the same
            h // (H / G) share a list.
        block: 1, 4, 16, 32, 64 or 128.
        key_lengths: (B,), int32 or int64.
        {shapes}
        out: (B, H, M, Dv), q's dtype, in the memory order (B, M, H, Dv).
        lse: (B, H, M), float32 (float64 for float64).

    Returns:
        out, or (out, lse) with return_lse. A row without keys has 0 and -inf (or its sink).

    Raises:
        ValueError: An argument has a value, shape, dtype or device that breaks these rules.
        TypeError: An argument has a wrong type.
        NotImplementedError: No backend can run the call; or forward mode, or a second derivative.

    Example:
        >>> import torch
        >>> import fastattn
        >>> q, k, v = torch.randn(3, 1, 4, 256, 32)
        >>> chosen = fastattn.top_blocks(q, k, block=16, count=4, causal=True)
        >>> out = fastattn.attention_selected(q, k, v, chosen, block=16, causal=True)
        >>> every = torch.arange(16).expand(1, 1, 256, 16)
        >>> full = fastattn.attention_selected(q, k, v, every, block=16, causal=True)
        >>> torch.testing.assert_close(full, fastattn.attention(q, k, v, causal=True))
    """
    flag("return_lse", return_lse)
    if is_overridden(q, k, v, indices) and not is_compiling():
        own: dict[str, Any] = dict(block=block, key_lengths=key_lengths, causal=causal)
        own |= dict(return_lse=return_lse, backend=backend, **arguments)
        given = q, k, v, indices
        return torch.overrides.handle_torch_function(attention_selected, given, *given, **own)
    refuse_unknown("attention_selected", arguments, ScoreArguments)
    others: Any = arguments
    sinks = others.pop("sinks", None)
    _check(q, k, v, indices, block, key_lengths, sinks)
    table, lengths = key_lists(indices, key_lengths, k.shape[2], block, alignment(causal))
    call = _Fold(*q.shape[:3], indices.shape[1], k.shape[1])
    one_group = call.G == 1
    rows, lse = attention_packed(
        call.rows(q),
        call.pages(k, block),
        call.pages(v, block),
        torch.arange(call.sequences + 1, device=q.device),
        block_table=call.table(table, -(-k.shape[2] // block)),
        key_lengths=lengths.flatten(),
        max_q=1,
        max_k=table.shape[3] * block,
        sinks=sinks if one_group else None,
        backend=backend,
        return_lse=True,
        **others,
    )
    out, lse = call.heads(rows), call.heads(lse[..., None])[..., 0]
    if sinks is not None and not one_group:
        out, lse = _with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


class _Fold(NamedTuple):
    """A call as a packed batch: a sequence for each item, group and row, in this order. The heads
    of a group are those of its sequences."""

    B: int
    H: int
    M: int
    G: int
    Hk: int

    @property
    def sequences(self) -> int:
        return self.B * self.G * self.M

    @property
    def key_heads(self) -> int:
        """The key heads of a sequence. With lists for each head, several read one key head."""
        return self.Hk if self.G == 1 else 1

    def rows(self, q: Tensor) -> Tensor:
        """(B,H,M,D) as (sequences, heads, D)."""
        return q.unflatten(1, (self.G, self.H // self.G)).transpose(2, 3).flatten(0, 2)

    def pages(self, x: Tensor, block: int) -> Tensor:
        """(B,Hk,N,D) as (pages, block, key heads, D): views of x where its layout allows them."""
        if rest := -x.shape[2] % block:
            x = F.pad(x, (0, 0, 0, rest))  # zeros that no row sees
        x = x.unflatten(2, (x.shape[2] // block, block))
        if self.key_heads == 1:
            return x.flatten(0, 2)[:, :, None]
        return x.permute(0, 2, 3, 1, 4).flatten(0, 1)

    def table(self, blocks: Tensor, per_head: int) -> Tensor:
        """Blocks (B,G,M,S) as pages (sequences, S). per_head: the blocks of a key head."""
        item = torch.arange(self.B, device=blocks.device)[:, None]
        if self.key_heads == 1:
            group = torch.arange(self.G, device=blocks.device)
            item = item * self.Hk + group * self.Hk // max(self.G, 1)
        return (blocks + (item * per_head)[:, :, None, None]).flatten(0, 2)

    def heads(self, x: Tensor) -> Tensor:
        """(sequences, heads, D) as (B,H,M,D), in the memory order (B,M,H,D)."""
        x = x.unflatten(0, (self.B, self.G, self.M)).transpose(1, 2)
        return x.flatten(2, 3).contiguous().transpose(1, 2)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add each head's sink to the denominators: each probability is multiplied by one factor."""
    own = sinks.to(lse.dtype)[:, None].expand_as(lse)
    (share, _), top, log = weigh(torch.stack([lse, own]))
    return (out.to(lse.dtype) * share).to(out.dtype), top + log


def _check(q, k, v, indices, block, key_lengths, sinks) -> None:
    for name, x, axes in (
        ("q", q, "B H M D"),
        ("k", k, "B Hk N D"),
        ("v", v, "B Hk N Dv"),
        ("indices", indices, "B G M S"),
    ):
        need_tensor(name, x, axes)
    if whole("block", block, f"one of {BLOCKS}") not in BLOCKS:
        raise ValueError(f"block: got {block}, expected one of {BLOCKS}")
    (B, H, M, D), (_, Hk, N, _) = q.shape, k.shape
    for name, x, shape, why in (
        ("k", k, (B, Hk, N, D), "q's B and D"),
        ("v", v, (B, Hk, N, v.shape[3]), "k's B, Hk and N"),
    ):
        if not agree(x.shape, shape):
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {shape}: {why}")
    if not divides(Hk, H):
        raise ValueError(f"k: got {Hk} heads, expected a divisor of q's {H} heads")
    G = indices.shape[1]
    if not (agree(indices.shape[:3:2], (B, M)) and holds((G == 1) | (G == Hk) | (G == H))):
        raise ValueError(
            f"indices: got shape {tuple(indices.shape)}, expected (B, G, M, S) with B = {B}, "
            f"M = {M} and G one of 1, Hk = {Hk} and H = {H}"
        )
    need_integers("indices", indices, q)
    need_lengths(key_lengths, B, q)
    if sinks is not None:
        need_tensor("sinks", sinks, "H")
        if not agree(sinks.shape, (H,)):
            raise ValueError(f"sinks: got shape {tuple(sinks.shape)}, expected (H,) = ({H},)")
