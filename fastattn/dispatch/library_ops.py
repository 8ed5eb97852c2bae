"""The torch.library operators: schemas, fake kernels, autograd formulas, vmap rules, FLOP counts.

Compilers see these, and nothing inside them. Schemas are generated from the lists in `spec`: the
order of an operator's arguments is that of `Pass.given`, then of `Tensors` and `Options`. Saved
programs have forward operators, so these have defaults, and an order of their own
(`run_pass.in_saved_order`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from ..backends.native.marshalling import kind
from ..call.spec import ARGUMENTS, DROPOUT_PERIODS, NATIVE_NAMES, Options, Tensors
from ..call.validation import check, check_results, need_memory
from ..namespace import PACKAGE, add_op_namespace_prefix, operator
from ..score_mods.unlowered import lowered_call
from . import flops, formulas, inductor
from .batches import batched
from .formulas import PassCall
from .operation import (
    ATTENTION,
    BACKWARD,
    FORWARD,
    JVP,
    SECOND,
    WEIGHTS,
    Group,
    Operation,
    Pass,
    empty_gradients,
    plan,
    tangent_outputs,
)
from .run_pass import (
    DEFAULTS,
    NAMES,
    arguments,
    as_tuple,
    drops_tangents,
    from_saved_order,
    has_tangents,
    in_saved_order,
    no_tangents,
    split,
)

N_TENSORS = len(Tensors._fields)
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


def _inputs(defaults: bool) -> list[str]:
    """The arguments for `Tensors`, then `Options`."""
    types = {name: f"Tensor{'?' if a.optional else ''}" for name, a in ARGUMENTS.items()}
    types |= {name: _TYPES[hint] for name, hint in get_type_hints(Options).items()} | _SYMBOLS
    schema = [f"{kind} {NATIVE_NAMES.get(name, name)}" for name, kind in types.items()]
    if defaults:
        for at, name in enumerate(NAMES):
            if name in DEFAULTS:
                schema[at] += f"={_shown(DEFAULTS[name])}"
    return schema


def _shown(default: Any) -> str:
    """A default in a schema."""
    return f'"{default}"' if isinstance(default, str) else repr(default)


def _schema(which: Pass, op: Operation) -> str:
    known = "Tensor?" if which is JVP else "Tensor"  # it returns out and normaliser if not given
    given = []
    for group, names in zip(which.given, which.names(op)):
        for at, name in enumerate(names):
            moved = "_t" if at >= 2 else ""  # of the second pass: tangents of results
            if group == "tangents":
                given.append(f"Tensor? {name}_t")
            elif group == "grads":
                given.append(f"Tensor? d{name}{moved}")
            else:
                given.append(f"Tensor {name}{moved}" if moved else f"{known} out_{name}")
    given += in_saved_order(_inputs(True)) if which is FORWARD else _inputs(False)
    given += ["str[] wants"] * which.chooses
    results = ", ".join(f"Tensor {x}" for x in op.results)
    return f"({', '.join(given)}) -> {f'({results})' if which is FORWARD else 'Tensor[]'}"


def _define(which: Pass, op: Operation, count: Any) -> None:
    """Register the operator of a pass, with fake kernel, autograd formula, vmap rule and FLOP
    count."""
    name, bind = op.name + which.suffix, functools.partial
    full = add_op_namespace_prefix(name)
    library.define(name + _schema(which, op), tags=TAGS)
    library.impl(name, bind(_kernel, which, op), "CompositeExplicitAutograd")
    torch.library.register_fake(full, bind(fake, which, op), lib=library)
    save = bind(_save, which, op)
    torch.library.register_autograd(full, bind(_autograd, which), setup_context=save, lib=library)
    torch.library.register_vmap(full, bind(_vmap, which, op), lib=library)
    flops.register(operator(name), count)


def _split(
    which: Pass, op: Operation, args: Sequence[Any]
) -> tuple[list[Group], Tensors, Options, tuple[str, ...]]:
    """The groups of a pass, tensors, options and needs_grad."""
    if which is FORWARD:
        return [], *split(args), ()
    groups, rest = which.split(op, args)
    needs_grad = tuple(rest[-1]) if which.chooses else ()
    t, o = rest[:N_TENSORS], rest[N_TENSORS : len(NAMES)]
    return groups, Tensors(*t), Options(*o), needs_grad


def _untuple(outs: Sequence[Any]) -> Any:
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


@opaque_to_dynamo
def _kernel(which: Pass, op: Operation, *args):
    _refuse_forward_mode()
    groups, t, o, needs_grad = _split(which, op, args)
    t, o = lowered_call(t, o)
    kind_of_tensors = kind(t)
    planned = plan(t, o, kind_of_tensors)
    if kind_of_tensors is None:
        need_memory(t)
    for group, names, tensors in zip(which.given, which.names(op), groups):
        if group != "tangents":
            check_results(t, o, names, tensors, "gradient of " if group == "grads" else "")
    results = which.run(op, planned, t, o, groups, needs_grad)
    return _untuple(results) if which is FORWARD else results


@opaque_to_dynamo
def fake(which: Pass, op: Operation, *args):
    groups, t, o, needs_grad = _split(which, op, args)
    if which is FORWARD or which is BACKWARD:
        inductor.keep_whole(op.operator(which.suffix).default)
    if which.chooses:  # it has the tensors and the results of a pass that was checked
        return empty_gradients(t, o, needs_grad)
    _refuse_forward_mode()
    if which is JVP:
        check(t, o)
        return tangent_outputs(t, o, groups[1][0] is not None)
    check(t, o)
    return _untuple(op.outputs(t, o))


def _save(which: Pass, op: Operation, ctx, inputs, output) -> None:
    """Save the tensors, and the results that a derivative takes: those of `FORWARD` and `JVP`."""
    groups, t, o, needs_grad = _split(which, op, inputs)
    tensors = [*(x for group in groups for x in group), *t]
    ctx.call, ctx.count = PassCall(which, op, o, needs_grad), len(tensors)
    ctx.save_for_backward(*tensors, *(() if which.chooses else as_tuple(output)))
    ctx.set_materialize_grads(False)


def _autograd(which: Pass, ctx, *moves):
    if which is not FORWARD:  # a list is one result
        (moves,) = moves
    kept, n = ctx.saved_tensors, ctx.count
    needed = _in_own_order(which, ctx.needs_input_grad, False)
    if which is SECOND:
        groups, of_t = ctx.call.split(needed[:n])
        if any((*groups[2][:2], *of_t)):
            formulas.refuse_third()
    gradients = formulas.derivative(_run, ctx.call, kept[:n], kept[n:], moves, needed[:n])
    every = *gradients, *(None,) * (len(Options._fields) + which.chooses)
    return tuple(in_saved_order(every)) if which is FORWARD else every


def _in_own_order(which: Pass, of: Sequence[Any], missing: Any) -> Sequence[Any]:
    """One of something for each argument of an operator, in the order of the pass."""
    if which is not FORWARD:
        return of
    t, o = from_saved_order(of, [missing] * len(NAMES))
    return *t, *o


def _vmap(which: Pass, op: Operation, info, in_dims, *args):
    groups, t, o, needs_grad = _split(which, op, args)
    tensors = [*(x for group in groups for x in group), *t]
    dims = _in_own_order(which, in_dims, None)[: len(tensors)]
    call = PassCall(which, op, o, needs_grad)
    results, dims = batched(_run, call, info.batch_size, dims, tensors)
    if which is FORWARD:
        return _untuple(results), _untuple(dims)
    return list(results), list(dims)


def _run(which: Pass, op: Operation, t, o: Options, groups=(), needs_grad=()):
    """A pass as its operator. If no tensor has a tangent, turn forward mode off, or it would
    raise."""
    given = arguments(which, t, o, groups, needs_grad)
    off = drops_tangents() and not has_tangents([x for x in given if isinstance(x, Tensor)])
    with no_tangents() if off else contextlib.nullcontext():
        return as_tuple(op.operator(which.suffix)(*given))


_define(FORWARD, ATTENTION, flops.forward)
_define(BACKWARD, ATTENTION, functools.partial(flops.backward, len(ATTENTION.results)))
_define(FORWARD, WEIGHTS, flops.forward)
_define(BACKWARD, WEIGHTS, functools.partial(flops.backward, len(WEIGHTS.results)))
_define(JVP, ATTENTION, flops.jvp)
_define(SECOND, ATTENTION, flops.second)
inductor.install()
