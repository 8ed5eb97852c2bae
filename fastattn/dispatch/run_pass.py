"""Run a pass: on the kernels directly, or as the registered operator if a mode is active.

Every way of a call ends in `Pass.run`: plain calls, autograd and `functorch` through this file, the
operators at once, because the dispatcher has recorded them.

Events of torch's profilers. The dispatcher records an event for each operator that it calls. A
kernel that is called directly records the event of its operator itself: the same name, the same
arguments, once. A profiler that counts FLOPs (`with_flops=True`) knows only some of aten's
operators by name: it counts none here. torch.utils.flop_counter.FlopCounterMode counts all (see
`flops`). With `with_stack=True` a profiler records calls of Python functions as events, too: the
time of a kernel is then the self time of the Python function, inside the kernel's event, that runs
it.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch._decomp import decomposition_table
from torch.autograd import forward_ad

from ..backends.base import Names
from ..backends.native.marshalling import kind
from ..call.constants import constant
from ..call.spec import Options, Tensors
from ..call.validation import check
from ..namespace import add_op_namespace_prefix
from .operation import FORWARD, JVP, Group, Groups, Operation, Pass, Plan, plan

_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_is_traced = torch.compiler.is_dynamo_compiling
_records_thread = torch.autograd._profiler_enabled
_profiler = torch.autograd.profiler


def run(
    which: Pass, op: Operation, t: Tensors, o: Options, groups: Groups = (), needs_grad: Names = ()
) -> Any:
    """The results of a pass, a tuple of forward, a list of the others. groups, needs_grad: as in
    `operation.Pass`."""
    kind_of_tensors = None
    if not (_is_traced() or dispatch_mode_active()) and _in_memory(groups):
        kind_of_tensors = kind(t)
    if kind_of_tensors is None:
        return via_operator(which, op, t, o, groups, needs_grad)
    return directly(which, op, plan(t, o, kind_of_tensors), t, o, groups, needs_grad)


def directly(
    which: Pass,
    op: Operation,
    planned: Plan,
    t: Tensors,
    o: Options,
    groups: Groups = (),
    needs_grad: Names = (),
) -> Any:
    """The same on plain memory, by its plan."""
    # A profiler of all threads (`profile_all_threads`) sets the second, a flag of the process.
    if not (_records_thread() or _profiler._is_profiler_enabled):
        return which.run(op, planned, t, o, groups, needs_grad)
    name = add_op_namespace_prefix(op.name + which.suffix)
    with _RecordFunctionFast(name, arguments(which, t, o, groups, needs_grad)):
        return which.run(op, planned, t, o, groups, needs_grad)


def via_operator(
    which: Pass, op: Operation, t: Tensors, o: Options, groups: Groups = (), needs_grad: Names = ()
) -> tuple[Tensor, ...]:
    """The same as the registered operator, because a mode is active or because a tensor is not
    plain memory."""
    if which is FORWARD and _tracing() is not None:
        return _traced(op, t, o)
    if which is FORWARD or which is JVP:  # others take results of these
        check(t, o)
    with no_tangents() if which is FORWARD else contextlib.nullcontext():
        return as_tuple(op.operator(which.suffix)(*arguments(which, t, o, groups, needs_grad)))


def arguments(
    which: Pass, t: Group, o: Options, groups: Groups = (), needs_grad: Names = ()
) -> list[Any]:
    """The arguments of the operator."""
    if which is FORWARD:
        return in_saved_order((*t, *o))
    return [*chain.from_iterable(groups), *t, *o, *([list(needs_grad)] if which.chooses else [])]


# Saved programs call forward operators by position: what came after the first of them stands last.
_LATER = ("captured_floats", "captured_ints", "mask_blocks", "score_mod", "captured_sizes")
_LATER += ("deterministic",)
NAMES = (*Tensors._fields, *Options._fields)
DEFAULTS = {**Tensors._field_defaults, **Options._field_defaults}
_order = constant(
    (*(at for at, name in enumerate(NAMES) if name not in _LATER), *map(NAMES.index, _LATER))
)


def in_saved_order(of: Sequence[Any]) -> list[Any]:
    """One of something for each of `Tensors` and `Options`, in the order of forward operators."""
    return [of[at] for at in _order()]


def from_saved_order(of: Sequence[Any], missing: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """The reverse, for `Tensors` and for `Options`. Last ones that are not there are `missing`'s,
    which has one for each of `Tensors` and `Options`."""
    values = list(missing)
    for at, x in zip(_order(), of):
        values[at] = x
    return values[: len(Tensors._fields)], values[len(Tensors._fields) :]


def split(args: Sequence[Any]) -> tuple[Tensors, Options]:
    """The call of a forward operator's arguments. The dispatcher leaves out the last ones that have
    their defaults."""
    t, o = from_saved_order(args, [DEFAULTS.get(name) for name in NAMES])
    return Tensors(*t), Options(*o)


def _in_memory(groups: Groups) -> bool:
    """False if one of the tensors is not plain memory."""
    return not groups or kind(tuple(chain.from_iterable(groups))) is not None


def dispatch_mode_active() -> bool:
    """True if a dispatch mode or torch.jit.trace is active. These intercept operators; they do not
    see a direct call of a kernel."""
    return _modes() > 0 or _tracing() is not None


def _traced(op: Operation, t: Tensors, o: Options) -> tuple[Tensor, ...]:
    """torch.jit.trace records the operator. ONNX's old exporter uses that trace and knows only
    torch's operators, so it gets the decomposition."""
    run = op.operator()
    with warnings.catch_warnings():  # the rules look at sizes, which a trace may vary
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        if "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export():
            return as_tuple(decomposition_table[run.default](*arguments(FORWARD, t, o)))
        check(t, o)
    # A traced graph may run with and without gradients.
    with no_tangents():
        return as_tuple(run(*arguments(FORWARD, t, o._replace(grad=True))))


def as_tuple(outs: Any) -> tuple[Tensor, ...]:
    """An operator with one result returns it bare."""
    return tuple(outs) if isinstance(outs, (tuple, list)) else (outs,)


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
