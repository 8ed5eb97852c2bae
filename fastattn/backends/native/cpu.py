"""Launcher of the C++ kernels in csrc/cpu: a short way for tiny calls, and errors by status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.spec import DIFFERENTIABLE, AttentionSpec, Feature, Tensors
from ...call.validation import DTYPES
from ..base import BAD_INDEX, COMMON_FEATURES, Grads, Layout, Outs, Support, empty_dense, register
from ..shared.gathered_pages import Rows, sink_gradient
from ..shared.per_sequence import backward_in_turn
from ..shared.value_checks import check_values
from . import libraries
from .launcher import (
    AFTER,
    PLACES,
    Launcher,
    Prepared,
    convert,
    in_grad_order,
    prepared,
    refused,
    with_heads,
)
from .marshalling import launch, pack
from .score_mod_code import encode


class FastPlan(NamedTuple):
    """Calls that differ in no more than the addresses of their tensors."""

    call: bytes  # FaCall of forward; its addresses count for nothing
    backward: bytes  # the same of backward, for the gradients of q, k and v
    run: int  # the address of fa_cpu_run
    brief: bool  # `Prepared.brief`
    widened: set[str]  # tensors of int32 that kernels take as int64
    out: Tensor  # results, and gradients by name, that lie as those of a call
    normaliser: Tensor
    acc: dict[str, Any]  # `Prepared.acc`
    grads: dict[str, Tensor]  # none if there is no `backward`


class Cpu(Launcher):
    name = "cpu"
    makes_all = True
    support: Support = Support(
        devices=frozenset({"cpu"}),
        dtypes=frozenset(DTYPES),
        max_head_dim=libraries.CPU_MAX_HEAD_DIM,
        features=(
            COMMON_FEATURES
            | Feature.INVARIANT
            | Feature.QUANTISED
            | Feature.INT4
            | Feature.TANGENTS
            | Feature.PAGED_GRAD
            | Feature.UNROUNDED
            | Feature.SCORE_MOD
        ),
    )

    def unavailable(self) -> str | None:
        return libraries.cpu_unavailable()

    def fast_plan(self, spec: AttentionSpec, t: Tensors) -> FastPlan | None:
        """What the fast path needs to run calls on tensors that lie as t's. None if kernels do not
        read the caller's tensors, except for whole numbers of 32 bits."""
        if spec.acc_dtype_out or spec.score_mod:
            return None
        read = convert(spec, t)
        widened = {name for name in spec.given if getattr(read, name) is not getattr(t, name)}
        for name in widened:
            x = t.given(name)
            if x.dtype != torch.int32 or not x.is_contiguous():
                return None
        like = prepared(spec)
        out = t.q.new_empty_strided(*like.out)
        normaliser = t.q.new_empty_strided(*like.normaliser, **like.acc)
        call = pack(like.form, PLACES[libraries.FORWARD], (*read, out, normaliser), 0)
        backward, grads = b"", {}
        if spec.needs_grad and not spec.packed and all(x.numel() for x in (t.q, t.k, out)):
            grads = self._gradients(spec, t, ("q", "k", "v"))
            given = out, normaliser, out, None, *map(grads.get, DIFFERENTIABLE)
            backward = pack(like.form, PLACES[libraries.BACKWARD], (*read, *given), 0)
        fast = call, backward, libraries.cpu().run_at, like.brief, widened
        return FastPlan(*fast, out, normaliser, like.acc, grads)

    def fast_weights(self, spec: AttentionSpec, t: Tensors) -> tuple[bytes, Layout]:
        """FaCall of the weights, where addresses count for nothing, and their layout."""
        weights = self.empty_weights(spec, t)
        given = *convert(spec, t), with_heads(spec, weights)
        call = pack(prepared(spec).form, PLACES[libraries.WEIGHTS], given, 0)
        return call, (tuple(weights.shape), weights.stride())

    def backward(
        self, spec: AttentionSpec, t: Tensors, outs: Outs, grads: Grads, needs_grad: Sequence[str]
    ) -> dict[str, Tensor]:
        if not spec.paged:
            return super().backward(spec, t, outs, grads, needs_grad)
        dout, dlse = grads
        rows = Rows(t.q, *outs, torch.zeros_like(outs[0]) if dout is None else dout, dlse)
        # The kernels have sequences of one row, which select their keys.
        if spec.M > 1 or spec.given & {"mask"} or spec.score_mod:
            made = backward_in_turn(self, spec, t, outs, (rows.dout, dlse), needs_grad)
        else:
            made = self._of_single_rows(spec, t, rows, needs_grad)
        return in_grad_order(spec, {name: made[name] for name in needs_grad}, t)

    def _of_single_rows(
        self, spec: AttentionSpec, t: Tensors, rows: Rows, needs_grad: Sequence[str]
    ) -> dict[str, Tensor]:
        """Gradients of sequences of one row. Kernels add to the gradients of pages."""
        grads = {"q": empty_dense(t.q, t.q.shape, spec.stored(spec.dtype), spec.grad_order)}
        for name in {"k", "v"}.intersection(needs_grad):
            x = t.given(name)
            grads[name] = empty_dense(x, x.shape, spec.acc_dtype, spec.grad_order).zero_()
        given = (*rows[1:], *map(grads.get, DIFFERENTIABLE))
        self._launch(libraries.BACKWARD, prepared(spec), t, given)
        if "sinks" in needs_grad:
            grads["sinks"] = sink_gradient(t.given("sinks"), rows)
        return grads

    def _launch(
        self, which: int, like: Prepared, t: Tensors, after: tuple[Tensor | None, ...]
    ) -> None:
        # Packs and launches in one step, without a workspace: the library allocates its own.
        spec = like.spec
        if spec.given:
            t = convert(spec, t)
        form = _with_code(like) if spec.score_mod else like.form
        given = form, PLACES[which], (*t, *after), libraries.get_num_threads()
        status = launch(libraries.cpu().run_at, which, like.brief, *given)
        if status == libraries.OK:
            return
        if status == libraries.BAD_INDEX:
            raise IndexError(BAD_INDEX)
        if status in (libraries.BAD_LENGTH, libraries.BAD_OFFSET, libraries.BAD_PAGE):
            check_values(spec, t)
        if status >= libraries.BAD_EXTENT:
            raise refused(status, spec, dict(zip(AFTER[which], after)))
        if status == libraries.NO_MEMORY:
            raise MemoryError("the CPU kernels could not allocate their scratch memory")
        raise RuntimeError(f"the CPU kernels returned the unknown status {status}")


def _with_code(like: Prepared) -> bytes:
    """FaCall without tensors, with the code of the score_mod. The spec keeps the code."""
    spec = like.spec
    entry = spec.launcher_cache.get("with_code")
    if entry is None:
        operators = libraries.cpu().score_mod_ops
        code = encode(spec.score_mod, spec.floats, spec.ints, operators)
        at, end = libraries.offset("code"), libraries.offset("code") + 8
        address = libraries.POINTER.pack(code.buffer_info()[0])
        form = like.form[:at] + address + like.form[end:]
        entry = spec.launcher_cache["with_code"] = form, code
    return entry[0]


register(Cpu())
