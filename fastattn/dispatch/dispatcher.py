"""How a call reaches a kernel.

The wrapper that a call goes through depends on which PyTorch subsystem is active: no wrapper serves
all of them, and each costs time:

    torch.compile, torch.export, FakeTensorMode, any dispatch mode  ->  the torch.library operator
    torch.func transforms (vmap, grad, ...), forward mode           ->  `functorch.Attention`
    autograd                                                        ->  `Attention`
    none                                                            ->  the kernel itself
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends.native.marshalling import Kind, gradients, kind
from ..call.spec import Options, Tangents, Tensors, changed
from . import functorch, run_pass
from .legacy_vmap import is_batched_by_autograd
from .operation import ATTENTION, BACKWARD, FORWARD, JVP, Operation, plan, spread
from .run_pass import as_tuple, directly, dispatch_mode_active, in_saved_order

_transforms = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling
_is_traced = torch.compiler.is_dynamo_compiling

Run = Callable[[Operation, Tensors, Options], tuple[Tensor, ...]]
Observer = Callable[[Run, Operation, Tensors, Options], tuple[Tensor, ...]]
# The function that computes calls on tensors of a class, by the name of the class, because to
# import DTensor takes a second. Modules above this one register here.
HANDLERS: dict[str, Run] = {}
_via_operator: Run = functools.partial(run_pass.via_operator, FORWARD)
_observers: list[Observer] = []


def call(op: Operation, t: Tensors, o: Options, observed: bool = True) -> tuple[Tensor, ...]:
    """Run an operation through the wrapper that the table above selects."""
    if _observers and observed:
        return _observers[-1](functools.partial(call, observed=False), op, t, o)
    if _is_compiling():
        if name := _handled(t):
            return HANDLERS[name](op, t, o)
        return as_tuple(op.operator("")(*in_saved_order((*t, *o))))
    if _transforms() or (forward_ad._current_level >= 0 and run_pass.has_tangents(t)):
        return tuple(functorch.run(FORWARD, op, t, changed(o, grad=True)))
    kind_of_tensors = None if dispatch_mode_active() else kind(t)
    if kind_of_tensors is None:
        return HANDLERS.get(_handled(t), _via_operator)(op, t, o)
    planned = plan(t, o, kind_of_tensors)
    if not o.grad:
        return directly(FORWARD, op, planned, t, o)
    # Only up to the last tensor that is given: autograd takes time for each argument, even None.
    differentiable = record if op is ATTENTION else _weights
    spec, _ = planned
    recorded = op, o, kind_of_tensors, planned
    return differentiable((recorded, t, None), *t[: spec.fields_to_last_given])


def _handled(tensors: Sequence[Tensor | None]) -> str:
    """The first class of a tensor that `HANDLERS` names, or nothing."""
    for x in tensors:
        if x is not None and type(x).__name__ in HANDLERS:
            return type(x).__name__
    return ""


@contextmanager
def observed(observer: Observer) -> Generator[None]:
    """In the block, every call on any thread becomes `observer(run, op, t, o)`, which returns the
    result of `run(op, t, o)`. If blocks are nested, only the innermost observes."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def call_jvp(t: Tensors, o: Options, tangents: Tangents) -> tuple[Tensor, ...]:
    """out, normaliser, and the tangents of out and LSE."""
    if name := _handled((*t, *tangents)):
        raise NotImplementedError(f"attention_jvp: got {name}s, expected plain tensors")
    o = changed(o, grad=True)
    if _is_compiling():
        return tuple(ATTENTION.operator("_jvp")(*tangents, None, None, *t, *o))
    groups = tangents, (None, None)
    if dispatch_mode_active() and not _transforms() and forward_ad._current_level < 0:
        return tuple(run_pass.run(JVP, ATTENTION, t, o, groups))
    return tuple(functorch.run(JVP, ATTENTION, t, o, groups))


class Attention(torch.autograd.Function):
    """For autograd alone: the cheapest form of a Function. Autograd sees only `tensors`, which are
    the call's. Users see its name as `grad_fn`: AttentionBackward.

    call: what backward needs beside tensors; the tensors as `Tensors`, or the results if the fast
        path has computed them; its plan, else None.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        recorded, outs, plan = call
        if plan is None:
            op, o, _, planned = recorded
            outs = directly(FORWARD, op, planned, outs, o)
        ctx.save_for_backward(*tensors, *outs)
        ctx.call = recorded, len(tensors), plan
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx, *grads):
        recorded, n, plan = ctx.call
        tensors = ctx.saved_tensors  # once, because each access unpacks them all (checkpoints)
        if plan is not None and not _is_traced():
            found = gradients(plan, tensors, grads)
            if found is not None:
                return found
        op, o, saved_kind, planned = recorded
        t, outs = Tensors(*tensors[:n]), tensors[n:]
        needs_grad = op.needs_grad(ctx.needs_input_grad[1:])
        given = BACKWARD, op, t, o, (grads, outs), needs_grad
        if _is_traced():  # by compiled autograd
            input_grads = run_pass.run(*given)
        # With create_graph=True these may be differentiated again; torch.func may batch the grads.
        elif torch.is_grad_enabled() or _transforms() or forward_ad._current_level >= 0:
            input_grads = functorch.backward(op, o, needs_grad, grads, outs, t)
        elif not dispatch_mode_active() and _begins_with(kind((*t, *outs, *grads)), saved_kind):
            input_grads = directly(BACKWARD, op, planned, t, o, (grads, outs), needs_grad)
        elif any(map(is_batched_by_autograd, grads)):
            input_grads = functorch.backward(op, o, needs_grad, grads, outs, t)
        else:  # hooks on saved tensors may return other tensors
            input_grads = run_pass.run(*given)
        return None, *spread(input_grads, needs_grad, n)


def _begins_with(kind_of_all: Kind | None, saved_kind: Kind) -> bool:
    """True if `kind_of_all`, the kind of a call's tensors, its results and their gradients, begins
    with `saved_kind`, the kind that the call's tensors had in forward.

    Then the kernel can run with the plan of forward: all tensors are plain memory, because their
    kind is not None, and the call's tensors still have the shapes, dtypes and devices of forward.
    Hooks on saved tensors may return others. A kind has an entry for each tensor, in order, so one
    call of `kind`, which takes time, checks both.
    """
    return kind_of_all is not None and kind_of_all[: len(saved_kind)] == saved_kind


class AttentionWeights(Attention):
    """The same Function for the weights, with a name of its own in `grad_fn`."""


# Function.apply first looks for torch.func's wrappers, which takes a microsecond. Here there are
# none: wrappers are not plain memory, and `call` has sent them elsewhere.
record, _weights = (
    super(torch.autograd.Function, function).apply  # ty: ignore
    for function in (Attention, AttentionWeights)
)
