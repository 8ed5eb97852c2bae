"""Properties of any call: derivatives agree with each other, bad arguments are refused.

FASTATTN_EXAMPLES=10000 runs that many newly drawn examples of each test.
"""

import pytest
import torch

pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch.func import jvp, vjp

import fastattn
from fastattn.call.spec import Feature
from tests.fuzz import draw
from tests.fuzz.refused import REFUSED
from tests.support.backends import (
    FUSED,
    declares,
    every_backend,
    small,
)
from tests.support.cases import Dims, Draft
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")


def problems(dtype, **fixed):
    """Dense calls. Hypothesis controls the random draws, so it can shrink them."""
    draws = st.randoms(use_true_random=False)
    return draws.map(lambda rng: draw.problem(rng, dtype, most=small(150, 40), **fixed))


def moved(problem, name):
    """(out and LSE as a function f of tensors with gradients, these tensors, two directions)."""
    given = problem.tensors() | dict(return_lse=True, backend=name)
    mask = given.get("mask")
    if mask is not None and mask.is_floating_point():  # finite differences vanish beside -1e308
        given["mask"] = torch.where(mask == -torch.inf, mask, mask.clamp(min=-9))

    def f(*tensors):
        call = given | dict(zip(problem.needs_grad, tensors))
        q, k, v = (call.pop(x) for x in "qkv")
        out, lse = fastattn.attention(q, k, v, **call)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    tensors = tuple(given[x].contiguous() for x in problem.needs_grad)
    generator = torch.Generator().manual_seed(len(problem.name))
    draw = lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)  # noqa: E731
    return f, tensors, *(tuple(map(draw, tensors)) for _ in range(2))


def dot(a, b):
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))


def agree(a, b, rtol):
    """Assert that two dot products agree, relative to the size of their terms, not of the sums."""
    assert abs(dot(*a) - dot(*b)) <= rtol * (1e-3 + dot(*(map(torch.abs, x) for x in a)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FUSED, "reference"])
@settings(max_examples=20)
@given(data=st.data())
def test_derivatives_of_any_call_agree_with_each_other(name, data):
    """Forward mode agrees with finite differences; <g, J u> = <J' g, u>; the Hessian of <g, f> is
    symmetric, in forward over reverse and in reverse over reverse."""
    declares(name, torch.float64, Feature.TANGENTS)
    problem = data.draw(problems(torch.float64, far=False))
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


@parametrize("why", REFUSED, fast=4)
@settings(max_examples=15)
@given(data=st.data())
def test_any_bad_call_is_refused(why, data):
    """One wrong argument in a valid call raises an error that says what it got."""
    problem = data.draw(problems(torch.float32, place=("no",)))
    if why == "heads do not divide" and problem.k.shape[1] == 1:
        return  # one key head serves any number of query heads
    argument, value, error = REFUSED[why]
    call = problem.tensors()
    call[argument] = value(problem)
    q, k, v = (call.pop(x) for x in "qkv")
    with pytest.raises(error, match=r"got .*expected") as raised:
        fastattn.attention(q, k, v, **call)
    assert not isinstance(raised.value, NotImplementedError)


@every_backend
@given(data=st.data())
def test_window_of_w_is_not_of_w_plus_1(name, data):
    """A window one larger at either edge changes exactly the rows that have a key there."""
    n, w = data.draw(st.integers(8, small(150, 40))), data.draw(st.integers(0, 6))
    draft = Draft(Dims(1, 1, 1, n, n, 8, 8), torch.float32, n)
    q, k, v = (draft.randn(1, 1, n, 8) for _ in "qkv")
    base = fastattn.attention(q, k, v, window=(w, w), backend=name)[0, 0]
    left = fastattn.attention(q, k, v, window=(w + 1, w), backend=name)[0, 0]
    right = fastattn.attention(q, k, v, window=(w, w + 1), backend=name)[0, 0]
    rows = torch.arange(n)
    assert torch.equal((left != base).any(-1), rows > w)  # row w + 1 has a key w + 1 to its left
    assert torch.equal((right != base).any(-1), rows < n - 1 - w)
