"""Rows with logits that a mask moves far from zero: left padding by finfo.min, or by -1e9.

If every key of a row has such a mask, adding it rounds q.k away in the accumulation dtype: near
-1e9 a float32 has steps of 64. The expected result is the softmax of the logits as rounded to that
dtype; float64 keeps q.k and would give another. So the oracle takes these rows' logits rounded
(`FarRows.hold`); the gradients flow as if nothing had been rounded, as they do in a kernel.

Rounding a logit is then no error, unless the logit is near the midpoint of two numbers of the
dtype: a kernel's own roundings of q.k may move it to either. Rows that have such a logit keep the
wide budget of rounding the mask (`ties`); the problems made here have none.
"""

from dataclasses import dataclass, replace

import torch

from fastattn import reference
from tests.support.cases import DTYPES, FEATURE, Dims, Draft, build

FAR = 2.0**14  # float32 holds smaller logits to 1e-3 or better, which a budget can cover


def accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class FarRows:
    """Of one problem: each (B,H,M,1), except `shift` and `below` (B,H,M,N); all float64 or bool."""

    rows: torch.Tensor  # which rows are far
    ties: torch.Tensor  # far rows with a logit that may be rounded either way
    shift: torch.Tensor  # what rounding adds to each of their logits
    below: torch.Tensor  # how far each of their logits is below the row's largest

    def hold(self, attention):
        """`attention` with the logits of far rows rounded."""

        def held(q, k, v, *, mask, **kwargs):
            return attention(q, k, v, mask=mask + self.shift.to(mask), **kwargs)

        return held

    def bring_near(self, attention):
        """`attention` with the mask's value, but not its gradient, subtracted in far rows."""

        def near(q, k, v, *, mask, **kwargs):
            size = torch.where(self.rows & mask.isfinite(), mask.detach(), 0)
            return attention(q, k, v, mask=mask - size, **kwargs)

        return near


def far_rows(problem):
    """The FarRows of a problem, or None where it has none."""
    mask = problem.kwargs.get("mask")
    if mask is None or mask.dtype == torch.bool or problem.q.numel() * problem.k.numel() == 0:
        return None
    wide, dtype = problem.to(torch.float64), accumulator(problem.q.dtype)
    logits, without_mask = scores(wide, wide.kwargs["mask"]), scores(wide, None)
    top = logits.amax(-1, keepdim=True)
    rows = (top.abs() >= FAR) & top.isfinite()
    if not rows.any():
        return None
    held = logits.to(dtype).double()
    step = torch.finfo(dtype).eps * torch.exp2(top.abs().log2().floor())
    doubt = 32 * torch.finfo(dtype).eps * (1 + without_mask.abs()) / step
    middle = ((without_mask / step).remainder(1) - 0.5).abs() <= doubt
    below = held.amax(-1, keepdim=True) - held
    return FarRows(
        rows,
        (rows & middle & (below < 40)).any(-1, keepdim=True),
        torch.where(rows & logits.isfinite(), held - logits, 0),
        torch.where(rows, below, 0),
    )


def scores(problem, mask):
    names = ("causal", "window", "key_lengths", "alibi_slopes", "softcap", "scale", "place")
    given = {name: problem.kwargs.get(name) for name in names}
    given["causal"] = given["causal"] or False
    with torch.no_grad():
        return reference.scores(problem.q, problem.k, mask, **given)


# ----------------------------------------------------------------------------------- the problems

LARGE = {"finfo.min": None, "-1e9": -1e9}  # None: the least number of the mask's dtype


def whole(shape, draft):
    """One row in three."""
    return torch.arange(shape[-2])[:, None].expand(shape) % 3 == 1


def left_padding(shape, draft):
    """The first keys of each item: none, half, all, and so on in turn, as tokenizers pad."""
    lengths = torch.tensor([0, shape[-1] // 2, shape[-1]])[torch.arange(shape[0]) % 3]
    return (torch.arange(shape[-1]) < lengths.view(-1, 1, 1, 1)).expand(shape)


# Title: sizes, the shape of the mask, which part of it is large, and the features of the call.
# Sizes end inside a tile; a large N spans several tiles.
ROWS = {
    "some rows": (Dims(1, 2, 2, 37, 37, 16, 16), "BHMN", whole, ""),
    "long rows": (Dims(1, 1, 1, 9, 300, 16, 16), "MN", whole, "lse_loss"),
    "left padding": (Dims(3, 2, 2, 70, 70, 16, 16), "B11N", left_padding, "causal"),
    "one query": (Dims(3, 4, 2, 1, 203, 16, 16), "B11N", left_padding, "lse_loss"),
    "grouped heads": (Dims(3, 4, 2, 21, 37, 16, 24), "B11N", left_padding, "bottom_right lse_loss"),
    "sinks": (Dims(1, 2, 2, 21, 37, 16, 16), "MN", whole, "sinks"),
    "dropout": (Dims(3, 2, 1, 21, 70, 16, 16), "B11N", left_padding, "dropout"),
}


def far_problem(title, value, dtype):
    """A problem with a mask that is `value` in part. The other mask values, q and k are small whole
    numbers and quarters: their products and sums are exact, so that no rounding of a logit depends
    on the order of summation."""
    dims, letters, where, features = ROWS[title]
    features = [FEATURE[name] for name in features.split()]
    problem = build(dims, features, DTYPES[dtype])
    problem.name += f":{value} in {title}"
    draft = Draft(dims, DTYPES[dtype], seed=7)
    problem.q, problem.k = (
        draft.randn(*x.shape).round().clamp(-2, 2) for x in (problem.q, problem.k)
    )
    sizes = dict(B=dims.B, H=dims.H, M=dims.M, N=dims.N)
    shape = [sizes.get(letter, 1) for letter in letters]
    least = LARGE[value]
    wide = torch.float32 if least and dtype == "float16" else DTYPES[dtype]  # float16 ends at 65504
    least = least or torch.finfo(wide).min
    mask = (draft.randn(*shape).double() * 4).round() / 4
    problem.kwargs["mask"] = mask.masked_fill(where(shape, draft), least).to(wide)
    if "sinks" in problem.kwargs:  # one head's sink is as large, so it gets a share of the row
        problem.kwargs["sinks"][0] = problem.kwargs["mask"].min().double()
    return replace(problem, needs_grad=(*problem.needs_grad, "mask"))
