"""The passes as autograd Functions that torch.func can transform: how each is differentiated, and
how V calls of it under vmap become one call.

`formulas` has the derivatives. Such a Function takes 15 µs more than `dispatcher.Attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..call.spec import (
    ARGUMENTS,
    DIFFERENTIABLE,
    INCOMING,
    INDEX,
    WITH_TANGENTS,
    Options,
    Tangents,
    Tensors,
)
from ..call.validation import check
from . import formulas, run_pass, vmap_fold
from .formulas import PassCall, Passes, names, normaliser_of
from .legacy_vmap import unbatched
from .operation import Operation, need_tangents, spread
from .vmap_fold import Dim

_is_traced = torch.compiler.is_dynamo_compiling

N_TENSORS = len(Tensors._fields)
N_TANGENTS = len(Tangents._fields)


def parts(of: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    """Split a sequence into parts of these sizes, and the rest."""
    found, first = [], 0
    for size in sizes:
        found.append(of[first : first + size])
        first += size
    return [*found, of[first:]]


class Attention(Function):
    """(op, o, *tensors)"""

    @staticmethod
    def forward(op: Operation, o: Options, *tensors: Any) -> Any:
        return run_pass.forward(op, Tensors(*tensors), o)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs[:2], (*inputs[2:], *output))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, o = ctx.call
        t, outs = parts(ctx.saved_tensors, N_TENSORS)
        needs_grad = op.needs_grad(ctx.needs_input_grad[2:])
        found = backward(op, o, needs_grad, grads, outs, t)
        return None, None, *spread(found, needs_grad)

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Any:
        op, o = ctx.call
        need_tangents(op)
        t, outs = parts(run_pass.primals(ctx.saved_tensors), N_TENSORS)
        u = _moving(moves[2:])

        def tangents(*u):
            out_t, lse_t = RUN.jvp(op, o, t, u, outs)
            return out_t, normaliser_of(lse_t)

        return tuple(unbatched(tangents, u))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        op, o, *tensors = args
        return batched_forward(RUN, op, info.batch_size, in_dims[2:], Tensors(*tensors), o)


class AttentionBackward(Function):
    """(op, o, needs_grad, *gradients of the results, *results, *tensors)"""

    @staticmethod
    def forward(op: Operation, o: Options, needs_grad: Sequence[str], *tensors: Any) -> Any:
        grads, outs, t = _around(op, tensors)
        return tuple(run_pass.backward(op, Tensors(*t), o, outs, grads, needs_grad))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs[:3], inputs[3:])

    @staticmethod
    def backward(ctx: Any, *moves: Any) -> Any:
        op, o, needs_grad = ctx.call
        need_tangents(op)
        grads, outs, t = _around(op, ctx.saved_tensors)
        of_grads, of_outs, of_t = _around(op, ctx.needs_input_grad[3:])
        call, wanted = PassCall(op, o, Tensors(*t), outs), op.needs_grad(of_t)

        def gradients(*moves):
            incoming, found = formulas.of_backward(RUN, call, grads, moves, needs_grad, wanted)
            return *incoming, *spread(found, wanted)

        found = unbatched(gradients, moves)
        incoming = (x if need else None for x, need in zip(found, of_grads))
        constant = _constant(outs, of_outs)
        return None, None, None, *incoming, *constant, *found[len(grads) :]

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Any:
        op, o, needs_grad = ctx.call
        need_tangents(op)
        grads, outs, t = _around(op, run_pass.primals(ctx.saved_tensors))
        grads_t, outs_t, t_t = _around(op, moves[3:])
        u = _moving(t_t)
        n = len(grads)

        def tangents(*moves):
            grads_t, outs_t, u = parts(moves, n, n)
            if all(x is None for x in u):
                return RUN.backward(op, o, needs_grad, grads_t, outs, t)
            out_t, lse_t = outs_t[0], formulas.lse_of(outs_t[1])
            if out_t is None or lse_t is None:
                out_t, lse_t = RUN.jvp(op, o, t, u, outs)
            every = (*_with_lse(grads), *_with_lse(grads_t))
            return RUN.second(op, o, needs_grad, t, u, (*outs, out_t, lse_t), every)

        return tuple(unbatched(tangents, (*grads_t, *outs_t, *u)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        op, o, needs_grad, *tensors = args
        return batched_backward(RUN, op, info.batch_size, in_dims[3:], tensors, o, needs_grad)


class AttentionJvp(Function):
    """(op, o, *tensors, *tangents, out, normaliser). Returns the tangents of out and LSE. If out
    and normaliser are None, it computes them, too, and returns them first."""

    @staticmethod
    def forward(op: Operation, o: Options, *tensors: Any) -> Any:
        t, u, outs = parts(tensors, N_TENSORS, N_TANGENTS)
        return tuple(run_pass.jvp(op, Tensors(*t), o, Tangents(*u), outs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        known = inputs[-2:] if len(output) == 2 else ()
        _keep(ctx, inputs[:2], (*inputs[2:-2], *known, *output))
        ctx.made = len(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, o = ctx.call
        t, u, outs = parts(ctx.saved_tensors, N_TENSORS, N_TANGENTS)
        call, u = PassCall(op, o, Tensors(*t), outs), Tangents(*u)
        of_t, of_u, of_known = parts(ctx.needs_input_grad[2:], N_TENSORS, N_TANGENTS)
        needs_grad, needs_grad_u = op.needs_grad(of_t), names(of_u)

        def gradients(*grads):
            every = (None,) * (4 - len(grads)) + grads
            found, of_u = formulas.of_jvp(RUN, call, u, every, needs_grad, needs_grad_u)
            return *spread(found, needs_grad), *formulas.tangents(of_u, needs_grad_u)

        return None, None, *unbatched(gradients, grads), *_constant(outs[:2], of_known)

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Any:
        formulas.refuse_forward_twice()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        op, o, *tensors = args
        return batched_jvp(RUN, op, info.batch_size, in_dims[2:], tensors, o)


class AttentionSecond(Function):
    """(op, o, needs_grad, *tensors, *tangents, *results and their tangents,
    *gradients of out and LSE and their tangents). The tensors and these gradients have gone through
    `DifferentiatedTwice`."""

    @staticmethod
    def forward(op: Operation, o: Options, needs_grad: Sequence[str], *tensors: Any) -> Any:
        t, u, outs, grads = parts(tensors, N_TENSORS, N_TANGENTS, 4)
        return tuple(run_pass.second(op, Tensors(*t), o, Tangents(*u), outs, grads, needs_grad))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs[:3], inputs[3:])

    @staticmethod
    def backward(ctx: Any, *moves: Any) -> Any:
        op, o, needs_grad = ctx.call
        t, _, outs, grads = parts(ctx.saved_tensors, N_TENSORS, N_TANGENTS, 4)
        _, of_u, _, of_grads = parts(ctx.needs_input_grad[3:], N_TENSORS, N_TANGENTS, 4)
        call, needs_grad_u = PassCall(op, o, Tensors(*t), outs), names(of_u)

        def gradients(*moves):
            found, of_t = formulas.of_second(RUN, call, grads, moves, needs_grad, needs_grad_u)
            return *formulas.tangents(found, needs_grad_u), *of_t

        found = unbatched(gradients, moves)
        incoming = (x if need else None for x, need in zip(found[N_TANGENTS:], of_grads[2:]))
        none = (None,) * (3 + N_TENSORS)
        return *none, *found[:N_TANGENTS], *(None,) * 6, *incoming

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Any:
        formulas.refuse_third()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        op, o, needs_grad, *tensors = args
        return batched_second(RUN, op, info.batch_size, in_dims[3:], tensors, o, needs_grad)


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


def _forward(op: Operation, o: Options, t) -> Sequence[Tensor]:
    return Attention.apply(op, o, *t)


def _backward(op: Operation, o: Options, needs_grad, grads, outs, t) -> Sequence[Tensor]:
    if _is_traced():
        return run_pass.backward(op, Tensors(*t), o, outs, grads, needs_grad)
    return AttentionBackward.apply(op, o, needs_grad, *grads, *outs, *t)


def _jvp(op: Operation, o: Options, t, u, outs) -> Sequence[Tensor]:
    if _is_traced():
        return run_pass.jvp(op, Tensors(*t), o, u, outs)
    return AttentionJvp.apply(op, o, *t, *u, *outs)


def _second(op: Operation, o: Options, needs_grad, t, u, outs, grads) -> Sequence[Tensor]:
    if _is_traced():
        return run_pass.second(op, Tensors(*t), o, u, outs, grads, needs_grad)
    *t, dout, dlse = DifferentiatedTwice.apply(*t, *grads[:2])
    return AttentionSecond.apply(op, o, needs_grad, *t, *u, *outs, dout, dlse, *grads[2:])


# While a compiler traces, the passes are operators. It is compiled autograd, which sees no forward.
RUN = Passes(_forward, _backward, _jvp, _second)


def backward(op: Operation, o: Options, needs_grad, grads, outs, t) -> Sequence[Tensor]:
    """Gradients that can be differentiated again. The incoming ones may be batched."""
    return unbatched(lambda *grads: RUN.backward(op, o, needs_grad, grads, outs, t), grads)


def _keep(ctx, call: tuple, tensors: Sequence[Tensor | None]) -> None:
    ctx.call = call
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def _constant(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of tensors that are constants here: None, but zeros for compiled autograd: it
    adds all gradients that it gets, and cannot add None."""
    zeros = _is_traced()
    return [torch.zeros_like(x) if zeros and need else None for x, need in zip(tensors, needed)]


def _around(op: Operation, of: Sequence[Any]) -> list[Sequence[Any]]:
    """Split into the parts for the results' gradients, for the results, and for the tensors."""
    return parts(of, len(op.results), len(op.results))


def _with_lse(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    return grads[0], formulas.lse_of(grads[1])


def _moving(moves: Sequence[Tensor | None]) -> Tangents:
    """`Tangents` from one tangent for each of `Tensors`. Raises if a constant has a tangent."""
    for (name, a), x in zip(ARGUMENTS.items(), moves):
        if x is not None and name not in DIFFERENTIABLE:
            raise ValueError(
                f"{a.name}: got a tensor with a tangent, expected a constant: there is no "
                f"derivative by it; pass {a.name}.detach()"
            )
    return Tangents(*(moves[INDEX[name]] for name in DIFFERENTIABLE))


# ------------------------------------------------------------------------------------------- vmap
# V calls become one call with V times as many items or heads, if they fold; else they run one after
# the other. Results have the mapped dimension first, and come with its index for each.


def batched_forward(
    run: Passes, op: Operation, V: int, dims: Sequence[Dim], t: Tensors, o: Options
):
    if V:
        check(Tensors(*vmap_fold.pick(t, dims, 0)), o)  # the rules are for one call, not for V
    fold = vmap_fold.fold_of(V, t, dims, o)
    if fold is None:
        return _in_turn(V, lambda *t: run.forward(op, o, t), t, dims)
    return _first(fold.back(op.results, run.forward(op, fold.options(o), fold.tensors(t, dims))))


def batched_backward(
    run: Passes,
    op: Operation,
    V: int,
    dims: Sequence[Dim],
    tensors: Sequence,
    o: Options,
    needs_grad,
):
    grads, outs, t = _around(op, tensors)
    dgrads, douts, dt = _around(op, dims)
    fold = vmap_fold.fold_of(V, Tensors(*t), dt, o, needs_grad=needs_grad)
    if fold is None:
        return _in_turn(
            V, lambda *x: run.backward(op, o, needs_grad, *_around(op, x)), tensors, dims
        )
    grads, outs = fold.results(op.results, grads, dgrads), fold.results(op.results, outs, douts)
    folded = fold.tensors(Tensors(*t), dt)
    found = run.backward(op, fold.options(o), needs_grad, grads, outs, folded)
    return _first(fold.back(needs_grad, found))


def batched_jvp(
    run: Passes, op: Operation, V: int, dims: Sequence[Dim], tensors: Sequence, o: Options
):
    sizes = N_TENSORS, N_TANGENTS
    t, u, outs = parts(tensors, *sizes)
    dt, du, douts = parts(dims, *sizes)
    fold = vmap_fold.fold_of(V, Tensors(*t), dt, o, du)
    if fold is None:
        return _in_turn(V, lambda *x: run.jvp(op, o, *parts(x, *sizes)), tensors, dims)
    outs = fold.results(WITH_TANGENTS, outs, douts)
    found = run.jvp(op, fold.options(o), *fold.moving(Tensors(*t), dt, u, du), outs)
    return _first(fold.back(WITH_TANGENTS[-len(found) :], found))


def batched_second(
    run: Passes,
    op: Operation,
    V: int,
    dims: Sequence[Dim],
    tensors: Sequence,
    o: Options,
    needs_grad,
):
    sizes = N_TENSORS, N_TANGENTS, 4
    t, u, outs, grads = parts(tensors, *sizes)
    dt, du, douts, dgrads = parts(dims, *sizes)
    fold = vmap_fold.fold_of(V, Tensors(*t), dt, o, du, needs_grad)
    if fold is None:
        return _in_turn(
            V, lambda *x: run.second(op, o, needs_grad, *parts(x, *sizes)), tensors, dims
        )
    outs, grads = fold.results(WITH_TANGENTS, outs, douts), fold.results(INCOMING, grads, dgrads)
    moving = fold.moving(Tensors(*t), dt, u, du)
    found = run.second(op, fold.options(o), needs_grad, *moving, outs, grads)
    return _first(fold.back(needs_grad, found))


def _in_turn(V: int, function: Callable, tensors: Sequence, dims: Sequence[Dim]):
    if V == 0:
        raise NotImplementedError(
            "vmap over a dimension of size 0 with per-example seeds or sinks, or gradients of "
            "masks or sinks: got 0, expected at least 1"
        )
    calls = [function(*vmap_fold.pick(tensors, dims, i)) for i in range(V)]
    return _first(tuple(torch.stack(x) for x in zip(*calls)))


def _first(found: tuple[Tensor, ...]):
    return found, (0,) * len(found)
