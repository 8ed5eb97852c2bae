"""flash-attn's key-value caches: find each key's page, append new keys, attend to the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..nn.positions import rotate
from .checks import in_their_names, need_integers, need_shape, refuse_int4, within
from .translation import Arguments, dense, packed


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
        lie = "items", "capacity"
        if block_table is not None:
            lie = "blocks", "page"
            need_integers("block_table", block_table, (batch, "pages"))
            for name, x in (("_batch_idx", cache_batch_idx), ("_leftpad", cache_leftpad)):
                if x is not None:
                    raise ValueError(f"cache{name}: got it beside block_table, expected only one")
        need_shape("k_cache", k_cache, (*lie, "heads", "head_dim"))
        need_shape("v_cache", v_cache, (*k_cache.shape[:3], "head_dim"))
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            refuse_int4(name, x)
        table, is_plain = block_table, False
        if cache_batch_idx is not None:
            need_integers("cache_batch_idx", cache_batch_idx, (batch,))
            table = within("cache_batch_idx", cache_batch_idx, len(k_cache) - 1)[:, None]
        elif table is None:
            if len(k_cache) < batch:
                raise ValueError(f"k_cache: got {len(k_cache)} items, expected {batch}, as q has")
            table, is_plain = torch.arange(batch, device=k_cache.device)[:, None], True
        if cache_leftpad is not None:
            need_integers("cache_leftpad", cache_leftpad, (batch,))
        return cls(k_cache, v_cache, table, cache_leftpad, is_plain and cache_leftpad is None)

    @property
    def capacity(self) -> int:
        return self.table.shape[1] * self.k.shape[1]

    def lengths(self, cache_seqlens: int | Tensor | None, new: int) -> Tensor:
        """Each sequence's length (B,) int64; raise on a CPU unless `new` more keys fit."""
        batch = len(self.table)
        if not isinstance(cache_seqlens, Tensor):
            length = self.capacity if cache_seqlens is None else cache_seqlens
            cache_seqlens = torch.full((batch,), length, device=self.k.device)
        need_integers("cache_seqlens", cache_seqlens, (batch,))
        room = f"{self.capacity} keys fit" + (f", {new} new ones among them" if new else "")
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

    def append(self, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        """Write k (B,n,Hk,D) and v (B,n,Hk,Dv) after the first `lengths` (B,) keys."""
        item = torch.arange(len(k), device=lengths.device)[:, None]
        at = lengths[:, None] + torch.arange(k.shape[1], device=lengths.device)
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
        first = self.table * self.capacity + self.starts[:, None]
        table = first + torch.arange(self.capacity, device=first.device)
        k, v = (x.flatten(0, 1)[:, None] for x in (self.k, self.v))
        return k, v, (table, lengths - self.starts)


@torch.no_grad()
def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache: Cache,
    cache_seqlens: int | Tensor | None,
    rotation: tuple[Tensor | None, Tensor | None, bool],
    arguments: Arguments,
) -> tuple[Tensor, Tensor]:
    """Append k and v, then attend: out (B,M,H,Dv) and LSE (B,H,M) of q (B,M,H,D)."""
    new = 0 if k is None and v is None else _count_new(k, v, cache, cache_seqlens)
    before = cache.lengths(cache_seqlens, new)
    lengths = before + new
    cache = cache.looked_at(lengths)
    if any(x is not None for x in rotation[:2]):
        together = not arguments["causal"] and arguments["window"] is None
        q, k = _rotated(q, k, before, rotation, together)
    if k is not None and v is not None:
        cache.append(k, v, before)
    B, M = q.shape[:2]
    with in_their_names(k="k_cache", v="v_cache", key_lengths="cache_seqlens"):
        if cache.is_plain:
            given = arguments | dict(key_lengths=lengths)
            return dense(q, cache.k[:B], cache.v[:B], given)[:2]
        cu_q = M * torch.arange(B + 1, device=q.device)
        keys, values, pages = cache.pages(lengths)
        sizes = M, cache.capacity
        out, lse, _ = packed(q.flatten(0, 1), keys, values, cu_q, pages, *sizes, arguments)
        return out.unflatten(0, (B, M)), lse.unflatten(1, (B, M)).transpose(0, 1)


def _need_own(rows: Tensor) -> None:
    """Raise if two sequences would write to one row of the cache. Only a CPU checks this."""
    if rows.device.type == "cpu" and rows.unique().numel() < rows.numel():
        raise ValueError(
            "k: got keys of two sequences for one row of the cache, expected a row of its own "
            "for each new key; sequences may share only rows that this call does not write"
        )


def _count_new(k: Tensor | None, v: Tensor | None, cache: Cache, cache_seqlens) -> int:
    """The number of keys to append; raise if k or v does not fit the cache."""
    if cache_seqlens is None:
        raise ValueError(
            "cache_seqlens: got None beside k and v, expected the position at which to write them"
        )
    n = k.shape[1] if isinstance(k, Tensor) and k.ndim > 1 else 0
    for name, x, into in (("k", k, cache.k), ("v", v, cache.v)):
        expected = len(cache.table), n, *into.shape[2:]
        if not isinstance(x, Tensor) or x.shape != expected or x.dtype != into.dtype:
            got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
            raise ValueError(f"{name}: got {got}, expected {into.dtype} {expected}, as its cache")
    return n


def _rotated(q, k, lengths, rotation, together: bool) -> tuple[Tensor, Tensor]:
    """Rotate the first R columns of q and k. Row j of k is at position lengths + j, row i of q at
    lengths + i, or, if `together`, every row of q at `lengths`."""
    cos, sin, interleaved = rotation
    if k is None:
        raise ValueError(
            "rotary_cos: got it without k, expected k too; rotate q alone before the call"
        )
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(x, Tensor) or x.ndim != 2 or 2 * x.shape[1] > q.shape[3]:
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
            raise ValueError(f"{name}: got {got}, expected (positions, R / 2), R <= {q.shape[3]}")
    if cos.shape != sin.shape:
        expected = f"{tuple(cos.shape)}, as rotary_cos has"
        raise ValueError(f"rotary_sin: got shape {tuple(sin.shape)}, expected {expected}")

    def turn(x, still):
        steps = torch.arange(x.shape[1], device=x.device) * (not still)
        at = within("rotary_cos", lengths[:, None] + steps, len(cos) - 1, "the positions it has")
        return rotate(x, cos[at][:, :, None], sin[at][:, :, None], interleaved)

    return turn(q, together), turn(k, False)
