"""The operators in the code that torch.compile's inductor generates.

Inductor keeps them whole: the code calls torch's dispatcher, which converts all arguments for
autograd's Python, and again for the kernel's. That takes as long as ten tiny kernels. On the CPU
the code calls attention and its gradients by `direct` instead, an attribute of the operator: one
call of the C extension if the fast path takes the call, else the operator.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..call.spec import Options, Tensors
from . import fast_path
from .operation import ATTENTION
from .run_pass import NAMES, in_saved_order, split

_is_traced = torch.compiler.is_dynamo_compiling


def keep_whole(operator: torch._ops.OpOverload) -> None:
    """Register how inductor lowers an operator. If the environment has CI, it raises for one that
    has a decomposition but no lowering. Fake kernels call this, because they run before inductor
    lowers a graph; only if the module is imported already, because importing it takes seconds."""
    lowering = sys.modules.get("torch._inductor.lowering")
    if not hasattr(lowering, "make_fallback") or operator in lowering.lowerings:
        return
    lowering.make_fallback(operator, warn=False)
    if hasattr(operator, "direct"):
        whole = lowering.lowerings[operator]
        lowering.lowerings[operator] = functools.partial(_lowered, operator, whole)


def _lowered(operator: Any, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let the code call `operator.direct`, by position."""
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False):
        return whole(*args, **kwargs)
    made = whole(*_by_position(operator._schema.arguments, args, kwargs))
    if made[0].get_device().type == "cpu":
        # Where a torch has no such nodes, the operator stays.
        nodes: Sequence[Any] = getattr(V.graph, "operations", ())
        for node in [x for x in nodes if getattr(x, "op_overload", None) is operator][-1:]:
            node.python_kernel_name = f"torch.ops.{operator}.direct"
    return made


def _by_position(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    """All arguments, without the last ones that have their defaults."""
    given = [*args, *(kwargs.get(x.name, x.default_value) for x in schema[len(args) :])]
    needed = (not x.has_default_value() or y != x.default_value for x, y in zip(schema, given))
    return given[: 1 + max(at for at, need in enumerate(needed) if need)]


def _prepare(t: Tensors, o: Options) -> fast_path.Prepared | None:
    """None for functions, which are lowered in each call."""
    return None if o.score_mod else fast_path.Prepared(t, o, lse=fast_path.as_it_is)


def _prepare_forward(*args: Any) -> fast_path.Prepared | None:
    return _prepare(*split(args[:-1]))


def _prepare_backward(*args: Any) -> fast_path.Prepared | None:
    n = len(Tensors._fields)
    return _prepare(Tensors(*args[:n]), Options(*args[n:-1]))


_FORWARD = fast_path.path(_prepare_forward, in_saved_order(NAMES)[3:])
_BACKWARD = fast_path.path(_prepare_backward, NAMES[3:])


def _forward(*args: Any) -> Any:
    found = None if _is_traced() else fast_path.attend(_FORWARD, *args, {})
    return ATTENTION.operator().default(*args) if found is None else found


def _backward(*args: Any) -> Any:
    *call, wants = args
    found = None
    if not _is_traced() and _POSITIONS.keys() >= set(wants):
        found = fast_path.differentiate(_BACKWARD, *call, {})
    if found is None:
        return ATTENTION.operator("_backward").default(*args)
    return [found[_POSITIONS[name]] for name in wants]


_POSITIONS = {name: at for at, name in enumerate("qkv")}


def install() -> None:
    """Make `direct` of both operators, which are defined, known to `keep_whole`."""
    ATTENTION.operator().default.direct = _forward
    ATTENTION.operator("_backward").default.direct = _backward
