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

from ..backends.base import Backend, Names, WithTangents, choose, empty_dense, why_not
from ..backends.native import marshalling
from ..backends.native.marshalling import Kind
from ..call.environment import setting
from ..call.int4 import INT4, columns
from ..call.spec import (
    ARGUMENTS,
    DIFFERENTIABLE,
    INCOMING,
    INDEX,
    WITH_TANGENTS,
    AttentionSpec,
    Options,
    Tangents,
    Tensors,
    acc_dtype,
    result_shape,
)
from ..call.validation import describe, need_like
from ..namespace import operator
from .advice import advise

Plan = tuple[AttentionSpec, Backend]
# The checks of a call and the choice of a backend take 0.1 ms, fifty times a tiny kernel. At this
# bound all are forgotten: lengths that never repeat must not fill memory.
MAX_PLANS = 4096
_plans: dict[tuple[Any, ...], Plan] = {}


@functools.lru_cache(maxsize=512)  # more sets than models have; it saves 1 us
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


def plan(t: Tensors, o: Options, kind: Kind | None) -> Plan:
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


@functools.lru_cache(maxsize=MAX_PLANS)  # as many as there are plans
def _plan_again(spec: AttentionSpec, what: str, requested: str, device: torch.device) -> Plan:
    """The plan of another pass than forward. what: the field of the spec that asks for it. Pages
    need the backend of forward only if that has the pass."""
    spec = dataclasses.replace(spec, **{what: True})
    if what == "paged_grad" and why_not(requested, spec, device):
        requested = ""
    backend = choose(spec, requested, device)
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
    _plan_again.cache_clear()


# ------------------------------------------------------------------------------------- the passes
# Each runs on the kernels of a plan. groups: its tensors beside those of the call, as `Pass.given`.

Group = Sequence[Any]  # tensors, some None
Groups = Sequence[Group]


def _run_forward(
    op: Operation, planned: Plan, t: Tensors, o: Options, groups: Groups, needs_grad: Names
) -> tuple[Tensor, ...]:
    spec, backend = planned
    return op.forward(backend, spec, t)


def _run_backward(
    op: Operation, planned: Plan, t: Tensors, o: Options, groups: Groups, needs_grad: Names
) -> list[Tensor]:
    """The gradients of the tensors that `needs_grad` names."""
    (spec, backend), (grads, outs) = planned, groups
    if grads[0] is None and all(grad is None for grad in grads):
        given = map(t.given, needs_grad)
        return [torch.zeros_like(x, dtype=spec.stored(x.dtype)) for x in given]
    _need_gradient(spec)
    if spec.paged:
        spec, backend = _plan_again(spec, "paged_grad", backend.name, t.q.device)
    gradients = op.backward(backend, spec, t, outs, grads, needs_grad)
    return [gradients[name] for name in needs_grad]


def _run_jvp(
    op: Operation, planned: Plan, t: Tensors, o: Options, groups: Groups, needs_grad: Names
) -> list[Tensor]:
    """The tangents of out and LSE, after out and normaliser if these are not given."""
    tangents, outs = Tangents(*groups[0]), groups[1]
    spec, backend = _plan_tangents(op, planned, t, o, tangents)
    known = None if any(x is None for x in outs) else outs
    results = backend.jvp(spec, t, tangents, known)
    return list(results[2:] if outs[0] is not None else results)


def _run_second(
    op: Operation, planned: Plan, t: Tensors, o: Options, groups: Groups, needs_grad: Names
) -> list[Tensor]:
    """The tangents of the gradients that `needs_grad` names. The results that are given are all of
    `WithTangents.jvp`; the gradients are those of out and LSE, and the tangents of these."""
    tangents, outs, grads = Tangents(*groups[0]), groups[1], groups[2]
    captures = "captured_floats" in needs_grad
    spec, backend = _plan_tangents(op, planned, t, o, tangents, captures)
    grad_tangents = backend.second(spec, t, tangents, outs, grads, needs_grad)
    return [grad_tangents[name] for name in needs_grad]


def _plan_tangents(
    op: Operation,
    planned: Plan,
    t: Tensors,
    o: Options,
    tangents: Tangents,
    captures: bool = False,
) -> tuple[AttentionSpec, WithTangents]:
    """Passes with tangents may run on another backend than forward; dropout draws match.

    captures: whether the gradient of captured numbers has a tangent. No kernel has that, nor their
    tangents: the oracle does."""
    need_tangents(op)
    for name, x_t in zip(Tangents._fields, tangents):
        if x_t is not None:  # a direct call of the operator may be wrong
            need_like(name, x_t, t.given(name), "shape")
    spec, _ = planned
    _need_gradient(spec)
    if spec.paged:
        raise NotImplementedError(
            "attention over keys and values in pages (block_table) has a first derivative in "
            "reverse mode and no other: for others, give keys one after the other, with cu_k"
        )
    if spec.acc_dtype_out:
        raise NotImplementedError("unrounded results have no derivative but the first in reverse")
    captures = captures or tangents.captured_floats is not None
    requested = "reference" if captures else o.backend
    return cast(Any, _plan_again(spec, "tangents", requested, t.q.device))


@dataclasses.dataclass(frozen=True, eq=False)  # no tuple: torch.func takes those apart
class Pass:
    """A pass of an operation.

    suffix: of its operator's name.
    given: what it takes before the tensors of the call, by group: the name of each tensor in
        `RESULTS`, or of the tensor that it is the tangent of; None for those of the operation.
    run: runs it on kernels.
    chooses: whether it computes the gradients that its caller names.
    """

    suffix: str
    given: dict[str, tuple[str, ...] | None]
    run: Callable[..., Sequence[Tensor]]
    chooses: bool = False

    def names(self, op: Operation) -> list[tuple[str, ...]]:
        """The names of the tensors of each group."""
        return [op.results if names is None else names for names in self.given.values()]

    def split(self, op: Operation, of: Sequence[Any]) -> tuple[list[Group], Group]:
        """One of something for each tensor of the pass, as groups and as the rest, which begins
        with those of the call."""
        groups, first = [], 0
        for names in self.given.values():
            end = first + len(op.results if names is None else names)
            groups.append(of[first:end])
            first = end
        return groups, of[first:]


FORWARD = Pass("", {}, _run_forward)
BACKWARD = Pass("_backward", dict(grads=None, outs=None), _run_backward, chooses=True)
JVP = Pass("_jvp", dict(tangents=DIFFERENTIABLE, outs=WITH_TANGENTS[:2]), _run_jvp)
SECOND = Pass(
    "_second",
    dict(tangents=DIFFERENTIABLE, outs=WITH_TANGENTS, grads=INCOMING),
    _run_second,
    chooses=True,
)


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
    """Gradients that a pass computed, in the order of the first n `Tensors`, None for one without a
    gradient."""
    every: list[Tensor | None] = [None] * n
    for name, grad in zip(needs_grad, grads):
        every[INDEX[name]] = grad
    return every


def empty_gradients(t: Tensors, o: Options, needs_grad: Sequence[str]) -> list[Tensor]:
    """Uninitialised tensors with the shapes, dtypes and strides of the gradients."""
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
    """As `empty_gradients`, for the results of `JVP`. known: are out and normaliser given?"""
    out, normaliser = _attention_outputs(t, o)
    outputs = [out, normaliser, torch.empty_like(out), _empty("lse", t, o, normaliser.dtype)]
    return outputs[2:] if known else outputs


def _weights_outputs(t: Tensors, o: Options) -> tuple[Tensor, ...]:
    return (_empty("weights", t, o, t.q.dtype),)


def _attention_backward(backend: Backend, spec, t, outs, grads, needs_grad) -> dict[str, Tensor]:
    """Of the normaliser only the LSE is differentiable; its rounding error is a constant."""
    dout, dnormaliser = grads
    dlse = None if dnormaliser is None else dnormaliser[0]
    if dout is not None and spec.acc_dtype_out:
        dout = dout.to(spec.dtype)  # it is multiplied by v: kernels take both in one dtype
    return backend.backward(spec, t, outs, (dout, dlse), needs_grad)


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
