"""torch.distributed.tensor.experimental.context_parallel: are we inside?

It cuts a sequence over ranks and gives torch's own scaled_dot_product_attention another body.
Other functions get a part of the sequence there, and nobody tells them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

# What stands in torch.nn.functional where nobody replaced it: then we are not, and need not ask.
TORCHS = torch._C._nn.scaled_dot_product_attention
_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
WORDS = (
    "got a call inside torch's context_parallel, where each rank has a part of the sequence: "
    "expected fastattn.distributed.attention(q, k, v, group=mesh, layout='zigzag'), or with layout="
    "'contiguous' where torch balances no loads; or the place=fastattn.Place(...) of what is a part"
)


def is_inside() -> bool:
    module = _entered("MONKEY_PATCH")
    if module is None:
        return False
    return module.DTensor._op_dispatcher._custom_op_handlers is not module.existing_custom_ops


def is_reordered() -> bool:
    """Did it cut what modules get, in an order that gives each rank as much to do?"""
    module = _entered("MODULE_WRAPPER")
    return module is not None and module._cp_options.enable_load_balance


def _entered(mode: str) -> Any:
    """torch's module, if it was used last in this way."""
    module = sys.modules.get(_MODULE)
    used = getattr(getattr(module, "_dispatch_mode", None), "name", None)
    return module if used == mode else None


# torch.compile asks when it traces.
is_inside._dynamo_marked_constant = True  # ty: ignore
