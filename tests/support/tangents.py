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
    found = {name: like(given[name]) for name in problem.wants}
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
    others = {x: y for x, y in problem.tensors().items() if x not in problem.wants}
    given = {name: problem.tensors()[name].contiguous() for name in problem.wants}
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
    wide = accumulator(problem.q.dtype)
    eps = torch.finfo(wide).eps
    stored = torch.finfo(problem.q.dtype).eps if problem.q.dtype.itemsize == 2 else 0.0
    as_drawn = problem
    problem = problem.to(torch.float64)
    q, k, v, dout = (x.abs().nan_to_num(0) for x in (problem.q, problem.k, problem.v, problem.dout))
    others = ("dropout_p", "seed", "return_lse")
    kwargs = {x: y for x, y in problem.kwargs.items() if x not in others}
    grown = 1 / (1 - problem.kwargs.get("dropout_p", 0.0))
    scale = kwargs.get("scale")
    scale = abs(scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))

    def of(name, like, heads=1):
        given = moves.get(name)
        if given is None:
            return torch.zeros_like(like)
        return given.double().abs().nan_to_num(0).repeat_interleave(heads, 1)

    q_t, k_t, v_t = of("q", q), of("k", k, group), of("v", v, group)
    dout_t = dout_t.double().abs()
    zero = dout.new_zeros(())
    dlse, dlse_t = (
        zero if problem.dlse is None else x.double().abs()[..., None]
        for x in (zero if problem.dlse is None else problem.dlse, dlse_t)
    )
    p = baseline(problem.q, problem.k, problem.v, **kwargs, return_weights=True)
    sink = (1 - p.sum(-1, keepdim=True)).clamp(min=0)
    # A kernel's exp is 0 below 2^-100 (float64: 2^-900).
    least = 2.0**-900 if wide == torch.float64 else 2.0**-100
    p = p + (p > 0) * (least / (ROUNDINGS * eps))
    sinks_t = zero
    if "sinks" in moves:
        sinks_t = moves["sinks"].double().abs()[None, :, None, None]
    size = 1 + scale * (q @ k.mT).amax() + largest_addend(kwargs, p)
    size = size + rounded_terms(as_drawn, p) / 2  # the error of a probability

    products_t = scale * (q_t @ k.mT + q @ k_t.mT)
    s_t = products_t
    if "mask" in moves:
        s_t = s_t + moves["mask"].double().abs().nan_to_num(0, 0, 0)
    lse_t = (p * s_t).sum(-1, keepdim=True) + sink * sinks_t
    r = s_t + lse_t
    sizes = {
        "out_t": grown * ((p * r) @ v + p @ v_t),
        "lse_t": lse_t[..., 0],
    }
    bend = 2 / kwargs["softcap"] * products_t if kwargs.get("softcap") else zero

    def gradients(by, by_t, row, row_t):
        """Gradients from |dP - delta| and its tangent, and from delta and its tangent."""
        ds, ds_t = p * by, p * (r * by + by_t)
        found = {"dmask_t": ds_t}
        if "sinks" in problem.wants:
            share = sink * ((sinks_t + lse_t) * row + row_t)
            found["dsinks_t"] = share.sum((0, 2, 3))
        ds_t = ds_t + ds * bend
        found["dq_t"] = scale * (ds_t @ k + ds @ k_t)
        found["dk_t"] = scale * (ds_t.mT @ q + ds.mT @ q_t)
        return found

    dp, dp_t = grown * dout @ v.mT, grown * (dout @ v_t.mT + dout_t @ v.mT)
    row = (p * dp).sum(-1, keepdim=True) + dlse
    row_t = (p * (r * dp + dp_t)).sum(-1, keepdim=True) + dlse_t
    sizes |= gradients(dp + row, dp_t + row_t, row, row_t)
    sizes["dv_t"] = grown * ((p * r).mT @ dout + p.mT @ dout_t)
    out = grown * p @ v
    out_t = expected["out_t"].abs() + lse_t * out
    row, row_t = ((dout * out).sum(-1, True), (dout * out_t + dout_t * out).sum(-1, True))
    through = gradients(row, row_t, row, row_t) | {"out_t": lse_t * out}

    def shaped(name, x):
        if name in ("dk_t", "dv_t"):
            return x.unflatten(1, (-1, group)).sum(2)
        return x.sum_to_size(expected[name].shape) if name == "dmask_t" else x

    size = size.amax() if isinstance(size, torch.Tensor) else size
    found = {}
    for name, x in expected.items():
        found[name] = ROUNDINGS * eps * size * shaped(name, sizes[name]) + 1e-30
        if stored and name != "lse_t":
            found[name] = found[name] + 2 * stored * x.abs().amax()
            if name in through:
                found[name] = found[name] + stored * shaped(name, through[name])
    return found


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
    outs = run.jvp(spec, t, tangents, *(before if known else ()))
    if not known:
        loose = 1e-5 if q.dtype.itemsize > 2 else 2 * torch.finfo(q.dtype).eps
        for x, y in zip(before, outs):
            torch.testing.assert_close(y, x, rtol=loose, atol=loose)
    dlse, dlse_t = (None, None) if problem.dlse is None else (problem.dlse, dlse_t)
    found = run.second(spec, t, tangents, outs, problem.dout, dlse, dout_t, dlse_t, problem.wants)
    return dict(out_t=outs[2], lse_t=outs[3]) | {f"d{x}_t": y for x, y in found.items()}
