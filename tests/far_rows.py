"""Rows whose logits a mask takes far from zero: left padding by finfo.min, or by -1e9.

Where every key of a row has such a mask, the accumulation dtype absorbs q.k into it: beside -1e9 a
float32 counts in steps of 64. The answer is then the softmax of the logits as that dtype holds
them, and float64, which holds q.k too, would give another. So the oracle takes these rows' logits
rounded (`FarRows.hold`); the gradients flow as if nothing had been rounded, as they do in a kernel.

Rounding a logit is then no error. It would be one where the logit lies in the middle between two
numbers of the dtype: a kernel's own roundings of q.k may take it to either. Rows that have such a
logit keep the wide budget of rounding the mask (`ties`); the problems made here have none.
"""

from dataclasses import dataclass, replace

import torch
from cases import DTYPES, FEATURE, Dims, Draft, build

from fastattn import reference

FAR = 2.0**14  # nearer logits are held by float32 to 1e-3 or better, which a budget can count


def accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class FarRows:
    """Of one problem: each (B,H,M,1), but `shift` and `below` (B,H,M,N), all float64 or bool."""

    rows: torch.Tensor  # which they are
    ties: torch.Tensor  # and which have a logit that may be rounded either way
    shift: torch.Tensor  # what rounding adds to each of their logits
    below: torch.Tensor  # how far each of their logits is below the row's largest

    def hold(self, attention):
        """`attention` with these rows' logits rounded."""

        def held(q, k, v, *, mask, **kwargs):
            return attention(q, k, v, mask=mask + self.shift.to(mask), **kwargs)

        return held

    def bring_near(self, attention):
        """`attention` without the mask in these rows: it has gradients, and the value 0."""

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
    logits, beside = scores(wide, wide.kwargs["mask"]), scores(wide, None)
    top = logits.amax(-1, keepdim=True)
    rows = (top.abs() >= FAR) & top.isfinite()
    if not rows.any():
        return None
    held = logits.to(dtype).double()
    step = torch.finfo(dtype).eps * torch.exp2(top.abs().log2().floor())
    doubt = 32 * torch.finfo(dtype).eps * (1 + beside.abs()) / step
    middle = ((beside / step).remainder(1) - 0.5).abs() <= doubt
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

LARGE = {"finfo.min": None, "-1e9": -1e9}  # None: the mask's own least number


def whole(shape, draft):
    """One row in three."""
    return torch.arange(shape[-2])[:, None].expand(shape) % 3 == 1


def left_padding(shape, draft):
    """Of each item another part, as tokenizers pad: none, half, all, and round again."""
    lengths = torch.tensor([0, shape[-1] // 2, shape[-1]])[torch.arange(shape[0]) % 3]
    return (torch.arange(shape[-1]) < lengths.view(-1, 1, 1, 1)).expand(shape)


# Title: sizes, the shape of the mask, which of it is large, and the features of the call. Sizes
# end inside a tile and, where N is large, past several.
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
    """The mask's ordinary numbers, q and k are small whole numbers and quarters: their products
    and sums are exact, so that no rounding of a logit depends on an order."""
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
    if "sinks" in problem.kwargs:  # in one head it is of the same size, and takes its share
        problem.kwargs["sinks"][0] = problem.kwargs["mask"].min().double()
    return replace(problem, wants=(*problem.wants, "mask"))
