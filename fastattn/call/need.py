"""Errors of rules: got, expected, and what to do."""

from __future__ import annotations

import torch
from torch import Tensor


def need(ok: bool, name: str, got: object, expected: str) -> None:
    if not ok:
        raise ValueError(f"{name}: got {got}, expected {expected}")


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
