"""What the tangent of a tensor must be."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .need import need, need_a_tensor, need_dense
from .sizes import agree


def need_like(name: str, x_t: Tensor, x: Tensor, *about: str) -> None:
    """Raise ValueError unless tangent x_t equals x in these attributes, such as "shape"."""
    for what in about:
        got, own = getattr(x_t, what), getattr(x, what)
        if not (agree(got, own) if what == "shape" else got == own):
            shown = tuple if what == "shape" else str
            need(False, f"{name}_t.{what}", shown(got), f"{shown(own)}, as {name} has")


def need_tangent(name: str, x_t: Any, x: Any) -> None:
    """Raise TypeError or ValueError unless x_t can be the tangent of x."""
    need_a_tensor(f"{name}_t", x_t, "a torch.Tensor or None")
    need_dense(f"{name}_t", x_t)
    moves = isinstance(x, Tensor) and x.is_floating_point()
    why = f"{name} is {'None' if x is None else 'no floating tensor'}"
    need(moves, f"{name}_t", "a tensor", f"None, because {why}")
    need_like(name, x_t, x, "shape", "dtype", "device")
