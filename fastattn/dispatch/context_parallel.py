"""Detect calls inside torch.distributed.tensor.experimental.context_parallel.

It splits a sequence over ranks and replaces torch's scaled_dot_product_attention. Any other
function gets one rank's part of the sequence there, without notice.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

# If torch.nn.functional has this function, nothing replaced it: no need to call `is_inside`.
TORCHS = torch._C._nn.scaled_dot_product_attention
_EXPERIMENTAL = "torch.distributed.tensor.experimental"
_MODULES = (
    f"{_EXPERIMENTAL}._context_parallel._attention",
    f"{_EXPERIMENTAL}._attention",  # before torch 2.10
)
WORDS = (
    "got a call inside torch's context_parallel, where each rank has a part of the sequence: "
    "expected fastattn.distributed.attention(q, k, v, group=mesh, layout='zigzag'), or with layout="
    "'contiguous' where torch balances no loads; or the place=fastattn.Place(...) of what is a part"
)


def is_inside() -> bool:
    module = _entered("MONKEY_PATCH")
    if module is None:
        return False
    handlers = module.DTensor._op_dispatcher._custom_op_handlers  # it adds some while it is active
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def is_reordered() -> bool:
    """True if it splits the inputs of modules, in an order that balances the load of ranks."""
    module = _entered("MODULE_WRAPPER")
    return module is not None and module._cp_options.enable_load_balance


def _entered(mode: str) -> Any:
    """The module that implements context_parallel, if `mode` is its last dispatch mode."""
    for module in map(sys.modules.get, _MODULES):
        used = getattr(getattr(module, "_dispatch_mode", None), "name", None)
        if used is not None:
            return module if used == mode else None
    return None


# torch.compile calls it while tracing and treats the result as a constant.
is_inside._dynamo_marked_constant = True  # ty: ignore
