"""flash-attn's key-value caches: find each key's page, append new keys, attend to the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.quantisation import STORAGE
from ..rotation.rotate import rotate
from .checks import in_their_names, need_integers, need_shape, refuse_int4, within
from .sequences import (
    NO_FUNCTIONS,
    NO_SCALES,
    Functions,
    Keys,
    Rows,
    Scales,
    Tokens,
    attend_sequences,
    check_scales,
    need_queries,
)
from .translation import Arguments, dense


class Cache(NamedTuple):
    """Pages k (P,page,Hk,D) and v (P,page,Hk,Dv). `table` (B,pages) lists each sequence's pages in
    order. A sequence's keys begin at `starts` (B,), or at 0. `is_plain` means that item b of k is
    sequence b: each sequence has one page of the cache's full capacity."""

    k: Tensor
    v: Tensor
    table: Tensor
    starts: Tensor | None
    is_plain: bool

    @classmethod
    def of(
        cls,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: int,
        block_table: Tensor | None,
        cache_batch_idx: Tensor | None,
        cache_leftpad: Tensor | None,
    ) -> Cache:
        """Make a Cache from flash-attn's arguments; raise if they do not fit each other."""
        lie = ("items", "capacity") if block_table is None else ("blocks", "page")
        need_shape("k_cache", k_cache, (*lie, "heads", "head_dim"))
        need_shape("v_cache", v_cache, (*k_cache.shape[:3], "head_dim"))
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            refuse_int4(name, x)
        if cache_batch_idx is not None:
            need_integers("cache_batch_idx", cache_batch_idx, (batch,))
        if block_table is not None:
            rows = batch if cache_batch_idx is None else "items"
            need_integers("block_table", block_table, (rows, "pages"))
            table = block_table
        elif cache_batch_idx is None and len(k_cache) < batch:
            raise ValueError(f"k_cache: got {len(k_cache)} items, expected {batch}, as q has")
        else:
            items = batch if cache_batch_idx is None else len(k_cache)
            table = torch.arange(items, device=k_cache.device)[:, None]
        if cache_batch_idx is not None:
            table = table[within("cache_batch_idx", cache_batch_idx, len(table) - 1)]
        is_plain = block_table is None and cache_batch_idx is None
        if cache_leftpad is not None:
            need_integers("cache_leftpad", cache_leftpad, (batch,))
        return cls(k_cache, v_cache, table, cache_leftpad, is_plain and cache_leftpad is None)

    @property
    def capacity(self) -> int:
        return self.table.shape[1] * self.k.shape[1]

    def lengths(self, cache_seqlens: int | Tensor | None, new: int | Tensor) -> Tensor:
        """Each sequence's length (B,) int64; raise on a CPU unless `new` more keys fit."""
        batch = len(self.table)
        if not isinstance(cache_seqlens, Tensor):
            length = self.capacity if cache_seqlens is None else cache_seqlens
            cache_seqlens = torch.full((batch,), length, device=self.k.device)
        need_integers("cache_seqlens", cache_seqlens, (batch,))
        count = f"{new} " if isinstance(new, int) else ""
        told = "" if count == "0 " else f", {count}new ones among them"
        room = f"{self.capacity} keys fit{told}"
        return within("cache_seqlens", cache_seqlens, self.capacity - new, room)

    def looked_at(self, lengths: Tensor) -> Cache:
        """This cache with a table and starts in range, for sequences that end at `lengths` (B,).
        Values out of range raise on a CPU and are clamped elsewhere; unused pages become 0."""
        if self.is_plain:
            return self
        page = self.k.shape[1]
        begins = page * torch.arange(self.table.shape[1], device=lengths.device)
        needed = torch.where(begins < lengths[:, None], self.table, 0)
        table, starts = within("block_table", needed, max(0, len(self.k) - 1)), self.starts
        if starts is not None:
            starts = within("cache_leftpad", starts, lengths, "no more than there are keys")
        return self._replace(table=table, starts=starts)

    def append(self, k: Tensor, v: Tensor, at: Tensor, item: Tensor) -> None:
        """Write token t of k and v, (B,n,Hk,·) or (n,Hk,·), as key at[t] of sequence item[t]."""
        page = self.k.shape[1]
        if not self.is_plain:
            item, at = self.table[item, at // page], at % page
            _need_own(item * page + at)
        self.k[item, at], self.v[item, at] = k, v

    def pages(self, lengths: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Pages of k and of v, then their table and the number of keys of each sequence, (B,).

        With left padding a sequence begins inside a page, so every key becomes a page of one."""
        if self.starts is None:
            return self.k, self.v, (self.table, lengths)
        page, count = self.k.shape[1], self.capacity
        j = (self.starts[:, None] + torch.arange(count, device=lengths.device)).clamp(max=count - 1)
        table = self.table.long().gather(1, j // page) * page + j % page
        k, v = (x.flatten(0, 1)[:, None] for x in (self.k, self.v))
        return k, v, (table, lengths - self.starts)


@torch.no_grad()
def attend_to_cache(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache: Cache,
    cache_seqlens: int | Tensor | None,
    rotation: tuple[Tensor | None, Tensor | None, bool],
    arguments: Arguments,
    functions: Functions = NO_FUNCTIONS,
    scales: Scales = NO_SCALES,
    *,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Append k and v, then attend: out and LSE, (B,M,H,Dv) and (B,H,M) of q (B,M,H,D), or (T,H,Dv)
    and (H,T) of q (T,H,D)."""
    B = len(cache.table)
    # What raises does so before anything is written.
    need_queries(q, qv, cu_seqlens_q)
    packed = None if cu_seqlens_q is None else Tokens.of("cu_seqlens_q", cu_seqlens_q, q, B)
    check_scales(B, q.shape[-2], cache.k.shape[2], scales)
    if arguments["sinks"] is not None:
        need_shape("s_aux", arguments["sinks"], (q.shape[-2],))
    if q.dtype != cache.k.dtype and cache.k.dtype not in STORAGE:
        raise ValueError(f"q.dtype: got {q.dtype}, expected {cache.k.dtype}, as k_cache has")
    new: Tokens | None = None
    if k is not None or v is not None:
        if cache_seqlens is None:
            raise ValueError(
                "cache_seqlens: got None beside k and v, expected the position at which to write "
                "them"
            )
        _need_like_cache(k, v, cache, cu_seqlens_k_new is not None)
        assert k is not None
        new = Tokens.of("cu_seqlens_k_new", cu_seqlens_k_new, k, B)
    elif cu_seqlens_k_new is not None:
        raise ValueError("cu_seqlens_k_new: got it without k and v, expected both, or None")
    before = cache.lengths(cache_seqlens, 0 if new is None else new.counts)
    lengths = before if new is None else before + new.counts
    cache = cache.looked_at(lengths)
    if any(x is not None for x in rotation[:2]):
        shown = arguments["window"], functions.band, functions.chunk or None
        together = not arguments["causal"] and all(x is None for x in shown)
        first = before
        if rotary_seqlens is not None:
            need_integers("rotary_seqlens", rotary_seqlens, (B,))
            first = rotary_seqlens.long()
        rows = packed or Tokens.of("cu_seqlens_q", None, q)
        q, k = _rotated(q, k, rows, new, first, rotation, together)
    if k is not None and v is not None and new is not None:
        cache.append(k, v, new.of_each(before) + new.step, new.item)
    in_eight_bits = any(x.dtype in STORAGE for x in (q, cache.k))
    with in_their_names(k="k_cache", v="v_cache", key_lengths="cache_seqlens"):
        plain = cache.is_plain and scales == NO_SCALES and not in_eight_bits
        if plain and packed is None:
            given = arguments | functions.of(q.shape[1], lengths) | dict(key_lengths=lengths)
            return dense(q, cache.k[:B], cache.v[:B], given, qv=qv)[:2]
        keys, values, (table, counts) = cache.pages(lengths)
        of_rows = Rows.of(q, qv, cu_seqlens_q, None, max_seqlen_q)
        of_keys = Keys(keys, values, None, table, counts, cache.capacity)
        return attend_sequences(of_rows, of_keys, arguments, functions, scales)


def _need_own(rows: Tensor) -> None:
    """Raise if two sequences would write to one row of the cache. Only a CPU checks this."""
    if rows.device.type == "cpu" and rows.unique().numel() < rows.numel():
        raise ValueError(
            "k: got keys of two sequences for one row of the cache, expected a row of its own "
            "for each new key; sequences may share only rows that this call does not write"
        )


def _need_like_cache(k: Any, v: Any, cache: Cache, packed: bool) -> None:
    """Raise if k or v does not fit the cache."""
    axis = 0 if packed else 1
    n = k.shape[axis] if isinstance(k, Tensor) and k.ndim > axis else 0
    tokens = (n,) if packed else (len(cache.table), n)
    for name, x, into in (("k", k, cache.k), ("v", v, cache.v)):
        expected = *tokens, *into.shape[2:]
        if x is None:
            raise ValueError(
                f"{name}: got None, expected {into.dtype} as its cache: k and v go together"
            )
        if not isinstance(x, Tensor) or x.shape != expected or x.dtype != into.dtype:
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
            raise ValueError(f"{name}: got {got}, expected {into.dtype} {expected}, as its cache")


def _rotated(
    q: Tensor,
    k: Tensor | None,
    rows: Tokens,
    new: Tokens | None,
    first: Tensor,
    rotation: tuple[Tensor | None, Tensor | None, bool],
    together: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate the first R columns of q and k. Token j of a sequence is at position first + j, or, if
    `together`, every row of q at `first`."""
    cos, sin, interleaved = rotation
    if k is None or new is None:
        raise ValueError(
            "rotary_cos: got it without k, expected k too; rotate q alone before the call"
        )
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(x, Tensor) or x.ndim != 2 or 2 * x.shape[1] > q.shape[-1]:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
            raise ValueError(f"{name}: got {got}, expected (positions, R / 2), R <= {q.shape[-1]}")
    assert cos is not None and sin is not None
    if cos.shape != sin.shape:
        expected = f"{tuple(cos.shape)}, as rotary_cos has"
        raise ValueError(f"rotary_sin: got shape {tuple(sin.shape)}, expected {expected}")

    def turn(x: Tensor, tokens: Tokens, still: bool) -> Tensor:
        at = tokens.of_each(first) + tokens.step * (not still)
        at = within("rotary_cos", at, len(cos) - 1, "the positions it has")
        return rotate(x, cos[at][..., None, :], sin[at][..., None, :], interleaved)

    return turn(q, rows, together), turn(k, new, False)
