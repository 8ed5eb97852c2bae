"""The error budget: how far from the float64 oracle a result may be.

Every dtype may err by what rounding in the accumulation dtype explains, element by element. That is
the whole budget of float32 and float64. A sum of terms that cancel keeps the error of its terms, so
`magnitudes` carries absolute values through the formulas of forward and backward; and a probability
errs by eps times the size of the logits that made it.

16-bit results may err further by 2x (gradients 3x) the largest error of `naive.baseline`, which
computes in the same dtype (torch's own math path is no baseline: it upcasts), or in out by four
times the standard deviation that rounded weights cause, by 2 units in the last place of the largest
value, and by what storing the output in 16 bits does to delta = sum(dout
* out), which backward subtracts: where a gradient is 0 by cancellation, the baseline may be exact
by luck. The LSE is float32 for 16-bit inputs, and has the budget of float32.

Rows with large mask values (large_logit_rows.py) use an oracle with rounded logits. Their budget
counts each logit's distance from the row's largest, not its distance from zero.
"""

import math
from contextlib import contextmanager

import torch

import fastattn
from tests.support.large_logit_rows import accumulator, far_rows
from tests.support.naive import baseline

FACTOR = {"out": 2}  # gradients: 3
ROUNDINGS = 4  # how many half-ulp steps of the accumulation dtype may add up


def oracle(problem, backward=True, far=None):
    attention = fastattn.reference.attention
    return problem.to(torch.float64).run(far.hold(attention) if far else attention, backward)


def budgets(problem, exact, backward=True, far=None):
    """{"out", "lse", ...}: a bound on |error| for every element of every result."""
    dtype = problem.q.dtype
    finfo = torch.finfo(accumulator(dtype))
    sizes = magnitudes(problem, exact["out"], backward, far)
    # The oracle of float64 rounds as often as a kernel does; random errors of both add up to that.
    roundings = ROUNDINGS * (math.sqrt(2) if dtype == torch.float64 else 1)
    # The last term: a value that underflows may be 0.
    bounds = {
        x: roundings * finfo.eps * size + 1e4 * finfo.tiny for x, size in sizes["all"].items()
    }
    for name, bound in bounds.items():  # e.g. the gradient of a float32 bias with float64 inputs
        stored = torch.finfo(expected_dtype(name, problem))
        bounds[name] = bound + stored.eps * exact[name].abs() + stored.tiny
    if dtype.itemsize > 2:
        return bounds
    finfo, roughly = torch.finfo(dtype), roughness(problem, exact, backward, far)
    for name in exact.keys() - {"lse"}:
        value = exact[name].masked_fill(~exact[name].isfinite(), 0)
        if value.numel():
            rough = torch.as_tensor(roughly.get(name, 0), dtype=torch.float64)
            if name == "out":  # the baseline of few numbers may be exact by luck
                rough = rough.maximum(finfo.eps / math.sqrt(3) * sizes["weights"])
            bounds[name] += FACTOR.get(name, 3) * rough
            bounds[name] += 2 * finfo.eps * max(value.abs().max().item(), finfo.tiny)
        if name in sizes["delta"]:
            bounds[name] += finfo.eps / 2 * sizes["delta"][name]
    return bounds


def roughness(problem, exact, backward, far):
    """The largest error of the baseline in each result. In far rows 16-bit logits lose q.k
    altogether, so their error does not measure rounding: it is taken without the large mask
    values."""
    attention = baseline
    if far:
        attention = far.bring_near(baseline)
        near = far.bring_near(fastattn.reference.attention)
        exact = problem.to(torch.float64).run(near, backward)
    rough = problem.run(attention, backward)
    errors = {name: (rough[name].double() - exact[name]).abs() for name in exact}
    return {name: x[x.isfinite()].max() for name, x in errors.items() if x.isfinite().any()}


def magnitudes(problem, out, backward=True, far=None):
    """{"all", "delta"}, each {"out", "lse", ...}: the absolute values that each result sums up,
    and those among them that pass through delta; and "weights": by what factor out errs, at random,
    where each weight is rounded."""
    exact = problem.to(torch.float64)
    k, v = (exact.sizes.get(name, getattr(exact, name)) for name in "kv")
    q, k, v = (x.abs().nan_to_num(0) for x in (exact.q, k, v))
    kwargs = {x: y for x, y in exact.kwargs.items() if x not in ("dropout_p", "seed", "return_lse")}
    p_drop = exact.kwargs.get("dropout_p", 0.0)
    grown = 1 / (1 - p_drop) if p_drop < 1 else 0.0
    heads, kv_heads = q.shape[1], k.shape[1]
    scale = kwargs.get("scale")
    scale = abs(scale if scale is not None else 1 / math.sqrt(max(q.shape[-1], 1)))

    def all_heads(x):
        return x.repeat_interleave(heads // max(kv_heads, 1), 1)

    def key_heads(x):
        return x.unflatten(1, (kv_heads, heads // max(kv_heads, 1))).sum(2)

    probabilities = far.hold(baseline) if far else baseline
    p = probabilities(exact.q, exact.k, exact.v, **kwargs, return_weights=True)
    # One ulp of the largest logit is a relative error of this many ulps in every probability;
    # sums of n terms err as the square root of n, where the terms are alike.
    logit = scale * (q @ all_heads(k).mT).amax() if p.numel() else torch.zeros(())
    logit = 1 + logit + largest_addend(kwargs, p, far) + rounded_terms(problem, p) / 2
    if kwargs.get("sinks") is not None:  # a logit is rounded beside the row's largest
        logit = torch.maximum(logit, kwargs["sinks"].view(-1, 1, 1))
    sizes = {"out": grown * (p @ all_heads(v)) * logit}
    of_weights = grown * (p.square() @ all_heads(v).square()).sqrt()
    if problem.kwargs.get("return_lse"):
        sizes["lse"] = logit.squeeze(-1)
    # A kernel's exp is 0 below 2^-100 (float64: 2^-900): each probability may err by that much.
    wide = accumulator(problem.q.dtype)
    zeroed = 2.0**-900 if wide == torch.float64 else 2.0**-100
    zeroed = (p > 0).to(p) * (zeroed / (ROUNDINGS * torch.finfo(wide).eps))
    sizes["out"] = sizes["out"] + grown * zeroed @ all_heads(v)
    p = p + zeroed
    if not backward:
        return {"all": sizes, "delta": {}, "weights": of_weights}

    def sink_shares():  # 1 - sum(p) would be 0 where they are small
        attention = far.hold(fastattn.reference.attention) if far else fastattn.reference.attention
        _, lse = attention(exact.q, exact.k, exact.v, **kwargs, return_lse=True)
        return torch.exp(kwargs["sinks"].view(-1, 1) - lse).nan_to_num(0)[..., None]

    def through_scores(ds, sink_row):
        found = {"dq": scale * (ds @ all_heads(k)), "dk": scale * key_heads(ds.mT @ q)}
        if "mask" in problem.needs_grad:
            found["dmask"] = ds.sum_to_size(problem.kwargs["mask"].shape)
        if "sinks" in problem.needs_grad:
            found["dsinks"] = (sink_shares() * sink_row).sum((0, 2, 3))
        return {x: y for x, y in found.items() if x[1:] in problem.needs_grad}

    dout = exact.dout.abs()
    dlse = 0 if exact.dlse is None else exact.dlse.abs().unsqueeze(-1)
    weighted = grown * (dout @ all_heads(v).mT) * p  # |P dP|
    row = weighted.sum(-1, keepdim=True) + dlse
    sizes |= through_scores((weighted + p * row) * logit, row * logit)
    if "v" in problem.needs_grad:
        sizes["dv"] = grown * key_heads((p * logit).mT @ dout)
    delta = (dout * out.abs()).sum(-1, keepdim=True)
    return {"all": sizes, "delta": through_scores(p * delta, delta), "weights": of_weights}


def rounded_terms(problem, p):
    """The number of roundings by which a sum over the rows or keys of p (B,H,M,N) errs.

    Roundings of n random terms add up to the square root of n. If a tensor repeats one row, the
    terms are equal, their roundings have one sign, and n of them add up, in the oracle too.
    """
    n = max(p.shape[-2:])
    tensors = problem.q, problem.k, problem.v, problem.dout
    repeats = any(x.shape[2] > 1 and x.stride(2) == 0 for x in tensors)
    return n if repeats else math.sqrt(n)


def largest_addend(kwargs, p, far=None):
    """(B,H,M,1): the largest term that a mask or ALiBi adds to a logit that matters in the row."""
    size = p.new_zeros((*p.shape[:3], 1))
    mask, slopes = kwargs.get("mask"), kwargs.get("alibi_slopes")
    if not p.numel():
        return size
    if mask is not None and mask.dtype != torch.bool:
        counts = mask.expand_as(p).abs()
        if far:
            counts = torch.where(far.rows & ~far.ties, far.below, counts)
        matters = p > 1e-12 * p.amax(-1, keepdim=True)  # beside a sink, all may be tiny
        size = size + counts.masked_fill(~matters, 0).amax(-1, keepdim=True)
    if slopes is not None:
        size = size + slopes.abs().max() * sum(p.shape[-2:])
    return size


def expected_dtype(name, problem):
    if name == "lse":
        return accumulator(problem.q.dtype)
    if name in ("dmask", "dsinks"):
        return problem.kwargs[name[1:]].dtype
    return problem.q.dtype


@contextmanager
def on_threads(count):
    """Run on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread():
    """For hundreds of tiny operations a second thread costs ten times what it saves."""
    return on_threads(1)


class Verdict:
    """The oracle's result for one problem, computed once and compared with several kernels."""

    def __init__(self, problem, backward=True):
        self.problem, self.backward = problem, backward
        with one_thread():
            far = far_rows(problem)
            self.exact = oracle(problem, backward, far)
            self.bounds = budgets(problem, self.exact, backward, far)
        self.dtypes = {name: expected_dtype(name, problem) for name in self.exact}

    def complaints(self, attention, **more):
        """One line for each result of `attention(...)` that is out of budget."""
        return self.about(self.problem.run(attention, self.backward, **more))

    def about(self, got):
        with one_thread():
            return [line for name in self.exact for line in self._about(name, got[name])]

    def _about(self, name, value):
        exact, want = self.exact[name], self.dtypes[name]
        if value.shape != exact.shape or value.dtype != want:
            yield f"{name}: got {value.dtype} {tuple(value.shape)}, not {want} {tuple(exact.shape)}"
            return
        value = value.double()
        special = ~exact.isfinite()  # -inf and NaN must be where the oracle has them, only
        if special.any() and not torch.equal(
            value[special].nan_to_num(7.0), exact[special].nan_to_num(7.0)
        ):
            yield f"{name}: not the oracle's infinities"
        error = (value - exact).abs().masked_fill(special, 0)
        over = ~(error <= self.bounds[name])  # true for NaN
        if over.any():
            bound = self.bounds[name].expand_as(error)
            worst = torch.where(over, error / bound, 0).nan_to_num(torch.inf).argmax()
            at = tuple(int(x) for x in torch.unravel_index(worst, error.shape))
            yield (
                f"{name}{list(at)}: got {value[at]:.9g}, oracle {exact[at]:.9g}, "
                f"error {error[at]:.3g} over the budget {bound[at]:.3g}; "
                f"{int(over.sum())} of {over.numel()} elements are over"
            )
