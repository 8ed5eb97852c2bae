"""Compare dropout calls that vmap folds into one call with the same calls made one by one."""

import functools
import itertools
from contextlib import contextmanager

import pytest
import torch
from torch.func import grad, jvp, vmap

import fastattn
from fastattn import Place
from fastattn.backends import base
from fastattn.call.spec import Feature
from fastattn.dispatch import functorch
from tests.support.backends import small

# The dimensions that each vmap folds along, the innermost first: "items" maps q, k and v, "heads"
# maps the sinks.
WAYS = ("items", "heads", "items items", "heads heads", "items heads", "heads items")
P, SEED, PLACE = 0.4, 5, Place(row=2, key=3, head=4, item=1)
SHAPE = B, H, M, N = 2, 2, 5, 30
HOW_MANY = small((3, 2), (2, 2))  # calls in each vmap, the innermost first


def attention(name, q, k, v, sinks=None):
    given = dict(dropout_p=P, seed=SEED, place=PLACE, backend=name)
    return fastattn.attention(q, k, v, sinks=sinks, **given)


def forward(f, *x):
    return (f(*x),)


def backward(f, q, k, v, sinks):
    return grad(lambda *x: f(*x, sinks).sin().sum(), (0, 1, 2))(q, k, v)


def tangent(f, q, k, v, sinks):
    return jvp(lambda *x: f(*x, sinks), (q, k, v), (q.sin(), k.sin(), v.sin()))


def second(f, q, k, v, sinks):
    of_grads = functools.partial(backward, lambda *x: f(*x))
    given = q, k, v
    return jvp(lambda *x: of_grads(*x, sinks), given, tuple(x.sin() for x in given))[1]


PASSES = {"forward": forward, "backward": backward, "jvp": tangent, "second": second}


def passes_of(name):
    """The passes that a backend supports."""
    able = base.get(name).support.features & Feature.TANGENTS
    return PASSES if able else {x: PASSES[x] for x in ("forward", "backward")}


def dims(along):
    return (0, 0, 0, None) if along == "items" else (None, None, None, 0)


def by_vmap(f, way):
    for along in way.split():
        f = vmap(f, dims(along))
    return f


def alone(f, way):
    """`f` mapped by a loop over calls instead of vmap."""

    def every(inner, at, n, *x):
        each = [inner(*(y if d is None else y[i] for y, d in zip(x, at))) for i in range(n)]
        return tuple(torch.stack(y) for y in zip(*each))

    for along, n in zip(way.split(), HOW_MANY):
        f = functools.partial(every, f, dims(along), n)
    return f


def tensors(way, dtype):
    """q, k, v and sinks, with a leading dimension for each vmap that maps them."""
    generator = torch.Generator().manual_seed(0)
    sizes = list(reversed(list(zip(way.split(), HOW_MANY))))
    shapes = (B, H, M, 8), (B, 1, N, 8), (B, 1, N, 8), (H,)
    for at, shape in enumerate(shapes):
        own = [n for along, n in sizes if dims(along)[at] is not None]
        kind = torch.float32 if shape == (H,) and dtype.itemsize == 2 else dtype
        yield torch.randn(*own, *shape, generator=generator).to(kind)


@contextmanager
def counted(which):
    """Record the runs of that pass inside the block: a list with an element for each."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        run = functorch.run_pass.run

        def count(this, *given):
            if this.suffix == ("" if which == "forward" else f"_{which}"):
                seen.append(which)
            return run(this, *given)

        patch.setattr(functorch.run_pass, "run", count)
        yield seen


def complaints(name, dtype=torch.float32, ways=WAYS, passes=None):
    """One line where a folded call differs from the separate calls, or is more than one call."""
    tolerance = {2: 2e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
    for way, which in itertools.product(ways, passes or passes_of(name)):
        f = functools.partial(PASSES[which], functools.partial(attention, name))
        given = list(tensors(way, dtype))
        with counted(which) as seen:
            found = by_vmap(f, way)(*given)
        if len(seen) != 1:
            yield f"{way}: {which} ran {len(seen)} times"
        for x, y in zip(found, alone(f, way)(*given), strict=True):
            error = (x.double() - y.double()).abs().max().item()
            if not error <= tolerance * max(1.0, y.double().abs().max().item()):
                yield f"{way}: {which} is off by {error:.2g}"


def draws_alike(name, way, dtype, rows=M):
    """Does dropout keep the same probabilities in a folded call as in separate calls, bit for bit,
    in forward and in dv?

    With q = 0 and v = I the output is the weights; with dout = I so is dv.
    """
    lead = [n for along, n in reversed(list(zip(way.split(), HOW_MANY))) if along == "items"]
    q = torch.zeros(*lead, B, H, rows, 8, dtype=dtype)
    k = torch.zeros(*lead, B, H, N, 8, dtype=dtype)
    v = torch.eye(N, dtype=dtype).expand(*lead, B, H, N, N)
    sinks = list(tensors(way, dtype))[3]
    dout = torch.eye(rows, N, dtype=dtype)

    def run(q, k, v, sinks):
        f = functools.partial(attention, name, q, k, sinks=sinks)
        return f(v), grad(lambda v: (f(v) * dout).sum())(v).mT[:, :, :rows]

    kept = fastattn.reference.keep_mask((B, H, rows, N), P, SEED, place=PLACE)
    return all(torch.equal(x != 0, kept.expand(x.shape)) for x in by_vmap(run, way)(q, k, v, sinks))
