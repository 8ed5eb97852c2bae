"""The oracle as a backend: runs everything, slowly, with memory O(M N)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference as oracle
from ..backend import Support, check_values, register, token_major
from ..check import DTYPES
from ..packing import backward_in_turn, sequences
from ..spec import ARGUMENTS, UNLIMITED, AttentionSpec, Feature, Tensors


def _without_autocast(method):
    """What is computed here is computed in the dtype it says, wherever it is called."""

    @functools.wraps(method)
    def run(self, spec: AttentionSpec, *args):
        with torch.autocast(spec.device, enabled=False):
            return method(self, spec, *args)

    return run


# A tensor that the oracle lacks is no argument of it, and raises; a scalar is named here.
ORACLES = functools.reduce(Feature.__or__, (a.feature for a in ARGUMENTS.values())) | (
    Feature.BAND
    | Feature.SOFTCAP
    | Feature.DROPOUT
    | Feature.GQA
    | Feature.WEIGHTS
    | Feature.GRAD
    | Feature.PLACE
    | Feature.PACKED
)


class Reference:
    name = "reference"
    support = Support(
        devices=None,
        dtypes=frozenset(DTYPES),
        max_head_dim=None,
        features=ORACLES,
    )

    def unavailable(self) -> None:
        return None

    @_without_autocast
    def forward(self, spec: AttentionSpec, t: Tensors) -> tuple[Tensor, Tensor]:
        if spec.packed:
            return _forward_packed(self, spec, t)
        w = _wide(spec, t)
        out, normaliser = oracle.attention(
            w.q,
            w.k,
            w.given("v"),
            **score_arguments(spec, w),
            sinks=w.sinks,
            dropout_p=spec.dropout_p,
            seed=w.seed,
            return_normaliser=True,
        )
        return token_major(t.q, out.shape, spec.dtype).copy_(out), normaliser

    @_without_autocast
    def backward(self, spec, t, out, normaliser, dout, dlse, wants):
        if spec.packed:
            grads = backward_in_turn(self, spec, t, out, normaliser, dout, dlse, wants)
            return _as_inputs(t, grads, wants)
        w = _wide(spec, t)._replace(normaliser=normaliser)
        p, kept = _probabilities(spec, w)
        dout = (torch.zeros_like(out) if dout is None else dout).to(p.dtype)
        dp = dout @ _heads(spec, w.given("v"), w).mT * kept
        delta = (p * dp).sum(-1) - (0 if dlse is None else dlse)
        grads = _score_gradients(spec, w, p, dp, delta)
        grads["v"] = _sum_groups(spec, (p * kept).mT @ dout)
        return _as_inputs(t, grads, wants)

    @_without_autocast
    def weights(self, spec: AttentionSpec, t: Tensors) -> Tensor:
        p, kept = _probabilities(spec, _wide(spec, t))
        p = p * kept
        return (p.mean(dim=1) if spec.average_heads else p).to(spec.dtype)

    @_without_autocast
    def weights_backward(self, spec, t, dweights, wants):
        w = _wide(spec, t)
        p, kept = _probabilities(spec, w)
        if spec.average_heads:
            dweights = (dweights[:, None] / max(spec.H, 1)).expand(p.shape)
        dp = dweights.to(p.dtype) * kept
        delta = (p * dp).sum(-1) * (0 if spec.constant_lse else 1)
        return _as_inputs(t, _score_gradients(spec, w, p, dp, delta), wants)


# The optional tensors, but for those that come after the scores, and what a sequence has not.
_OTHERS = ("sinks", "seed", "normaliser", "cu_q", "cu_k", "pages", "k_scale", "v_scale")
_OF_SCORES = [x for x in Tensors._field_defaults if x not in _OTHERS]


def _wide(spec: AttentionSpec, t: Tensors) -> Tensors:
    """16-bit inputs in float32, and key lengths that are in range."""
    check_values(spec, t)
    q, k, v, lengths = t.q, t.k, t.v, t.lengths
    if lengths is not None:
        lengths = lengths.clamp(0, spec.keys)
    q, k = q.to(spec.wide), k.to(spec.wide)
    v = None if v is None else v.to(spec.wide)
    return t._replace(q=q, k=k, v=v, lengths=lengths)


def score_arguments(spec: AttentionSpec, t: Tensors) -> dict:
    """The oracle's arguments for scores; causal is the right edge of the window, and its place."""
    left, right = (None if x >= UNLIMITED else x for x in (spec.left, spec.right))
    return {ARGUMENTS[name].public: getattr(t, name) for name in _OF_SCORES} | dict(
        causal=False,
        window=(left, right),
        softcap=spec.softcap or None,
        scale=spec.scale,
        place=spec.place,
    )


# The gradients are written out, not left to autograd: a backend may run below autograd's dispatch,
# where nothing is recorded and every derivative would come out as 0.


def _heads(spec: AttentionSpec, x: Tensor, t: Tensors) -> Tensor:
    """Keys or values as the query heads see them, with 0 at and past the key lengths."""
    if t.lengths is not None:
        inside = oracle.within(t.lengths, x.shape[2], spec.place)
        x = x.masked_fill(~inside[:, None, :, None], 0)
    return x.repeat_interleave(t.q.shape[1] // max(x.shape[1], 1), dim=1)


def _probabilities(spec: AttentionSpec, t: Tensors) -> tuple[Tensor, Tensor | float]:
    """P = exp(S - normaliser), and what dropout multiplies it by."""
    s = oracle.scores(t.q, t.k, **score_arguments(spec, t))
    p = oracle.weights(s, t.given("normaliser"))
    return p, oracle.dropout(torch.ones_like(p), spec.dropout_p, t.seed, spec.place)


def _score_gradients(
    spec: AttentionSpec, t: Tensors, p: Tensor, dp: Tensor, delta: Tensor
) -> dict[str, Tensor]:
    """dS = P (dP - delta) (Dao 2023, section 3.1), and from it those of q, k, mask and sinks."""
    grads = {}
    k = _heads(spec, t.k, t)
    ds = p * (dp - delta[..., None])
    if t.mask is not None:
        grads["mask"] = ds.sum_to_size((1,) * (4 - t.mask.ndim) + t.mask.shape)
    if t.sinks is not None:
        share = oracle.weights(t.sinks.to(p)[:, None, None], t.given("normaliser")).squeeze(-1)
        grads["sinks"] = -(share * delta).sum((0, 2))
    ds = ds * oracle.derivative(t.q, k, **score_arguments(spec, t))
    grads["q"] = ds @ k
    grads["k"] = _sum_groups(spec, ds.mT @ t.q)
    return grads


def _sum_groups(spec: AttentionSpec, x: Tensor) -> Tensor:
    """(B,H,N,D) -> (B,Hk,N,D): a key head's gradient is the sum over the query heads it serves."""
    return x.unflatten(1, (spec.Hk, spec.H // max(spec.Hk, 1))).sum(2)


def _as_inputs(t: Tensors, grads: dict[str, Tensor], wants: Sequence[str]) -> dict[str, Tensor]:
    """The gradients that are wanted, in each input's shape and dtype."""
    found = {}
    for name in wants:
        x = getattr(t, name)
        room = token_major(x, x.shape, x.dtype) if name in "qkv" else x.new_empty(x.shape)
        found[name] = room.copy_(grads[name].reshape(x.shape))
    return found


# ------------------------------------------------------------- packed: one sequence after the other


def _forward_packed(run: Reference, spec: AttentionSpec, t: Tensors) -> tuple[Tensor, Tensor]:
    check_values(spec, t)
    v = t.given("v")
    out = token_major(t.q, (*t.q.shape[:3], v.shape[3]), spec.dtype)
    normaliser = t.q.new_empty((2, *t.q.shape[:3]), dtype=spec.wide)
    for one in sequences(spec, t):
        out[:, :, one.rows], normaliser[..., one.rows] = run.forward(one.spec, one.t)
    return out, normaliser


register(Reference())
