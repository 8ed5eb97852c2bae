"""Pages that the items of a cache share: the number of users of each, and how rows are stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.int4 import INT4, columns, quantised_int4, row_bytes
from ..call.quantisation import STORAGE, quantised
from .huge_pages import advised
from .key_offset import offset_of


def indexable(x: Tensor) -> Tensor:
    """x, or its bytes where it is of float8, which torch does not index on CPUs before 2.10."""
    return x.view(torch.int8) if x.itemsize == 1 else x


class Claim(NamedTuple):
    """Pages that a call takes from a pool and gives back. The pool does not change until
    `Pool.settle`."""

    kept: dict[str, Tensor]  # the pool's tensors, or longer ones in their place
    taken: Tensor  # pages that had no user
    users: Tensor  # the change in each page's number of users

    def copy(self, pages: Tensor, to: Tensor) -> None:
        device = self.kept["k"].device
        pages, to = pages.to(device), to.to(device)
        for x in self.kept.values():
            stored = indexable(x)
            stored[to] = stored[pages]


class Pool:
    """Pages (P,page,Hk,D) of keys and of values, and how many items use each.

    kept: the tensors by their names in `attention_packed`. Rows in eight bits also have scales
        (P,page,Hk). Rows in four bits are bytes of `INT4`, D / 32 * 20 for D numbers.
    latent: None; or that many, the first, of the numbers of a key are its value: only keys are
        kept.
    offset: (Hk,D), or None: rows of keys in few bits are stored less it.
    """

    forked: bool
    dtype: torch.dtype
    kept: dict[str, Tensor]
    users: Tensor
    latent: int | None
    offset: Tensor | None = None

    def __init__(
        self,
        shape: tuple[int, int, int],
        D: int,
        Dv: int,
        dtype: torch.dtype,
        storage: torch.dtype,
        device: torch.device | str | None,
        latent: int | None = None,
    ):
        self.forked, self.dtype, self.latent = False, dtype, latent
        sizes = dict(k=D) if latent is not None else dict(k=D, v=Dv)
        self.kept = {}
        for name, n in sizes.items():
            rows = row_bytes(n) if storage == INT4 else n
            like = torch.empty(0, dtype=storage, device=device)
            self.kept[name] = _pages(like, *shape, rows)
        if storage in STORAGE:
            like = torch.empty(0, dtype=torch.float32, device=device)
            for name in sizes:
                self.kept[f"{name}_scale"] = _pages(like, *shape)
        self.users = torch.zeros(shape[0], dtype=torch.int64, device="cpu")

    @property
    def k(self) -> Tensor:
        return self.kept["k"]

    @property
    def v(self) -> Tensor:
        if self.latent is None:
            return self.kept["v"]
        return self.k[..., : row_bytes(self.latent) if self.k.dtype == INT4 else self.latent]

    @property
    def head_dims(self) -> tuple[int, int]:
        """D and Dv."""
        return columns(self.k), columns(self.v)

    def scale(self, name: str) -> Tensor | None:
        """The factors of the rows of "k" or "v"; None unless rows have eight bits."""
        return self.kept.get("k_scale" if self.latent is not None else f"{name}_scale")

    def given(self) -> dict[str, Tensor]:
        """What `attention_packed` reads."""
        arguments = dict(k=self.k, v=self.v, k_scale=self.scale("k"), v_scale=self.scale("v"))
        return {name: x for name, x in arguments.items() if x is not None}

    @property
    def page(self) -> int:
        return self.k.shape[1]

    def decide_offset(self, k: Tensor) -> None:
        """Keys (B,Hk,n,D) or (T,Hk,D) that come into empty pages decide the offset."""
        if self.k.dtype != self.dtype and not self.users.any():
            self.offset = offset_of(k, self.latent or 0)

    def rows(self, **given: Tensor) -> dict[str, Tensor]:
        """Rows (n,Hk,D) of k, and of v, as they are stored. Views of the pages are copied, because
        the pages will be written."""
        if self.offset is not None:
            given["k"] = given["k"].to(self.offset.dtype) - self.offset
        if self.k.dtype == self.dtype:
            pages = {x.untyped_storage().data_ptr() for x in self.kept.values()}
            return {
                name: x.clone() if x.untyped_storage().data_ptr() in pages else x
                for name, x in given.items()
            }
        if self.k.dtype == INT4:
            if len({x.shape for x in given.values()}) > 1:
                return {name: quantised_int4(x) for name, x in given.items()}
            both = quantised_int4(torch.stack(list(given.values())))
            return dict(zip(given, both))
        stored = {}
        for name, x in given.items():
            stored[name], stored[f"{name}_scale"] = quantised(x, self.k.dtype)
        return stored

    def claim(
        self, n: int, dropped: Tensor, grow: bool = False, kept: dict[str, Tensor] | None = None
    ) -> Claim:
        """Claim n pages without a user once `dropped` are given back. kept: tensors to claim in."""
        kept = kept or self.kept
        fewer = torch.bincount(dropped, minlength=len(self.users))
        free = (self.users == fewer).nonzero()[:, 0]
        if len(free) < n:
            if not grow:
                raise RuntimeError(
                    f"KVCache is full: got {n} more pages of {self.page} keys to find, expected at "
                    f"most {len(free)}, those that are free; free() gives back those of items, "
                    "grow=True makes room"
                )
            first, more = len(self.users), max(n - len(free), len(self.users) // 2)
            kept = {name: _longer(x, len(x) + more, x.shape[1]) for name, x in kept.items()}
            fewer = torch.cat([fewer, fewer.new_zeros(more)])
            free = torch.cat([free, torch.arange(first, first + more, device="cpu")])
        taken = free[:n]
        return Claim(kept, taken, torch.bincount(taken, minlength=len(fewer)) - fewer)

    def settle(self, claim: Claim) -> None:
        users = self.users
        if more := len(claim.users) - len(users):
            users = torch.cat([users, users.new_zeros(more)])
        users += claim.users
        self.users, self.kept = users, claim.kept

    def add(self, pages: Tensor) -> None:
        self.users += torch.bincount(pages, minlength=len(self.users))

    def drop(self, pages: Tensor) -> None:
        self.users -= torch.bincount(pages, minlength=len(self.users))

    def longer(self, page: int) -> dict[str, Tensor]:
        """The tensors with pages lengthened to `page` keys."""
        return {name: _longer(x, len(x), page) for name, x in self.kept.items()}

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle: without users, because caches that are copied along add
        themselves."""
        return self.__dict__ | {"users": torch.zeros_like(self.users)}


def _pages(like: Tensor, pages: int, page: int, heads: int, *row: int) -> Tensor:
    """New pages (pages,page,heads,*row). On CPUs a page has the rows of a head one after the other,
    as a task of decoding reads them: hardware prefetches memory that is read in order."""
    if like.device.type != "cpu":
        return like.new_empty(pages, page, heads, *row)
    return advised(like.new_empty(pages, heads, page, *row)).transpose(1, 2)


def _longer(x: Tensor, pages: int, page: int) -> Tensor:
    """x (P,page,...) with more pages, or longer ones."""
    longer = _pages(x, pages, page, *x.shape[2:])
    longer[: len(x), : x.shape[1]] = x
    return longer


def write(kept: dict[str, Tensor], at: tuple[Tensor, Tensor], rows: dict[str, Tensor]) -> None:
    """Write rows into pages. at: the page of each row, and its position in the page."""
    for name, x in kept.items():
        x[at] = rows[name]


def used(table: Tensor, lengths: Tensor, page: int) -> Tensor:
    """The pages of all items, each as often as items use it."""
    return table[torch.arange(table.shape[1], device="cpu") < (-(-lengths // page))[:, None]]
