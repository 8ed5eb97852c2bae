"""The oracle as a backend: runs everything, slowly, with memory O(M N)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference as oracle
from ..call.spec import ARGUMENTS, UNLIMITED, AttentionSpec, Feature, Tangents, Tensors
from ..call.validation import DTYPES
from ..score_mods.evaluate import NOWHERE, evaluate
from ..score_mods.mod_text import ModText
from ..score_mods.partial_derivatives import ScoreModAt
from .base import BAD_INDEX, COMMON_FEATURES, Grads, Outs, Support, empty_dense, register
from .shared.per_sequence import backward_in_turn, jvp_in_turn, second_in_turn, sequences
from .shared.value_checks import check_values


def _without_autocast(method):
    """Turn autocast off in a method, so that it computes in the dtypes that it names."""

    @functools.wraps(method)
    def run(self, spec: AttentionSpec, *args):
        with torch.autocast(spec.device, enabled=False):
            return method(self, spec, *args)

    return run


# The features of every tensor, because the oracle raises for an argument that it lacks.
OF_TENSORS = functools.reduce(Feature.__or__, (a.feature for a in ARGUMENTS.values()))


class Reference:
    name = "reference"
    support: Support = Support(
        devices=None,
        dtypes=frozenset(DTYPES),
        max_head_dim=None,
        features=(
            COMMON_FEATURES
            | OF_TENSORS
            | Feature.TANGENTS
            | Feature.UNROUNDED
            | Feature.PAGED_GRAD
            | Feature.INT4
        ),
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
            again=(spec.dropout_batch_period, spec.dropout_head_period),
            return_normaliser=True,
        )
        room = empty_dense(t.q, out.shape, spec.stored(spec.dtype), spec.out_order)
        return room.copy_(out), normaliser

    @_without_autocast
    def backward(
        self, spec: AttentionSpec, t: Tensors, outs: Outs, grads: Grads, needs_grad: Sequence[str]
    ) -> dict[str, Tensor]:
        if spec.packed:
            made = backward_in_turn(self, spec, t, outs, grads, needs_grad)
            return _as_inputs(spec, t, made, needs_grad)
        (out, normaliser), (dout, dlse) = outs, grads
        w = _wide(spec, t)._replace(normaliser=normaliser)
        p, kept = _probabilities(spec, w)
        dout = (torch.zeros_like(out) if dout is None else dout).to(p.dtype)
        dp = dout @ _heads(spec, w.given("v"), w).mT * kept
        # From out, not from p and dp: in a ring, rows have keys on other ranks; out is of all keys.
        delta = (out.to(p.dtype) * dout).sum(-1) - (0 if dlse is None else dlse)
        made = _score_gradients(spec, w, p, dp, delta)
        made["v"] = _sum_groups(spec, (p * kept).mT @ dout)
        return _as_inputs(spec, t, made, needs_grad)

    @_without_autocast
    def jvp(
        self, spec: AttentionSpec, t: Tensors, tangents: Tangents, outs: Outs | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if spec.packed:
            return jvp_in_turn(self, spec, t, tangents, outs)
        out, normaliser = self.forward(spec, t) if outs is None else outs
        w = _wide(spec, t)._replace(normaliser=normaliser)
        p, kept = _probabilities(spec, w)
        moved = _score_and_lse_tangents(spec, w, _tangents(spec, tangents), p)
        out_t = (moved.p_t * kept) @ _heads(spec, w.given("v"), w)
        if tangents.v is not None:
            out_t = out_t + (p * kept) @ _heads(spec, tangents.v.to(p), w)
        return out, normaliser, torch.empty_like(out).copy_(out_t), moved.lse_t

    @_without_autocast
    def second(
        self,
        spec: AttentionSpec,
        t: Tensors,
        tangents: Tangents,
        outs: Outs,
        grads: Grads,
        needs_grad: Sequence[str],
    ) -> dict[str, Tensor]:
        if spec.packed:
            made = second_in_turn(self, spec, t, tangents, outs, grads, needs_grad)
            return _as_inputs(spec, t, made, needs_grad)
        dout, dlse, dout_t, dlse_t = grads
        w = _wide(spec, t)._replace(normaliser=outs[1])
        p, kept = _probabilities(spec, w)
        u = _tangents(spec, tangents)
        moved = _score_and_lse_tangents(spec, w, u, p)
        zeros = torch.zeros_like(outs[0])
        dout, dout_t = ((zeros if x is None else x).to(p.dtype) for x in (dout, dout_t))
        v = _heads(spec, w.given("v"), w)
        dp, dp_t = dout @ v.mT * kept, dout_t @ v.mT * kept
        if u.v is not None:
            dp_t = dp_t + dout @ _heads(spec, u.v, w).mT * kept
        delta = (p * dp).sum(-1) - (0 if dlse is None else dlse)
        delta_t = (moved.p_t * dp + p * dp_t).sum(-1) - (0 if dlse_t is None else dlse_t)
        made = _score_tangents(spec, w, u, moved, p, (dp, dp_t), (delta, delta_t))
        made["v"] = _sum_groups(spec, (moved.p_t * kept).mT @ dout + (p * kept).mT @ dout_t)
        return _as_inputs(spec, t, made, needs_grad)

    @_without_autocast
    def weights(self, spec: AttentionSpec, t: Tensors) -> Tensor:
        p, kept = _probabilities(spec, _wide(spec, t))
        p = p * kept
        return (p.mean(dim=1) if spec.average_heads else p).to(spec.dtype)

    @_without_autocast
    def weights_backward(
        self, spec: AttentionSpec, t: Tensors, dweights: Tensor, needs_grad: Sequence[str]
    ) -> dict[str, Tensor]:
        w = _wide(spec, t)
        p, kept = _probabilities(spec, w)
        if spec.average_heads:
            dweights = (dweights[:, None] / max(spec.H, 1)).expand(p.shape)
        dp = dweights.to(p.dtype) * kept
        delta = (p * dp).sum(-1) * (0 if spec.constant_lse else 1)
        return _as_inputs(spec, t, _score_gradients(spec, w, p, dp, delta), needs_grad)


# The optional tensors, except those used after the scores, those of packed batches alone, and those
# of a score_mod.
_OTHERS = ("sinks", "seed", "normaliser", "cu_q", "cu_k", "block_table", "k_scale", "v_scale")
_OTHERS += ("captured_floats", "captured_ints", "mask_blocks")
_OF_SCORES = [x for x in Tensors._field_defaults if x not in _OTHERS]


def _wide(spec: AttentionSpec, t: Tensors) -> Tensors:
    """The tensors with q, k and v in float32 at least, and with key lengths clamped to the keys."""
    check_values(spec, t)
    q, k, v, lengths = t.q, t.k, t.v, t.key_lengths
    if lengths is not None:
        lengths = lengths.clamp(0, spec.keys)
    q, k = q.to(spec.acc_dtype), k.to(spec.acc_dtype)
    v = None if v is None else v.to(spec.acc_dtype)
    return t._replace(q=q, k=k, v=v, key_lengths=lengths)


def score_arguments(spec: AttentionSpec, t: Tensors) -> dict[str, Any]:
    """The oracle's arguments for scores. The window's right edge and the place stand for causal."""
    left, right = (None if x >= UNLIMITED else x for x in (spec.left, spec.right))
    arguments = {ARGUMENTS[name].name: getattr(t, name) for name in _OF_SCORES} | dict(
        causal=False,
        window=(left, right),
        softcap=spec.softcap or None,
        scale=spec.scale,
        place=spec.place,
    )
    if spec.score_mod:
        functions = _Functions.of(spec, t)
        if functions.outside is not None:
            _check_indices(functions.outside, t, arguments)
        arguments["mask"] = functions.mask(t.mask)
        if functions.has_score:
            arguments["score_mod"] = lambda s: functions.at(s).value()
    return arguments


def _check_indices(outside: Tensor, t: Tensors, arguments: dict[str, Any]) -> None:
    """Raise IndexError if an index is out of range at a pair that only functions may hide. On a CPU
    alone: elsewhere, and under vmap, such an index is clamped."""
    if outside.device.type != "cpu" or torch.compiler.is_compiling():
        return
    of_pairs: dict[str, Any] = {**arguments, "softcap": None, "alibi_slopes": None}
    seen = oracle.scores(torch.zeros_like(t.q), torch.zeros_like(t.k), **of_pairs) != -torch.inf
    try:
        wrong = bool((seen & outside).any())
    except RuntimeError:  # values are not known
        return
    if wrong:
        raise IndexError(BAD_INDEX)


class _Functions(NamedTuple):
    """The score_mod and the mask_mod of a call."""

    text: str
    has_score: bool
    shown: Tensor | None  # what the mask_mod shows
    outside: Tensor | None  # where an index is out of range: `ModText.outside`
    captured: tuple[Tensor, Tensor]
    indices: dict[str, Tensor]
    factor: float

    @classmethod
    def of(cls, spec: AttentionSpec, t: Tensors) -> _Functions:
        programs, device = ModText.parse(spec.score_mod), t.q.device
        none = torch.zeros(1, dtype=spec.acc_dtype, device=device), torch.zeros(1, device=device)
        floats = none[0] if t.captured_floats is None else t.captured_floats
        ints = none[1].long() if t.captured_ints is None else t.captured_ints
        counts = {
            "b": (spec.at_item, spec.B, spec.dropout_batch_period),
            "h": (spec.at_head, spec.H, spec.dropout_head_period),
            "i": (spec.at_row, t.q.shape[2], 0),
            "j": (spec.at_key, t.k.shape[2], 0),
        }
        indices = {}
        for dim, (name, (first, n, period)) in enumerate(counts.items()):
            x = torch.arange(n, device=device)
            x = first + (x % period if period else x)
            indices[name] = x.view(-1, *(1,) * (3 - dim))
        given: dict[str, Any] = dict(dtype=spec.acc_dtype, seen=NOWHERE, **indices)
        captured = floats, ints
        shown, outside = (
            None if x is None else evaluate(x, captured, **given)
            for x in (programs.mask, programs.outside)
        )
        has_score = programs.score is not None
        return cls(spec.score_mod, has_score, shown, outside, captured, indices, spec.scale)

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """A mask, with what the mask_mod hides."""
        if self.shown is None or mask is None:
            return self.shown if mask is None else mask
        hides = mask.dtype != torch.bool
        return torch.where(self.shown, mask, -torch.inf) if hides else mask & self.shown

    def at(self, products: Tensor) -> ScoreModAt:
        return ScoreModAt(self.text, self.captured, self.indices, products)


def _score_mod_at(spec: AttentionSpec, t: Tensors, k: Tensor) -> ScoreModAt | None:
    """The score_mod at the call's products; k has H heads."""
    functions = _Functions.of(spec, t) if spec.score_mod else None
    return functions.at(t.q @ k.mT * spec.scale) if functions and functions.has_score else None


def _derivative(spec: AttentionSpec, t: Tensors, k: Tensor, mod: ScoreModAt | None) -> Any:
    """The derivative of a score by q.k."""
    if mod is not None:
        return spec.scale * mod.slope()
    return oracle.derivative(t.q, k, **score_arguments(spec, t))


# The gradients are written out, not left to autograd: a backend may run below autograd's dispatch,
# where nothing is recorded and every derivative would come out as 0.


def _heads(spec: AttentionSpec, x: Tensor, t: Tensors) -> Tensor:
    """Keys or values repeated for all query heads, with 0 at and past the key lengths."""
    if t.key_lengths is not None:
        inside = oracle.within(t.key_lengths, x.shape[2], spec.place)
        x = x.masked_fill(~inside[:, None, :, None], 0)
    return x.repeat_interleave(t.q.shape[1] // max(x.shape[1], 1), dim=1)


def _probabilities(spec: AttentionSpec, t: Tensors) -> tuple[Tensor, Tensor | float]:
    """P = exp(S - normaliser), and the factors by which dropout multiplies it."""
    s = oracle.scores(t.q, t.k, **score_arguments(spec, t))
    p, again = (
        oracle.weights(s, t.given("normaliser")),
        (spec.dropout_batch_period, spec.dropout_head_period),
    )
    return p, oracle.dropout(torch.ones_like(p), spec.dropout_p, t.seed, spec.place, again)


def _score_gradients(
    spec: AttentionSpec, t: Tensors, p: Tensor, dp: Tensor, delta: Tensor
) -> dict[str, Tensor]:
    """dS = P (dP - delta) (Dao 2023, section 3.1), and from it dq, dk, dmask and dsinks."""
    grads = {}
    k = _heads(spec, t.k, t)
    ds = p * (dp - delta[..., None])
    if t.mask is not None:
        grads["mask"] = ds.sum_to_size((1,) * (4 - t.mask.ndim) + t.mask.shape)
    if t.sinks is not None:
        grads["sinks"] = -(_shares(t) * delta).sum((0, 2))
    mod = _score_mod_at(spec, t, k)
    if t.captured_floats is not None:  # a mask_mod alone has no gradient by them
        nothing = torch.zeros_like(t.captured_floats)
        grads["captured_floats"] = nothing if mod is None else mod.gradient(ds)
    ds = _by_product(ds, _derivative(spec, t, k, mod))
    grads["q"] = ds @ k
    grads["k"] = _sum_groups(spec, ds.mT @ t.q)
    return grads


def _by_product(ds: Tensor, derivative: Any) -> Tensor:
    """The gradient of products; 0 where that of scores is, because a hidden score may have none."""
    return torch.where(ds == 0, 0.0, ds * derivative)


class _ScoreTangents(NamedTuple):
    """Tangents of what a call computes on the way to out."""

    products_t: Tensor  # of q.k, (B,H,M,N)
    p_t: Tensor  # of the probabilities, P (s_t - lse_t)
    lse_t: Tensor  # (B,H,M)


def _tangents(spec: AttentionSpec, tangents: Tangents) -> Tangents:
    return Tangents(*(None if x is None else x.to(spec.acc_dtype) for x in tangents))


def _score_and_lse_tangents(
    spec: AttentionSpec, t: Tensors, u: Tangents, p: Tensor
) -> _ScoreTangents:
    k, zero = _heads(spec, t.k, t), torch.zeros_like(p)
    products_t = zero if u.q is None else u.q @ k.mT
    if u.k is not None:
        products_t = products_t + t.q @ _heads(spec, u.k, t).mT
    mod = _score_mod_at(spec, t, k)
    s_t = products_t * _derivative(spec, t, k, mod)
    if mod is not None and u.captured_floats is not None:
        s_t = s_t + mod.of_floats(u.captured_floats)
    if u.mask is not None:
        s_t = s_t + u.mask
    s_t = s_t.masked_fill(p == 0, 0)  # the tangent of a hidden score may be NaN
    lse_t = (p * s_t).sum(-1)
    if u.sinks is not None:
        lse_t = lse_t + _seen(_shares(t), u.sinks[:, None])
    return _ScoreTangents(products_t, p * (s_t - lse_t[..., None]), lse_t)


def _shares(t: Tensors) -> Tensor:
    """The probability of each row's sink, (B,H,M)."""
    normaliser = t.given("normaliser")
    return oracle.weights(t.given("sinks").to(normaliser)[:, None, None], normaliser).squeeze(-1)


def _seen(share: Tensor, moves: Tensor) -> Tensor:
    """share * moves, but 0 where the share is 0: the tangent of a sink of -inf may be NaN."""
    return torch.where(share > 0, share * moves, 0.0)


def _score_tangents(
    spec: AttentionSpec,
    t: Tensors,
    u: Tangents,
    moved: _ScoreTangents,
    p: Tensor,
    dps: tuple[Tensor, Tensor],
    deltas: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """The tangents of the gradients from `_score_gradients`, term by term."""
    grads = {}
    (dp, dp_t), (delta, delta_t) = dps, deltas
    ds = p * (dp - delta[..., None])
    ds_t = moved.p_t * (dp - delta[..., None]) + p * (dp_t - delta_t[..., None])
    if t.mask is not None:
        grads["mask"] = ds_t.sum_to_size((1,) * (4 - t.mask.ndim) + t.mask.shape)
    if t.sinks is not None:
        share = _shares(t)
        sinks_t = 0 if u.sinks is None else u.sinks[:, None]
        share_t = _seen(share, sinks_t - moved.lse_t)
        grads["sinks"] = -(share_t * delta + share * delta_t).sum((0, 2))
    k = _heads(spec, t.k, t)
    mod, by_product = _score_mod_at(spec, t, k), moved.products_t * spec.scale
    if t.captured_floats is not None:
        own = ds, ds_t, by_product, u.captured_floats
        nothing = torch.zeros_like(t.captured_floats)
        grads["captured_floats"] = nothing if mod is None else mod.gradient_tangent(*own)
    if mod is not None:
        curved = spec.scale * mod.slope_tangent(by_product, u.captured_floats)
    else:
        curved = oracle.derivative_tangent(t.q, k, moved.products_t, **score_arguments(spec, t))
    derivative = _derivative(spec, t, k, mod)
    ds, ds_t = (
        _by_product(ds, derivative),
        _by_product(ds_t, derivative) + _by_product(ds, curved),
    )
    grads["q"], dk = ds_t @ k, ds_t.mT @ t.q
    if u.k is not None:
        grads["q"] = grads["q"] + ds @ _heads(spec, u.k, t)
    grads["k"] = _sum_groups(spec, dk if u.q is None else dk + ds.mT @ u.q)
    return grads


def _sum_groups(spec: AttentionSpec, x: Tensor) -> Tensor:
    """(B,H,N,D) -> (B,Hk,N,D): a key head's gradient is the sum over the query heads it serves."""
    return x.unflatten(1, (spec.Hk, spec.H // max(spec.Hk, 1))).sum(2)


def _as_inputs(
    spec: AttentionSpec, t: Tensors, grads: dict[str, Tensor], needs_grad: Sequence[str]
) -> dict[str, Tensor]:
    """The gradients that are wanted, each in its input's shape and in the dtype of storage."""
    shaped = {}
    for name in needs_grad:
        x = getattr(t, name)
        dtype = spec.stored(x.dtype)
        room = (
            empty_dense(x, x.shape, dtype, spec.grad_order)
            if name in "qkv"
            else x.new_empty(x.shape, dtype=dtype)
        )
        shaped[name] = room.copy_(grads[name].reshape(x.shape))
    return shaped


# ------------------------------------------------------------- packed: one sequence after the other


def _forward_packed(run: Reference, spec: AttentionSpec, t: Tensors) -> tuple[Tensor, Tensor]:
    check_values(spec, t)
    out = empty_dense(t.q, (*t.q.shape[:3], spec.Dv), spec.dtype, spec.out_order)
    normaliser = t.q.new_empty((2, *t.q.shape[:3]), dtype=spec.acc_dtype)
    for one in sequences(spec, t):
        out[:, :, one.rows], normaliser[..., one.rows] = run.forward(one.spec, one.t)
    return out, normaliser


register(Reference())
