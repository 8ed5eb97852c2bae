"""The two operations, attention and its weights, and how their passes run.

Each has a forward and a backward kernel in every backend; attention also has the passes that take
tangents. The layers above this file are written once for both.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..backends.base import Backend, WithTangents, choose, empty_dense, why_not
from ..backends.native import marshalling
from ..backends.native.marshalling import Kind
from ..call.environment import setting
from ..call.int4 import INT4, columns
from ..call.spec import (
    ARGUMENTS,
    DIFFERENTIABLE,
    INDEX,
    AttentionSpec,
    Options,
    Tangents,
    Tensors,
    acc_dtype,
    result_shape,
)
from ..call.validation import describe, need_like, need_memory
from ..namespace import operator
from .advice import advise

MAX_PLANS = 4096

_plans: dict[tuple[Any, ...], tuple[AttentionSpec, Backend]] = {}


@functools.lru_cache(maxsize=512)
def _needs_grad(differentiable: tuple[str, ...], needed: tuple[bool, ...]) -> tuple[str, ...]:
    wanted = {name for name, need in zip(INDEX, needed) if need}
    return tuple(name for name in differentiable if name in wanted)


class Operation(NamedTuple):
    """What differs between attention and its weights."""

    name: str
    results: tuple[str, ...]  # of `RESULTS`
    differentiable: tuple[str, ...]  # of `ARGUMENTS`
    forward: Callable[[Backend, AttentionSpec, Tensors], tuple[Tensor, ...]]
    backward: Callable[..., dict[str, Tensor]]
    outputs: Callable[[Tensors, Options], tuple[Tensor, ...]]  # empty ones, for fake tensors

    def operator(self, suffix: str = "") -> Any:
        return operator(self.name + suffix)

    def needs_grad(self, needed: Sequence[bool]) -> tuple[str, ...]:
        """The gradients that autograd asks for. needed: a bool for each of the first `Tensors`."""
        # torch.compile warns that it ignores an lru_cache.
        needs_grad = (
            _needs_grad.__wrapped__ if torch.compiler.is_dynamo_compiling() else _needs_grad
        )
        return needs_grad(self.differentiable, tuple(needed))


def plan(t: Tensors, o: Options, kind: Kind | None) -> tuple[AttentionSpec, Backend]:
    """The spec of a call and the backend that runs it; checked once for each kind of call."""
    try:
        key = o, _described(t) if kind is None else kind
        return _plans[key]
    except (KeyError, AttributeError, TypeError, RuntimeError):  # a nested tensor has no shape
        spec = describe(t, o)  # raises the readable error if the arguments were to blame
    backend = choose(spec, o.backend, t.q.device)
    advise(spec, o)
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[key] = spec, backend
    _log(spec, backend)
    return spec, backend


@functools.lru_cache(maxsize=MAX_PLANS)
def _plan_tangents(
    spec: AttentionSpec, requested: str, device: torch.device
) -> tuple[AttentionSpec, WithTangents]:
    """Passes with tangents may run on another backend than forward; dropout draws match."""
    spec = dataclasses.replace(spec, tangents=True)
    backend = choose(spec, requested, device)
    _log(spec, backend)
    return spec, cast(WithTangents, backend)


@functools.lru_cache(maxsize=MAX_PLANS)
def _plan_paged_grad(
    spec: AttentionSpec, forward: str, device: torch.device
) -> tuple[AttentionSpec, Backend]:
    """The backward pass of pages runs on the backend of forward if that has it, else on the first
    that has it; dropout draws match."""
    spec = dataclasses.replace(spec, paged_grad=True)
    backend = choose(spec, "" if why_not(forward, spec) else forward, device)
    _log(spec, backend)
    return spec, backend


def _log(spec: AttentionSpec, backend: Backend) -> None:
    if setting("FASTATTN_LOG") == "1":
        print(f"fastattn: {backend.name} runs {spec}", file=sys.stderr)


def _described(t: Tensors) -> tuple:
    """A key of tensors that are not plain memory, in place of their kind."""
    return tuple(None if x is None else (x.shape, x.dtype, x.device, x.layout) for x in t)


def forget_plans() -> None:
    """Forget all plans, so that calls choose a backend again; for use after the backends change."""
    _plans.clear()
    marshalling.forget_plans()
    _plan_tangents.cache_clear()
    _plan_paged_grad.cache_clear()


def run_forward(op: Operation, t: Tensors, o: Options, kind: Kind | None) -> tuple[Tensor, ...]:
    spec, backend = plan(t, o, kind)
    if kind is None:
        need_memory(t)
    return op.forward(backend, spec, t)


def run_backward(
    op: Operation,
    planned: tuple[AttentionSpec, Backend],
    t: Tensors,
    outs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[str],
) -> list[Tensor]:
    """The gradients of the tensors that `needs_grad` names."""
    spec, backend = planned
    if grads[0] is None and all(grad is None for grad in grads):
        given = map(t.given, needs_grad)
        return [torch.zeros_like(x, dtype=spec.stored(x.dtype)) for x in given]
    _need_gradient(spec)
    if spec.paged:
        spec, backend = _plan_paged_grad(spec, backend.name, t.q.device)
    found = op.backward(backend, spec, t, outs, grads, needs_grad)
    return [found[name] for name in needs_grad]


def run_jvp(
    op: Operation,
    t: Tensors,
    o: Options,
    kind: Kind | None,
    tangents: Tangents,
    outs: Sequence[Tensor | None],
) -> list[Tensor]:
    """The tangents of out and LSE, after out and normaliser if `outs` does not have these."""
    spec, backend = _planned_for_tangents(op, t, o, kind, tangents)
    found = backend.jvp(spec, t, tangents, *outs)
    return list(found[2:] if outs[0] is not None else found)


def run_second(
    op: Operation,
    t: Tensors,
    o: Options,
    kind: Kind | None,
    tangents: Tangents,
    outs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[str],
) -> list[Tensor]:
    """The tangents of the gradients that `needs_grad` names. outs: all results of
    `WithTangents.jvp`; grads: the gradients of out and LSE, and the tangents of these."""
    captures = "captured_floats" in needs_grad
    spec, backend = _planned_for_tangents(op, t, o, kind, tangents, captures)
    found = backend.second(spec, t, tangents, outs, *grads, needs_grad)
    return [found[name] for name in needs_grad]


def _planned_for_tangents(
    op: Operation,
    t: Tensors,
    o: Options,
    kind: Kind | None,
    tangents: Tangents,
    captures: bool = False,
):
    """captures: whether the gradient of captured numbers has a tangent. No kernel has that, nor
    their tangents: the oracle does."""
    need_tangents(op)
    for name, x_t in zip(Tangents._fields, tangents):
        if x_t is not None:  # a direct call of the operator may be wrong
            need_like(name, x_t, t.given(name), "shape")
    spec, _ = plan(t, o, kind)
    if kind is None:
        need_memory(t)
    _need_gradient(spec)
    if spec.paged:
        raise NotImplementedError(
            "attention over keys and values in pages (block_table) has a first derivative in "
            "reverse mode and no other: for others, give keys one after the other, with cu_k"
        )
    if spec.acc_dtype_out:
        raise NotImplementedError("unrounded results have no derivative but the first in reverse")
    captures = captures or tangents.captured_floats is not None
    return _plan_tangents(spec, "reference" if captures else o.backend, t.q.device)


def need_tangents(op: Operation) -> None:
    if op.name != "attention":
        raise NotImplementedError(
            f"attention_{op.name} has a first derivative in reverse mode and no other (no forward "
            "mode, no double backward): call a module with need_weights=False, or use "
            "fastattn.reference.attention(..., return_weights=True), which is made of "
            "differentiable torch operations"
        )


def _need_gradient(spec: AttentionSpec) -> None:
    if spec.storage is not None:
        how = "four bits a number" if spec.storage == INT4 else "k_scale, v_scale"
        raise NotImplementedError(
            f"attention over keys and values of {spec.storage} ({how}) has no gradient: "
            f"to train, give them in {spec.dtype}"
        )


def spread(
    grads: Sequence[Tensor], needs_grad: Sequence[str], n: int = len(INDEX)
) -> list[Tensor | None]:
    """`run_backward`'s gradients in the order of the first n `Tensors`, None for one without a
    gradient."""
    if len(needs_grad) == n:
        return list(grads)
    every: list[Tensor | None] = [None] * n
    for name, grad in zip(needs_grad, grads):
        every[INDEX[name]] = grad
    return every


def empty_gradients(t: Tensors, o: Options, needs_grad: Sequence[str]) -> list[Tensor]:
    """Uninitialised tensors with the shapes, dtypes and strides of what `run_backward` returns."""
    wanted = [(ARGUMENTS[name], t.given(name)) for name in needs_grad]
    return [
        empty_dense(x, x.shape, o.stored(x.dtype), o.grad_order)
        if a.passed_as == "strided"
        else x.new_empty(x.shape, dtype=o.stored(x.dtype))
        for a, x in wanted
    ]


# ----------------------------------------------------------------------------------- the operations


def _empty(result: str, t: Tensors, o: Options, dtype: torch.dtype) -> Tensor:
    return t.q.new_empty(result_shape(result, t, o), dtype=dtype)


def _attention_outputs(t: Tensors, o: Options) -> tuple[Tensor, ...]:
    assert t.v is not None
    shape = *t.q.shape[:3], columns(t.v)
    out = empty_dense(t.q, shape, o.stored(t.q.dtype), o.out_order)
    return out, _empty("normaliser", t, o, acc_dtype(t.q.dtype))


def tangent_outputs(t: Tensors, o: Options, known: bool) -> list[Tensor]:
    """As `empty_gradients`, for `run_jvp`. known: are out and normaliser given?"""
    out, normaliser = _attention_outputs(t, o)
    found = [out, normaliser, torch.empty_like(out), _empty("lse", t, o, normaliser.dtype)]
    return found[2:] if known else found


def _weights_outputs(t: Tensors, o: Options) -> tuple[Tensor, ...]:
    return (_empty("weights", t, o, t.q.dtype),)


def _attention_backward(backend: Backend, spec, t, outs, grads, needs_grad) -> dict[str, Tensor]:
    """Of the normaliser only the LSE is differentiable; its rounding error is a constant."""
    dout, dnormaliser = grads
    dlse = None if dnormaliser is None else dnormaliser[0]
    if dout is not None and spec.acc_dtype_out:
        dout = dout.to(spec.dtype)  # it is multiplied by v: kernels take both in one dtype
    return backend.backward(spec, t, *outs, dout, dlse, needs_grad)


ATTENTION = Operation(
    "attention",
    results=("out", "normaliser"),
    differentiable=DIFFERENTIABLE,
    forward=lambda backend, spec, t: backend.forward(spec, t),
    backward=_attention_backward,
    outputs=_attention_outputs,
)
WEIGHTS = Operation(
    "weights",
    results=("weights",),
    differentiable=tuple(name for name in DIFFERENTIABLE if name != "v"),
    forward=lambda backend, spec, t: (backend.weights(spec, t),),
    backward=lambda backend, spec, t, outs, grads, needs_grad: backend.weights_backward(
        spec, t, grads[0], needs_grad
    ),
    outputs=_weights_outputs,
)
