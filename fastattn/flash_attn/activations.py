"""flash-attn 2.8's `ops.activations`, of which models import `swiglu`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ..call.spec import acc_dtype
from .checks import need_floats, need_shape

__all__ = ["swiglu"]


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """Compute silu(x) y, in float32 (float64 for float64), and round once.

    Args:
        x: What gates.
        y: What is gated.

    Shape:
        x: Any, a floating dtype.
        y: As x.
        out: As x.

    Returns:
        out.

    Raises:
        ValueError: The shapes differ, or a dtype is not floating.
        TypeError: An argument is not a tensor.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.activations import swiglu
        >>> swiglu(torch.tensor([0.0, 2.0]), torch.ones(2))
        tensor([0.0000, 1.7616])
    """
    need_shape("x", x, (*getattr(x, "shape", ()),))
    need_shape("y", y, tuple(x.shape))
    need_floats("x", x)
    need_floats("y", y)
    wide = acc_dtype(x.dtype)
    return (F.silu(x.to(wide)) * y.to(wide)).to(x.dtype)
