"""Run a packed batch one sequence at a time, for passes that have no kernel for packed batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...call.need import whole
from ...call.quantisation import dequantised
from ...call.spec import (
    ARGUMENTS,
    INCOMING,
    RESULTS,
    TOKENS,
    WITH_TANGENTS,
    AttentionSpec,
    Tangents,
    Tensors,
)
from ..base import Grads, Names, Outs, empty_dense
from ..native.marshalling import kind

# The tensors that a call of one sequence does not have.
OF_BATCHES = ("cu_q", "cu_k", "block_table", "k_scale", "v_scale")


def longest(name: str, most: Any, cu: Any, total: int) -> int:
    """A bound on the rows of a sequence: `most` if the caller gives it, else the largest step of
    `cu`, which waits for a GPU; `total` if values are unknown, as in a compiler."""
    if most is not None:
        return whole(name, most, "an int, or None for the longest there is")
    seen = isinstance(cu, Tensor) and not torch.compiler.is_compiling() and kind((cu,)) is not None
    if not seen or cu.ndim != 1:  # the checks refuse other offsets
        return total
    steps = cu.diff()
    return max(0, min(int(steps.max()), total)) if steps.numel() else 0


class Sequence(NamedTuple):
    """One sequence of a packed batch: a call of its own, and where its rows and keys are."""

    spec: AttentionSpec
    t: Tensors
    rows: slice
    keys: slice


def sequences(spec: AttentionSpec, t: Tensors) -> Iterator[Sequence]:
    """Yield the sequences of a batch with ordered offsets. It reads values: it waits for a GPU."""
    starts = _within(t.given("cu_q"), spec.T, spec.M)
    ends = None if t.cu_k is None else _within(t.cu_k, spec.S, spec.N)
    given = spec.given - set(OF_BATCHES)
    kept = t.k, t.v, t.k_scale, t.v_scale
    of_items = {name: x for name in given if ARGUMENTS[name].counts_items(x := t.given(name))}
    for b in range(spec.B):
        rows = starts[b]
        if ends is not None:
            keys = ends[b]
            parts = [None if x is None else x[:, :, keys] for x in kept]
        else:
            keys = slice(0, int(t.given("key_lengths")[b]))
            parts = [None if x is None else gathered(x, t, b, keys.stop) for x in kept]
        k, v, *scales = parts
        k, v = (dequantised(x, by, t.q.dtype) for x, by in zip((k, v), scales))
        M, N = rows.stop - rows.start, keys.stop - keys.start
        own = t._replace(
            q=t.q[:, :, rows],
            k=k,
            v=v,
            mask=None if t.mask is None else of_sequence(t.mask, b)[..., :M, :N],
            **{name: x[b : b + 1] for name, x in of_items.items()},
            **dict.fromkeys(OF_BATCHES),
            normaliser=None if t.normaliser is None else t.normaliser[..., rows],
        )
        shape = None if own.mask is None else tuple(own.mask.shape)
        yield Sequence(
            dataclasses.replace(
                spec,
                **dict(B=1, M=M, N=N, T=0, S=0, P=0, page=0, blocks=0, storage=None),
                given=given,
                mask_shape=shape,
                at_item=spec.at_item + b,
            ),
            own,
            rows,
            keys,
        )


def _within(cu: Tensor, total: int, most: int) -> list[slice]:
    """Each sequence's slice, clamped to `total` and `most`, as kernels clamp unchecked offsets."""
    slices = []
    for first, end in itertools.pairwise(cu.tolist()):
        first = min(max(first, 0), total)
        slices.append(slice(first, min(max(first, end), total, first + most)))
    return slices


def backward_in_turn(
    backend: Any, spec: AttentionSpec, t: Tensors, outs: Outs, grads: Grads, needs_grad: Names
) -> dict[str, Tensor]:
    """`Backend.backward` of a packed batch, with one call for each sequence."""

    def of(one: Sequence) -> dict[str, Tensor]:
        given = _rows(WITH_TANGENTS, outs, one.rows), _rows(INCOMING, grads, one.rows)
        return backend.backward(one.spec, one.t, *given, needs_grad)

    return _summed(spec, t, needs_grad, of)


def jvp_in_turn(
    backend: Any, spec: AttentionSpec, t: Tensors, tangents: Tangents, outs: Outs | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`WithTangents.jvp` likewise."""
    like_out = (*t.q.shape[:3], t.given("v").shape[3])
    like_lse = t.q.shape[:3]
    out, out_t = (empty_dense(t.q, like_out, t.q.dtype, TOKENS) for _ in range(2))
    wide = [t.q.new_empty(shape, dtype=spec.acc_dtype) for shape in ((2, *like_lse), like_lse)]
    rooms = out, wide[0], out_t, wide[1]
    for one in sequences(spec, t):
        known = None if outs is None else _rows(WITH_TANGENTS, outs, one.rows)
        results = backend.jvp(one.spec, one.t, _tangents_of(one, spec, tangents), known)
        for room, x in zip(_rows(WITH_TANGENTS, rooms, one.rows), results):
            assert room is not None
            room.copy_(x)
    return rooms


def second_in_turn(
    backend: Any,
    spec: AttentionSpec,
    t: Tensors,
    tangents: Tangents,
    outs: Outs,
    grads: Grads,
    needs_grad: Names,
) -> dict[str, Tensor]:
    """`WithTangents.second` likewise."""

    def of(one: Sequence) -> dict[str, Tensor]:
        given = _rows(WITH_TANGENTS, outs, one.rows), _rows(INCOMING, grads, one.rows)
        turned = _tangents_of(one, spec, tangents)
        return backend.second(one.spec, one.t, turned, *given, needs_grad)

    return _summed(spec, t, needs_grad, of)


def _summed(
    spec: AttentionSpec,
    t: Tensors,
    needs_grad: Names,
    of: Callable[[Sequence], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Gradients in spec.acc_dtype. Those of shared tensors are summed in the order of sequences."""
    grads = {name: torch.zeros_like(t.given(name), dtype=spec.acc_dtype) for name in needs_grad}
    for one in sequences(spec, t):
        part_grads = of(one)
        for name in needs_grad:
            grad = part_grads[name].to(spec.acc_dtype)
            if spec.paged and name in ("k", "v"):
                _add_to_pages(grads[name], grad, one, t, spec)
            else:
                own = _own(name, grads[name], one, spec)
                own += grad
    return grads


def _add_to_pages(pages: Tensor, grad: Tensor, one: Sequence, t: Tensors, spec: AttentionSpec):
    """Add the gradient of a sequence's keys or values (1,Hk,length,D) to that of their pages
    (P,Hk,page,D)."""
    count = -(-grad.shape[2] // spec.page)
    table = t.given("block_table")[one.spec.at_item - spec.at_item, :count]
    grad = F.pad(grad[0], (0, 0, 0, count * spec.page - grad.shape[2]))
    pages.index_add_(0, table, grad.unflatten(1, (count, spec.page)).transpose(0, 1))


def _own(name: str, x: Tensor, one: Sequence, spec: AttentionSpec) -> Tensor:
    """One sequence's part of a batch's tensor, gradient or tangent: a view."""
    if name == "q":
        return x[:, :, one.rows]
    if name in ("k", "v"):
        return x[:, :, one.keys]
    if name == "mask":
        mine = of_sequence(x, one.spec.at_item - spec.at_item)
        return mine[..., : one.spec.M, : one.spec.N]
    return x


def _tangents_of(one: Sequence, spec: AttentionSpec, tangents: Tangents) -> Tangents:
    named = zip(Tangents._fields, tangents)
    return Tangents(*(None if x is None else _own(name, x, one, spec) for name, x in named))


def _rows(of: Iterable[str], tensors: Iterable[Tensor | None], rows: slice) -> list[Tensor | None]:
    """A sequence's rows of results, or of their gradients or tangents; `of` names each result."""
    before = ((slice(None),) * RESULTS[name].split().index("M") for name in of)
    return [None if x is None else x[(*at, rows)] for at, x in zip(before, tensors)]


def gathered(x: Tensor, t: Tensors, b: int, length: int) -> Tensor:
    """A sequence's keys or values from their pages (P,Hk,page,D), as (1,Hk,length,D); likewise
    scales."""
    page = x.shape[2]
    mine = x[t.given("block_table")[b, : -(-length // page)].long()]
    return mine.transpose(0, 1).flatten(1, 2)[None, :, :length]


def of_sequence(mask: Tensor, b: int) -> Tensor:
    """Sequence b's part of a mask or its gradient, which broadcasts to (B,H,M,N): a view."""
    mask = mask[(None,) * max(0, 2 - mask.ndim)]
    return mask if mask.ndim < 4 or mask.shape[0] == 1 else mask[b : b + 1]
