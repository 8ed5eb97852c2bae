"""The torch.library operators: schemas, fake kernels, autograd formulas, vmap rules, FLOP counts.

Compilers see these, and nothing inside them. Schemas follow from the tables of a call in `spec`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import flops
from .check import check
from .crossing import kind
from .operation import (
    ATTENTION,
    WEIGHTS,
    Operation,
    empty_gradients,
    plan,
    run_backward,
    run_forward,
    spread,
)
from .roads import (
    N_TENSORS,
    as_tuple,
    batched_backward,
    batched_forward,
    refuse_double_backward,
    refuse_forward_ad,
    saved,
)
from .spec import ARGUMENTS, Options, Tensors

N_SCALARS = len(Options._fields)
_TYPES = {
    str: "str",
    bool: "bool",
    int: "int",
    float: "float",
    float | None: "float?",
    int | None: "int?",
}
# Sizes: of tensors, where nobody says them, and so symbols in a compiler.
_SYMBOLS = {"max_q": "SymInt?", "max_k": "SymInt?"}

library = torch.library.Library("fastattn", "DEF")


def inputs_schema() -> str:
    """`Tensors`, then `Options`."""
    tensors = [f"Tensor{'?' if a.optional else ''} {name}" for name, a in ARGUMENTS.items()]
    hints = get_type_hints(Options)
    scalars = [f"{_SYMBOLS.get(name) or _TYPES[hint]} {name}" for name, hint in hints.items()]
    return ", ".join(tensors + scalars)


def _define(op: Operation) -> None:
    """Operator, fake kernel, autograd formula, vmap rule and FLOP count of an operation."""
    tags = (torch.Tag.pt2_compliant_tag,)
    name, back, inputs = op.name, op.name + "_backward", inputs_schema()
    results = ", ".join(f"Tensor {x}" for x in op.results)
    given = ", ".join(
        [*(f"Tensor? d{x}" for x in op.results), *(f"Tensor out_{x}" for x in op.results), inputs]
    )
    library.define(f"{name}({inputs}) -> ({results})", tags=tags)
    library.define(f"{back}({given}, str[] wants) -> Tensor[]", tags=tags)

    n = len(op.results)
    bind = functools.partial
    library.impl(name, bind(_forward_kernel, op), "CompositeExplicitAutograd")
    library.impl(back, bind(_backward_kernel, op, n), "CompositeExplicitAutograd")
    name, back = f"fastattn::{name}", f"fastattn::{back}"
    torch.library.register_fake(name, bind(fake, op), lib=library)
    torch.library.register_fake(back, bind(_fake_backward, n), lib=library)
    torch.library.register_autograd(name, bind(_autograd, op), setup_context=_save, lib=library)
    torch.library.register_autograd(back, lambda ctx, *g: refuse_double_backward(), lib=library)
    torch.library.register_vmap(name, bind(_vmap, op), lib=library)
    torch.library.register_vmap(back, bind(_vmap_backward, op), lib=library)
    flops.register(op.operator(), flops.forward)
    flops.register(op.operator("_backward"), bind(flops.backward, n))


def split(args: Sequence[Any]) -> tuple[Tensors, Options]:
    return Tensors(*args[:N_TENSORS]), Options(*args[N_TENSORS : N_TENSORS + N_SCALARS])


def _untuple(outs: tuple):
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
    t, o = split(args)
    return _untuple(run_forward(op, t, o, kind(t)))


@unseen
def _backward_kernel(op: Operation, n: int, *args) -> list[Tensor]:
    _refuse_forward_mode()
    t, o = split(args[2 * n :])
    return run_backward(op, plan(t, o, kind(t)), t, args[n : 2 * n], args[:n], args[-1])


@unseen
def fake(op: Operation, *args):
    _refuse_forward_mode()
    t, o = split(args)
    check(t, o)
    return _untuple(op.outputs(t, o))


@unseen
def _fake_backward(n: int, *args) -> list[Tensor]:
    t, _ = split(args[2 * n :])
    return empty_gradients(t, args[-1])


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:N_TENSORS], *as_tuple(output))
    ctx.options = inputs[N_TENSORS:]
    ctx.set_materialize_grads(False)


def _autograd(op: Operation, ctx, *grads):
    t, outs = saved(ctx)
    wants = op.wants(ctx.needs_input_grad)
    found = op.operator("_backward")(*grads, *outs, *t, *ctx.options, list(wants))
    return (*spread(found, wants), *(None,) * N_SCALARS)


def _vmap(op: Operation, info, in_dims, *args):
    t, o = split(args)
    outs, out_dims = batched_forward(op, info.batch_size, in_dims[:N_TENSORS], t, o)
    return _untuple(outs), _untuple(out_dims)


def _vmap_backward(op: Operation, info, in_dims, *args):
    n = 2 * len(op.results) + N_TENSORS
    o, wants = Options(*args[n:-1]), tuple(args[-1])
    found, dims = batched_backward(op, info.batch_size, in_dims[:n], args[:n], o, wants)
    return list(found), list(dims)


_define(ATTENTION)
_define(WEIGHTS)
