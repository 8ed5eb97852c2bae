"""The same operations under torch.func: vmap, grad, and whatever they are stacked into."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .ops import (
    ATTENTION,
    N_TENSORS,
    WEIGHTS,
    Operation,
    call,
    call_backward_kernel,
    call_kernel,
    library,
    refuse_double_backward,
    refuse_forward_ad,
    saved,
    spread,
    untuple,
)
from .spec import Maybe, Options, Tensors


class Transformed(torch.autograd.Function):
    """A Function that torch.func can take apart, at 15 µs a call more than `Differentiable`."""

    @staticmethod
    def forward(op, o, *tensors):
        return call_kernel(op, Tensors(*tensors), o)

    @staticmethod
    def setup_context(ctx, inputs, output):
        op, o, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.call = op, o
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads):
        op, o = ctx.call
        t, outs = saved(ctx)
        wants = [ctx.needs_input_grad[2 + i] for i in op.wants]
        found = TransformedBackward.apply(op, o, tuple(wants), *grads, *outs, *t)
        return None, None, *spread(op, found, wants)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_forward_ad()

    @staticmethod
    def vmap(info, in_dims, *args):
        op, o, *tensors = args
        return batched_forward(op, info.batch_size, in_dims[2:], Tensors(*tensors), o)


class TransformedBackward(torch.autograd.Function):
    """The backward kernel; it has no derivative, and says so."""

    @staticmethod
    def forward(op, o, wants, *tensors):
        grads, outs, t = _parts(tensors)
        return tuple(call_backward_kernel(op, t, o, outs, grads, wants))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        refuse_double_backward()

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_forward_ad()

    @staticmethod
    def vmap(info, in_dims, *args):
        op, o, wants, *tensors = args
        return batched_backward(op, info.batch_size, in_dims[3:], tensors, o, wants)


def _parts(tensors: Sequence) -> tuple[Sequence, Sequence, Tensors]:
    n = (len(tensors) - N_TENSORS) // 2
    return tensors[:n], tensors[n : 2 * n], Tensors(*tensors[2 * n :])


# -------------------------------------------------------------------------------------------- vmap
# V calls are one call whose batch is V times as large, unless a call's place in the batch matters
# (dropout counts by it) or something is per call that has no batch dimension (sinks, and the
# gradients of masks and sinks). Those run one after the other.


def batched_forward(op: Operation, V: int, dims: Sequence, t: Tensors, o: Options):
    """Outputs with the new dimension first, and where it is."""
    if _folds(t, Tensors(*dims), o):
        outs = call(op, _fold_tensors(V, dims, t), o)
        B = _batch(t, dims)
        outs = tuple(_unfold(V, B, x, at) for x, at in zip(outs, op.batch_at))
    else:
        calls = [call(op, Tensors(*_pick(t, dims, i)), o) for i in range(_some(V))]
        outs = tuple(torch.stack(x) for x in zip(*calls))
    return outs, (0,) * len(outs)


def batched_backward(op: Operation, V: int, dims: Sequence, tensors: Sequence, o: Options, wants):
    grads, outs, t = _parts(tensors)
    dgrads, douts, dt = _parts(dims)
    n_layout = 3 if op is ATTENTION else 2  # of `wants`: those of q, k and v, which fold
    if _folds(t, dt, o) and not any(wants[n_layout:]):
        B = _batch(t, dt)
        grads = [_fold(V, B, x, dim, at) for x, dim, at in zip(grads, dgrads, op.batch_at)]
        outs = [_fold(V, B, x, dim, at) for x, dim, at in zip(outs, douts, op.batch_at)]
        inputs = (*grads, *outs, *_fold_tensors(V, dt, t))
        found = TransformedBackward.apply(op, o, wants, *inputs)
        found = tuple(x.unflatten(0, (V, B)) for x in found)
    else:
        calls = [
            TransformedBackward.apply(op, o, wants, *_pick(tensors, dims, i))
            for i in range(_some(V))
        ]
        found = tuple(torch.stack(x) for x in zip(*calls))
    return found, (0,) * len(found)


def _folds(t: Tensors, dims: Tensors, o: Options) -> bool:
    return o.dropout_p == 0 and (t.sinks is None or dims.sinks is None)


def _batch(t: Tensors, dims: Sequence) -> int:
    """B of one call."""
    shape = list(t.q.shape)
    if dims[0] is not None:
        del shape[dims[0]]
    return shape[0]


def _some(V: int) -> int:
    if V == 0:
        raise NotImplementedError(
            "vmap over a dimension of size 0 with dropout, per-example sinks, or gradients of "
            "masks or sinks: got 0, expected at least 1"
        )
    return V


def _pick(tensors: Sequence, dims: Sequence, i: int) -> list:
    return [x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims)]


def _front(V: int, x: Tensor, dim: int | None) -> Tensor:
    """The mapped dimension first; made by expansion where there is none."""
    return x.expand(V, *x.shape) if dim is None else x.movedim(dim, 0)


def _fold(V: int, B: int, x: Maybe, dim: Maybe, at: int = 0) -> Maybe:
    """(B, ...) and a mapped dimension -> (V B, ...); the batch is dimension `at`."""
    if x is None:
        return None
    x = _front(V, x, dim).movedim(0, at)
    return x.reshape(*x.shape[:at], V * B, *x.shape[at + 2 :])


def _unfold(V: int, B: int, x: Tensor, at: int) -> Tensor:
    """The reverse: the mapped dimension comes first."""
    return x.unflatten(at, (V, B)).movedim(at, 0)


def _fold_tensors(V: int, dims: Sequence, t: Tensors) -> Tensors:
    B, d = _batch(t, dims), Tensors(*dims)  # of each tensor, which dimension is mapped
    return Tensors(
        q=_fold(V, B, t.q, d.q),
        k=_fold(V, B, t.k, d.k),
        v=_fold(V, B, t.v, d.v),
        mask=_fold_mask(V, B, t.mask, d.mask),
        lengths=_fold(V, B, t.lengths, d.lengths),
        slopes=_fold_slopes(V, B, t.slopes, d.slopes),
        sinks=t.sinks,
        seed=None,  # there is no dropout
        normaliser=_fold(V, B, t.normaliser, d.normaliser, 1),
    )


def _fold_mask(V: int, B: int, mask: Maybe, dim: Maybe) -> Maybe:
    if mask is None or (dim is None and (mask.ndim < 4 or mask.shape[0] == 1)):
        return mask  # the same for every item
    mask = _front(V, mask, dim)
    mask = mask.reshape(V, *[1] * (5 - mask.ndim), *mask.shape[1:])
    return mask.expand(V, B, *mask.shape[2:]).reshape(V * B, *mask.shape[2:])


def _fold_slopes(V: int, B: int, slopes: Maybe, dim: Maybe) -> Maybe:
    if slopes is None or (dim is None and slopes.ndim == 1):
        return slopes
    slopes = _front(V, slopes, dim)
    H = slopes.shape[-1]
    return slopes.reshape(V, -1 if slopes.ndim == 3 else 1, H).expand(V, B, H).reshape(V * B, H)


def _register_vmap(op: Operation) -> None:
    """The same rule for the operators, which compiled code maps over."""

    def rule(info, in_dims, *args):
        t, o = Tensors(*args[:N_TENSORS]), Options(*args[N_TENSORS:])
        outs, out_dims = batched_forward(op, info.batch_size, in_dims[:N_TENSORS], t, o)
        return untuple(outs), untuple(out_dims)

    def backward_rule(info, in_dims, *args):
        n = 2 * len(op.results) + N_TENSORS
        o, wants = Options(*args[n:-1]), tuple(args[-1])
        found, dims = batched_backward(op, info.batch_size, in_dims[:n], args[:n], o, wants)
        return list(found), list(dims)

    torch.library.register_vmap(f"fastattn::{op.name}", rule, lib=library)
    torch.library.register_vmap(f"fastattn::{op.name}_backward", backward_rule, lib=library)


_register_vmap(ATTENTION)
_register_vmap(WEIGHTS)
