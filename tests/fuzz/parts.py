"""The parts of the fuzzer. Each is a function that draws one call, makes it, and raises an
AssertionError if the result differs from the oracle's."""

from contextlib import contextmanager

import torch
from torch.func import grad, jvp, vjp, vmap

import fastattn
from fastattn import reference
from fastattn.backends import base
from fastattn.call.spec import Feature
from tests.features import checking, factors
from tests.semantics.test_weights import Averaged, ask, with_identity
from tests.support import cache_model, tangents
from tests.support.backends import FUSED, REASONS, variant, variants
from tests.support.cases import DTYPES
from tests.support.error_budget import Verdict

from . import draw

PARTS = {}


def part(function):
    PARTS[function.__name__] = function
    return function


class NoBackend(Exception):
    """No backend here supports a call: Triton in its interpreter has no float64."""


@contextmanager
def somewhere(rng, dtype, features=Feature.NONE):
    """Choose a backend that supports the dtype and the features, an instruction set of it and a
    number of threads. Yields the backend's name."""
    able = [
        name
        for name, why in REASONS.items()
        if not why
        and dtype in base.get(name).support.dtypes
        and not features & ~base.get(name).support.features
    ]
    if len(able) > 1 and rng.random() < 0.9:  # the reference backend is simpler: test it less
        able = [name for name in able if name != "reference"]
    if not able:
        raise NoBackend(f"got {dtype} and {features!r}, which no backend here supports")
    name = rng.choice(able)
    isa = rng.choice(variants(name, dtype))
    try:
        with threads(rng), variant(isa):
            yield name
    except Exception as error:
        error.add_note(f"on {isa or name}")
        raise


@contextmanager
def threads(rng):
    before, count = torch.get_num_threads(), rng.choice((1, 1, 1, 2, 3))
    torch.set_num_threads(count)
    try:
        yield
    except Exception as error:
        error.add_note(f"on {count} threads")
        raise
    finally:
        torch.set_num_threads(before)


def dtype_of(rng):
    return DTYPES[rng.choice([x for x in DTYPES if any_backend_has(DTYPES[x])])]


def any_backend_has(dtype):
    return any(dtype in base.get(x.values[0]).support.dtypes for x in FUSED)


def none(complaints):
    found = list(complaints)
    assert not found, " | ".join(map(str, found[:3]))


# --------------------------------------------------------------------------------------- the parts


def of_form(form):
    """A part that draws a call of this form."""

    def made(rng):
        row = draw.row(rng, form)
        ways = checking.ways(row)
        if not ways:
            raise NoBackend(f"got {row['dtype']}, which no backend here supports")
        with threads(rng):
            none(checking.complaints(form, row, rng.choice(ways)))

    PARTS[form] = made


for form in factors.FORMS:
    of_form(form)


@part
def weights(rng):
    """`attention_weights`, forward and backward."""
    dtype, average = dtype_of(rng), rng.random() < 0.5
    problem = draw.problem(rng, dtype, most=70)
    problem.kwargs.pop("return_lse", None)
    problem.dlse = None
    problem.needs_grad = tuple(x for x in problem.needs_grad if x != "v") or ("q",)
    problem = with_identity(problem, average)
    with somewhere(rng, dtype, Feature.WEIGHTS) as name:
        verdict = (Averaged if average else Verdict)(problem)
        none(verdict.about(ask(problem, name, average)))


@part
def passes_with_tangents(rng):
    """A backend's passes `jvp` and `second`, in every dtype."""
    dtype = dtype_of(rng)
    problem = draw.problem(rng, dtype, most=70, far=False)
    with somewhere(rng, dtype, Feature.TANGENTS) as name:
        given = tangents.directions(problem, draw.some(rng, problem.needs_grad))
        wanted = tangents.exact(problem, *given)
        none(tangents.complaints(name, problem, wanted, given, known=rng.random() < 0.5))


@part
def derivatives(rng):
    """Forward mode, and forward over reverse, of a call in float64, against torch's own derivatives
    of the oracle."""
    problem = draw.problem(rng, torch.float64, most=60, far=False)
    given = problem.tensors() | dict(return_lse=True)
    with somewhere(rng, torch.float64, Feature.TANGENTS) as name:
        same_derivatives(rng, given, problem.needs_grad, name)


def without(given, *names):
    return {name: x for name, x in given.items() if name not in names}


def same_derivatives(rng, given, needs_grad, name):
    """Results, their tangents, gradients and their tangents."""
    leaves = tuple(given[x].detach().clone() for x in needs_grad)
    generator = torch.Generator().manual_seed(rng.randrange(2**20))

    def like(x):
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)

    def of(function, **more):
        def f(*x):
            call = given | dict(zip(needs_grad, x)) | more
            q, k, v = (call.pop(n) for n in "qkv")
            return tuple(map(draw.finite, function(q, k, v, **call)))

        return f

    f = of(fastattn.attention, backend=name)
    expected = of(reference.attention)
    directions = tuple(map(like, leaves))
    incoming = tuple(map(like, expected(*leaves)))

    def gradients(function):
        return lambda *x: vjp(function, *x)[1](incoming)

    for title, mine, exact in (
        ("out and LSE", f, expected),
        ("gradients", gradients(f), gradients(expected)),
    ):
        found, wanted = jvp(mine, leaves, directions), jvp(exact, leaves, directions)
        for what, got, want in zip((title, f"tangents of {title}"), found, wanted):
            for x, y in zip(got, want, strict=True):
                close(x, y, what)


def close(x, y, what, tolerance=1e-9):
    """Compare x with y. The tolerance is relative to the largest |y|, or to 1."""
    assert x.shape == y.shape, f"{what}: got {tuple(x.shape)}, not {tuple(y.shape)}"
    x, y = x.double(), y.double()
    assert torch.equal(x.isnan(), y.isnan()), f"{what}: NaN in other places"
    if x.numel():
        error = (x - y).nan_to_num(0, 0, 0).abs().max().item()
        largest = max(1.0, y.nan_to_num(0, 0, 0).abs().max().item())
        assert error <= tolerance * largest, f"{what}: off by {error:.3g} beside {largest:.3g}"


@part
def vmapped(rng):
    """vmap of a call and of its gradients, over some of its tensors, against a loop; float64."""
    form = rng.choice(("dense", "packed", "selected"))
    levels = factors.IN_FLOAT64 | dict(dtype=("float64",), grad=("all",))
    levels |= dict(longest=("exact", "spare"))  # vmap cannot look into offsets
    call = checking.MAKE[form](draw.row(rng, form, 40, **factors.of_form(form, levels)))
    given = call.tensors | call.given | dict(return_lse=True)
    tensors = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
    n = rng.choice((1, 2, 3))
    along = {x: rng.randint(0, given[x].ndim) if rng.random() < 0.6 else None for x in tensors}
    if all(x is None for x in along.values()):
        along["q"] = 0
    generator = torch.Generator().manual_seed(rng.randrange(2**20))
    batched = {x: several(x, given[x], n, along[x], generator) for x in tensors}
    others = without(given, *tensors)

    def results(*x):
        found = call.function(**others, **dict(zip(tensors, x)), backend=name)
        return tuple(map(draw.finite, found))

    def loss(*x):
        return sum(x.sin().sum() for x in results(*x))

    at = tuple(tensors.index(x) for x in call.wants)
    with somewhere(rng, torch.float64) as name:
        for what, f in (("results", results), ("gradients", grad(loss, at))):
            found = vmap(f, tuple(along.values()))(*batched.values())
            each = [
                f(*(x if along[t] is None else x.select(along[t], i) for t, x in batched.items()))
                for i in range(n)
            ]
            for x, y in zip(found, map(torch.stack, zip(*each)), strict=True):
                close(x, y, f"{form} {what}")


# How examples differ in the integers of an argument. Those of `cu_q` and `cu_k` are equal.
ANOTHER = {
    "key_lengths": lambda x, i: (x - i).clamp(min=0),
    "seed": lambda x, i: x + i,
    "mask": lambda x, i: x.roll(i, -1) if x.ndim else x,
    "indices": lambda x, i: x.roll(i, -1),
}


def several(name, x, n, dim, generator):
    """n examples along a new dimension, which differ."""
    if dim is None:
        return x
    if not x.is_floating_point():
        return torch.stack([ANOTHER[name](x, i) if name in ANOTHER else x for i in range(n)], dim)
    found = torch.stack([x] * n, dim)
    return found * (1 + torch.rand(found.shape, generator=generator, dtype=x.dtype))


@part
def wrong_shapes(rng):
    """A tensor of another shape, in any call, is refused or broadcast; it never crashes."""
    dtype = dtype_of(rng)
    problem = draw.problem(rng, dtype, most=40)
    given = problem.tensors()
    tensors = [n for n, x in given.items() if isinstance(x, torch.Tensor)]
    name = rng.choice(tensors)
    x = reshaped(rng, given[name].detach())
    given[name] = x
    q, k, v = (given.pop(n) for n in "qkv")
    with somewhere(rng, dtype) as backend_name:
        tensors = [x.detach().requires_grad_(x.is_floating_point()) for x in (q, k, v)]
        if "mask" in given and given["mask"].is_floating_point():
            given["mask"] = given["mask"].detach().requires_grad_()
            tensors.append(given["mask"])
        try:
            result = fastattn.attention(*tensors[:3], **given, backend=backend_name)
        except (ValueError, TypeError) as error:
            assert "expected" in str(error), error
            return
        outs = result if isinstance(result, tuple) else (result,)
        for leaf, x in zip(tensors, torch.autograd.grad(sum(map(total, outs)), tensors)):
            assert x.shape == leaf.shape


def reshaped(rng, x):
    """x in another shape: one dimension more, fewer, or of another size."""
    if x.ndim == 0:
        return x.expand(rng.randint(1, 3))
    dim = rng.randrange(x.ndim)
    return rng.choice(
        (
            lambda: x.unsqueeze(dim),
            lambda: x.flatten(0, dim),
            lambda: x.sum(dim) if x.dtype != torch.bool else x.any(dim),
            lambda: x.narrow(dim, 0, x.shape[dim] // 2),
            lambda: torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim),
            lambda: x.transpose(0, dim),
        )
    )()


def total(x):
    return draw.finite(x).sum()


@part
def cache_states(rng):
    """`KVCache` and its forks as a state machine, against a model."""
    with somewhere(rng, torch.float32):
        cache_model.run(rng.randrange(2**32), steps=25)
