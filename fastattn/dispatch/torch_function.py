"""__torch_function__ for the public calls and modules: tensor subclasses, modes and torch.fx.

A call with such an argument goes to __torch_function__ (`handle`), as in torch's own functions. A
subclass or a mode sees the function, and torch.fx.symbolic_trace records one node.

A module records itself as one node (`call`), as torch's attention modules are recorded. Its forward
cannot be traced: a torch.fx.Proxy has no shape. A Tracer does not record it so by default: only
modules that are defined in torch.nn are leaves. The traced program holds the module, so hooks,
train and eval mode, and `fastattn.revert` work on it as before.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_variadic

is_overridden = has_torch_function_variadic  # 30 ns for three tensors
# Calls are not handled in torch.compile: it dispatches on the operators itself. It also traces into
# a subclass's __torch_function__ without noticing that torch has turned that off there.
is_compiling = torch.compiler.is_compiling
is_dynamo_compiling = torch.compiler.is_dynamo_compiling  # the cheaper check
# Functions of the subsystems that see, record or transform calls, each with what it returns while
# its subsystem is inactive.
SUBSYSTEMS: tuple[tuple[Any, Any], ...] = (
    (torch._C._len_torch_function_stack, 0),
    (torch._C._len_torch_dispatch_stack, 0),
    (torch._C._get_tracing_state, None),
    (torch._C._are_functorch_transforms_active, False),
    (torch._C._is_any_autocast_enabled, False),
)


def is_plain() -> bool:
    """True if nothing in torch sees or transforms calls: no compiler, none of SUBSYSTEMS, no
    forward-mode differentiation."""
    if is_compiling() or forward_ad._current_level >= 0:
        return False
    return all(function() == inactive for function, inactive in SUBSYSTEMS)


def handle(function: Any, given: tuple, *rest: Any, **named: Any) -> Any:
    """The result of a call from __torch_function__ of one of the tensors `given`, or of a mode."""
    return handle_torch_function(function, given, *given, *rest, **named)


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """nn.Module.__call__, 0.4 us slower; if an argument is a torch.fx.Proxy, record a node.

    This is not in forward, because hooks run around forward and belong to the traced program.
    """
    if has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values()))):
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.fx.Proxy):
                return _record(module, x.tracer, args, kwargs)
    return nn.Module.__call__(module, *args, **kwargs)


def _record(module: nn.Module, tracer: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if not isinstance(tracer, torch.fx.Tracer):
        refuse(module)

    def node(*args, **kwargs):
        return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)

    return tracer.call_module(module, node, args, kwargs)  # with the module's scope and names


def refuse(module: nn.Module) -> NoReturn:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    raise TypeError(
        f"{name}: got a torch.fx.Proxy in forward, expected tensors: torch.fx.symbolic_trace "
        "records the module as one node where a model calls it as a submodule. Another Tracer has "
        f"to make it a leaf: its is_leaf_module returns True for {name}. In a converted model "
        "fastattn.revert(model) gives torch's modules back"
    )
