"""The passes as autograd Functions that torch.func can transform.

`formulas` has the derivatives, `batches` how V calls under vmap become one. Such a Function takes
15 µs more than `dispatcher.Attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..call.spec import ARGUMENTS, DIFFERENTIABLE, INDEX, Options, Tangents, Tensors
from . import formulas, run_pass
from .batches import batched
from .formulas import PassCall, normaliser_of
from .legacy_vmap import unbatched
from .operation import BACKWARD, FORWARD, JVP, SECOND, Group, Operation, Pass, need_tangents

_is_traced = torch.compiler.is_dynamo_compiling


class _Pass(Function):
    """(call, *tensors), the tensors in the order of the pass's operator."""

    @staticmethod
    def forward(call: PassCall, *tensors: Any) -> Any:
        groups, t = call.split(tensors)
        return tuple(
            run_pass.run(call.which, call.op, Tensors(*t), call.o, groups, call.needs_grad)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.count = len(tensors)
        if not ctx.call.which.chooses:  # derivatives of the others need no results
            tensors += output
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *moves: Any) -> Any:
        kept = ctx.saved_tensors
        given = kept[: ctx.count], kept[ctx.count :], moves, ctx.needs_input_grad[1:]
        return None, *formulas.derivative(run, ctx.call, *given)

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Any:
        if ctx.call.which is JVP:
            formulas.refuse_forward_twice()
        if ctx.call.which is SECOND:
            formulas.refuse_third()
        need_tangents(ctx.call.op)
        kept = run_pass.primals(ctx.saved_tensors)
        of = _jvp_of_forward if ctx.call.which is FORWARD else _jvp_of_backward
        return tuple(of(ctx.call, kept[: ctx.count], kept[ctx.count :], moves[1:]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        call, *tensors = args
        return batched(run, call, info.batch_size, in_dims[1:], tensors)


class Attention(_Pass):
    """FORWARD. Users see the names of these classes in `grad_fn`."""


class AttentionBackward(_Pass):
    """BACKWARD."""


class AttentionJvp(_Pass):
    """JVP."""


class AttentionSecond(_Pass):
    """SECOND. The tensors and the gradients of out and LSE have gone through
    `DifferentiatedTwice`."""


_FUNCTIONS = {
    FORWARD.suffix: Attention,
    BACKWARD.suffix: AttentionBackward,
    JVP.suffix: AttentionJvp,
    SECOND.suffix: AttentionSecond,
}


def _jvp_of_forward(call: PassCall, t, outs, moves) -> Sequence[Tensor]:
    def tangents(*u):
        out_t, lse_t = run(JVP, call.op, t, call.o, (u, outs))
        return out_t, normaliser_of(lse_t)

    return unbatched(tangents, _moving(moves))


def _jvp_of_backward(call: PassCall, tensors, results, moves) -> Sequence[Tensor]:
    op, o = call.op, call.o
    (grads, outs), t = call.split(tensors)
    (grads_t, outs_t), t_t = call.split(moves)
    n = len(grads)

    def tangents(*moves):
        grads_t, outs_t, u = moves[:n], moves[n : 2 * n], moves[2 * n :]
        if all(x is None for x in u):
            return run(BACKWARD, op, t, o, (grads_t, outs), call.needs_grad)
        out_t, lse_t = outs_t[0], formulas.lse_of(outs_t[1])
        if out_t is None or lse_t is None:
            out_t, lse_t = run(JVP, op, t, o, (u, outs))
        every = grads[0], formulas.lse_of(grads[1]), grads_t[0], formulas.lse_of(grads_t[1])
        return run(SECOND, op, t, o, (u, (*outs, out_t, lse_t), every), call.needs_grad)

    return unbatched(tangents, (*grads_t, *outs_t, *_moving(t_t)))


def _moving(moves: Sequence[Tensor | None]) -> Tangents:
    """`Tangents` from one tangent for each of `Tensors`. Raises if a constant has a tangent."""
    for (name, a), x in zip(ARGUMENTS.items(), moves):
        if x is not None and name not in DIFFERENTIABLE:
            raise ValueError(
                f"{a.name}: got a tensor with a tangent, expected a constant: there is no "
                f"derivative by it; pass {a.name}.detach()"
            )
    return Tangents(*(moves[INDEX[name]] for name in DIFFERENTIABLE))


class DifferentiatedTwice(Function):
    """The identity, for tensors of which the next derivative would be a third. Asking for that
    raises, and only then: which gradients a Function needs is fixed long before they are asked for.
    """

    @staticmethod
    def forward(*tensors: Any) -> Any:
        return tuple(None if x is None else x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *moves: Any) -> Any:
        formulas.refuse_third()

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Any:
        formulas.refuse_third()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *tensors: Any) -> Any:
        return DifferentiatedTwice.apply(*tensors), in_dims


def run(
    which: Pass,
    op: Operation,
    t: Sequence[Any],
    o: Options,
    groups: Sequence[Group] = (),
    needs_grad: Sequence[str] = (),
) -> Sequence[Tensor]:
    """A pass as a Function. While a compiler traces, as an operator: it is compiled autograd, which
    sees no forward."""
    if _is_traced():
        return run_pass.run(which, op, Tensors(*t), o, groups, needs_grad)
    if which is SECOND:
        *t, dout, dlse = DifferentiatedTwice.apply(*t, *groups[2][:2])
        groups = *groups[:2], (dout, dlse, *groups[2][2:])
    call, every = PassCall(which, op, o, needs_grad), chain.from_iterable(groups)
    return _FUNCTIONS[which.suffix].apply(call, *every, *t)


def backward(op: Operation, o: Options, needs_grad, grads, outs, t) -> Sequence[Tensor]:
    """Gradients that can be differentiated again. The incoming ones may be batched."""
    return unbatched(lambda *grads: run(BACKWARD, op, t, o, (grads, outs), needs_grad), grads)
