"""The road a call takes to a kernel.

Which wrapper a call goes through depends on who is watching, because no single one serves everybody
and each costs time:

    torch.compile, torch.export, FakeTensorMode, any dispatch mode  ->  the torch.library operator
    torch.func transforms (vmap, grad, ...), forward mode           ->  `transforms.Attention`
    autograd                                                        ->  `Attention`
    nobody                                                          ->  the kernel itself
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import passes, transforms
from .crossing import Kind, kind
from .events import recorded, recording
from .gradient_batches import is_batched_by_autograd
from .operation import ATTENTION, Operation, plan, run_backward, spread
from .passes import as_tuple, seen, watched
from .spec import Options, Tangents, Tensors

_transforms = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling
_is_traced = torch.compiler.is_dynamo_compiling

Run = Callable[[Operation, Tensors, Options], tuple[Tensor, ...]]
Observer = Callable[[Run, Operation, Tensors, Options], tuple[Tensor, ...]]
# What computes calls on tensors of a class, by the name of the class: importing DTensor takes a
# second. Modules above this one register here.
HANDLERS: dict[str, Run] = {}
_observers: list[Observer] = []


def call(op: Operation, t: Tensors, o: Options, observed: bool = True) -> tuple[Tensor, ...]:
    """Run an operation through the wrapper that this moment needs; see above."""
    if _observers and observed:
        return _observers[-1](functools.partial(call, observed=False), op, t, o)
    if _is_compiling():
        if handler := _handler(t):
            return handler(op, t, o)
        return as_tuple(op.operator()(*t, *o))
    if _transforms() or (forward_ad._current_level >= 0 and passes.has_tangents(t)):
        return transforms.Attention.apply(op, o._replace(grad=True), *t)
    found = None if watched() else kind(t)
    if found is None:
        return (_handler(t) or seen)(op, t, o)
    planned = spec, backend = plan(t, o, found)
    if not o.grad:
        if recording():
            return recorded(op, "", op.forward, (backend, spec, t), t, o)
        return op.forward(backend, spec, t)
    # Autograd takes its time for each, None as well.
    differentiable = _attention if op is ATTENTION else _weights
    return differentiable((op, o, t, found, planned), *t[: spec.last])


def _handler(tensors: Sequence[Tensor | None]) -> Run | None:
    """Of the first tensor whose class has one."""
    for x in tensors:
        if type(x).__name__ in HANDLERS:
            return HANDLERS[type(x).__name__]
    return None


@contextmanager
def observed(observer: Observer) -> Generator[None]:
    """Every call in the block, on any thread, is `observer(run, op, t, o)`: it returns what
    `run(op, t, o)` does. Of nested blocks the inner one observes."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def call_jvp(t: Tensors, o: Options, tangents: Tangents) -> tuple[Tensor, ...]:
    """out, normaliser, and the tangents of out and LSE."""
    every = (*t, *tangents)
    if _handler(every):
        got = next(name for x in every if (name := type(x).__name__) in HANDLERS)
        raise NotImplementedError(f"attention_jvp: got {got}s, expected plain tensors")
    o = o._replace(grad=True)
    if _is_compiling():
        return tuple(ATTENTION.operator("_jvp")(*tangents, None, None, *t, *o))
    if watched() and not _transforms() and forward_ad._current_level < 0:
        return tuple(passes.jvp(ATTENTION, t, o, tangents, (None, None)))
    return transforms.AttentionJvp.apply(ATTENTION, o, *t, *tangents, None, None)


class Attention(torch.autograd.Function):
    """For autograd alone: the cheapest form of a Function. It sees only `tensors`, those of t.

    Its name is what users see as `grad_fn`: AttentionBackward.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        op, o, t, found, planned = call
        spec, backend = planned
        if recording():
            outs = recorded(op, "", op.forward, (backend, spec, t), t, o)
        else:
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
        if _is_traced():  # by compiled autograd
            found = passes.backward(op, t, o, outs, grads, wants)
        # With create_graph=True somebody may differentiate again; torch.func may batch the grads.
        elif torch.is_grad_enabled() or _transforms() or forward_ad._current_level >= 0:
            found = transforms.backward(op, o, wants, grads, outs, t)
        elif not watched() and _begins(kind((*t, *outs, *grads)), before):
            if recording():
                given, arguments = (op, planned, t, outs, grads, wants), (grads, outs, t, o)
                found = recorded(op, "_backward", run_backward, given, *arguments, [list(wants)])
            else:
                found = run_backward(op, planned, t, outs, grads, wants)
        elif any(map(is_batched_by_autograd, grads)):
            found = transforms.backward(op, o, wants, grads, outs, t)
        else:  # hooks may save one tensor and give back another
            found = passes.backward(op, t, o, outs, grads, wants)
        return None, *spread(found, wants, n)


def _begins(found: Kind | None, before: Kind) -> bool:
    """Is it a kind of tensors of which the first are of the kind `before`?"""
    return found is not None and found[: len(before)] == before


class AttentionWeights(Attention):
    """The same of the weights."""


# Their own `apply` looks for torch.func's wrappers first, for a microsecond. Here there are none:
# they are no plain memory.
_attention, _weights = (
    super(torch.autograd.Function, function).apply  # ty: ignore
    for function in (Attention, AttentionWeights)
)
