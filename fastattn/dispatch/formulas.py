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
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.spec import DIFFERENTIABLE, Options, Tangents, Tensors
from .operation import Operation

Grads = Sequence[Tensor | None]
NeedsGrad = Sequence[str]


class Passes(NamedTuple):
    """The passes in a form that can be differentiated again: as Functions or as operators."""

    forward: Callable[..., Sequence[Tensor]]  # op, o, t
    backward: Callable[..., Sequence[Tensor]]  # op, o, wants, grads, outs, t
    jvp: Callable[..., Sequence[Tensor]]  # op, o, t, tangents, outs
    second: Callable[..., Sequence[Tensor]]  # op, o, wants, t, tangents, outs, grads


class PassCall(NamedTuple):
    """The call that a pass belongs to: its operation, options, tensors and results."""

    op: Operation
    o: Options
    t: Tensors
    outs: Sequence[Tensor]  # out, normaliser; for `jvp` and `second` also their tangents


def names(needed: Sequence[bool]) -> tuple[str, ...]:
    """The names of the needed tensors. needed: a bool for each of `Tangents`."""
    return tuple(name for name, need in zip(DIFFERENTIABLE, needed) if need)


def of_backward(
    run: Passes, call: PassCall, grads: Grads, moves: Grads, made: NeedsGrad, needs_grad: NeedsGrad
) -> tuple[list[Tensor], Sequence[Tensor]]:
    """Differentiate `backward`: the gradients for its incoming gradients, and for the tensors that
    `needs_grad` names. moves: the gradient for each result of `backward`; `made` names these."""
    op, o, t, outs = call
    u = tangents(moves, made)
    out_t, lse_t = run.jvp(op, o, t, u, outs)
    dout, dlse = grads[0], lse_of(grads[1])
    found: Sequence[Tensor] = ()
    if needs_grad:
        every = dout, dlse, None, None
        found = run.second(op, o, needs_grad, t, u, (*outs, out_t, lse_t), every)
    return [out_t, normaliser_of(lse_t)], found


def of_jvp(
    run: Passes,
    call: PassCall,
    u: Tangents,
    grads: Grads,
    needs_grad: NeedsGrad,
    needs_grad_u: NeedsGrad,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Differentiate `jvp`: the gradients for the tensors in `needs_grad`, and for the tangents in
    `needs_grad_u`. grads: those of out, normaliser and their tangents."""
    op, o, t, outs = call
    dout, dnormaliser, g, g_lse = grads
    if g is None and g_lse is None:  # the loss does not use the tangents
        none = [torch.zeros_like(getattr(u, name)) for name in needs_grad_u]
        return run.backward(
            op, o, needs_grad, (dout, dnormaliser), outs[:2], t
        ) if needs_grad else (), none
    every = g, g_lse, dout, lse_of(dnormaliser)
    found = run.second(op, o, needs_grad, t, u, outs, every) if needs_grad else ()
    incoming = g, None if g_lse is None else normaliser_of(g_lse)
    return found, run.backward(op, o, needs_grad_u, incoming, outs[:2], t) if needs_grad_u else ()


def of_second(
    run: Passes,
    call: PassCall,
    grads: Grads,
    moves: Grads,
    made: NeedsGrad,
    needs_grad_u: NeedsGrad,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Differentiate `second`: the gradients for the tangents that `needs_grad_u` names, and for the
    tangents of dout and dlse. moves, made: as in `of_backward`."""
    op, o, t, outs = call
    w = tangents(moves, made)
    out_w, lse_w = run.jvp(op, o, t, w, outs[:2])
    every = *grads[:2], None, None
    found = (
        run.second(op, o, needs_grad_u, t, w, (*outs[:2], out_w, lse_w), every)
        if needs_grad_u
        else ()
    )
    return found, (out_w, lse_w)


def tangents(moves: Grads, made: NeedsGrad) -> Tangents:
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
