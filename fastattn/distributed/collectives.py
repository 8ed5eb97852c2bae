"""Differentiable communication between ranks. All of it is exchanges of pieces: sums of gradients
are computed here, in the order of ranks, so that they have the same bits each time."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..call.spec import acc_dtype

Shape = tuple[int, ...]


@contextlib.contextmanager
def waiting(group: dist.ProcessGroup, what: str) -> Generator[None, None, None]:
    """If another rank is gone or waits for something else, raise with this rank and `what`."""
    try:
        yield
    except (dist.DistError, RuntimeError) as caught:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        raise RuntimeError(
            f"rank {rank} of {ranks} lost its group while it waited for {what}: another rank died, "
            f"raised, or made another call ({str(caught).splitlines()[0]})"
        ) from caught


def exchange(
    pieces: Sequence[Tensor], shapes: Sequence[Shape], group: dist.ProcessGroup, what: str
) -> list[Tensor]:
    """Send piece r to rank r. Returns the piece from each rank r, which has shape `shapes[r]`."""
    first = pieces[0]
    sent = torch.cat([x.reshape(-1) for x in pieces])
    sizes = [torch.Size(x).numel() for x in shapes]
    received = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
    with waiting(group, what):
        dist.all_to_all_single(received, sent, sizes, [x.numel() for x in pieces], group=group)
    return [x.view(shape) for x, shape in zip(received.split(sizes), shapes)]


class Exchange(Function):
    """(group, what, shapes, *pieces). Its derivative is the exchange back."""

    @staticmethod
    def forward(ctx: Any, group: Any, what: Any, shapes: Any, *pieces: Any) -> Any:
        ctx.back = group, f"the gradient of {what}", [tuple(x.shape) for x in pieces]
        return tuple(exchange(pieces, shapes, group, what))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None, *Exchange.apply(*ctx.back, *grads)


class Gather(Function):
    """(group, what, shapes, x): all ranks' x, of these shapes. The gradient of x is the sum over
    ranks, computed in float32 at least."""

    @staticmethod
    def forward(ctx: Any, group: Any, what: Any, shapes: Any, x: Any) -> Any:
        ctx.back = group, f"the gradient of {what}", [tuple(x.shape)] * len(shapes)
        return tuple(exchange([x] * len(shapes), shapes, group, what))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        parts = Exchange.apply(*ctx.back, *grads)
        return None, None, None, total(parts)


def total(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    summed = first.to(acc_dtype(first.dtype))
    for x in parts[1:]:
        summed = summed + x
    return summed.to(first.dtype)


class Shared(Function):
    """(group, what, x): x, which every rank holds whole; its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, group: Any, what: Any, x: Any) -> Any:
        ctx.call = group, f"the gradient of {what}"
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, Summed.apply(*ctx.call, *grads)


class Summed(Function):
    """(group, what, x): the sum over ranks, on each of them."""

    @staticmethod
    def forward(ctx: Any, group: Any, what: Any, x: Any) -> Any:
        ctx.call = group, f"the gradient of {what}"
        ranks = dist.get_world_size(group)
        return total(exchange([x] * ranks, [tuple(x.shape)] * ranks, group, what))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, Summed.apply(*ctx.call, *grads)
