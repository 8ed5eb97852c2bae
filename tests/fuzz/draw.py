"""Draw random calls. One `random.Random` determines everything, so a seed repeats a call."""

import itertools
import math
from dataclasses import dataclass, field, replace

import torch

import fastattn
from fastattn.backends import base
from tests.support.argument_shapes import shapes_of
from tests.support.backends import REASONS
from tests.support.cases import Dims, Draft, Problem, spoil_tail
from tests.support.error_budget import Verdict

EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129)


def size(rng, most=150):
    """A length: often small, often at the edge of a block."""
    kind = rng.random()
    if kind < 0.4:
        return rng.randint(0, 9)
    if kind < 0.7:
        return rng.choice([n for n in EDGES if n <= most] or [most])
    return rng.randint(1, most)


# The largest head dim that every fused backend supports.
WIDEST = min(
    base.get(name).support.max_head_dim or 512
    for name, why in REASONS.items()
    if not why and name != "reference"
)


def head_dim(rng, widest=WIDEST):
    if rng.random() < 0.6:
        return rng.randint(1, 40)
    some = (48, 64, 72, 80, 96, 127, 128, 129, 160, 192, 256, 512, 576, 1000)
    return rng.choice([d for d in some if d <= widest])


def dims(rng, most=150, widest=WIDEST):
    """The sizes of a dense call. One in eight has few rows and many keys."""
    key_heads, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3, 4))
    D = head_dim(rng, widest)
    Dv = D if rng.random() < 0.5 else head_dim(rng, widest)
    M, N = size(rng, most), size(rng, most)
    if rng.random() < 0.125:
        M, N = rng.randint(1, 4), rng.randint(1, 10 * most)
    return Dims(rng.choice((0, 1, 1, 2, 3)), key_heads * group, key_heads, M, N, D, Dv)


def strided(rng, x):
    """The values of x in memory of other strides: permuted, with gaps, offset, or expanded.

    The gaps hold NaN, or True for a bool tensor."""
    order = rng.sample(range(x.ndim), x.ndim)
    steps = [rng.choice((1, 1, 1, 2, 3)) for _ in range(x.ndim)]
    offset = rng.randint(0, 7)
    strides, reach = [0] * x.ndim, 1
    for dim in reversed(order):
        strides[dim] = reach * steps[dim]
        reach *= max(x.shape[dim], 1) * steps[dim]
    expanded = rng.choice((None, None, *range(x.ndim - 1))) if x.ndim > 1 else None
    stored = x
    if expanded is not None and x.shape[expanded] > 1:
        stored = x.narrow(expanded, 0, 1)
        x = stored.expand_as(x)
        strides[expanded] = 0
    between = torch.nan if x.is_floating_point() else True
    memory = torch.full((reach + offset,), between, dtype=x.dtype)
    memory.as_strided(stored.shape, strides, offset).copy_(stored)
    return memory.as_strided(x.shape, strides, offset)


MASKS = ("bool", "float", "float32", "-inf", "finfo.min")


def shape_of(rng, name, full):
    """A shape that an argument may have in a call of sizes (B,H,M,N)."""
    return rng.choice(shapes_of(name, dict(zip("BHMN", full))))


def summable(dtype):
    """Kinds of masks for calls in parts.

    The gradient of a part is rounded to the mask's dtype, which must not be narrower than q's. With
    finfo.min an LSE is too coarse to merge blocks."""
    return [x for x in MASKS if x != "finfo.min" and (x, dtype) != ("float32", torch.float64)]


def mask(rng, draft, full, kinds=MASKS):
    """A mask that broadcasts to `full` (B,H,M,N)."""
    values = draft.rand(*shape_of(rng, "mask", full))
    kind = rng.choice(kinds)
    hidden = values < rng.choice((0.0, 0.3, 0.9, 1.0))
    if kind == "bool":
        found = ~hidden
    else:
        dtype = torch.float32 if kind == "float32" else draft.dtype
        found = (values * 6 - 3).to(dtype)
        if kind == "-inf":
            found = found.masked_fill(hidden, -torch.inf)
        if kind == "finfo.min" and found.ndim:
            found[..., :1] = torch.finfo(dtype).min
    return strided(rng, found) if rng.random() < 0.5 else found


def scalars(rng, longest):
    """The scalar arguments, without `place`, `row_invariant` and `backend`."""

    def edge():
        return None if rng.random() < 0.3 else rng.randint(0, 2 * longest + 1)

    found = dict(
        causal=rng.choice((False, True, "top_left", "bottom_right")),
        window=None if rng.random() < 0.5 else (edge(), edge()),
        softcap=rng.choice((None, None, 0.5, 5.0, 50.0)),
        scale=rng.choice((None, None, 0.0, 0.05, -0.2, 0.5)),
        return_lse=rng.random() < 0.5,
    )
    if rng.random() < 0.3:
        found |= dict(dropout_p=rng.choice((0.2, 0.7, 1.0)), seed=rng.randrange(-(2**63), 2**63))
    return found


def some(rng, names):
    """A non-empty subset of `names`; in half of the draws all of them."""
    chosen = [name for name in names if rng.random() < 0.6]
    return tuple(chosen if chosen and rng.random() < 0.5 else names)


def wanted(rng, more, return_lse):
    """The names of the tensors that require grad. The LSE does not depend on v."""
    found = some(rng, ("q", "k", "v", *more))
    return ("q", "v") if found == ("v",) and return_lse else found


def optional_tensors(rng, draft, full, longest, masks=MASKS):
    """Some of mask, alibi_slopes, sinks and key_lengths, and the names of those that require grad.

    full: (B,H,M,N). longest: the largest key length of each item."""
    found, needs_grad = {}, []
    if rng.random() < 0.5:
        found["mask"] = mask(rng, draft, full, masks)
        if found["mask"].is_floating_point() and rng.random() < 0.7:
            needs_grad.append("mask")
    if rng.random() < 0.25:
        found["alibi_slopes"] = draft.rand(*shape_of(rng, "alibi_slopes", full)).to(draft.exact)
    if rng.random() < 0.25:
        found["sinks"] = draft.randn(*shape_of(rng, "sinks", full), dtype=draft.exact)
        needs_grad.append("sinks")
    if rng.random() < 0.3:
        index = rng.choice((torch.int32, torch.int64))
        found["key_lengths"] = torch.tensor([rng.randint(0, n) for n in longest]).to(index)
    return found, needs_grad


def problem(rng, dtype, most=150, masks=MASKS, widest=WIDEST):
    """A dense call. most: rows, and keys unless rows are few. widest: the largest head dim."""
    d = dims(rng, most, widest)
    draft = Draft(d, dtype, rng.randrange(2**20))
    kwargs = scalars(rng, max(d.M, d.N))
    full = d.B, d.H, d.M, d.N
    given, needs_grad = optional_tensors(rng, draft, full, [d.N] * d.B, masks)
    kwargs |= given
    q = draft.randn(d.B, d.H, d.M, d.D)
    k, v = draft.randn(d.B, d.Hk, d.N, d.D), draft.randn(d.B, d.Hk, d.N, d.Dv)
    q, k, v = (strided(rng, x) for x in (q, k, v))
    if "key_lengths" in kwargs and all(x.stride(0) for x in (k, v) if x.numel()):
        k, v = (spoil_tail(x.contiguous(), kwargs["key_lengths"]) for x in (k, v))
    dout = strided(rng, draft.randn(d.B, d.H, d.M, d.Dv))
    dlse = draft.randn(d.B, d.H, d.M, dtype=draft.exact) if kwargs["return_lse"] else None
    return Problem(
        str(d), q, k, v, kwargs, dout, dlse, wanted(rng, needs_grad, kwargs["return_lse"])
    )


# ----------------------------------------------------------------------------------- packed batches


@dataclass
class Packed:
    """A packed call, and each of its sequences as a dense call.

    given: q (T,H,D), k, v, cu_q, cu_k and the keyword arguments of `attention_packed`.
    """

    name: str
    given: dict
    rows: list
    keys: list
    needs_grad: tuple
    dout: torch.Tensor
    dlse: torch.Tensor | None
    alone: list = field(default_factory=list)

    @property
    def dtype(self):
        return self.given["q"].dtype

    def run(self, function, backward=True, **more):
        """{"out", "lse", "dq", ...}, by a function like `attention_packed`."""
        given = dict(self.given)
        if backward:
            for name in self.needs_grad:
                given[name] = given[name].detach().requires_grad_()
        leaves = [given[name] for name in self.needs_grad]
        result = function(**given, **more)
        outputs = result if isinstance(result, tuple) else (result,)
        found = dict(zip(("out", "lse"), outputs, strict=False))
        if backward:
            incoming = (self.dout, self.dlse)[: len(outputs)]
            grads = torch.autograd.grad(outputs, leaves, incoming)
            found |= {"d" + name: grad for name, grad in zip(self.needs_grad, grads, strict=True)}
        return {name: x.detach() for name, x in found.items()}

    def part(self, name, x, b):
        """A view of the part of a tensor that belongs to sequence b, in the layout of a dense call.

        name: of an argument, a result or a gradient, which says how x is laid out."""
        if name in ("out", "lse", "dq", "q"):
            return x[self.rows[b]].transpose(0, 1)[None]
        if name in ("dk", "dv", "k", "v"):
            return x[self.keys[b]].transpose(0, 1)[None]
        if name in ("mask", "dmask"):
            return of_sequence(x, b, rows_in(self.rows[b]), rows_in(self.keys[b]))
        return x


def of_sequence(x, b, M, N):
    """The part of a mask that broadcasts to (B,H,M,N) which sequence b sees: a view."""
    if x.ndim == 4 and x.shape[0] > 1:
        x = x[b : b + 1]
    if x.ndim > 1 and x.shape[-2] > 1:
        x = x[..., :M, :]
    if x.ndim > 0 and x.shape[-1] > 1:
        x = x[..., :N]
    return x


def rows_in(part):
    return part.stop - part.start


def packed(rng, dtype, most=100, masks=MASKS, widths=1):
    """A packed call of up to five sequences, some of them empty. widths: D and Dv are multiples."""
    d = dims(rng, most)
    d = replace(d, D=-(-d.D // widths) * widths, Dv=-(-d.Dv // widths) * widths)
    B = rng.choice((0, 1, 2, 2, 3, 5))
    counts = [(size(rng, most), size(rng, most)) for _ in range(B)]
    if rng.random() < 0.2:  # decoding
        counts = [(rng.randint(0, 3), rng.randint(0, 4 * most)) for _ in range(B)]
    # max_q and max_k may be larger than any sequence, and the mask with them.
    spare = rng.choice((0, 0, 3))
    max_q, max_k = (max(x, default=0) + spare for x in zip(*counts, (0, 0)))
    draft = Draft(d, dtype, rng.randrange(2**20))
    given, needs_grad = optional_tensors(
        rng, draft, (B, d.H, max_q, max_k), [n for _, n in counts], masks
    )
    given |= scalars(rng, max(max_q, max_k))
    if spare or rng.random() < 0.5:
        given |= dict(max_q=max_q, max_k=max_k)
    index = rng.choice((torch.int32, torch.int64))
    edges = [
        list(itertools.accumulate(x, initial=0))
        for x in ([m for m, _ in counts], [n for _, n in counts])
    ]
    given["cu_q"], given["cu_k"] = (torch.tensor(x, dtype=index) for x in edges)
    T, S = (x[-1] for x in edges)
    for name, shape in (("q", (T, d.H, d.D)), ("k", (S, d.Hk, d.D)), ("v", (S, d.Hk, d.Dv))):
        given[name] = strided(rng, draft.randn(*shape))
    rows, keys = ([slice(*x) for x in itertools.pairwise(one)] for one in edges)
    found = Packed(
        f"sequences of {counts}, {d}",
        given,
        rows,
        keys,
        wanted(rng, needs_grad, given["return_lse"]),
        strided(rng, draft.randn(T, d.H, d.Dv)),
        draft.randn(T, d.H, dtype=draft.exact) if given["return_lse"] else None,
    )
    found.alone = [alone(found, b) for b in range(B)]
    return found


def alone(batch, b):
    """Sequence b of a packed call as a `Problem`."""
    given = dict(batch.given)
    for name in ("cu_q", "cu_k", "max_q", "max_k"):
        given.pop(name, None)
    q, k, v = (batch.part(name, given.pop(name), b) for name in "qkv")
    given["place"] = fastattn.Place(item=b)
    if "mask" in given:
        given["mask"] = batch.part("mask", given["mask"], b)
    if "alibi_slopes" in given and given["alibi_slopes"].ndim == 2:
        given["alibi_slopes"] = given["alibi_slopes"][b : b + 1]
    if "key_lengths" in given:
        given["key_lengths"] = given["key_lengths"][b : b + 1]
    dout = batch.part("out", batch.dout, b)
    dlse = None if batch.dlse is None else batch.part("lse", batch.dlse, b)
    return Problem(f"sequence {b} of {batch.name}", q, k, v, given, dout, dlse, batch.needs_grad)


class PackedVerdict(Verdict):
    """The oracle's result for a packed call: one dense call per sequence. Gradients of arguments
    that the sequences share are summed."""

    def __init__(self, batch, backward=True):
        self.backward = backward
        given = batch.given
        out = given["q"].new_zeros(*given["q"].shape[:2], given["v"].shape[2])
        shapes = {"out": out, "lse": out[..., 0]}
        if not given["return_lse"]:
            del shapes["lse"]
        if backward:
            shapes |= {"d" + name: given[name] for name in batch.needs_grad}
        self.dtypes = {name: x.dtype for name, x in shapes.items()}
        self.exact, self.bounds = (
            {name: torch.zeros(x.shape, dtype=torch.float64) for name, x in shapes.items()}
            for _ in range(2)
        )
        for b, problem in enumerate(batch.alone):
            verdict = Verdict(problem, backward)
            for name in shapes:
                for whole, own in ((self.exact, verdict.exact), (self.bounds, verdict.bounds)):
                    batch.part(name, whole[name], b).add_(own[name])
        self.problem = Problem(batch.name, given["q"], given["k"], given["v"], given, out)


def finite(x):
    """x with 0 in place of infinity, for use in a loss."""
    return torch.where(x.abs() == math.inf, 0.0, x)
