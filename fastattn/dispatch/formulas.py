"""The derivative of each pass, computed by the passes themselves: a pass, then its derivatives.

    forward                  backward: J' g
    backward, J' g           by g: jvp.  By the tensors, in direction u: second, H(g) u
    jvp, J u                 by the tensors: second (the Hessian H is symmetric).  By u: backward
    second, H(g) u + J' g_t  by u: second, likewise.  By g_t: jvp.  Else a third derivative

J is the Jacobian of (out, LSE) by the tensors of a call, H(g) the Hessian of <g, (out, LSE)>. The
passes take out and LSE only to save time. They count as constants there, because these formulas are
the total derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call.spec import DIFFERENTIABLE, Options, Tangents, Tensors
from .legacy_vmap import unbatched
from .operation import BACKWARD, FORWARD, JVP, SECOND, Group, Operation, Pass, need_tangents, spread

Grads = Sequence[Tensor | None]
# Runs a pass in a form that can be differentiated again, as a Function or as an operator:
# (which, op, o, t, groups, needs_grad), the arguments of `run_pass.run`.
Run = Callable[..., Sequence[Tensor]]

_is_traced = torch.compiler.is_dynamo_compiling


@dataclass(eq=False)  # no tuple: torch.func takes those apart
class PassCall:
    """What a pass is called with, beside tensors."""

    which: Pass
    op: Operation
    o: Options
    needs_grad: Sequence[str] = ()

    def split(self, of: Sequence[Any]) -> tuple[list[Group], Group]:
        return self.which.split(self.op, of)


def derivative(
    run: Run,
    call: PassCall,
    tensors: Grads,
    results: Sequence[Tensor],
    moves: Grads,
    needed: Sequence[bool],
) -> Sequence[Tensor | None]:
    """The gradients for the tensors of a pass, in their order. They may be batched by autograd.

    results: those of the pass, for `FORWARD` and `JVP`.
    moves: the gradient for each result.
    needed: whether a gradient is asked for, for each of the tensors.
    """
    groups, t = call.split(tensors)
    needed_in_groups, needed_t = call.split(needed)
    formula = _FORMULAS[call.which.suffix]
    given = run, call, groups, Tensors(*t), results
    needs = needed_in_groups, call.op.needs_grad(needed_t[: len(t)])
    return unbatched(lambda *moves: formula(*given, moves, *needs), moves)


def _of_forward(run, call, groups, t, outs, moves, needed, needs_grad) -> list[Tensor | None]:
    return spread(run(BACKWARD, call.op, t, call.o, (moves, outs), needs_grad), needs_grad)


def _of_backward(run, call, groups, t, results, moves, needed, needs_grad) -> list[Tensor | None]:
    """Its incoming gradients count as tensors, its results as constants."""
    op, o = call.op, call.o
    need_tangents(op)
    grads, outs = groups
    u = tangents(moves, call.needs_grad)
    out_t, lse_t = run(JVP, op, t, o, (u, outs))
    incoming = _needed((out_t, normaliser_of(lse_t)), needed[0])
    gradients: Sequence[Tensor] = ()
    if needs_grad:
        every = grads[0], lse_of(grads[1]), None, None
        gradients = run(SECOND, op, t, o, (u, (*outs, out_t, lse_t), every), needs_grad)
    return [*incoming, *_constant(outs, needed[1]), *spread(gradients, needs_grad)]


def _of_jvp(run, call, groups, t, results, moves, needed, needs_grad) -> list[Tensor | None]:
    op, o = call.op, call.o
    u, known = groups
    outs = (*known, *results)[-4:]  # out and normaliser are given, or results
    of_u, needs_grad_u = (), names(needed[0])
    dout, dnormaliser, g, g_lse = (*(None,) * (4 - len(moves)), *moves)
    if g is None and g_lse is None:  # the loss does not use the tangents
        of_u = [torch.zeros_like(x) for x, need in zip(u, needed[0]) if need]
        incoming = dout, dnormaliser
        gradients = run(BACKWARD, op, t, o, (incoming, outs[:2]), needs_grad) if needs_grad else ()
    else:
        every = g, g_lse, dout, lse_of(dnormaliser)
        gradients = run(SECOND, op, t, o, (u, outs, every), needs_grad) if needs_grad else ()
        incoming = g, None if g_lse is None else normaliser_of(g_lse)
        if needs_grad_u:
            of_u = run(BACKWARD, op, t, o, (incoming, outs[:2]), needs_grad_u)
    moved = tangents(of_u, needs_grad_u)
    return [*moved, *_constant(outs[:2], needed[1]), *spread(gradients, needs_grad)]


def _of_second(run, call, groups, t, results, moves, needed, needs_grad) -> list[Tensor | None]:
    """The gradients for its tangents, and for the tangents of its incoming gradients."""
    op, o = call.op, call.o
    _, outs, grads = groups
    w, needs_grad_u = tangents(moves, call.needs_grad), names(needed[0])
    out_w, lse_w = run(JVP, op, t, o, (w, outs[:2]))
    gradients: Sequence[Tensor] = ()
    if needs_grad_u:
        every = *grads[:2], None, None
        gradients = run(SECOND, op, t, o, (w, (*outs[:2], out_w, lse_w), every), needs_grad_u)
    incoming = _needed((out_w, lse_w), needed[2][2:])
    constant = (None,) * (len(outs) + 2)
    return [*tangents(gradients, needs_grad_u), *constant, *incoming, *(None,) * len(t)]


_FORMULAS = {
    FORWARD.suffix: _of_forward,
    BACKWARD.suffix: _of_backward,
    JVP.suffix: _of_jvp,
    SECOND.suffix: _of_second,
}


def names(needed: Sequence[bool]) -> tuple[str, ...]:
    """The names of the needed tensors. needed: a bool for each of `Tangents`."""
    return tuple(name for name, need in zip(DIFFERENTIABLE, needed) if need)


def _needed(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    return [x if need else None for x, need in zip(tensors, needed)]


def _constant(tensors: Sequence[Any], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of tensors that are constants here: None, but zeros for compiled autograd: it
    adds all gradients that it gets, and cannot add None."""
    zeros = _is_traced()
    return [torch.zeros_like(x) if zeros and need else None for x, need in zip(tensors, needed)]


def tangents(moves: Grads, made: Sequence[str]) -> Tangents:
    """The gradients that arrive for gradients, as tangents of the same tensors."""
    return Tangents(**dict(zip(made, moves)))


def lse_of(normaliser: Tensor | None) -> Tensor | None:
    """The LSE's part of a normaliser's gradient or tangent. The rounding error is a constant."""
    return None if normaliser is None else normaliser[0]


def normaliser_of(lse: Tensor) -> Tensor:
    return torch.stack([lse, torch.zeros_like(lse)])


def refuse_third() -> None:
    raise NotImplementedError(
        "fastattn has no third derivative: differentiate twice, or use "
        "fastattn.reference.attention, which is made of differentiable torch operations"
    )


def refuse_forward_twice() -> None:
    raise NotImplementedError(
        "fastattn has no forward mode over forward mode (jvp of jvp, jacfwd of jacfwd): take "
        "forward mode over reverse mode (torch.func.hessian, jvp of grad), or use "
        "fastattn.reference.attention, which is made of differentiable torch operations"
    )
