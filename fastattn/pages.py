"""Pages that the items of a cache share, and who uses them; how rows are kept in them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .quantisation import STORAGE, quantised


class Claim(NamedTuple):
    """Pages that a call takes from a pool and gives back, which `Pool.settle` does. Until then the
    pool is as it was."""

    kept: dict[str, Tensor]  # the pool's tensors, or longer ones in their place
    taken: Tensor  # pages that had no user
    users: Tensor  # how many more each page has

    def copy(self, pages: Tensor, to: Tensor) -> None:
        device = self.kept["k"].device
        pages, to = pages.to(device), to.to(device)
        for x in self.kept.values():
            x[to] = x[pages]


class Pool:
    """Pages (P,page,Hk,D) of keys and of values, and how many items use each.

    kept: by the names that `attention_packed` has for them. In eight bits rows have scales
    (P,page,Hk) beside them.
    """

    forked: bool
    dtype: torch.dtype
    kept: dict[str, Tensor]
    users: Tensor

    def __init__(
        self,
        shape: tuple[int, int, int],
        D: int,
        Dv: int,
        dtype: torch.dtype,
        storage: torch.dtype,
        device: torch.device | str | None,
    ):
        self.forked, self.dtype = False, dtype
        self.kept = {
            name: torch.empty(*shape, columns, dtype=storage, device=device)
            for name, columns in (("k", D), ("v", Dv))
        }
        if storage in STORAGE:
            for name in ("k_scale", "v_scale"):
                self.kept[name] = torch.empty(shape, dtype=torch.float32, device=device)
        self.users = torch.zeros(shape[0], dtype=torch.int64, device="cpu")

    @property
    def k(self) -> Tensor:
        return self.kept["k"]

    @property
    def v(self) -> Tensor:
        return self.kept["v"]

    @property
    def page(self) -> int:
        return self.k.shape[1]

    def rows(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Rows (n,Hk,D) as they are kept. What lies in the pages themselves is copied, since these
        are to be written."""
        if self.k.dtype == self.dtype:
            pages = {x.untyped_storage().data_ptr() for x in self.kept.values()}
            k, v = (x.clone() if x.untyped_storage().data_ptr() in pages else x for x in (k, v))
            return {"k": k, "v": v}
        (k, k_scale), (v, v_scale) = (quantised(x, self.k.dtype) for x in (k, v))
        return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}

    def claim(
        self, n: int, dropped: Tensor, grow: bool = False, kept: dict[str, Tensor] | None = None
    ) -> Claim:
        """n pages without a user once `dropped` are given back. kept: in place of the tensors."""
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
            kept = {
                name: torch.cat([x, x.new_empty(more, *x.shape[1:])]) for name, x in kept.items()
            }
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
        """What is kept, with so many keys a page."""
        longer = {name: x.new_empty(len(x), page, *x.shape[2:]) for name, x in self.kept.items()}
        for name, x in self.kept.items():
            longer[name][:, : self.page] = x
        return longer

    def __getstate__(self) -> dict[str, Any]:
        """Of deepcopy and pickle: with no users, since the caches that come along count
        themselves."""
        return self.__dict__ | {"users": torch.zeros_like(self.users)}


def write(kept: dict[str, Tensor], at: tuple[Tensor, Tensor], rows: dict[str, Tensor]) -> None:
    """Rows to where they are kept: page, and row in it, of each."""
    for name, x in kept.items():
        x[at] = rows[name]


def used(table: Tensor, lengths: Tensor, page: int) -> Tensor:
    """Every page that items have, as often as one does."""
    return table[torch.arange(table.shape[1], device="cpu") < (-(-lengths // page))[:, None]]
