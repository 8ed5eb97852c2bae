"""Judge a peer's output and gradients against the oracle in float64, before any timing.

The oracle runs on blocks of query rows, so that it never holds an N x N matrix in float64, and on
as many heads as a fixed amount of work allows; the verdict says which heads those were. Rows and
keys are never sampled: dk and dv of a head sum over all of its rows. Heads that share their keys
are judged together, for the same reason.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastattn import reference

from ..cases import FORWARD, TRAINING, Case, Inputs
from ..masks import SEED
from ..peers.registry import BASELINE, PEERS, Call, Peer
from . import isolated_process

# dtype -> (whole tensor, worst row): bounds on |x - oracle| / |oracle| in the 2-norm. A row is
# judged against the larger of its own norm and the tensor's mean row norm, because the gradients
# of early causal rows cancel to nearly nothing. torch's own kernels measure about (6e-7, 2e-6),
# (4e-3, 1e-2) and (5e-4, 1e-3): a kernel 1% off fails, and rounding does not. The first rows of a
# long causal call cancel the most, and rows are smaller the more keys they see: there a row may be
# as wrong as torch's own worst one, and half as much again, up to a multiple of its bound.
BOUNDS = {"float32": (5e-6, 2e-5), "bfloat16": (7e-3, 4e-2), "float16": (1e-3, 6e-3)}
LIKE_TORCH, MOST_BOUNDS = 1.5, 3.0
ORACLE_FLOPS = {"cpu": 6e9, "cuda": 4e12}
BLOCK_ELEMENTS = 1 << 21  # of a block of scores, over all the heads judged


@dataclass
class Verdict:
    """reason is "" when everything asked for passed; errors are whole-tensor relative errors.
    note says how the judged call differs from the timed one."""

    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""


class Oracle:
    """The float64 answer for some heads of one case. `groups` are the key heads judged, counted
    over the batch, each with all of its query heads."""

    def __init__(self, case: Case, gradients: bool):
        self.case = case
        self.inputs = case.inputs()
        self.groups = judged_groups(case)
        self.expected = self._compute(gradients)

    def scope(self, what: str) -> str:
        """What a pass is judged on, in words."""
        case, names = self.case, ["out", *(f"d{x}" for x in self.case.leaves)]
        heads = self._heads().tolist()
        total = case.B * case.H
        some = ", ".join(map(str, heads[:8])) + ("…" if len(heads) > 8 else "")
        which = f"all {total} heads" if len(heads) == total else f"head {some} of {total}"
        return f"{'out' if what == FORWARD else ', '.join(names)}: every row of {which}"

    def select(self, x: Tensor) -> Tensor:
        """The judged heads of a (B, heads, rows, columns) tensor in float64, as (groups, heads of
        a group, rows, columns). A bias has B = 1 and serves every item."""
        x = x.detach().expand(self.case.B, *x.shape[1:])
        groups = x.unflatten(1, (self.case.Hk, -1)).flatten(0, 1)
        return groups[self.groups].double()

    def _heads(self) -> Tensor:
        G = self.case.H // self.case.Hk
        return (torch.tensor(self.groups)[:, None] * G + torch.arange(G)).flatten()

    def _compute(self, gradients: bool) -> dict[str, Tensor]:
        case = self.case
        chosen = {name: self.select(getattr(self.inputs, name)) for name in ("q", "k", "v")}
        if self.inputs.bias is not None:
            chosen["bias"] = self.select(self.inputs.bias)
        leaves = [chosen[name].requires_grad_(gradients) for name in case.leaves]
        dout = self.select(self.inputs.dout)
        expected = {"out": torch.empty_like(dout)}
        if gradients:
            expected |= {f"d{n}": torch.zeros_like(x) for n, x in zip(case.leaves, leaves)}
        step = max(1, BLOCK_ELEMENTS // (case.N * dout.shape[0] * dout.shape[1]))
        for start in range(0, case.M, step):
            stop = min(start + step, case.M)
            block = self._rows(chosen, start, stop)
            expected["out"][:, :, start:stop] = block.detach()
            if gradients:
                parts = torch.autograd.grad(block, leaves, dout[:, :, start:stop])
                for name, part in zip(case.leaves, parts):
                    expected[f"d{name}"] += part
        return expected

    def _rows(self, chosen: dict[str, Tensor], start: int, stop: int) -> Tensor:
        """The output of rows start:stop from their own keys and no others."""
        case, rule = self.case, self.case.rule
        first = 0 if rule.left is None else max(0, start - rule.left)
        last = case.N if rule.right is None else min(case.N, stop + rule.right)
        items = torch.tensor(self.groups, device=case.device) // case.Hk
        keep = case.visible(start, stop)[items, ..., first:last]
        k, v = chosen["k"][:, :, first:last], chosen["v"][:, :, first:last]
        s = chosen["q"][:, :, start:stop] @ k.mT / case.D**0.5
        if "bias" in chosen:
            s = s + chosen["bias"][:, :, start:stop, first:last]
        p, _ = reference.softmax(s.masked_fill(~keep, -torch.inf))
        if rule.dropout_p:
            heads = self._heads().view(len(self.groups), -1)
            keep_mask = keep_mask_of_rows(heads, case, start, stop)[..., first:last]
            p = torch.where(keep_mask, p, 0.0) / (1 - rule.dropout_p)
        return p @ v

    @functools.cached_property
    def worst_rows_of_torch(self) -> dict[str, float]:
        """By tensor, the error of the worst row of torch's own function; {} if it has no result."""
        case = self.case
        what = TRAINING if len(self.expected) > 1 else FORWARD
        try:
            actual = compute(PEERS[BASELINE].prepare(case), case, self.inputs, what)
        except Exception:  # out of memory, or no such call
            return {}
        return {x: relative_errors(self.select(y), self.expected[x])[1] for x, y in actual.items()}

    def judge(self, actual: dict[str, Tensor]) -> Verdict:
        """Compare what `compute` returned for this case."""
        errors = {}
        tensor_bound, row_bound = BOUNDS[self.case.dtype]
        for name, x in actual.items():
            errors[name], worst = relative_errors(self.select(x), self.expected[name])
            allowed = row_bound
            if allowed < worst <= MOST_BOUNDS * allowed and not self.case.rule.dropout_p:
                allowed = max(allowed, LIKE_TORCH * self.worst_rows_of_torch.get(name, 0.0))
            if not (errors[name] <= tensor_bound and worst <= allowed):
                return Verdict(
                    f"{name} is off by {errors[name]:.1e} (at most {tensor_bound:.0e}),"
                    f" its worst row by {worst:.1e} (at most {allowed:.0e})",
                    errors,
                )
        return Verdict("", errors)


class Judge:
    """Run one pass of a case exactly as it will be timed, and compare. A peer that draws its own
    dropout is compared without dropout."""

    def __init__(self, case: Case, gradients: bool):
        self.oracle = Oracle(case, gradients)
        plain = dataclasses.replace(case, mask="full")
        self.plain = Oracle(plain, gradients) if case.rule.dropout_p else self.oracle

    def __call__(self, peer: Peer, what: str) -> Verdict:
        case, inputs = self.oracle.case, self.oracle.inputs
        if declined := peer.why_not(case, what):
            return Verdict(f"declined: {declined}")
        try:
            actual = compute(peer.prepare(case), case, inputs, what)
            if wrong := [name for name, x in actual.items() if not torch.isfinite(x).all()]:
                return Verdict(f"{wrong[0]} is not finite")
            if peer.our_draws or self.plain is self.oracle:
                return self.oracle.judge(actual)
            plain = self.plain.case
            verdict = self.plain.judge(compute(peer.prepare(plain), plain, inputs, what))
        except Exception as error:  # the table must show any error of a peer
            reason = isolated_process.one_line(error)
        else:
            verdict.note = "judged without dropout: its draws are its own"
            return verdict
        isolated_process.recover(reason)
        return Verdict(reason)


def compute(call: Call, case: Case, inputs: Inputs, what: str) -> dict[str, Tensor]:
    """out and, unless the pass is the forward one, the gradient of each leaf as d<leaf>."""
    if what == FORWARD:
        with torch.no_grad():
            return {"out": call(inputs)}
    inputs = differentiable(case, inputs)
    leaves = [getattr(inputs, name) for name in case.leaves]
    out = call(inputs)
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    return {"out": out, **{f"d{n}": x for n, x in zip(case.leaves, gradients, strict=True)}}


def differentiable(case: Case, inputs: Inputs) -> Inputs:
    """The same values; the leaves of the case require grad."""
    return inputs._replace(
        **{name: getattr(inputs, name).detach().requires_grad_() for name in case.leaves}
    )


def keep_mask_of_rows(heads: Tensor, case: Case, start: int, stop: int) -> Tensor:
    """reference.keep_mask for rows start:stop of some heads, counted over the batch; heads is
    (groups, G), and the result (groups, G, stop - start, N)."""
    device = case.device
    j = torch.arange(-(-case.N // 4), device=device)
    i = torch.arange(start, stop, device=device)[:, None]
    b, h = (x.to(device)[..., None, None] for x in (heads // case.H, heads % case.H))
    words = torch.stack(torch.broadcast_tensors(*reference.philox((j, i, h, b), SEED)), dim=-1)
    return words.flatten(-2)[..., : case.N] >= int(case.rule.dropout_p * 2**32)


def relative_errors(x: Tensor, expected: Tensor) -> tuple[float, float]:
    """(whole tensor, worst row)."""
    error, norm = (x - expected).norm(dim=-1), expected.norm(dim=-1)
    mean_norm = norm.square().mean().sqrt()
    return (
        float(error.norm() / norm.norm()),
        float((error / torch.maximum(norm, mean_norm)).max()),
    )


def judged_groups(case: Case) -> list[int]:
    """Evenly spread indices of key heads over the batch, the last one included."""
    total = case.B * case.Hk
    per_group = 14.0 * case.M * case.N * case.D * case.H / case.Hk
    count = int(min(total, max(1, ORACLE_FLOPS[case.device] // per_group)))
    return [(i + 1) * total // count - 1 for i in range(count)]
