"""Any shape, layout, mask and mixture of features is either right or refused.

FASTATTN_EXAMPLES=10000 runs as many examples of each test, drawn anew.
"""

import math

import pytest
import torch

pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from cases import DTYPES, Dims, Draft, Problem, spoil_tail
from hypothesis import given, note, settings
from hypothesis import strategies as st
from judge import Verdict
from runners import (
    DECLARED,
    FUSED,
    declares,
    every_backend,
    every_dtype,
    passed,
    small,
    variant,
    variants,
)
from test_place import AXES, in_parts
from torch.func import jvp, vjp

import fastattn
from fastattn.spec import Feature

pytestmark = pytest.mark.usefixtures("one_thread")
maybe = st.none
edges = st.sampled_from(small([63, 64, 65, 96, 128], [31, 32, 33, 64]))
sizes = st.one_of(st.integers(0, 9), st.integers(1, small(150, 40)), edges)
head_dims = st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 96, 128, 129]))
batches, heads = st.integers(0, small(3, 2)), st.integers(1, small(3, 2))


@st.composite
def dims(draw):
    kv_heads, group = draw(heads), draw(heads)
    return Dims(
        B=draw(batches),
        H=kv_heads * group,
        Hk=kv_heads,
        M=draw(sizes),
        N=draw(sizes),
        D=draw(head_dims),
        Dv=draw(head_dims),
    )


@st.composite
def layouts(draw, x):
    """The values of x behind other strides: permuted, stepped, offset, or expanded."""
    order = draw(st.permutations(range(x.ndim)))
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=x.ndim, max_size=x.ndim))
    offset = draw(st.integers(0, 7))
    strides, reach = [0] * x.ndim, 1
    for dim in reversed(order):
        strides[dim] = reach * steps[dim]
        reach *= max(x.shape[dim], 1) * steps[dim]
    expand = draw(st.sampled_from([None, None, *range(x.ndim - 1)]))
    if expand is not None and x.shape[expand] > 1:  # one slice's memory serves all
        x = x.narrow(expand, 0, 1).expand_as(x)
        strides[expand] = 0
    # Memory in between is NaN when x is floating: reading a stride too far shows.
    filler = torch.nan if x.is_floating_point() else True
    memory = torch.full((reach + offset,), filler, dtype=x.dtype)
    view = memory.as_strided(x.shape, strides, offset)
    if x.numel():
        target, source = (
            (view, x) if expand is None else (view.narrow(expand, 0, 1), x.narrow(expand, 0, 1))
        )
        target.copy_(source)
    return view


@st.composite
def masks(draw, draft):
    full = (draft.dims.B, draft.dims.H, draft.dims.M, draft.dims.N)
    rank = draw(st.integers(0, 4))
    shape = [n if draw(st.booleans()) else 1 for n in full[4 - rank :]]
    values = draft.rand(*shape)
    kind = draw(st.sampled_from(["bool", "float", "float32", "-inf", "finfo.min"]))
    hidden = values < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    if kind == "bool":
        mask = ~hidden
    else:
        dtype = draft.dtype if kind != "float32" else torch.float32
        mask = (values * 6 - 3).to(dtype)
        if kind == "-inf":
            mask = mask.masked_fill(hidden, -torch.inf)
        if kind == "finfo.min" and mask.ndim:
            mask[..., :1] = torch.finfo(dtype).min
    return draw(layouts(mask)) if rank > 1 else mask


@st.composite
def problems(draw, dtype):
    d = draw(dims())
    draft = Draft(d, dtype, draw(st.integers(0, 2**20)))
    edge = st.one_of(maybe(), st.integers(0, 2 * max(d.M, d.N) + 1))
    kwargs = dict(
        causal=draw(st.sampled_from([False, True, "top_left", "bottom_right"])),
        window=draw(st.one_of(maybe(), st.tuples(edge, edge))),
        softcap=draw(st.sampled_from([None, None, 0.5, 5.0, 50.0])),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.2, 0.7, 1.0])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        scale=draw(st.sampled_from([None, None, 0.0, 0.05, -0.2, 0.5])),
        return_lse=draw(st.booleans()),
    )
    wants = ["q", "k", "v"]
    if draw(st.booleans()):
        kwargs["mask"] = draw(masks(draft))
        if kwargs["mask"].is_floating_point() and draw(st.booleans()):
            wants.append("mask")
    if draw(st.booleans()):
        lengths = st.lists(st.integers(0, d.N), min_size=d.B, max_size=d.B)
        index = draw(st.sampled_from([torch.int32, torch.int64]))
        kwargs["key_lengths"] = torch.tensor(draw(lengths), dtype=index)
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(d.H,), (d.B, d.H)]))
        kwargs["alibi_slopes"] = draft.rand(*shape).to(draft.exact)
    if draw(st.booleans()):
        kwargs["sinks"] = draft.randn(d.H, dtype=draft.exact)
        wants.append("sinks")
    q = draft.randn(d.B, d.H, d.M, d.D)
    k, v = draft.randn(d.B, d.Hk, d.N, d.D), draft.randn(d.B, d.Hk, d.N, d.Dv)
    q, k, v = (draw(layouts(x)) for x in (q, k, v))
    if "key_lengths" in kwargs and all(x.stride(0) for x in (k, v) if x.numel()):
        k, v = (spoil_tail(x.contiguous(), kwargs["key_lengths"]) for x in (k, v))
    dout = draw(layouts(draft.randn(d.B, d.H, d.M, d.Dv)))
    dlse = draft.randn(d.B, d.H, d.M, dtype=draft.exact) if kwargs["return_lse"] else None
    return Problem(str(d), q, k, v, kwargs, dout, dlse, tuple(wants))


@every_dtype
@every_backend
@given(data=st.data())
def test_any_call_is_right(name, dtype, data):
    declares(name, DTYPES[dtype])
    problem = data.draw(problems(DTYPES[dtype]))
    note(problem.name)
    isa = data.draw(st.sampled_from(variants(name, DTYPES[dtype])))
    verdict = Verdict(problem)
    with variant(isa):
        passed(verdict.complaints(fastattn.attention, backend=name))


@every_backend
@pytest.mark.parametrize("dtype", [x for x in DECLARED if DTYPES[x].itemsize > 2])
@given(data=st.data())
def test_any_call_in_any_parts_is_right(name, dtype, data):
    """Cut along all axes at once, at places that may fall together: some parts are empty."""
    declares(name, DTYPES[dtype], Feature.PLACE)
    problem = data.draw(problems(DTYPES[dtype]))
    (B, Hk, N, _), M = problem.k.shape, problem.q.shape[2]
    attention = fastattn.attention
    for axis, size in zip(AXES, (B, Hk, M, N), strict=True):
        cuts = []
        if size > 1:
            cuts = data.draw(st.lists(st.integers(1, size - 1), max_size=small(2, 1)))
        attention = in_parts(axis, attention, sorted(cuts))
    passed(Verdict(problem).complaints(attention, backend=name))


def moved(problem, name):
    """out and LSE as a function of the tensors that have gradients; these; and two directions."""
    given = problem.tensors() | dict(return_lse=True, backend=name)
    mask = given.get("mask")
    if mask is not None and mask.is_floating_point():  # beside -1e308 no difference is seen
        given["mask"] = torch.where(mask == -torch.inf, mask, mask.clamp(min=-9))

    def f(*tensors):
        call = given | dict(zip(problem.wants, tensors))
        q, k, v = (call.pop(x) for x in "qkv")
        out, lse = fastattn.attention(q, k, v, **call)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    tensors = tuple(given[x].contiguous() for x in problem.wants)
    generator = torch.Generator().manual_seed(len(problem.name))
    draw = lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)  # noqa: E731
    return f, tensors, *(tuple(map(draw, tensors)) for _ in range(2))


def dot(a, b):
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))


def agree(a, b, rtol):
    """Two sums of as many terms; relative to what the terms are, not to what they cancel to."""
    assert abs(dot(*a) - dot(*b)) <= rtol * (1e-3 + dot(*(map(torch.abs, x) for x in a)))


@pytest.mark.parametrize("name", [*FUSED, "reference"])
@settings(max_examples=20)
@given(data=st.data())
def test_derivatives_of_any_call_agree_with_each_other(name, data):
    """What forward mode says is what differences say; <g, J u> = <J' g, u>; the Hessian of <g, f>
    is symmetric, whoever multiplies by it."""
    declares(name, torch.float64, Feature.TANGENTS)
    problem = data.draw(problems(torch.float64)).to(torch.float64)  # a mask may be float32
    note(problem.name)
    f, x, u, w = moved(problem, name)
    outs, outs_t = jvp(f, x, u)
    g = tuple(map(torch.cos, outs))
    along = lambda h: f(*(a + h * b for a, b in zip(x, u)))  # noqa: E731
    step = 1e-6
    for here, there, slope in zip(along(-step), along(step), outs_t):
        size = 1 + slope.abs().max() if slope.numel() else 1
        torch.testing.assert_close((there - here) / (2 * step), slope, rtol=1e-4, atol=1e-5 * size)

    def gradients(*x):
        return vjp(f, *x)[1](g)

    agree((g, outs_t), (gradients(*x), u), 1e-10)
    _, forward_u = jvp(gradients, x, u)
    _, forward_w = jvp(gradients, x, w)
    agree((forward_u, w), (forward_w, u), 1e-9)
    agree((vjp(gradients, *x)[1](w), u), (forward_w, u), 1e-9)


def bad(argument, value, error=ValueError):
    """A value that any call must refuse, as a function of the call."""
    return argument, (value if callable(value) else lambda problem: value), error


# The calls that raise, and nothing else does. ValueError and TypeError, never a wrong answer.
REFUSED = {
    "rank": bad("q", lambda p: p.q[0]),
    "integers": bad("q", lambda p: p.q.to(torch.int32)),
    "no tensor": bad("k", lambda p: p.k.tolist(), TypeError),
    "two dtypes": bad("k", lambda p: p.k.to(other_dtype(p.k.dtype))),
    "two batch sizes": bad("v", lambda p: torch.cat([p.v, p.v[:1]])),
    "two head dims": bad("k", lambda p: torch.cat([p.k, p.k], -1)),
    "two key counts": bad("v", lambda p: torch.cat([p.v, p.v[:, :, :1]], 2)),
    "two key heads": bad("v", lambda p: torch.cat([p.v, p.v], 1)),
    "heads do not divide": bad("q", lambda p: torch.cat([p.q, p.q[:, :1]], 1)),
    "mask too large": bad("mask", lambda p: torch.ones(p.k.shape[2] + 2, dtype=torch.bool)),
    "mask of rank 5": bad("mask", torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)),
    "mask of integers": bad("mask", torch.ones(1, 1, dtype=torch.int64)),
    "no such causal": bad("causal", "diagonal"),
    "window to the right of itself": bad("window", (-1, 2)),
    "negative right window": bad("window", (None, -3)),
    "window of one edge": bad("window", (2,)),
    "window of halves": bad("window", (1.5, 2), TypeError),
    "length past the end": bad("key_lengths", lambda p: lengths_of(p, p.k.shape[2] + 1)),
    "negative length": bad("key_lengths", lambda p: lengths_of(p, -1)),
    "lengths of rank 2": bad("key_lengths", lambda p: lengths_of(p, 1)[None]),
    "too many lengths": bad("key_lengths", lambda p: lengths_of(p, 1).repeat(2)),
    "float lengths": bad("key_lengths", lambda p: lengths_of(p, 1).float()),
    "slopes of another size": bad("alibi_slopes", lambda p: torch.ones(p.q.shape[1] + 1)),
    "sinks of another size": bad("sinks", lambda p: torch.ones(p.q.shape[1] + 1)),
    "softcap of 0": bad("softcap", 0.0),
    "negative softcap": bad("softcap", -1.0),
    "NaN softcap": bad("softcap", math.nan),
    "negative p": bad("dropout_p", -0.1),
    "p above 1": bad("dropout_p", 1.1),
    "NaN p": bad("dropout_p", math.nan),
    "NaN scale": bad("scale", math.nan),
    "infinite scale": bad("scale", math.inf),
    "a word for a scale": bad("scale", "half", TypeError),
    "no such backend": bad("backend", "abacus"),
}


def other_dtype(dtype):
    return torch.float32 if dtype != torch.float32 else torch.float64


def lengths_of(problem, length):
    return torch.full((problem.q.shape[0],), length)


@pytest.mark.parametrize("why", REFUSED)
@settings(max_examples=15)
@given(data=st.data())
def test_any_bad_call_is_refused(why, data):
    """One fault, in the midst of any valid call, raises and says what it got."""
    problem = data.draw(problems(torch.float32).filter(lambda p: p.q.numel() and p.k.numel()))
    if why == "heads do not divide" and problem.k.shape[1] == 1:
        return  # one key head serves any number of query heads
    argument, value, error = REFUSED[why]
    call = problem.tensors()
    if call["dropout_p"] == 0:
        call["seed"] = None
    call[argument] = value(problem)
    q, k, v = (call.pop(x) for x in "qkv")
    with pytest.raises(error, match=r"got .*expected") as raised:
        fastattn.attention(q, k, v, **call)
    assert not isinstance(raised.value, NotImplementedError)


@every_backend
@given(data=st.data())
def test_window_of_w_is_not_of_w_plus_1(name, data):
    """Off by one at either edge changes a row that has a key there."""
    n, w = data.draw(st.integers(8, small(150, 40))), data.draw(st.integers(0, 6))
    draft = Draft(Dims(1, 1, 1, n, n, 8, 8), torch.float32, n)
    q, k, v = (draft.randn(1, 1, n, 8) for _ in "qkv")
    base = fastattn.attention(q, k, v, window=(w, w), backend=name)[0, 0]
    left = fastattn.attention(q, k, v, window=(w + 1, w), backend=name)[0, 0]
    right = fastattn.attention(q, k, v, window=(w, w + 1), backend=name)[0, 0]
    rows = torch.arange(n)
    assert torch.equal((left != base).any(-1), rows > w)  # row w + 1 has a key w + 1 to its left
    assert torch.equal((right != base).any(-1), rows < n - 1 - w)
