"""flash-attn 2.8's `losses.cross_entropy` and `ops.triton.cross_entropy`, by torch's own functions.

They compute in float32 (float64 for float64), and losses have that dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call.spec import acc_dtype
from .checks import need_floats, need_integers, need_shape
from .sequences import say_once

__all__ = ["CrossEntropyLoss", "cross_entropy_loss"]


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Compute the cross entropy of each row, and the part of it that is the square of the LSE.

    Args:
        logits: The logits of each row.
        labels: The class of each row.
        precomputed_lse: It has no effect: the LSE is computed.
        label_smoothing: The weight of the mean over all classes, from 0 to 1.
        logit_scale: The factor of logits.
        lse_square_scale: The factor of the LSE's square, which is added to the loss.
        ignore_index: The label of rows that have no loss: 0.
        inplace_backward: It has no effect: backward does not write into logits.
        process_group: It must be None: classes are not split over ranks.

    Shape:
        logits: (N, C), any floating dtype.
        labels: (N,), int64 or int32.
        precomputed_lse: (N,).
        losses, z_losses: (N,), float32 (float64 for float64).

    Returns:
        (losses, z_losses). z_losses have no gradient, and are a part of losses.

    Raises:
        ValueError: A shape, a dtype or label_smoothing does not fit.
        IndexError: A label is no class, on CPUs.
        TypeError: An argument is not a tensor.
        NotImplementedError: There is a process_group.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.losses import cross_entropy_loss
        >>> losses, _ = cross_entropy_loss(torch.zeros(2, 4), torch.tensor([1, -100]))
        >>> losses
        tensor([1.3863, 0.0000])
    """
    say_once(precomputed_lse=precomputed_lse, inplace_backward=inplace_backward or None)
    if process_group is not None:
        raise NotImplementedError("process_group: got a group, expected None: one rank has the row")
    need_shape("logits", logits, ("batch", "classes"))
    need_floats("logits", logits)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: got {label_smoothing}, expected a number from 0 to 1")
    need_integers("labels", labels, (len(logits),))
    x, labels = logits.to(acc_dtype(logits.dtype)), labels.long()
    x = x if logit_scale == 1 else x * logit_scale
    given: dict[str, Any] = dict(ignore_index=ignore_index, label_smoothing=label_smoothing)
    losses = F.cross_entropy(x, labels, reduction="none", **given)
    if not lse_square_scale:
        return losses, torch.zeros_like(losses)
    squares = lse_square_scale * x.logsumexp(-1).square()
    squares = squares.masked_fill(labels == ignore_index, 0.0)
    return losses + squares, squares.detach()


class CrossEntropyLoss(nn.Module):
    """The cross entropy of rows.

    Args:
        ignore_index: The label of rows that have the loss 0 and do not count.
        reduction: "mean" over the rows that count, "sum" or "none".
        label_smoothing, logit_scale, lse_square_scale: As in `cross_entropy_loss`.
        inplace_backward, process_group: As in `cross_entropy_loss`.
        return_z_loss: If True, also return the part that is the square of the LSE.

    Shape:
        input: (N, C), any floating dtype.
        target: (N,), int64 or int32.
        precomputed_lse: (N,).
        loss, z_loss: (), or (N,) with reduction="none"; float32 (float64 for float64).

    Raises:
        ValueError: The reduction is none of these.

    Example:
        >>> import torch
        >>> from fastattn.flash_attn.losses import CrossEntropyLoss
        >>> CrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor(1.3863)
    """

    ignore_index: int
    reduction: str
    label_smoothing: float
    logit_scale: float
    lse_square_scale: float
    inplace_backward: bool
    process_group: Any
    return_z_loss: bool

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise ValueError(f"reduction: got {reduction!r}, expected 'mean', 'sum' or 'none'")
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.logit_scale = label_smoothing, logit_scale
        self.lse_square_scale, self.inplace_backward = lse_square_scale, inplace_backward
        self.process_group, self.return_z_loss = process_group, return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the loss.

        Args:
            input: The logits of each row.
            target: The class of each row.
            precomputed_lse: It has no effect: the LSE is computed.

        Returns:
            loss, or (loss, z_loss) with return_z_loss.

        Raises:
            ValueError, TypeError, NotImplementedError: As `cross_entropy_loss`.
        """
        found = cross_entropy_loss(
            input,
            target,
            precomputed_lse=precomputed_lse,
            label_smoothing=self.label_smoothing,
            logit_scale=self.logit_scale,
            lse_square_scale=self.lse_square_scale,
            ignore_index=self.ignore_index,
            inplace_backward=self.inplace_backward,
            process_group=self.process_group,
        )
        if self.reduction != "none":
            found = found[0].sum(), found[1].sum()
        if self.reduction == "mean":
            counted = (target != self.ignore_index).sum()
            found = found[0] / counted, found[1] / counted
        return found if self.return_z_loss else found[0]
