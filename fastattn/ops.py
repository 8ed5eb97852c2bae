"""The torch operators, and the road a call takes to a kernel.

An operation (attention, or its weights) has one forward and one backward kernel in each backend.
Everything here is written once for both. Which wrapper a call goes through depends on who is
watching, because no single one serves everybody and each costs time:

    torch.compile, torch.export, FakeTensorMode, any dispatch mode  ->  the torch.library operator
    torch.func transforms (vmap, grad, ...)                         ->  `transforms.Transformed`
    autograd                                                        ->  `Differentiable`
    nobody                                                          ->  the kernel itself
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import flops
from .backend import Backend, choose, token_major
from .check import check, describe
from .spec import AttentionSpec, Options, Tensors

INPUTS = (
    "Tensor q, Tensor k, Tensor? v, Tensor? mask, Tensor? lengths, Tensor? slopes, Tensor? sinks, "
    "Tensor? seed, Tensor? normaliser, float? scale, str causal, int? left, int? right, "
    "float? softcap, float dropout_p, str backend, bool grad, bool average_heads, bool constant_lse"
)
PLAIN = frozenset({Tensor, torch.nn.Parameter})  # no subclass with a dispatch of its own
N_TENSORS = len(Tensors._fields)
N_SCALARS = len(Options._fields)
MAX_PLANS = 4096

_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state
_is_compiling = torch.compiler.is_compiling
_is_batched_by_autograd = torch._C._functorch.is_legacy_batchedtensor
_plans: dict[tuple, tuple[AttentionSpec, Backend]] = {}


class Operation(NamedTuple):
    """What differs between attention and its weights."""

    name: str
    results: tuple[str, ...]
    batch_at: tuple[int, ...]  # which dimension of each result is the batch
    wants: tuple[int, ...]  # which of `Tensors` have gradients, in the backends' order
    forward: Callable[[Backend, AttentionSpec, Tensors], tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    outputs: Callable[[Tensors, Options], tuple[Tensor, ...]]  # empty ones, for fake tensors

    def operator(self, suffix: str = ""):
        return getattr(torch.ops.fastattn, self.name + suffix)


# ------------------------------------------------------------------------------------ the kernels


def plan(t: Tensors, o: Options) -> tuple[AttentionSpec, Backend]:
    """The spec of a call and the backend that runs it; checked once for each kind of call."""
    q, k, v, mask, lengths, slopes, sinks, seed, normaliser = t
    try:
        key: tuple = (q.shape, k.shape, q.dtype, k.dtype, q.device, k.device, o)
        key += (q.layout, k.layout)
        if v is not None:
            key += (v.shape, v.dtype, v.device, v.layout)
        if not (mask is lengths is slopes is sinks is seed is normaliser is None):
            for x in (mask, lengths, slopes, sinks, seed, normaliser):
                key += (None,) if x is None else (x.shape, x.dtype, x.device)
        return _plans[key]
    except (KeyError, AttributeError, TypeError):
        spec = describe(t, o)  # raises the readable error if the arguments were to blame
    backend = choose(spec, o.backend)
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[key] = spec, backend
    if os.environ.get("FASTATTN_LOG") == "1":
        print(f"fastattn: {backend.name} runs {spec}", file=sys.stderr)
    return spec, backend


def run_forward(op: Operation, t: Tensors, o: Options) -> tuple[Tensor, ...]:
    spec, backend = plan(t, o)
    return op.forward(backend, spec, t)


def run_backward(
    op: Operation,
    t: Tensors,
    o: Options,
    outs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    wants: Sequence[bool],
) -> list[Tensor]:
    """The gradients that `wants` asks for, by the backend that ran forward."""
    if all(grad is None for grad in grads):
        return [torch.zeros_like(t[i]) for i, wanted in zip(op.wants, wants) if wanted]
    spec, backend = plan(t, o)
    found = op.backward(backend, spec, t, outs, grads, wants)
    return [grad for grad, wanted in zip(found, wants) if wanted and grad is not None]


def spread(op: Operation, grads: Sequence[Tensor], wants: Sequence[bool]) -> list[Tensor | None]:
    """`run_backward`'s gradients in the order of `Tensors`, None where there is none."""
    rest, every = iter(grads), [None] * N_TENSORS
    for index, wanted in zip(op.wants, wants):
        if wanted:
            every[index] = next(rest)
    return every


# ----------------------------------------------------------------------------------------- roads


def call(op: Operation, t: Tensors, o: Options) -> tuple[Tensor, ...]:
    """Run an operation through the wrapper that this moment needs; see above."""
    if _is_compiling():
        return _as_tuple(op.operator()(*t, *o))
    if _transforms():
        from .transforms import Transformed  # imports this module

        return Transformed.apply(op, o._replace(grad=True), *t)
    if forward_ad._current_level >= 0:
        refuse_tangents(t)
    if o.grad and not _observed(t):
        return Differentiable.apply(op, o, *t)
    return call_kernel(op, t, o)


def call_kernel(op: Operation, t: Tensors, o: Options) -> tuple[Tensor, ...]:
    """The kernel, or the operator where something wants to see it pass."""
    if _observed(t):
        check(t, o)
        if _tracing() is not None:  # a traced graph serves with and without gradients
            o = o._replace(grad=True)
        return _as_tuple(op.operator()(*t, *o))
    return run_forward(op, t, o)


def call_backward_kernel(op, t, o, outs, grads, wants) -> list[Tensor]:
    if _observed((*t, *outs, *grads)):
        return op.operator("_backward")(*grads, *outs, *t, *o, list(wants))
    return run_backward(op, t, o, outs, grads, wants)


def _observed(tensors: Sequence[Tensor | None]) -> bool:
    """Is a mode active that has to see operators, or a tensor here that is no plain memory?"""
    if _modes() or _tracing() is not None:
        return True
    for x in tensors:
        if x is None:
            continue
        if type(x) not in PLAIN or x.is_meta or x.is_neg():
            return True
    return False


def _as_tuple(outs) -> tuple[Tensor, ...]:
    return (outs,) if isinstance(outs, Tensor) else tuple(outs)


def refuse_tangents(t: Sequence[Tensor | None]) -> None:
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in t):
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


def refuse_batched_gradients() -> None:
    raise NotImplementedError(
        "fastattn cannot be given a batch of gradients by autograd itself (is_grads_batched=True, "
        "jacobian(vectorize=True)): use torch.func.jacrev or torch.func.vmap, or vectorize=False"
    )


def saved(ctx) -> tuple[Tensors, tuple[Tensor, ...]]:
    """Inputs and outputs; asked for once, because every asking unpacks them all (checkpoints)."""
    tensors = ctx.saved_tensors
    return Tensors(*tensors[:N_TENSORS]), tensors[N_TENSORS:]


class Differentiable(torch.autograd.Function):
    """For autograd alone: the cheapest form of a Function."""

    @staticmethod
    def forward(ctx, op, o, *tensors):
        t = Tensors(*tensors)
        outs = run_forward(op, t, o)
        ctx.save_for_backward(*t, *outs)
        ctx.call = op, o
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx, *grads):
        op, o = ctx.call
        t, outs = saved(ctx)
        wants = [ctx.needs_input_grad[2 + i] for i in op.wants]
        if any(x is not None and _is_batched_by_autograd(x) for x in grads):
            refuse_batched_gradients()
        # With create_graph=True somebody may differentiate again; torch.func may batch the grads.
        if torch.is_grad_enabled() or _transforms():
            from .transforms import TransformedBackward

            found = TransformedBackward.apply(op, o, tuple(wants), *grads, *outs, *t)
        else:
            found = call_backward_kernel(op, t, o, outs, grads, wants)
        return None, None, *spread(op, found, wants)


# ------------------------------------------------------------------------- torch.library operators

library = torch.library.Library("fastattn", "DEF")


def _define(op: Operation) -> None:
    """Operator, fake kernel, autograd formula and FLOP count of an operation."""
    tags = (torch.Tag.pt2_compliant_tag,)
    name, back = op.name, op.name + "_backward"
    results = ", ".join(f"Tensor {x}" for x in op.results)
    grads = ", ".join(f"Tensor? d{x}" for x in op.results)
    saved = results.replace("Tensor ", "Tensor out_") + ", "
    library.define(f"{name}({INPUTS}) -> ({results})", tags=tags)
    library.define(f"{back}({grads}, {saved}{INPUTS}, bool[] wants) -> Tensor[]", tags=tags)

    n = len(op.results)
    library.impl(name, functools.partial(_forward_kernel, op), "CompositeExplicitAutograd")
    library.impl(back, functools.partial(_backward_kernel, op, n), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastattn::{name}", functools.partial(_fake, op), lib=library)
    torch.library.register_fake(
        f"fastattn::{back}", functools.partial(_fake_backward, op, n), lib=library
    )
    torch.library.register_autograd(
        f"fastattn::{name}",
        functools.partial(_autograd, op),
        setup_context=_save,
        lib=library,
    )
    torch.library.register_autograd(
        f"fastattn::{back}", lambda ctx, *grads: refuse_double_backward(), lib=library
    )
    flops.register(op.operator(), flops.forward)
    flops.register(op.operator("_backward"), functools.partial(flops.backward, n))


def _split(args: Sequence[Any]) -> tuple[Tensors, Options]:
    return Tensors(*args[:N_TENSORS]), Options(*args[N_TENSORS : N_TENSORS + N_SCALARS])


def untuple(outs: tuple[Tensor, ...]):
    return outs if len(outs) > 1 else outs[0]


# The compiler sees the operators, and nothing inside them. torch.compiler.disable would do, but
# it imports the compiler, a second, at once; this is what torch's own modules use instead.
unseen = torch._disable_dynamo


def _refuse_forward_mode() -> None:
    """Below autograd tangents cannot be seen, and would be dropped without a word."""
    if forward_ad._current_level >= 0:
        refuse_forward_ad()


@unseen
def _forward_kernel(op: Operation, *args):
    _refuse_forward_mode()
    return untuple(run_forward(op, *_split(args)))


@unseen
def _backward_kernel(op: Operation, n: int, *args):
    _refuse_forward_mode()
    t, o = _split(args[2 * n :])
    return run_backward(op, t, o, args[n : 2 * n], args[:n], args[-1])


@unseen
def _fake(op: Operation, *args):
    _refuse_forward_mode()
    t, o = _split(args)
    check(t, o)
    return untuple(op.outputs(t, o))


@unseen
def _fake_backward(op: Operation, n: int, *args):
    t, _ = _split(args[2 * n :])
    inputs = [t[i] for i, wanted in zip(op.wants, args[-1]) if wanted]
    return [
        x.new_empty(x.shape) if x is t.mask or x is t.sinks else token_major(x, x.shape, x.dtype)
        for x in inputs
    ]


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:N_TENSORS], *_as_tuple(output))
    ctx.options = inputs[N_TENSORS:]
    ctx.set_materialize_grads(False)


def _autograd(op: Operation, ctx, *grads):
    t, outs = saved(ctx)
    wants = [ctx.needs_input_grad[i] for i in op.wants]
    found = op.operator("_backward")(*grads, *outs, *t, *ctx.options, wants)
    return (*spread(op, found, wants), *(None,) * N_SCALARS)


# ----------------------------------------------------------------------------------- the operations


def _attention_outputs(t: Tensors, o: Options) -> tuple[Tensor, ...]:
    B, H, M, _ = t.q.shape
    out = token_major(t.q, (B, H, M, t.v.shape[3]), t.q.dtype)
    return out, t.q.new_empty((2, B, H, M), dtype=lse_dtype(t.q))


def _weights_outputs(t: Tensors, o: Options) -> tuple[Tensor, ...]:
    (B, H, M, _), N = t.q.shape, t.k.shape[2]
    return (t.q.new_empty((B, M, N) if o.average_heads else (B, H, M, N)),)


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _attention_backward(backend, spec, t, outs, grads, wants):
    """Of the normaliser only the LSE is a function to differentiate: what rounding lost is not."""
    dout, dnormaliser = grads
    return backend.backward(
        spec, t, *outs, dout, None if dnormaliser is None else dnormaliser[0], wants
    )


ATTENTION = Operation(
    "attention",
    results=("out", "normaliser"),
    batch_at=(0, 1),
    wants=(0, 1, 2, 3, 6),  # q k v mask sinks
    forward=lambda backend, spec, t: backend.forward(spec, t),
    backward=_attention_backward,
    outputs=_attention_outputs,
)
WEIGHTS = Operation(
    "weights",
    results=("weights",),
    batch_at=(0,),
    wants=(0, 1, 3, 6),  # q k mask sinks
    forward=lambda backend, spec, t: (backend.weights(spec, t),),
    backward=lambda backend, spec, t, outs, grads, wants: backend.weights_backward(
        spec, t, grads[0], wants
    ),
    outputs=_weights_outputs,
)
_define(ATTENTION)
_define(WEIGHTS)
