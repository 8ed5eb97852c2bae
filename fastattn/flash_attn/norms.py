"""flash-attn 2.8's `ops.triton.layer_norm`, and `rms_norm` of its `ops.rms_norm`: norms of rows,
with dropout and a residual before them.

torch's own functions compute them, in float32 (float64 for float64), and results are rounded once.
`layer_norm_fn` documents the arguments that the functions share.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call.spec import acc_dtype
from .checks import need_shape

__all__ = ["RMSNorm", "layer_norm_fn", "rms_norm", "rms_norm_fn"]

Results = Tensor | tuple[Tensor | None, ...]


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Results:
    """Compute the norm of a sum: of x, x1 after dropout, and the residual.

    Args:
        x: Rows.
        weight: The factor of each column after the norm.
        bias: What is added to each column after that.
        residual: What is added to x after dropout.
        x1: What else is added, with dropout of its own. Not with rowscale.
        weight1, bias1: Those of a second result, of the same norm.
        eps: What is added to the variance, or to the mean of squares.
        dropout_p: The probability with which each element of x and of x1 is dropped.
        rowscale: The factor of each row of x before dropout.
        prenorm: If True, also return the sum.
        residual_in_fp32: If True, the sum is float32 where there is no residual. With one it has
            the residual's dtype.
        zero_centered_weight: If True, 1 is added to weight and weight1.
        is_rms_norm: If True, divide by the root of the mean of squares (RMSNorm); otherwise
            subtract the mean and divide by the standard deviation (LayerNorm).
        return_dropout_mask: If True, also return which elements of x and of x1 dropout kept.
        out_dtype: The dtype of results; None is x's.
        out, residual_out: Where to write the first result and the sum.

    Shape:
        x: (..., C), any floating dtype.
        weight, bias, weight1, bias1: (C,).
        residual, x1: As x.
        rowscale: (...).
        out, residual_out: As x.

    Returns:
        The first of these that are asked for, or a tuple: the result; that of weight1; the sum;
        the two masks, None where nothing is dropped.

    Raises:
        ValueError: A shape, a dtype or dropout_p does not fit, or there is rowscale beside x1, or
            bias1 without weight1.
        TypeError: An argument is not a tensor.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.norms import layer_norm_fn
        >>> x, residual = torch.randn(2, 4, 3, 8)
        >>> out, total = layer_norm_fn(x, torch.ones(8), None, residual, prenorm=True)
        >>> torch.testing.assert_close(total, x + residual)
    """
    shape = tuple(_need_rows(x).shape)
    sizes = [("weight", weight, shape[-1:]), ("residual", residual, shape), ("x1", x1, shape)]
    sizes += [(name, y, shape[-1:]) for name, y in (("bias", bias), ("bias1", bias1))]
    sizes += [("weight1", weight1, shape[-1:]), ("rowscale", rowscale, shape[:-1])]
    for name, y, size in (*sizes, ("out", out, shape), ("residual_out", residual_out, shape)):
        if y is not None or name == "weight":
            need_shape(name, y, size)  # ty: ignore
    if rowscale is not None and x1 is not None:
        raise ValueError("rowscale: got it beside x1, expected one of them")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: got {dropout_p}, expected a number from 0 to below 1")
    if bias1 is not None and weight1 is None:
        raise ValueError("bias1: got it without weight1, expected both or neither")
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise ValueError(f"out_dtype: got {out_dtype}, expected a floating dtype")
    wide = acc_dtype(x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    total = x.to(wide) if rowscale is None else x.to(wide) * rowscale[..., None]
    total, kept = _dropped(total, dropout_p)
    kept1 = None
    if x1 is not None:
        other, kept1 = _dropped(x1.to(wide), dropout_p)
        total = total + other
    if residual is not None:
        total = total + residual.to(wide)
    results: list[Tensor | None] = []
    for w, b in ((weight, bias), (weight1, bias1)):
        if w is not None:
            w, b = w.to(wide) + bool(zero_centered_weight), None if b is None else b.to(wide)
            results.append(_normed(total, w, b, eps, is_rms_norm).to(out_dtype or x.dtype))
    if out is not None:
        results[0] = out.copy_(results[0])  # ty: ignore
    if prenorm or residual_out is not None:
        dtype = torch.float32 if residual_in_fp32 else x.dtype
        total = total.to(dtype if residual is None else residual.dtype)
        total = total if residual_out is None else residual_out.copy_(total)
    if prenorm:
        results.append(total)
    if return_dropout_mask:
        results += [kept, kept1]
    return tuple(results) if len(results) > 1 else results[0]  # ty: ignore


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Results:
    """Compute `layer_norm_fn` with is_rms_norm=True.

    Args:
        x, weight, bias, residual, x1, weight1, bias1: As in `layer_norm_fn`.
        eps, dropout_p, rowscale, prenorm, residual_in_fp32: As in `layer_norm_fn`.
        zero_centered_weight, return_dropout_mask, out_dtype: As in `layer_norm_fn`.
        out, residual_out: As in `layer_norm_fn`.

    Shape:
        x: (..., C), any floating dtype.
        weight, bias, weight1, bias1: (C,).
        residual, x1: As x.
        rowscale: (...).
        out, residual_out: As x.

    Returns:
        As `layer_norm_fn`.

    Raises:
        ValueError, TypeError: As `layer_norm_fn`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.norms import rms_norm_fn
        >>> rms_norm_fn(torch.tensor([[3.0, 4.0]]), torch.ones(2), None)
        tensor([[0.8485, 1.1314]])
    """
    return layer_norm_fn(
        x,
        weight,
        bias,
        residual,
        x1,
        weight1,
        bias1,
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        zero_centered_weight,
        True,
        return_dropout_mask,
        out_dtype,
        out,
        residual_out,
    )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute `rms_norm_fn` of x alone.

    Args:
        x: Rows.
        weight: The factor of each column.
        epsilon: What is added to the mean of squares.

    Shape:
        x: (..., C), any floating dtype.
        weight: (C,).
        out: As x.

    Returns:
        out.

    Raises:
        ValueError, TypeError: As `layer_norm_fn`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.norms import rms_norm
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 1e-6)
        tensor([[0.8485, 1.1314]])
    """
    return rms_norm_fn(x, weight, None, eps=epsilon)  # ty: ignore


class RMSNorm(nn.Module):
    """RMSNorm of rows, with dropout and a residual before it.

    Args:
        hidden_size: The number of columns C.
        eps: What is added to the mean of squares.
        dropout_p: The probability with which each element of x is dropped in training.
        zero_centered_weight: If True, the parameter is the factor less 1.
        device: The device of the parameter.
        dtype: Its dtype.

    Shape:
        x: (..., C), any floating dtype.
        residual: As x.
        out: As x.

    Raises:
        ValueError, TypeError: As `layer_norm_fn`.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.norms import RMSNorm
        >>> RMSNorm(8)(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    weight: nn.Parameter
    bias: None
    drop: nn.Dropout | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0 else None
        self.zero_centered_weight = zero_centered_weight
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the factors of columns 1.

        Example:
            >>> from fastattn.flash_attn.norms import RMSNorm
            >>> norm = RMSNorm(2, zero_centered_weight=True)
            >>> norm.reset_parameters()
            >>> norm.weight.data
            tensor([0., 0.])
        """
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Results:
        """Compute the norm.

        Args:
            x, residual, prenorm, residual_in_fp32: As in `layer_norm_fn`.

        Returns:
            out, or (out, sum) with prenorm.

        Raises:
            ValueError, TypeError: As `layer_norm_fn`.
        """
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )


def _need_rows(x: Tensor) -> Tensor:
    if isinstance(x, Tensor) and x.ndim and x.is_floating_point():
        return x
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, expected a torch.Tensor")
    raise ValueError(f"x: got {x.dtype} {tuple(x.shape)}, expected floats (..., columns)")


def _dropped(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """x after dropout, and which elements are kept."""
    if not p:
        return x, None
    kept = torch.rand(x.shape, device=x.device) >= p
    return torch.where(kept, x / (1 - p), 0), kept


def _normed(x: Tensor, w: Tensor, b: Tensor | None, eps: float, is_rms_norm: bool) -> Tensor:
    if not is_rms_norm:
        return F.layer_norm(x, w.shape, w, b, eps)
    y = F.rms_norm(x, w.shape, w, eps)
    return y if b is None else y + b
