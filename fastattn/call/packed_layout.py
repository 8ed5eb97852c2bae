"""The layouts of packed batches and pages: as users give them, and with the heads first.

`attention_packed` takes q as (T,H,D), and everything below it (1,H,T,D): the heads of one item.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .need import need_a_tensor
from .sizes import agree


def heads_first(name: str, x: Any) -> Tensor:
    """(T,H,D) as (1,H,T,D)."""
    need_a_tensor(name, x)
    if x.ndim != 3:
        axes = "(T, H, D)" if name == "q" else "(S, Hk, D)"
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected 3 dimensions {axes}")
    return x.transpose(0, 1).unsqueeze(0)


def pages_first(name: str, x: Any) -> Tensor:
    """Pages (P,page,Hk,D) as (P,Hk,page,D)."""
    need_a_tensor(name, x)
    if x.ndim != 4:
        got, axes = tuple(x.shape), "(P, page, Hk, D)"
        raise ValueError(f"{name}: got shape {got}, expected 4 dimensions {axes} with block_table")
    return x.transpose(1, 2)


def scales_first(name: str, x: Any, k: Tensor, pages: bool) -> Tensor:
    """Scales (S,Hk) as (1,Hk,S), or (P,page,Hk) as (P,Hk,page): one for each row of k. (Hk,) and
    () are scales of each head, and of all."""
    need_a_tensor(name, x, "a torch.Tensor or None")
    P, Hk, S, _ = k.shape
    expected = (P, S, Hk) if pages else (S, Hk)
    if x.ndim == 0 or (x.ndim == 1 and agree(x.shape, (Hk,))):
        x = x.expand(expected)
    if not agree(x.shape, expected):
        axes = "(P, page, Hk)" if pages else "(S, Hk)"
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, expected {axes} = {expected}, (Hk,) or ()"
        )
    return x.transpose(-1, -2) if pages else x.transpose(0, 1).unsqueeze(0)


def rows_first(x: Tensor) -> Tensor:
    """(1,H,T,...) as (T,H,...)."""
    return x.squeeze(0).transpose(0, 1)
