"""The road a call takes to a kernel.

Which wrapper a call goes through depends on who is watching, because no single one serves everybody
and each costs time:

    torch.compile, torch.export, FakeTensorMode, any dispatch mode  ->  the torch.library operator
    torch.func transforms (vmap, grad, ...)                         ->  `Transformed`
    autograd                                                        ->  `Differentiable`
    nobody                                                          ->  the kernel itself
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import batching
from .check import check
from .crossing import Kind, kind
from .operation import Operation, plan, run_backward, run_forward, spread
from .spec import Options, Tensors

N_TENSORS = len(Tensors._fields)

_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state
_is_compiling = torch.compiler.is_compiling
_is_batched_by_autograd = torch._C._functorch.is_legacy_batchedtensor


def call(op: Operation, t: Tensors, o: Options) -> tuple[Tensor, ...]:
    """Run an operation through the wrapper that this moment needs; see above."""
    if _is_compiling():
        return as_tuple(op.operator()(*t, *o))
    if _transforms():
        return Transformed.apply(op, o._replace(grad=True), *t)
    if forward_ad._current_level >= 0:
        refuse_tangents(t)
    found = None if _watched() else kind(t)
    if found is None:
        return _seen(op, t, o)
    planned = spec, backend = plan(t, o, found)
    if not o.grad:
        return op.forward(backend, spec, t)
    # Autograd takes its time for each, None as well.
    return _differentiable((op, o, t, found, planned), *t[: spec.last])


def call_kernel(op: Operation, t: Tensors, o: Options) -> tuple[Tensor, ...]:
    """The kernel, or the operator where something wants to see it pass."""
    found = None if _watched() else kind(t)
    return _seen(op, t, o) if found is None else run_forward(op, t, o, found)


def call_backward_kernel(op: Operation, t: Tensors, o: Options, outs, grads, wants) -> list[Tensor]:
    found = None if _watched() or kind((*outs, *grads)) is None else kind(t)
    if found is None:
        return op.operator("_backward")(*grads, *outs, *t, *o, list(wants))
    return run_backward(op, plan(t, o, found), t, outs, grads, wants)


def _watched() -> bool:
    """Is a mode active that has to see operators?"""
    return _modes() > 0 or _tracing() is not None


def _seen(op: Operation, t: Tensors, o: Options) -> tuple[Tensor, ...]:
    """Through the operator: for modes, and for tensors that are no plain memory."""
    check(t, o)
    if _tracing() is not None:  # a traced graph serves with and without gradients
        o = o._replace(grad=True)
    return as_tuple(op.operator()(*t, *o))


def as_tuple(outs) -> tuple[Tensor, ...]:
    """An operator with one result returns it bare."""
    return (outs,) if isinstance(outs, Tensor) else tuple(outs)


def saved(ctx) -> tuple[Tensors, tuple[Tensor, ...]]:
    """Inputs and outputs; asked for once, because every asking unpacks them all (checkpoints)."""
    tensors = ctx.saved_tensors
    return Tensors(*tensors[:N_TENSORS]), tensors[N_TENSORS:]


# ------------------------------------------------------------------------ what has no derivative


def refuse_tangents(t: Sequence[Tensor | None]) -> None:
    tensors = (x for x in t if isinstance(x, Tensor))  # what else there is, the checks say
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        refuse_forward_ad()


def refuse_forward_ad() -> None:
    raise NotImplementedError(
        "fastattn has no forward-mode derivative (jvp, jacfwd, hessian): use reverse mode, or "
        "fastattn.reference.attention, which is made of differentiable torch operations"
    )


def refuse_double_backward() -> None:
    raise NotImplementedError(
        "fastattn has no second derivative (double backward): differentiate once, or use "
        "fastattn.reference.attention, which is made of differentiable torch operations"
    )


def _refuse_batched(grads: Sequence[Tensor | None]) -> None:
    if any(x is not None and _is_batched_by_autograd(x) for x in grads):
        raise NotImplementedError(
            "fastattn cannot be given a batch of gradients by autograd itself "
            "(is_grads_batched=True, jacobian(vectorize=True)): use torch.func.jacrev or "
            "torch.func.vmap, or vectorize=False"
        )


# ------------------------------------------------------------------------------------- Functions


class Differentiable(torch.autograd.Function):
    """For autograd alone: the cheapest form of a Function. It sees only `tensors`, those of t."""

    @staticmethod
    def forward(ctx, call, *tensors):
        op, o, t, found, planned = call
        spec, backend = planned
        outs = op.forward(backend, spec, t)
        ctx.save_for_backward(*tensors, *outs)
        ctx.call = op, o, len(tensors), found, planned
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx, *grads):
        op, o, n, before, planned = ctx.call
        tensors = ctx.saved_tensors  # once, because every asking unpacks them all (checkpoints)
        t, outs = Tensors(*tensors[:n]), tensors[n:]
        wants = op.wants(ctx.needs_input_grad[1:])
        # With create_graph=True somebody may differentiate again; torch.func may batch the grads.
        if torch.is_grad_enabled() or _transforms():
            _refuse_batched(grads)
            found = TransformedBackward.apply(op, o, wants, *grads, *outs, *t)
        elif not _watched() and _begins(kind((*t, *outs, *grads)), before):
            found = run_backward(op, planned, t, outs, grads, wants)
        else:  # hooks may save one tensor and give back another
            _refuse_batched(grads)
            found = call_backward_kernel(op, t, o, outs, grads, wants)
        return None, *spread(found, wants, n)


def _begins(found: Kind | None, before: Kind) -> bool:
    """Is it a kind of tensors of which the first are of the kind `before`?"""
    return found is not None and found[: len(before)] == before


# Its own `apply` looks for torch.func's wrappers first, for a microsecond. Here there are none:
# they are no plain memory.
_differentiable = super(torch.autograd.Function, Differentiable).apply  # ty: ignore


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
        wants = op.wants(ctx.needs_input_grad[2:])
        found = TransformedBackward.apply(op, o, wants, *grads, *outs, *t)
        return None, None, *spread(found, wants)

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
        return tuple(call_backward_kernel(op, Tensors(*t), o, outs, grads, wants))

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


def _parts(of: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Gradients of the results, the results, the inputs; or what is said of each of these."""
    n = (len(of) - N_TENSORS) // 2
    return of[:n], of[n : 2 * n], of[2 * n :]


# ------------------------------------------------------------------------------------------- vmap
# V calls are one call whose batch is V times as large, where they fold; the others run one after
# the other.


def batched_forward(op: Operation, V: int, dims: Sequence, t: Tensors, o: Options):
    """Outputs with the new dimension first, and where it is."""
    if V:
        check(Tensors(*batching.pick(t, dims, 0)), o)  # the rules speak of one call, not of V
    if batching.can_fold(t, dims, o):
        outs = call(op, batching.fold_tensors(V, dims, t), o)
        outs = batching.unfold_results(op.results, V, batching.batch_of(t, dims), outs)
    else:
        calls = [call(op, Tensors(*batching.pick(t, dims, i)), o) for i in range(_some(V))]
        outs = tuple(torch.stack(x) for x in zip(*calls))
    return outs, (0,) * len(outs)


def batched_backward(op: Operation, V: int, dims: Sequence, tensors: Sequence, o: Options, wants):
    grads, outs, inputs = _parts(tensors)
    dgrads, douts, dt = _parts(dims)
    t = Tensors(*inputs)
    if batching.can_fold(t, dt, o) and batching.gradients_fold(wants):
        B = batching.batch_of(t, dt)
        grads = batching.fold_results(op.results, V, B, grads, dgrads)
        outs = batching.fold_results(op.results, V, B, outs, douts)
        inputs = (*grads, *outs, *batching.fold_tensors(V, dt, t))
        found = TransformedBackward.apply(op, o, wants, *inputs)
        found = tuple(batching.unfold(V, B, x, 0) for x in found)
    else:
        calls = [
            TransformedBackward.apply(op, o, wants, *batching.pick(tensors, dims, i))
            for i in range(_some(V))
        ]
        found = tuple(torch.stack(x) for x in zip(*calls))
    return found, (0,) * len(found)


def _some(V: int) -> int:
    if V == 0:
        raise NotImplementedError(
            "vmap over a dimension of size 0 with dropout, per-example sinks, or gradients of "
            "masks or sinks: got 0, expected at least 1"
        )
    return V
