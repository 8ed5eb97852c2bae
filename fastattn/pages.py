"""Pages that the items of a cache share, and who uses them; how rows are kept in them."""

from __future__ import annotations

import torch
from torch import Tensor

from .quantisation import STORAGE, quantised


class Pool:
    """Pages (P,page,Hk,D) of keys and of values, and how many items use each.

    kept: by the names that `attention_packed` has for them. In eight bits rows have scales
    (P,page,Hk) beside them.
    """

    page: int
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
        self.page, self.forked, self.dtype = shape[1], False, dtype
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

    def rows(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Rows (n,Hk,D) as they are kept."""
        if self.k.dtype == self.dtype:
            return {"k": k, "v": v}
        (k, k_scale), (v, v_scale) = (quantised(x, self.k.dtype) for x in (k, v))
        return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}

    def write(self, at: tuple[Tensor, Tensor], rows: dict[str, Tensor]) -> None:
        for name, x in self.kept.items():
            x[at] = rows[name]

    def take(self, n: int, grow: bool) -> Tensor:
        """n pages that nobody uses."""
        free = (self.users == 0).nonzero()[:, 0]
        if len(free) < n:
            if not grow:
                raise RuntimeError(
                    f"KVCache is full: got {n} more pages of {self.page} keys to find, expected at "
                    f"most {len(free)}, those that are free; free() gives back those of items, "
                    "grow=True makes room"
                )
            self._more(max(n - len(free), len(self.users) // 2))
            free = (self.users == 0).nonzero()[:, 0]
        self.users[free[:n]] = 1
        return free[:n]

    def drop(self, pages: Tensor) -> None:
        self.users -= torch.bincount(pages, minlength=len(self.users))

    def copy(self, pages: Tensor, to: Tensor) -> None:
        pages, to = pages.to(self.k.device), to.to(self.k.device)
        for x in self.kept.values():
            x[to] = x[pages]

    def _more(self, n: int) -> None:
        for name, x in self.kept.items():
            self.kept[name] = torch.cat([x, x.new_empty(n, *x.shape[1:])])
        self.users = torch.cat([self.users, self.users.new_zeros(n)])

    def lengthen(self, page: int) -> None:
        longer = {name: x.new_empty(len(x), page, *x.shape[2:]) for name, x in self.kept.items()}
        for name, x in self.kept.items():
            longer[name][:, : self.page] = x
        self.kept, self.page = longer, page


def used(table: Tensor, lengths: Tensor, page: int) -> Tensor:
    """Every page that items have, as often as one does."""
    return table[torch.arange(table.shape[1], device="cpu") < (-(-lengths // page))[:, None]]
