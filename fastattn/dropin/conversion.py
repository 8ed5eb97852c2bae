"""convert and revert: give the modules of an existing model fused attention, and undo it.

A swap changes the class of a module object and none of its contents: parameters, optimizer state,
ties, hooks, mode, device and all references to the module stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import parametrize

from .multihead import MultiheadAttention, always_call_forward

# Set on modules that convert swapped: revert does not touch modules built as MultiheadAttention.
# It is in the module's __dict__, so copies and pickles can be reverted, too.
_MARK = "_converted_by_fastattn"

_BY_TYPE = (
    "torch.ao.quantization.prepare, Opacus and ptflops look modules up by exact type and skip "
    "these: call fastattn.revert(model) first"
)


@dataclass(frozen=True)
class Conversion:
    """What `convert` or `revert` did, by qualified module name ("" is the model itself)."""

    swapped: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)  # name -> why
    note: str = ""  # about the swapped modules

    def __str__(self) -> str:
        lines = [f"swapped {len(self.swapped)}, left {len(self.left)}"]
        lines += [f"  swapped {_shown(name)}" for name in self.swapped]
        lines += [f"  left {_shown(name)}: {reason}" for name, reason in self.left.items()]
        lines += [self.note] if self.note and self.swapped else []
        return "\n".join(lines)


def convert(model: nn.Module) -> Conversion:
    """Make every plain torch.nn.MultiheadAttention in `model` (or `model` itself) a fused one.

    In place; only modules of exactly the type nn.MultiheadAttention are swapped. The Conversion
    returned says which were, and why any other attention module was left.

    Some libraries look modules up by exact type and skip the swapped ones, mostly without a
    warning. torch.ao.quantization.prepare quantizes only their output projection. Opacus accepts
    them and has no rule for their gradients. ptflops does not count them. Call
    `fastattn.revert(model)` before you use such a library. isinstance checks, torch.fx and
    prepare_fx treat the swapped modules as torch's own.
    """
    return _swap(model, _why_not_convert, _convert_one, _BY_TYPE)


def revert(model: nn.Module) -> Conversion:
    """Undo `convert`: every module that it swapped is a plain torch.nn.MultiheadAttention again."""
    return _swap(model, _why_not_revert, _revert_one)


def _swap(
    model: nn.Module,
    why_not: Callable[[nn.Module], str | None],
    swap_one: Callable[[nn.Module], None],
    note: str = "",
) -> Conversion:
    if not isinstance(model, nn.Module):
        raise TypeError(f"got {type(model).__name__}, expected a torch.nn.Module")
    swapped, left = [], {}
    for name, module in list(model.named_modules()):  # lists a module with several names once
        if not _is_attention(module):
            continue
        reason = why_not(module)
        if reason is None:
            swap_one(module)
            swapped.append(name)
        else:
            left[name] = reason
    return Conversion(tuple(swapped), left, note)


def _is_attention(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return getattr(module, "original_name", None) == "MultiheadAttention"
    return isinstance(module, nn.MultiheadAttention)


def _why_not_convert(module: nn.Module) -> str | None:
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted: its code is fixed; convert the model before torch.jit.script or trace"
    if kind is MultiheadAttention:
        return "already a fastattn.MultiheadAttention"
    if parametrize.is_parametrized(module):
        return "parametrized: convert the model before it registers parametrizations"
    if kind.__module__.startswith("torch.ao."):
        return f"quantizable or quantized: {kind.__module__}.{kind.__qualname__}"
    if kind is not nn.MultiheadAttention:
        return f"a subclass of nn.MultiheadAttention: {kind.__module__}.{kind.__qualname__}"
    if "forward" in vars(module):
        return "its forward was replaced on the instance, so a change of class would do nothing"
    return None


def _why_not_revert(module: nn.Module) -> str | None:
    if type(module) is MultiheadAttention:
        return None if _MARK in vars(module) else "built as a fastattn.MultiheadAttention"
    if _MARK in vars(module):
        return f"its class changed after convert, to {type(module).__qualname__}: undo that first"
    return "not a fastattn.MultiheadAttention"


def _convert_one(module: nn.Module) -> None:
    module.__class__ = MultiheadAttention
    module.register_forward_pre_hook(always_call_forward)
    vars(module)[_MARK] = True


def _revert_one(module: nn.Module) -> None:
    hooks = module._forward_pre_hooks
    for hook_id in [i for i, hook in hooks.items() if hook is always_call_forward]:
        del hooks[hook_id]
    del vars(module)[_MARK]
    module.__class__ = nn.MultiheadAttention


def _shown(name: str) -> str:
    return name or "the model itself"
