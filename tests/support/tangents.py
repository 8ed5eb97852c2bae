"""Directional derivatives of a call: the exact ones by torch's forward mode on the float64 oracle.

`directions` makes a tangent for every tensor of a problem that has a gradient. `exact` pushes them
through the oracle and its gradients; `passes` does so by a backend's two passes, and `complaints`
lists the results that err by more than `budgets` allows.
"""

from __future__ import annotations

import dataclasses
import math

import torch

import fastattn
from fastattn import api
from fastattn.backends import base
from fastattn.call.spec import Tangents
from fastattn.call.validation import describe
from tests.support.cases import Problem
from tests.support.error_budget import ROUNDINGS, accumulator, largest_addend, rounded_terms
from tests.support.naive import baseline


def directions(problem: Problem, only=None) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Tangents by name (of those in `only`, or all), and tangents of dout and dlse."""
    generator = torch.Generator().manual_seed(len(problem.name))

    def like(x):
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)

    given = problem.tensors()
    found = {name: like(given[name]) for name in problem.needs_grad}
    dlse = problem.dlse if problem.dlse is not None else problem.dout.new_zeros(1)
    incoming = like(problem.dout), like(dlse)
    return {name: x for name, x in found.items() if only is None or name in only}, *incoming


def exact(problem: Problem, moves: dict, dout_t: torch.Tensor, dlse_t: torch.Tensor) -> dict:
    """{"out_t", "lse_t", "dq_t", ...} of the oracle in float64."""
    problem = problem.to(torch.float64)
    moves = {name: x.double() for name, x in moves.items()}
    dout_t, dlse_t = dout_t.double(), dlse_t.double()
    dlse = torch.zeros(problem.dout.shape[:3]).double() if problem.dlse is None else problem.dlse
    dlse_t = torch.zeros_like(dlse) if problem.dlse is None else dlse_t
    others = {x: y for x, y in problem.tensors().items() if x not in problem.needs_grad}
    given = {name: problem.tensors()[name].contiguous() for name in problem.needs_grad}
    others["return_lse"] = True

    def outputs(inputs):
        out, lse = fastattn.reference.attention(**inputs, **others)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    def gradients(inputs, dout, dlse):
        _, back = torch.func.vjp(outputs, inputs)
        return back((dout, dlse))[0]

    moves = {x: moves.get(x, torch.zeros_like(y)) for x, y in given.items()}
    _, (out_t, lse_t) = torch.func.jvp(outputs, (given,), (moves,))
    _, found = torch.func.jvp(
        gradients, (given, problem.dout.contiguous(), dlse), (moves, dout_t, dlse_t)
    )
    return dict(out_t=out_t, lse_t=lse_t) | {f"d{name}_t": x for name, x in found.items()}


def budgets(problem: Problem, moves: dict, dout_t, dlse_t, expected: dict) -> dict:
    """A bound on |error| for every element of `expected`, which is exact. A dtype may err by what
    rounding in the accumulation dtype explains: the formulas of both passes in absolute values,
    where a probability errs by eps times the size of the logits that made it. 16-bit results may
    err further by their own rounding, and by that of out and out_t, which `second` gets."""
    eps = torch.finfo(accumulator(problem.q.dtype)).eps
    stored = torch.finfo(problem.q.dtype).eps if problem.q.dtype.itemsize == 2 else 0.0
    absolute = Absolute(problem, moves, dout_t, dlse_t)
    sizes, through = absolute.results(), absolute.through_out(expected["out_t"])
    size = absolute.of_a_probability()
    found = {}
    for name, x in expected.items():
        shape = x.shape
        found[name] = ROUNDINGS * eps * size * absolute.shaped(name, sizes[name], shape) + 1e-30
        if stored and name != "lse_t":
            found[name] = found[name] + 2 * stored * x.abs().amax()
            if name in through:
                found[name] = found[name] + stored * absolute.shaped(name, through[name], shape)
    return found


class Absolute:
    """The formulas of `jvp` and `second` in absolute values, in float64. x_t is the tangent of x;
    k, v and their tangents are repeated for the query heads of a group."""

    def __init__(self, problem: Problem, moves: dict, dout_t, dlse_t):
        self.problem, self.moves = problem, moves
        wide = problem.to(torch.float64)
        parts = wide.q, wide.k, wide.v, wide.dout
        self.q, k, v, self.dout = (x.abs().nan_to_num(0) for x in parts)
        others = ("dropout_p", "seed", "return_lse")
        self.kwargs = {x: y for x, y in wide.kwargs.items() if x not in others}
        self.grown = 1 / (1 - problem.kwargs.get("dropout_p", 0.0))
        scale = self.kwargs.get("scale")
        self.scale = abs(scale if scale is not None else 1 / math.sqrt(self.q.shape[-1]))
        self.group = self.q.shape[1] // k.shape[1]
        self.k, self.v = (x.repeat_interleave(self.group, 1) for x in (k, v))
        self.q_t = self._moved("q", self.q)
        self.k_t = self._moved("k", self.k, self.group)
        self.v_t = self._moved("v", self.v, self.group)
        self.dout_t = dout_t.double().abs()
        zero = self.dout.new_zeros(())
        self.dlse, self.dlse_t = (
            zero if problem.dlse is None else x.double().abs()[..., None]
            for x in (zero if problem.dlse is None else wide.dlse, dlse_t)
        )
        p = baseline(wide.q, wide.k, wide.v, **self.kwargs, return_weights=True)
        self.sink = (1 - p.sum(-1, keepdim=True)).clamp(min=0)
        self.p = self._with_least(p)
        self._move_scores()

    def _moved(self, name: str, like: torch.Tensor, heads: int = 1) -> torch.Tensor:
        given = self.moves.get(name)
        if given is None:
            return torch.zeros_like(like)
        return given.double().abs().nan_to_num(0).repeat_interleave(heads, 1)

    def _with_least(self, p: torch.Tensor) -> torch.Tensor:
        """Probabilities, and beside each the least one: a kernel's exp is 0 below 2^-100 (float64:
        2^-900)."""
        wide = accumulator(self.problem.q.dtype)
        least = 2.0**-900 if wide == torch.float64 else 2.0**-100
        return p + (p > 0) * (least / (ROUNDINGS * torch.finfo(wide).eps))

    def _move_scores(self) -> None:
        """The tangents of the sinks, of the LSE and, as r, of scores and the LSE together."""
        zero = self.dout.new_zeros(())
        self.sinks_t = zero
        if "sinks" in self.moves:
            self.sinks_t = self.moves["sinks"].double().abs()[None, :, None, None]
        products_t = self.scale * (self.q_t @ self.k.mT + self.q @ self.k_t.mT)
        s_t = products_t
        if "mask" in self.moves:
            s_t = s_t + self.moves["mask"].double().abs().nan_to_num(0, 0, 0)
        self.lse_t = (self.p * s_t).sum(-1, keepdim=True) + self.sink * self.sinks_t
        self.r = s_t + self.lse_t
        softcap = self.kwargs.get("softcap")
        self.bend = 2 / softcap * products_t if softcap else zero  # the derivative of a softcap's

    def of_a_probability(self) -> torch.Tensor:
        """The largest relative error of a probability, in eps: the size of its logits."""
        size = 1 + self.scale * (self.q @ self.k.mT).amax() + largest_addend(self.kwargs, self.p)
        return (size + rounded_terms(self.problem, self.p) / 2).amax()

    def results(self) -> dict:
        """{"out_t", "lse_t", "dq_t", ...} of both passes."""
        p, r, grown, dout, v = self.p, self.r, self.grown, self.dout, self.v
        dp, dp_t = grown * dout @ v.mT, grown * (dout @ self.v_t.mT + self.dout_t @ v.mT)
        row = (p * dp).sum(-1, keepdim=True) + self.dlse
        row_t = (p * (r * dp + dp_t)).sum(-1, keepdim=True) + self.dlse_t
        return {
            "out_t": grown * ((p * r) @ v + p @ self.v_t),
            "lse_t": self.lse_t[..., 0],
            **self._gradients(dp + row, dp_t + row_t, row, row_t),
            "dv_t": grown * ((p * r).mT @ dout + p.mT @ self.dout_t),
        }

    def through_out(self, exact_out_t: torch.Tensor) -> dict:
        """What results change by, per relative error of out and out_t, which delta is made of."""
        out = self.grown * self.p @ self.v
        out_t = exact_out_t.abs() + self.lse_t * out
        row = (self.dout * out).sum(-1, True)
        row_t = (self.dout * out_t + self.dout_t * out).sum(-1, True)
        return self._gradients(row, row_t, row, row_t) | {"out_t": self.lse_t * out}

    def _gradients(self, by, by_t, row, row_t) -> dict:
        """Gradients from |dP - delta| and its tangent, and from delta and its tangent."""
        ds, ds_t = self.p * by, self.p * (self.r * by + by_t)
        found = {"dmask_t": ds_t}
        if "sinks" in self.problem.needs_grad:
            share = self.sink * ((self.sinks_t + self.lse_t) * row + row_t)
            found["dsinks_t"] = share.sum((0, 2, 3))
        ds_t = ds_t + ds * self.bend
        found["dq_t"] = self.scale * (ds_t @ self.k + ds @ self.k_t)
        found["dk_t"] = self.scale * (ds_t.mT @ self.q + ds.mT @ self.q_t)
        return found

    def shaped(self, name: str, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """x of all query heads, summed to the shape of the result."""
        if name in ("dk_t", "dv_t"):
            return x.unflatten(1, (-1, self.group)).sum(2)
        return x.sum_to_size(shape) if name == "dmask_t" else x


def complaints(name: str, problem: Problem, expected: dict, given: tuple, **how) -> list[str]:
    """One line for each result of a backend that is out of budget."""
    return about(passes(name, problem, *given, **how), problem, expected, given)


def about(found: dict, problem: Problem, expected: dict, given: tuple) -> list[str]:
    """One line for each result in `found` that is out of budget."""
    bounds = budgets(problem, *given, expected)
    lines = []
    for what, x in expected.items():
        if found[what].shape != x.shape:
            lines.append(f"{problem.name}: {what}: got {found[what].shape}, not {x.shape}")
            continue
        error = (found[what].double() - x).abs()
        over = ~(error <= bounds[what])  # true for NaN
        if over.any():
            worst = (error / bounds[what].expand_as(error)).nan_to_num(torch.inf).max()
            lines.append(
                f"{problem.name}: {what}: {worst:.3g} of its budget, {int(over.sum())} over"
            )
    return lines


def passes(name: str, problem: Problem, moves: dict, dout_t, dlse_t, known=True) -> dict:
    """A backend's results. known: does `jvp` get the results of forward?"""
    run = base.get(name)
    given = {x: y for x, y in problem.tensors().items() if x != "return_lse"}
    q, k, v = (given.pop(x) for x in "qkv")
    t, options = api.prepare(q, k, v, given)
    spec = dataclasses.replace(describe(t, options), tangents=True)
    assert not run.support.why_not(spec)
    tangents = Tangents(**moves)
    before = run.forward(spec, t)
    outs = run.jvp(spec, t, tangents, before if known else None)
    if not known:
        loose = 1e-5 if q.dtype.itemsize > 2 else 2 * torch.finfo(q.dtype).eps
        for x, y in zip(before, outs):
            torch.testing.assert_close(y, x, rtol=loose, atol=loose)
    dlse, dlse_t = (None, None) if problem.dlse is None else (problem.dlse, dlse_t)
    grads = problem.dout, dlse, dout_t, dlse_t
    found = run.second(spec, t, tangents, outs, grads, problem.needs_grad)
    return dict(out_t=outs[2], lse_t=outs[3]) | {f"d{x}_t": y for x, y in found.items()}
