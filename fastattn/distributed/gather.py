"""Every rank gathers all keys and values (Llama 3, Grattafiori 2024, section 3.3.2).

A row's sums over keys are then computed in the same order as on one rank, with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import api
from .global_call import GlobalCall, gathered
from .layout import Span, held


def attention(call: GlobalCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, LSE) of this rank's rows."""
    k = gathered(call.team, k, call.keys, "all keys")
    v = gathered(call.team, v, call.keys, "all values")
    arguments: dict[str, Any] = call.arguments | call.differentiable()
    mask = arguments["mask"]
    outs, lses = [], []
    # A rank without rows has gradients, too: zeros.
    for rows, own in held(call.rows[call.rank] or (Span(0, 0),)):
        about: dict[str, Any] = dict(
            mask=mask[..., own, :] if mask is not None and call.mask_rows else mask,
            place=call.at(row=rows.first),
        )
        out, lse = api.attention(q[:, :, own], k, v, **arguments | about, return_lse=True)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)
