"""Run one pass: call the kernel directly, or the registered operator if a mode is active."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.autograd import forward_ad

from ..backends.native.marshalling import kind
from ..call.spec import Options, Tangents, Tensors
from ..call.validation import check
from .forward_arguments import flat
from .operation import Operation, plan, run_backward, run_forward, run_jvp, run_second
from .profiler_events import recorded, recording

_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_is_traced = torch.compiler.is_dynamo_compiling


Outs = Sequence[Any]  # results, or gradients of them, some None


def forward(op: Operation, t: Tensors, o: Options) -> tuple[Tensor, ...]:
    kind_of_tensors = _kind(t)
    if kind_of_tensors is None:
        return call_via_operator(op, t, o)
    if recording():
        return recorded(op, "", run_forward, (op, t, o, kind_of_tensors), flat(t, o))
    return run_forward(op, t, o, kind_of_tensors)


def backward(
    op: Operation, t: Tensors, o: Options, outs: Outs, grads: Outs, needs_grad: Sequence[str]
) -> list[Tensor]:
    kind_of_tensors = _kind(t, *outs, *grads)
    if kind_of_tensors is None:
        return op.operator("_backward")(*grads, *outs, *t, *o, list(needs_grad))
    given = op, plan(t, o, kind_of_tensors), t, outs, grads, needs_grad
    if recording():
        return recorded(op, "_backward", run_backward, given, grads, outs, t, o, [list(needs_grad)])
    return run_backward(*given)


def jvp(op: Operation, t: Tensors, o: Options, tangents: Tangents, outs: Outs) -> list[Tensor]:
    """outs: out and normaliser of an earlier forward, or None and None."""
    kind_of_tensors = _kind(t, *tangents, *outs)
    if kind_of_tensors is None:
        check(t, o)
        return op.operator("_jvp")(*tangents, *outs, *t, *o)
    given = op, t, o, kind_of_tensors, tangents, outs
    if recording():
        return recorded(op, "_jvp", run_jvp, given, tangents, outs, t, o)
    return run_jvp(*given)


def second(
    op: Operation,
    t: Tensors,
    o: Options,
    tangents: Tangents,
    outs: Outs,
    grads: Outs,
    needs_grad: Sequence[str],
) -> list[Tensor]:
    kind_of_tensors = _kind(t, *tangents, *outs, *grads)
    if kind_of_tensors is None:
        return op.operator("_second")(*tangents, *outs, *grads, *t, *o, list(needs_grad))
    given = op, t, o, kind_of_tensors, tangents, outs, grads, needs_grad
    if recording():
        arguments = tangents, outs, grads, t, o, [list(needs_grad)]
        return recorded(op, "_second", run_second, given, *arguments)
    return run_second(*given)


def _kind(t: Tensors, *others: Tensor | None):
    """`marshalling.kind` of t. None if the operator must run, because a mode is active or because
    one of t or `others` is not plain memory."""
    return None if _is_traced() or dispatch_mode_active() or kind(others) is None else kind(t)


def dispatch_mode_active() -> bool:
    """True if a dispatch mode or torch.jit.trace is active. These intercept operators; they do not
    see a direct call of a kernel."""
    return _modes() > 0 or _tracing() is not None


def call_via_operator(op: Operation, t: Tensors, o: Options) -> tuple[Tensor, ...]:
    """Run forward as the registered operator, because a mode is active or because a tensor is not
    plain memory."""
    if _tracing() is not None:
        return _traced(op, t, o)
    check(t, o)
    with no_tangents():
        return as_tuple(op.operator()(*flat(t, o)))


def _traced(op: Operation, t: Tensors, o: Options) -> tuple[Tensor, ...]:
    """torch.jit.trace records the operator. ONNX's old exporter uses that trace and knows only
    torch's operators, so it gets the decomposition."""
    run = op.operator()
    with warnings.catch_warnings():  # the rules look at sizes, which a trace may vary
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        if "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export():
            return as_tuple(decomposition_table[run.default](*flat(t, o)))
        check(t, o)
    # A traced graph may run with and without gradients.
    with no_tangents():
        return as_tuple(run(*flat(t, o._replace(grad=True))))


def as_tuple(outs: Any) -> tuple[Tensor, ...]:
    """An operator with one result returns it bare."""
    return (outs,) if isinstance(outs, Tensor) else tuple(outs)


# --------------------------------------------------------------------------- forward-mode tangents


def drops_tangents() -> bool:
    """True if tensors here may have tangents that were not checked for. Inside a Function they have
    none: torch turns forward mode off there."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def no_tangents() -> contextlib.AbstractContextManager[Any]:
    """Turn forward mode off around an operator, after tangents were checked for."""
    return forward_ad._set_fwd_grad_enabled(False) if drops_tangents() else contextlib.nullcontext()


def has_tangents(tensors: Sequence[Tensor | None]) -> bool:
    each = (x for x in tensors if isinstance(x, Tensor))  # the checks refuse others
    return any(forward_ad.unpack_dual(x).tangent is not None for x in each)


def primals(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else forward_ad.unpack_dual(x).primal for x in tensors]
