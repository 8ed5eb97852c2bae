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

from .encoder_layer import TransformerEncoderLayer
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
    """Report what `convert` or `revert` did.

    `str()` lists it. Modules are named by qualified name; "" is the model itself.

    Attributes:
        swapped: The names of the modules that were swapped.
        left: The names of the attention modules that were left, each with the reason.
        note: A warning about the swapped modules.

    Example:
        >>> import torch
        >>> import fastattn
        >>> made = fastattn.convert(torch.nn.TransformerDecoderLayer(64, 4))
        >>> made.swapped, made.left
        (('self_attn', 'multihead_attn'), {})
    """

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
    """Make every plain torch.nn.MultiheadAttention in `model` a fused one, in place.

    Only modules of exactly the type nn.MultiheadAttention are swapped; `model` itself may be one.
    An nn.TransformerEncoderLayer around one becomes a subclass that calls its submodules as
    before, and in inference on CPUs computes what they do in fewer steps.

    Some libraries look modules up by exact type and skip the swapped ones, mostly without a
    warning. torch.ao.quantization.prepare quantizes only their output projection. Opacus accepts
    them and has no rule for their gradients. ptflops does not count them. Call
    `fastattn.revert(model)` before you use such a library. isinstance checks, torch.fx and
    prepare_fx treat the swapped modules as torch's own.

    Args:
        model: A model of any kind.

    Returns:
        A Conversion: `swapped` names the modules that were swapped, and `left` gives the reason why
        any other attention module was left.

    Raises:
        TypeError: model is not a torch.nn.Module.

    Example:
        >>> import torch
        >>> import fastattn
        >>> model = torch.nn.TransformerEncoderLayer(64, 4)
        >>> fastattn.convert(model).swapped
        ('self_attn',)
        >>> type(model.self_attn)
        <class 'fastattn.MultiheadAttention'>
        >>> fastattn.revert(model).swapped
        ('self_attn',)
    """
    return _swap(model, _why_not_convert, _convert_one, _BY_TYPE)


def revert(model: nn.Module) -> Conversion:
    """Undo `convert`: make every module that it swapped a plain torch.nn.MultiheadAttention again.

    Args:
        model: The model, or any part of it.

    Returns:
        A Conversion, as from `convert`.

    Raises:
        TypeError: model is not a torch.nn.Module.

    Example:
        >>> import torch
        >>> import fastattn
        >>> model = torch.nn.Sequential(torch.nn.MultiheadAttention(64, 4))
        >>> made = fastattn.convert(model)
        >>> print(fastattn.revert(model))
        swapped 1, left 0
          swapped 0
        >>> type(model[0]) is torch.nn.MultiheadAttention
        True
    """
    return _swap(model, _why_not_revert, _revert_one)


def _swap(
    model: nn.Module,
    why_not: Callable[[nn.Module], str | None],
    swap_one: Callable[[nn.Module], None],
    note: str = "",
) -> Conversion:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
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
    match_layers(model)
    return Conversion(tuple(swapped), left, note)


def match_layers(model: nn.Module) -> None:
    """Give each encoder layer the class that fits its self_attn: ours if that was converted."""
    for module in model.modules():
        kind = type(module)
        if kind is nn.TransformerEncoderLayer or kind is TransformerEncoderLayer:
            attention = module._modules.get("self_attn")
            ours = type(attention) is MultiheadAttention and _MARK in vars(attention)
            module.__class__ = TransformerEncoderLayer if ours else nn.TransformerEncoderLayer


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
