"""The class of nn.TransformerEncoderLayer in a converted model: fewer steps in inference.

torch's layer has fused steps in eval mode only where it may bypass the forward of its self_attn,
which `convert` prevents. This class has such steps around our attention. Heads are views of one
projection, and the activation and the residuals change the products in place. Rounding may differ
in float32; other dtypes have the same bits.

Every other call is torch's forward, which calls the submodules: in training, with a gradient,
under autocast, while torch traces or transforms, with nested tensors, and if a submodule is not of
torch's own class, has hooks, or has parameters that are not plain memory of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as module_globals
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..dispatch import torch_function
from . import multihead
from .multihead import MultiheadAttention, always_call_forward

_SUBMODULES = {
    "self_attn": MultiheadAttention,
    "linear1": nn.Linear,
    "linear2": nn.Linear,
    "norm1": nn.LayerNorm,
    "norm2": nn.LayerNorm,
    "dropout": nn.Dropout,
    "dropout1": nn.Dropout,
    "dropout2": nn.Dropout,
}
_WITH_PARAMETERS = ("linear1", "linear2", "norm1", "norm2")
_METHODS = ("forward", "_sa_block", "_ff_block")  # an instance may have its own
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """nn.TransformerEncoderLayer, with a shorter forward in inference. `convert` makes it."""

    __call__ = torch_function.call

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As nn.TransformerEncoderLayer.forward."""
        if not torch_function.is_dynamo_compiling() and _is_plain_inference(self, src):
            activation = _activation(self)
            if activation is not None and _are_plain(self, src):
                masks = _canonical_masks(src, src_mask, src_key_padding_mask)
                return _run(self, src, *masks, is_causal, activation)
        return super().forward(src, src_mask, src_key_padding_mask, is_causal)


def _canonical_masks(
    src: Tensor, mask: Tensor | None, padding: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The masks as torch's layer gives them to self_attn: added to the scores."""
    if padding is not None:
        padding = F._canonical_mask(
            padding, "src_key_padding_mask", F._none_or_dtype(mask), "src_mask", src.dtype
        )
    if mask is not None:
        mask = F._canonical_mask(mask, "src_mask", None, "", src.dtype, False)
    return mask, padding


def _run(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The layer on (B, L, E), or (L, B, E) without batch_first. src is not changed."""
    attention: Any = layer.self_attn
    x = src.flatten(0, 1)
    y = _normalised(x, layer.norm1) if layer.norm_first else x
    y = _product(y, attention.in_proj_weight, attention.in_proj_bias)
    y = _attended(attention, src, y, mask, padding, is_causal)
    x = _added(x, y, attention.out_proj)
    if not layer.norm_first:
        x = _normalised(x, layer.norm1)
    y = _normalised(x, layer.norm2) if layer.norm_first else x
    y = activation(_product(y, layer.linear1.weight, layer.linear1.bias))
    x = _added(x, y, layer.linear2)
    return (x if layer.norm_first else _normalised(x, layer.norm2)).view(src.shape)


def _attended(
    attention: MultiheadAttention,
    src: Tensor,
    projected: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """The heads' outputs side by side, (B L, E) or (L B, E), with the checks and the rules of
    MultiheadAttention.forward without weights."""
    multihead.check_mask_kinds(padding, mask)
    F._mha_shape_check(  # ty: ignore  (private: torch's own checks and texts)
        src, src, src, padding, mask, attention.num_heads
    )
    multihead.check_hint(is_causal, mask)
    causal = is_causal and padding is None
    seq_first = not attention.batch_first
    if padding is None and (mask is None or causal):
        rows = projected.view(*src.shape[:2], -1)
        at_once = attention._attend_at_once(rows, seq_first, causal)
        if at_once is not None:
            return at_once[0].flatten(0, 1)
    q, k, v = attention._split_heads(projected.unflatten(0, src.shape[:2]), seq_first)
    merged = attention._merge_masks(q, k, None if causal else mask, padding)
    out, _ = attention._attend(q, k, v, False, False, mask=merged, causal=causal)
    order = (2, 0, 1, 3) if seq_first else (0, 2, 1, 3)
    return out.permute(order).flatten(2).flatten(0, 1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, in a new tensor.

    In float32 the bias is added to the product: F.linear copies it to every row first, and the
    product then reads it from memory, 1.02 times the time of a layer of 49 to 96 rows. In 16 bits
    that would round twice.
    """
    if x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    y = torch.mm(x, weight.t())
    return y if bias is None else y.add_(bias)


def _added(x: Tensor, y: Tensor, linear: nn.Linear) -> Tensor:
    """x + linear(y), in a new tensor."""
    return _product(y, linear.weight, linear.bias).add_(x)


def _normalised(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


# -- checks ------------------------------------------------------------------------------------


def _is_plain_inference(layer: nn.Module, src: Any) -> bool:
    """No gradient, and none of the subsystems of torch that observe or change a module's calls."""
    return (
        not layer.training
        and not torch.is_grad_enabled()
        and type(src) is Tensor
        and src.device.type == "cpu"
        and not src.is_nested
        and src.dim() == 3
        and src.dtype in _DTYPES
        and src.is_contiguous()
        and src.numel() > 0
        and torch.backends.mha.get_fastpath_enabled()
        and not torch.compiler.is_compiling()
        and torch_function.is_plain()
        and not module_globals._global_forward_pre_hooks
        and not module_globals._global_forward_hooks
    )


def _activation(layer: nn.TransformerEncoderLayer) -> Callable[[Tensor], Tensor] | None:
    """ReLU or GELU in place, or None if the layer has another activation."""
    activation = layer.activation
    if activation is F.relu or (type(activation) is nn.ReLU and _calls_forward_alone(activation)):
        return F.relu_
    if activation is F.gelu or (
        type(activation) is nn.GELU
        and activation.approximate == "none"
        and _calls_forward_alone(activation)
    ):
        return torch.ops.aten.gelu_
    return None


def _are_plain(layer: nn.Module, src: Tensor) -> bool:
    """The submodules are torch's own and nothing but their forward runs when they are called, and
    the parameters are plain tensors of the dtype of src."""
    submodules, own = layer._modules, vars(layer)
    if any(name in own for name in _METHODS):
        return False
    for name, kind in _SUBMODULES.items():
        module = submodules.get(name)
        if module is None or type(module) is not kind or module.training:
            return False
        if not _calls_forward_alone(module):
            return False
    attention: Any = submodules["self_attn"]
    if (
        attention.in_proj_weight is None
        or attention.bias_k is not None
        or attention.add_zero_attn
        or src.size(2) != attention.embed_dim
        or type(attention.out_proj) is not NonDynamicallyQuantizableLinear
        or not _calls_forward_alone(attention.out_proj)
    ):
        return False
    parameters = [attention.in_proj_weight, attention.in_proj_bias]
    for module in (attention.out_proj, *(getattr(layer, name) for name in _WITH_PARAMETERS)):
        parameters += (module.weight, module.bias)
    return all(x is None or _is_plain(x, src) for x in parameters)


def _is_plain(x: Tensor, src: Tensor) -> bool:
    return (
        (type(x) is nn.Parameter or type(x) is Tensor)
        and x.dtype == src.dtype
        and x.device == src.device
        and x.layout == torch.strided
    )


def _calls_forward_alone(module: nn.Module) -> bool:
    if module._forward_hooks or "forward" in vars(module) or module._compiled_call_impl is not None:
        return False
    return all(hook is always_call_forward for hook in module._forward_pre_hooks.values())
