"""Errors of rules: got, expected, and what to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .sizes import holds


def need(ok: Any, name: str, got: object, expected: str) -> None:
    """Raise ValueError unless `ok`, a bool or a claim of sizes (`sizes`), holds."""
    if not holds(ok):
        raise ValueError(f"{name}: got {got}, expected {expected}")


def need_constant(why: str, **given: object) -> None:
    """Raise ValueError for tensors with a derivative, which the caller would drop: `why`."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            continue
        if torch.is_grad_enabled() and x.requires_grad:
            got, do = "that requires grad", "call it under torch.no_grad(), or "
        elif forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            got, do = "with a tangent", ""
        else:
            continue
        raise ValueError(
            f"{name}: got a tensor {got}, expected a constant: {why}; {do}pass {name}.detach()"
        )


def need_a_tensor(name: str, x: object, expected: str = "a torch.Tensor") -> None:
    """Raise TypeError unless x is a tensor."""
    if not isinstance(x, Tensor):
        holds = isinstance(x, (list, tuple)) or hasattr(x, "__array__")
        hint = f": torch.as_tensor({name}) makes one" if holds else ""
        raise TypeError(f"{name}: got {type(x).__name__}, expected {expected}{hint}")


def need_dense(name: str, x: Tensor) -> None:
    """Raise TypeError for nested, sparse and other tensors that strides do not describe."""
    if x.is_nested and x.layout == torch.jagged:
        raise TypeError(
            f"{name}: got a jagged tensor, expected a dense one: scaled_dot_product_attention and "
            "MultiheadAttention take it, attention_packed its values() and offsets()"
        )
    if x.is_nested:
        raise TypeError(
            f"{name}: got a nested tensor, expected a dense one: torch.nested.to_padded_tensor "
            "makes it, and key_lengths tells where each item ends"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name}: got a {x.layout} tensor, expected a dense one: use to_dense()")


def shape_of(x: Tensor) -> str:
    return f"shape {tuple(x.shape)}"
