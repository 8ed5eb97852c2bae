"""Calls of a few features, for tests of one property; pairs of everything are in tests/features.

A `Feature` changes the sizes, the arguments or the memory layout of a call. Features of one
group exclude each other (a call has one mask); any two of different groups make a pair. `build`
turns a shape and some features into a `Problem`: inputs, incoming gradients, and how to run them
through any function with the signature of `fastattn.attention`.
"""

import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional as F

import fastattn

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Dims:
    B: int
    H: int
    Hk: int
    M: int
    N: int
    D: int
    Dv: int

    def __str__(self):
        return f"B{self.B}H{self.H}Hk{self.Hk}M{self.M}N{self.N}D{self.D}Dv{self.Dv}"


def square(batch, heads, n, dim):
    return Dims(batch, heads, heads, n, n, dim, dim)


# Smaller than every tile; odd in every size; several query and key blocks, with a head dimension
# that suits 16-bit dot-product instructions.
SHAPES = (square(1, 2, 5, 3), square(2, 2, 63, 17), square(1, 1, 197, 32))


class Draft:
    """Random tensors for one case, the same on every run."""

    def __init__(self, dims, dtype, seed):
        self.dims, self.dtype = dims, dtype
        self.exact = torch.float64 if dtype == torch.float64 else torch.float32  # dtype of the LSE
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape, dtype=None):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(
            dtype or self.dtype
        )

    def rand(self, *shape):
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def bool_mask(self, *shape, full_row=True):
        mask = self.rand(*shape) < 0.7
        if full_row and shape[-2] > 1:
            mask[..., shape[-2] // 2, :] = False  # a row with nothing to attend to
        return mask

    def float_mask(self, *shape, dtype=None):
        hidden = ~self.bool_mask(*shape)
        return self.randn(*shape, dtype=dtype).masked_fill(hidden, -torch.inf)

    def lengths(self, dtype=torch.int64):
        """The full length, 0, half, one key, and so on in turn."""
        n = self.dims.N
        some = [n, 0, n // 2, min(1, n)]
        return torch.tensor([some[b % 4] for b in range(self.dims.B)], dtype=dtype)


@dataclass(frozen=True)
class Feature:
    name: str
    group: str
    dims: Callable = lambda dims: dims
    args: Callable = lambda draft: {}
    needs_grad: str | None = None  # an optional tensor that requires a gradient
    layout: str | None = None  # the memory layout of q, k, v (or of dout, in that group)


def constant(**kwargs):
    return lambda draft: kwargs


def somewhere(dims):
    """The call is a part of one that is larger on all sides. Its first key is the third of a group
    of four keys that share a random draw."""
    return fastattn.Place(row=3, key=6, head=1, item=2, rows=3 + dims.M + 4, keys=6 + dims.N + 7)


def bhmn(dims):
    return dims.B, dims.H, dims.M, dims.N


FEATURES = (
    Feature("causal", "causal", args=constant(causal=True)),
    Feature("bottom_right", "causal", args=constant(causal="bottom_right")),
    Feature("aligned", "causal", args=constant(place=fastattn.Place(bottom_right=True))),
    Feature("window", "window", args=constant(window=(5, 3))),
    Feature("left_window", "window", args=constant(window=(4, None))),
    Feature("right_window", "window", args=constant(window=(None, 2))),
    Feature("own_key", "window", args=constant(window=(0, 0))),
    Feature(
        "lengths",
        "lengths",
        dims=lambda dims: replace(dims, B=max(dims.B, 4) if dims.N < 100 else 2),
        args=lambda draft: dict(key_lengths=draft.lengths()),
    ),
    Feature("alibi", "alibi", args=lambda x: dict(alibi_slopes=x.rand(x.dims.H).to(x.exact))),
    Feature(
        "alibi_batch",
        "alibi",
        args=lambda x: dict(alibi_slopes=x.rand(x.dims.B, x.dims.H).to(x.exact)),
    ),
    Feature("softcap", "softcap", args=constant(softcap=4.0)),
    Feature("bool_mask", "mask", args=lambda x: dict(mask=x.bool_mask(*bhmn(x.dims)))),
    Feature(
        "padding_mask",
        "mask",
        args=lambda x: dict(mask=x.bool_mask(x.dims.B, 1, 1, x.dims.N)),
    ),
    Feature("float_mask", "mask", args=lambda x: dict(mask=x.float_mask(*bhmn(x.dims)))),
    Feature(
        "bias_grad",
        "mask",
        args=lambda x: dict(mask=x.float_mask(*bhmn(x.dims))),
        needs_grad="mask",
    ),
    Feature(
        "head_bias_grad",
        "mask",
        args=lambda x: dict(mask=x.randn(x.dims.H, x.dims.M, x.dims.N, dtype=x.exact)),
        needs_grad="mask",
    ),
    Feature(
        "key_bias_grad",
        "mask",
        args=lambda x: dict(mask=x.randn(x.dims.B, 1, 1, x.dims.N)),
        needs_grad="mask",
    ),
    Feature(
        "sinks",
        "sinks",
        args=lambda x: dict(sinks=x.randn(x.dims.H, dtype=x.exact)),
        needs_grad="sinks",
    ),
    Feature("dropout", "dropout", args=constant(dropout_p=0.3, seed=2**63 - 25)),
    Feature("place", "place", args=lambda x: dict(place=somewhere(x.dims))),
    Feature("gqa", "heads", dims=lambda dims: replace(dims, H=2 * dims.Hk)),
    Feature("mqa", "heads", dims=lambda dims: replace(dims, H=3, Hk=1)),
    Feature("wide_values", "values", dims=lambda dims: replace(dims, Dv=dims.D + 13)),
    Feature("narrow_values", "values", dims=lambda dims: replace(dims, Dv=max(1, dims.D // 2))),
    Feature("one_query", "queries", dims=lambda dims: replace(dims, M=1)),
    Feature("few_queries", "queries", dims=lambda dims: replace(dims, M=dims.N // 3 + 1)),
    Feature("many_queries", "queries", dims=lambda dims: replace(dims, M=dims.N * 3 // 2 + 1)),
    Feature("lse_loss", "lse", args=constant(return_lse=True)),
    Feature("no_scale", "scale", args=constant(scale=0.0)),
    Feature("negative_scale", "scale", args=constant(scale=-0.3)),
    Feature("token_major", "layout", layout="permuted"),
    Feature("offset_slices", "layout", layout="offset"),
    Feature("column_major", "layout", layout="columns"),
    Feature("expanded", "layout", layout="expanded"),
    Feature("expanded_dout", "dout", layout="expanded"),
    Feature("column_major_dout", "dout", layout="columns"),
)
PLAIN = ()
SINGLES = tuple((feature,) for feature in FEATURES)
PAIRS = tuple(p for p in itertools.combinations(FEATURES, 2) if p[0].group != p[1].group)
FEATURE = {feature.name: feature for feature in FEATURES}


def name_of(features):
    """The features' names joined by +; a string is returned as it is."""
    if isinstance(features, str):
        return features
    return "+".join(f.name for f in features) or "plain"


def laid(x, layout, heads=-3):
    """The values of x in other memory. "expanded" makes all heads equal. "shifted" and "apart" are
    contiguous, but for one element before all, or after each item of the third dimension from the
    end."""
    if layout == "permuted":  # the output layout of projections
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "offset":  # a slice of each row of a fused projection
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan).to(x.dtype)
        wide[..., 3:-2] = x
        return wide[..., 3:-2]
    if layout == "columns":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded":
        return x.narrow(heads, 0, 1).clone().expand_as(x)
    if layout == "shifted":
        return F.pad(x.flatten(), (1, 0))[1:].view(x.shape)
    if layout == "apart":
        return F.pad(x.flatten(-2), (0, 1))[..., :-1].unflatten(-1, x.shape[-2:])
    if layout == "negated":
        return torch._neg_view(-x)
    return x.contiguous()


@dataclass
class Problem:
    """One call: inputs, keyword arguments, and incoming gradients."""

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kwargs: dict
    dout: torch.Tensor
    dlse: torch.Tensor | None = None
    needs_grad: tuple = ("q", "k", "v")
    sizes: dict = field(default_factory=dict)  # of k and v: what their rounding is relative to

    def tensors(self):
        return dict(q=self.q, k=self.k, v=self.v, **self.kwargs)

    def to(self, dtype):
        """The same values in another dtype and the same layouts; float32 masks are cast too."""

        def cast(x):
            floating = isinstance(x, torch.Tensor) and x.is_floating_point()
            return x.to(dtype) if floating else x

        return replace(
            self,
            q=cast(self.q),
            k=cast(self.k),
            v=cast(self.v),
            kwargs={name: cast(x) for name, x in self.kwargs.items()},
            dout=cast(self.dout),
            dlse=cast(self.dlse),
        )

    def run(self, attention, backward=True, **more):
        """{"out", "lse", "dq", "dk", "dv", "dmask", "dsinks"}, as far as the problem has them."""
        given = self.tensors()
        if backward:
            for name in self.needs_grad:
                given[name] = given[name].detach().requires_grad_()
        leaves = [given[name] for name in self.needs_grad]
        q, k, v = (given.pop(name) for name in "qkv")
        result = attention(q, k, v, **given, **more)
        outputs = result if isinstance(result, tuple) else (result,)
        found = dict(zip(("out", "lse"), outputs, strict=False))
        if backward:
            incoming = (self.dout, self.dlse)[: len(outputs)]
            grads = torch.autograd.grad(outputs, leaves, incoming)
            found |= {"d" + name: grad for name, grad in zip(self.needs_grad, grads, strict=True)}
        return {name: x.detach() for name, x in found.items()}


def build(dims, features, dtype, seed=None):
    for feature in features:
        dims = feature.dims(dims)
    name = f"{dims}:{name_of(features)}"
    draft = Draft(dims, dtype, zlib.crc32(name.encode()) if seed is None else seed)
    kwargs, needs_grad, layout, dout_layout = {}, ["q", "k", "v"], None, None
    for feature in features:
        kwargs |= feature.args(draft)
        needs_grad += [feature.needs_grad] if feature.needs_grad else []
        if feature.group == "layout":
            layout = feature.layout
        if feature.group == "dout":
            dout_layout = feature.layout
    q = draft.randn(dims.B, dims.H, dims.M, dims.D)
    k = draft.randn(dims.B, dims.Hk, dims.N, dims.D)
    v = draft.randn(dims.B, dims.Hk, dims.N, dims.Dv)
    if "key_lengths" in kwargs:
        first = kwargs["place"].key if "place" in kwargs else 0
        k, v = (spoil_tail(x, (kwargs["key_lengths"] - first).clamp(min=0)) for x in (k, v))
    q, k, v = (laid(x, layout) for x in (q, k, v))
    dout = laid(draft.randn(dims.B, dims.H, dims.M, dims.Dv), dout_layout)
    dlse = draft.randn(dims.B, dims.H, dims.M, dtype=draft.exact)
    return Problem(
        name, q, k, v, kwargs, dout, dlse if kwargs.get("return_lse") else None, tuple(needs_grad)
    )


def spoil_tail(x, key_lengths):
    """Write NaN to every key at or past its item's length, in place."""
    for b, length in enumerate(key_lengths.tolist()):
        x[b, ..., length:, :] = torch.nan
    return x


def inside_nan(x):
    """The values of x, with NaN before and after the keys of each head."""
    wide = torch.full((*x.shape[:2], x.shape[2] + 80, x.shape[3]), torch.nan, dtype=x.dtype)
    wide[:, :, 40:-40] = x
    return wide[:, :, 40:-40]


def with_nan_behind(problem, lengths):
    """The problem with NaN for keys and values at and past these lengths, one for each item."""
    k, v = problem.k.clone(), problem.v.clone()
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:] = v[b, :, length:] = torch.nan
    return replace(problem, k=k, v=v)


def expanded(problem):
    """The problem with keys of one head, and values and queries of one item, by strides of 0."""
    return replace(
        problem,
        k=problem.k[:, :1].expand_as(problem.k),
        v=problem.v[:1].expand_as(problem.v),
        q=problem.q[:1].expand_as(problem.q),
    )


def negative_logits(problem):
    """The same problem with every logit near -32, so that one leaked zero logit decides the row.

    Random logits average out: one leaked key among a thousand changes a row no more than rounding
    does. Here it takes the whole row.
    """
    dim = problem.q.shape[-1]
    scale = problem.kwargs.get("scale") or dim**-0.5
    size = (32 / (dim * scale)) ** 0.5
    signs = torch.tensor([1.0 if d % 3 else -1.0 for d in range(dim)], dtype=torch.float64)

    def near(x, sign):
        wobble = 1 + 0.05 * x.double()
        return x.copy_(sign * size * signs * wobble)

    q = near(problem.q.clone(), 1)
    k = near(problem.k.clone(), -1)
    kwargs = dict(problem.kwargs)
    if "sinks" in kwargs:
        kwargs["sinks"] = kwargs["sinks"] - 32
    return replace(problem, name=problem.name + ":negative_logits", q=q, k=k, kwargs=kwargs)
