"""The backward pass of keys and values in pages by a backend's own packed backward: the pages of
some sequences are gathered, and the gradients of these copies are added to those of the pages.

For GPUs, where a row and its keys are too few for a tile unless the heads of a group are its rows.
Nothing here waits for the device, unless some sequences have no row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.spec import BY_HEAD, AttentionSpec, Feature, Tensors
from ..base import Backend

_OF_ROWS = Feature.DROPOUT | Feature.BAND
_OF_HEADS = functools.reduce(Feature.__or__, (a.feature for a in BY_HEAD), _OF_ROWS)
ROOM = 1 << 28  # most bytes of gathered keys and values and of their gradients


class Rows(NamedTuple):
    """What has a row of each sequence, heads first; the last dimension may be missing."""

    q: Tensor
    out: Tensor
    normaliser: Tensor  # (2,1,H,T)
    dout: Tensor
    dlse: Tensor | None


def backward_of_pages(
    backend: Backend, spec: AttentionSpec, t: Tensors, rows: Rows, needs_grad: Sequence[str]
) -> dict[str, Tensor]:
    """`Backend.backward` of q, k, v and sinks for a call without a mask and without a score_mod, in
    spec.acc_dtype. The sums of pages have a fixed order."""
    exact = spec.acc_dtype
    wanted = [name for name in ("q", "k", "v") if name in needs_grad]
    grads = {"q": torch.zeros_like(t.q, dtype=exact)} if "q" in wanted else {}
    pages = {
        name: torch.zeros_like(t.given(name).transpose(1, 2), dtype=exact)
        for name in wanted
        if name != "q"
    }
    keys = spec.blocks * spec.page
    bytes_of_one = max(1, keys * spec.Hk * (spec.D + spec.Dv)) * (spec.dtype.itemsize + 4)
    step = max(1, ROOM // bytes_of_one)
    for b in range(0, spec.B if keys and spec.T else 0, step):
        end = min(b + step, spec.B)
        here = _rows_of(spec, t, b, end)
        at = _pages_of(spec, t, b, end)
        part_grads = _of_sequences(backend, spec, t, _of(rows, here), b, end, at, wanted)
        if "q" in grads:
            grads["q"][:, :, here] = part_grads["q"]
        for name, page in pages.items():
            grad = part_grads[name].squeeze(0).transpose(0, 1).unflatten(0, (-1, spec.page))
            page.index_put_((at.flatten(),), grad, accumulate=True)  # torch's sums have an order
    grads |= {name: x.transpose(1, 2) for name, x in pages.items()}
    if "sinks" in needs_grad:
        grads["sinks"] = sink_gradient(t.given("sinks"), rows)
    return grads


def sink_gradient(sinks: Tensor, rows: Rows) -> Tensor:
    """-sum_rows P_sink delta (H,)."""
    exact = rows.normaliser.dtype
    delta = (rows.out.to(exact) * rows.dout.to(exact)).sum(-1)
    if rows.dlse is not None:
        delta = delta - rows.dlse
    return -(sink_shares(sinks, rows.normaliser) * delta).sum((0, 2))


def sink_shares(sinks: Tensor, normaliser: Tensor) -> Tensor:
    """(B,H,M): the probability of each row's sink, a key without a value. 0 in a row without keys
    and sink: there -inf - (-inf) would be NaN."""
    lse, tail = normaliser
    lse = torch.where(lse == -torch.inf, torch.inf, lse)
    return torch.exp(sinks.to(lse)[:, None] - lse - tail)


def _rows_of(spec: AttentionSpec, t: Tensors, b: int, end: int) -> slice:
    """The rows of sequences [b, end)."""
    if spec.M == 1 and spec.T == spec.B:
        return slice(b, end)
    cu_q = t.given("cu_q")
    return slice(*cu_q[[b, end]].tolist())


def _of(rows: Rows, here: slice) -> Rows:
    q, out, dout = (x[:, :, here] for x in (rows.q, rows.out, rows.dout))
    dlse = None if rows.dlse is None else rows.dlse[..., here]
    return Rows(q, out, rows.normaliser[..., here], dout, dlse)


def _pages_of(spec: AttentionSpec, t: Tensors, b: int, end: int) -> Tensor:
    """The table of these sequences. Entries past a length are page 0, where they add zeros."""
    table = t.given("block_table")[b:end].to(torch.int64)
    first = torch.arange(spec.blocks, device=table.device) * spec.page
    seen = first < t.given("key_lengths")[b:end, None]
    return table.masked_fill(~seen, 0).clamp(0, max(spec.P - 1, 0))


def _of_sequences(
    backend: Backend,
    spec: AttentionSpec,
    t: Tensors,
    rows: Rows,
    b: int,
    end: int,
    at: Tensor,
    wanted: Sequence[str],
) -> dict[str, Tensor]:
    """Those gradients of q, and of the gathered keys and values, of sequences [b, end).

    at: the pages of these sequences.
    """
    k, v = (t.given(x).transpose(1, 2)[at].flatten(0, 2).transpose(0, 1).unsqueeze(0) for x in "kv")
    # Zeros for what no length reaches: NaN in a page must not meet a probability of 0.
    keys = spec.blocks * spec.page
    lengths = t.given("key_lengths")[b:end].to(torch.int64).clamp(0, min(spec.N, keys))
    unseen = torch.arange(keys, device=k.device) >= lengths[:, None]
    k, v = (x.masked_fill_(unseen.flatten()[:, None], 0) for x in (k, v))
    cu_q = t.given("cu_q")[b : end + 1] - t.given("cu_q")[b]
    given = (spec.given - {"block_table", "sinks"}) | {"cu_k"}
    part = dataclasses.replace(
        spec,
        **dict(B=end - b, N=keys, T=rows.q.shape[2], S=k.shape[2], P=0, page=0, blocks=0),
        **dict(given=given, at_item=spec.at_item + b, acc_dtype_out=True, paged_grad=False),
    )
    # A head for each row of a tile, if nothing depends on the head or the row.
    group = spec.H // max(spec.Hk, 1)
    folds = group > 1 and spec.M == 1 and not part.features & _OF_HEADS
    if folds:
        rows, cu_q = _folded(rows, group), cu_q * group
        part = dataclasses.replace(part, H=spec.Hk, M=group, T=part.T * group)
    cu_k = torch.arange(end - b + 1, device=k.device) * keys
    own = t._replace(
        **dict(q=rows.q, k=k, v=v, cu_q=cu_q, cu_k=cu_k, key_lengths=lengths),
        **dict(block_table=None, sinks=None),
    )
    grads = backend.backward(part, own, rows[1:3], rows[3:], wanted)
    if folds and "q" in wanted:
        grads["q"] = grads["q"].unflatten(2, (-1, group)).transpose(2, 3).flatten(1, 2)
    return grads


def _folded(rows: Rows, group: int) -> Rows:
    """The heads of a group as rows: (1,H,T,..) as (1,Hk,T group,..)."""

    def fold(x: Tensor, head: int = 1) -> Tensor:
        x = x.unflatten(head, (-1, group)).transpose(head + 1, head + 2)
        return x.flatten(head + 1, head + 2)

    dlse = None if rows.dlse is None else fold(rows.dlse)
    return Rows(fold(rows.q), fold(rows.out), fold(rows.normaliser, 2), fold(rows.dout), dlse)
