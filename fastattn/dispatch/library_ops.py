"""The torch.library operators: schemas, fake kernels, autograd formulas, vmap rules, FLOP counts.

Compilers see these, and nothing inside them. Schemas are generated from the lists in `spec`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from ..backends.native.marshalling import kind
from ..call.spec import (
    ARGUMENTS,
    DIFFERENTIABLE,
    DROPOUT_PERIODS,
    INCOMING,
    NATIVE_NAMES,
    WITH_TANGENTS,
    Options,
    Tangents,
    Tensors,
)
from ..call.validation import check, check_results
from ..namespace import PACKAGE, add_op_namespace_prefix, operator
from ..score_mods.unlowered import lowered_call
from . import flops, formulas, functorch
from .formulas import PassCall, Passes, names
from .forward_arguments import FIELDS, LATER, flat, pair
from .functorch import N_TANGENTS, N_TENSORS, parts
from .operation import (
    ATTENTION,
    WEIGHTS,
    Operation,
    empty_gradients,
    need_tangents,
    plan,
    run_backward,
    run_forward,
    run_jvp,
    run_second,
    spread,
    tangent_outputs,
)
from .run_pass import as_tuple, drops_tangents, has_tangents, no_tangents

N_SCALARS = len(Options._fields)
_TYPES = {
    str: "str",
    bool: "bool",
    int: "int",
    float: "float",
    float | None: "float?",
    int | None: "int?",
    tuple[int, ...] | None: "SymInt[]?",
}
# Sizes: by default those of tensors, which are symbols in a compiler.
_SYMBOLS = {"max_q": "SymInt?", "max_k": "SymInt?"}
_SYMBOLS |= dict.fromkeys(DROPOUT_PERIODS, "SymInt")

# The layouts in `Options` may follow the strides of inputs: a compiler has to keep these strides.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
library: torch.library.Library = torch.library.Library(PACKAGE, "DEF")


def inputs_schema() -> str:
    """The arguments for `Tensors`, then `Options`."""
    types = {name: f"Tensor{'?' if a.optional else ''}" for name, a in ARGUMENTS.items()}
    types |= {name: _TYPES[hint] for name, hint in get_type_hints(Options).items()} | _SYMBOLS
    return ", ".join(f"{kind} {NATIVE_NAMES.get(name, name)}" for name, kind in types.items())


def forward_schema() -> str:
    """The same in the order of `forward_arguments`, with defaults for later arguments."""
    kinds = dict(zip((*ARGUMENTS, *Options._fields), inputs_schema().split(", ")))
    defaults = {name: '""' if name == "score_mod" else "None" for name in LATER}
    return ", ".join(
        kinds[name] + (f"={defaults[name]}" if name in defaults else "") for name in FIELDS
    )


def _define(op: Operation) -> None:
    """Register the forward and backward operators of an operation, each with fake kernel, autograd
    formula, vmap rule and FLOP count."""
    name, back, inputs = op.name, op.name + "_backward", inputs_schema()
    results = ", ".join(f"Tensor {x}" for x in op.results)
    library.define(f"{name}({forward_schema()}) -> ({results})", tags=TAGS)
    given = [f"Tensor? d{x}" for x in op.results] + [f"Tensor out_{x}" for x in op.results]
    n = len(op.results)
    _register(op, name, _forward_kernel, fake, _autograd, _save, _vmap, flops.forward)
    library.define(f"{back}({', '.join(given)}, {inputs}, str[] wants) -> Tensor[]", tags=TAGS)
    count = functools.partial(flops.backward, n)
    _register(op, back, *BACKWARD, count)


def _define_tangents(op: Operation) -> None:
    """Register the operators of the passes that take tangents. `_jvp` returns out and normaliser
    only if they are not given."""
    inputs, moves = inputs_schema(), ", ".join(f"Tensor? {name}_t" for name in DIFFERENTIABLE)
    name = op.name + "_jvp"
    given = f"{moves}, Tensor? out_out, Tensor? out_normaliser, {inputs}"
    library.define(f"{name}({given}) -> Tensor[]", tags=TAGS)
    _register(op, name, *JVP, flops.jvp)
    name = op.name + "_second"
    outs = "Tensor out_out, Tensor out_normaliser, Tensor out_t, Tensor lse_t"
    grads = "Tensor? dout, Tensor? dlse, Tensor? dout_t, Tensor? dlse_t"
    given = f"{moves}, {outs}, {grads}, {inputs}, str[] wants"
    library.define(f"{name}({given}) -> Tensor[]", tags=TAGS)
    _register(op, name, *SECOND, flops.second)


def _register(op: Operation, name: str, kernel, fake, autograd, save, vmap, count) -> None:
    bind, full = functools.partial, add_op_namespace_prefix(name)
    library.impl(name, bind(kernel, op), "CompositeExplicitAutograd")
    torch.library.register_fake(full, bind(fake, op), lib=library)
    torch.library.register_autograd(full, bind(autograd, op), setup_context=save, lib=library)
    torch.library.register_vmap(full, bind(vmap, op), lib=library)
    flops.register(operator(name), count)


def split(args: Sequence[Any]) -> tuple[Tensors, Options]:
    """The call of a forward operator's arguments."""
    t, o = pair(args)
    return Tensors(*t), Options(*o)


def _untuple(outs: tuple):
    return outs if len(outs) > 1 else outs[0]


# Keeps the compiler from tracing into operators. torch.compiler.disable would do that, too, but it
# imports the compiler at once, which takes a second. torch's own modules use this instead.
opaque_to_dynamo = torch._disable_dynamo


def _refuse_forward_mode() -> None:
    """Raise if tangents may be dropped silently: operators cannot see them below autograd."""
    if drops_tangents():
        raise NotImplementedError(
            "fastattn has no forward-mode derivative (jvp, jacfwd, hessian) of compiled code, nor "
            "of its operators: call fastattn.attention as it is, not compiled, or "
            "fastattn.attention_jvp, which compiles"
        )


# ----------------------------------------------------------------------------- forward and backward


@opaque_to_dynamo
def _forward_kernel(op: Operation, *args):
    _refuse_forward_mode()
    t, o = lowered_call(*split(args))
    return _untuple(run_forward(op, t, o, kind(t)))


@opaque_to_dynamo
def fake(op: Operation, *args):
    _refuse_forward_mode()
    _keep_whole_in_inductor(op.operator().default)
    t, o = split(args)
    check(t, o)
    return _untuple(op.outputs(t, o))


def _keep_whole_in_inductor(operator: torch._ops.OpOverload) -> None:
    """Register a fallback. If the environment has CI, inductor raises for an operator that has a
    decomposition but no lowering. Fake kernels call this, because they run before inductor lowers a
    graph; only if the module is imported already, because importing it takes seconds."""
    lowering = sys.modules.get("torch._inductor.lowering")
    if hasattr(lowering, "make_fallback") and operator not in lowering.lowerings:
        lowering.make_fallback(operator, warn=False)


def _save(ctx, inputs, output) -> None:
    t, ctx.options = pair(inputs)
    ctx.save_for_backward(*t, *as_tuple(output))
    ctx.set_materialize_grads(False)


def _autograd(op: Operation, ctx, *grads):
    t, outs = parts(ctx.saved_tensors, N_TENSORS)
    needs_grad = op.needs_grad(pair(ctx.needs_input_grad)[0])
    found = RUN.backward(op, ctx.options, needs_grad, grads, outs, t)
    return flat(spread(found, needs_grad), (None,) * N_SCALARS)


def _vmap(op: Operation, info, in_dims, *args):
    t, o = split(args)
    dims, _ = pair(in_dims)
    outs, dims = functorch.batched_forward(RUN, op, info.batch_size, dims, t, o)
    return _untuple(outs), _untuple(dims)


@opaque_to_dynamo
def _backward_kernel(op: Operation, *args) -> list[Tensor]:
    _refuse_forward_mode()
    grads, outs, t, o, needs_grad = _backward_arguments(op, args)
    t, o = lowered_call(t, o)
    planned = plan(t, o, kind(t))
    check_results(t, o, op.results, outs)
    check_results(t, o, op.results, grads, "gradient of ")
    return run_backward(op, planned, t, outs, grads, needs_grad)


@opaque_to_dynamo
def _fake_backward(op: Operation, *args) -> list[Tensor]:
    *_, t, o, needs_grad = _backward_arguments(op, args)
    return empty_gradients(t, o, needs_grad)


def _backward_arguments(op: Operation, args):
    """Gradients, results, tensors, options and needs_grad."""
    n = len(op.results)
    grads, outs, t, rest = parts(args, n, n, N_TENSORS)
    return grads, outs, Tensors(*t), Options(*rest[:-1]), tuple(rest[-1])


def _save_all(ctx, inputs, output) -> None:
    """Save all arguments of `_backward` or `_second`: tensors, options and needs_grad."""
    at = len(inputs) - N_SCALARS - 1
    ctx.save_for_backward(*inputs[:at])
    ctx.call = Options(*inputs[at:-1]), tuple(inputs[-1])
    ctx.set_materialize_grads(False)


def _autograd_of_backward(op: Operation, ctx, moves):
    need_tangents(op)
    o, needs_grad = ctx.call
    n = len(op.results)
    grads, outs, t = parts(ctx.saved_tensors, n, n)
    of_t = ctx.needs_input_grad[2 * n : 2 * n + N_TENSORS]
    call, wanted = PassCall(op, o, Tensors(*t), outs), op.needs_grad(of_t)
    incoming, found = formulas.of_backward(RUN, call, grads, moves, needs_grad, wanted)
    incoming = (x if need else None for x, need in zip(incoming, ctx.needs_input_grad))
    return (*incoming, *(None,) * n, *spread(found, wanted), *(None,) * (N_SCALARS + 1))


def _vmap_backward(op: Operation, info, in_dims, *args):
    n = 2 * len(op.results) + N_TENSORS
    o, needs_grad = Options(*args[n:-1]), tuple(args[-1])
    found = functorch.batched_backward(
        RUN, op, info.batch_size, in_dims[:n], args[:n], o, needs_grad
    )
    return tuple(map(list, found))


BACKWARD = _backward_kernel, _fake_backward, _autograd_of_backward, _save_all, _vmap_backward

# ------------------------------------------------------------------ the passes that take tangents


def _jvp_arguments(args):
    """Tangents; out and normaliser, or None twice; tensors; options."""
    u, outs, t, o = parts(args, N_TANGENTS, 2, N_TENSORS)
    return Tangents(*u), outs, Tensors(*t), Options(*o)


@opaque_to_dynamo
def _jvp_kernel(op: Operation, *args) -> list[Tensor]:
    _refuse_forward_mode()
    u, outs, t, o = _jvp_arguments(args)
    t, o = lowered_call(t, o)
    found = kind(t)
    plan(t, o, found)
    check_results(t, o, op.results, outs)
    return run_jvp(op, t, o, found, u, outs)


@opaque_to_dynamo
def _fake_jvp(op: Operation, *args) -> list[Tensor]:
    _refuse_forward_mode()
    _, outs, t, o = _jvp_arguments(args)
    check(t, o)
    return tangent_outputs(t, o, outs[0] is not None)


def _save_jvp(ctx, inputs, output) -> None:
    u, outs, t, o = _jvp_arguments(inputs)
    known = outs if outs[0] is not None else ()
    ctx.save_for_backward(*u, *t, *known, *output)
    ctx.options = o
    ctx.set_materialize_grads(False)


def _autograd_of_jvp(op: Operation, ctx, grads):
    u, t, outs = parts(ctx.saved_tensors, N_TANGENTS, N_TENSORS)
    of_u, _, of_t = parts(ctx.needs_input_grad, N_TANGENTS, 2)
    needs_grad, needs_grad_u = op.needs_grad(of_t[:N_TENSORS]), names(of_u)
    every = (*(None,) * (4 - len(grads)), *grads)
    call = PassCall(op, ctx.options, Tensors(*t), outs)
    found, moved = formulas.of_jvp(RUN, call, Tangents(*u), every, needs_grad, needs_grad_u)
    tangents = formulas.tangents(moved, needs_grad_u)
    return (*tangents, None, None, *spread(found, needs_grad), *(None,) * N_SCALARS)


def _vmap_jvp(op: Operation, info, in_dims, *args):
    u, outs, t, o = _jvp_arguments(args)
    du, douts, dt, _ = parts(in_dims, N_TANGENTS, 2, N_TENSORS)
    dims, tensors = (*dt, *du, *douts), (*t, *u, *outs)
    return tuple(map(list, functorch.batched_jvp(RUN, op, info.batch_size, dims, tensors, o)))


JVP = _jvp_kernel, _fake_jvp, _autograd_of_jvp, _save_jvp, _vmap_jvp


def _second_arguments(args):
    """Tangents; results and their tangents; gradients and theirs; tensors; options; needs_grad."""
    u, outs, grads, t, rest = parts(args, N_TANGENTS, 4, 4, N_TENSORS)
    return Tangents(*u), outs, grads, Tensors(*t), Options(*rest[:-1]), tuple(rest[-1])


@opaque_to_dynamo
def _second_kernel(op: Operation, *args) -> list[Tensor]:
    _refuse_forward_mode()
    u, outs, grads, t, o, needs_grad = _second_arguments(args)
    t, o = lowered_call(t, o)
    found = kind(t)
    plan(t, o, found)
    check_results(t, o, WITH_TANGENTS, outs)
    check_results(t, o, INCOMING, grads, "gradient of ")
    return run_second(op, t, o, found, u, outs, grads, needs_grad)


@opaque_to_dynamo
def _fake_second(op: Operation, *args) -> list[Tensor]:
    *_, t, o, needs_grad = _second_arguments(args)
    return empty_gradients(t, o, needs_grad)


def _autograd_of_second(op: Operation, ctx, moves):
    o, needs_grad = ctx.call
    _, outs, grads, t = parts(ctx.saved_tensors, N_TANGENTS, 4, 4)
    of_u, _, of_grads, rest = parts(ctx.needs_input_grad, N_TANGENTS, 4, 4)
    if any((*of_grads[:2], *rest[:N_TENSORS])):
        formulas.refuse_third()
    call, needs_grad_u = PassCall(op, o, Tensors(*t), outs), names(of_u)
    found, incoming = formulas.of_second(RUN, call, grads, moves, needs_grad, needs_grad_u)
    incoming = (x if need else None for x, need in zip(incoming, of_grads[2:]))
    tangents = formulas.tangents(found, needs_grad_u)
    none = (None,) * (N_TENSORS + N_SCALARS + 1)
    return (*tangents, *(None,) * 6, *incoming, *none)


def _vmap_second(op: Operation, info, in_dims, *args):
    u, outs, grads, t, o, needs_grad = _second_arguments(args)
    du, douts, dgrads, dt, _ = parts(in_dims, N_TANGENTS, 4, 4, N_TENSORS)
    dims, tensors = (*dt, *du, *douts, *dgrads), (*t, *u, *outs, *grads)
    found = functorch.batched_second(RUN, op, info.batch_size, dims, tensors, o, needs_grad)
    return tuple(map(list, found))


SECOND = _second_kernel, _fake_second, _autograd_of_second, _save_all, _vmap_second


def _run(operator, tensors: Sequence[Tensor | None], *rest):
    """Call an operator. If no tensor has a tangent, turn forward mode off, or it would raise."""
    if drops_tangents() and not has_tangents(tensors):
        with no_tangents():
            return operator(*tensors, *rest)
    return operator(*tensors, *rest)


def _run_forward(op: Operation, o: Options, t: Sequence[Tensor | None]):
    if drops_tangents() and not has_tangents(t):
        with no_tangents():
            return op.operator()(*flat(t, o))
    return op.operator()(*flat(t, o))


RUN = Passes(
    forward=lambda op, o, t: as_tuple(_run_forward(op, o, t)),
    backward=lambda op, o, needs_grad, grads, outs, t: _run(
        op.operator("_backward"), (*grads, *outs, *t), *o, list(needs_grad)
    ),
    jvp=lambda op, o, t, u, outs: _run(op.operator("_jvp"), (*u, *outs, *t), *o),
    second=lambda op, o, needs_grad, t, u, outs, grads: _run(
        op.operator("_second"), (*u, *outs, *grads, *t), *o, list(needs_grad)
    ),
)

_define(ATTENTION)
_define(WEIGHTS)
_define_tangents(ATTENTION)
