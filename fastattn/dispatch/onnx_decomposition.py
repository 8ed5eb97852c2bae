"""Decompositions into torch's operators, for exporters that know no others: torch.onnx.export.

They run the oracle: exact, in O(M N) memory. Exporters find them in torch's `decomposition_table`.
The TorchScript exporter does not use it: `run_pass.via_operator` decomposes the call there.
torch.compile and torch.export keep the operators whole; `run_decompositions` takes the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from .. import reference as oracle
from ..backends.base import in_order
from ..backends.reference import score_arguments
from ..call.spec import AttentionSpec, Tensors
from ..call.validation import describe
from ..score_mods.unlowered import lowered_call
from . import library_ops
from .operation import ATTENTION, FORWARD, WEIGHTS, Operation


def attention(*args: Any) -> tuple[Tensor, Tensor]:
    t, spec = _wide(*args)
    given = score_arguments(spec, t)
    out, normaliser = oracle.attention(
        *(t.q, t.k, t.given("v")), **given, sinks=t.sinks, return_normaliser=True
    )
    return in_order(out.to(spec.stored(spec.dtype)), spec.out_order), normaliser


def weights(*args: Any) -> Tensor:
    t, spec = _wide(*args)
    p = oracle.weights(oracle.scores(t.q, t.k, **score_arguments(spec, t)), t.given("normaliser"))
    return (p.mean(dim=1) if spec.average_heads else p).to(spec.dtype)


def _wide(*args) -> tuple[Tensors, AttentionSpec]:
    """An operator's arguments, with 16-bit tensors in float32."""
    t, o = lowered_call(*library_ops.split(args), known=False)
    if o.dropout_p:
        raise NotImplementedError(
            f"dropout_p: got {o.dropout_p}, expected 0 where a graph of torch's own operators is "
            "made: export the model after model.eval()"
        )
    if t.cu_q is not None:
        raise NotImplementedError(
            "cu_q: got a packed batch (attention_packed, or a jagged tensor), expected a dense one "
            "where a graph of torch's own operators is made: export a model that pads its batch "
            "and calls fastattn.attention with key_lengths"
        )
    wide = torch.promote_types(t.q.dtype, torch.float32)
    v = None if t.v is None else t.v.to(wide)
    return t._replace(q=t.q.to(wide), k=t.k.to(wide), v=v), describe(t, o)


def _where_traced(op: Operation, function: Callable) -> Callable:
    """Decompose only under a tracer. FakeTensorMode looks into the table too if sizes are symbolic:
    it gets empty results. DTensor would derive shardings from the decomposition, which does not
    show that a causal row depends on its position: for DTensors this raises."""

    def run(*args):
        from torch.fx.experimental.proxy_tensor import get_proxy_mode  # takes long to import

        if any(hasattr(x, "_spec") for x in args):
            raise NotImplementedError("fastattn.attention is the call that takes DTensors")
        if get_proxy_mode() is None and torch._C._get_tracing_state() is None:
            return library_ops.fake(FORWARD, op, *args)
        return function(*args)

    return run


decomposition_table[ATTENTION.operator().default] = _where_traced(ATTENTION, attention)
decomposition_table[WEIGHTS.operator().default] = _where_traced(WEIGHTS, weights)
