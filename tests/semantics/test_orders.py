"""`Options.out_order` and `grad_order`: how results and gradients lie in memory."""

import dataclasses
import itertools

import pytest
import torch

import fastattn
from fastattn import api
from fastattn.call.spec import TOKENS, Feature, Tangents
from fastattn.dispatch import run_pass
from fastattn.dispatch.operation import ATTENTION, BACKWARD, FORWARD, JVP, SECOND, WEIGHTS
from tests.support.backends import (
    declares,
    every_backend,
    not_interpreted,
    small,
    thinned,
    variant,
    variants,
)
from tests.support.cases import DTYPES, SHAPES, Dims
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")

ORDERS = ["".join(letters) for letters in itertools.permutations("BHM")]
DIMS = small(
    (SHAPES[1], Dims(2, 4, 2, 1, 70, 32, 32), Dims(2, 4, 2, 70, 45, 33, 17)),
    (Dims(2, 2, 1, 3, 5, 16, 8), Dims(2, 2, 1, 1, 5, 16, 16)),
)
WANTS = ["q", "k", "v", "mask"]


def inputs(dims, dtype):
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    B, H, Hk, M, N, D, Dv = dataclasses.astuple(dims)
    q, k, v = rand(B, H, M, D), rand(B, Hk, N, D), rand(B, Hk, N, Dv)
    return q, k, v, rand(H, 1, N), rand(B, H, M, Dv)


def lies(x, order):
    return x.permute([*map("BHM".index, order), 3]).is_contiguous()


def passes_of(name, dims, dtype, orders):
    """Results of all passes in `out_order`, those in `grad_order`, and the mask's gradient."""
    q, k, v, mask, dout = inputs(dims, dtype)
    t, o = api.prepare(q, k, v, dict(backend=name, mask=mask, causal=True), orders=orders)
    o = o._replace(grad=True)
    outs = run_pass.run(FORWARD, ATTENTION, t, o)
    *grads, dmask = run_pass.run(BACKWARD, ATTENTION, t, o, ((dout, None), outs), WANTS)
    u = Tangents(q, k, v)
    out_t, lse_t = run_pass.run(JVP, ATTENTION, t, o, (u, outs))
    both = run_pass.run(JVP, ATTENTION, t, o, (u, (None, None)))
    groups = u, (*outs, out_t, lse_t), (dout, None, None, None)
    second = run_pass.run(SECOND, ATTENTION, t, o, groups, WANTS[:3])
    return [outs[0], out_t, both[0], both[2]], [*grads, *second], dmask


def holds(name, dims, dtype, order):
    plain = passes_of(name, dims, dtype, (TOKENS, TOKENS))
    found = passes_of(name, dims, dtype, (order, order[::-1]))
    for of_plain, of_found, own in zip(plain, found, (order, order[::-1])):
        for a, b in zip(of_plain, of_found, strict=True):
            assert lies(a, TOKENS) and lies(b, own)
            assert torch.equal(a, b)
    assert torch.equal(plain[2], found[2])


@every_backend
@parametrize("order, dtype", thinned(ORDERS, list(DTYPES)), fast=20)
def test_every_pass_writes_in_every_order(name, order, dtype):
    """Every order gives the same values."""
    declares(name, DTYPES[dtype], Feature.TANGENTS)
    for dims, isa in itertools.product(DIMS, variants(name, DTYPES[dtype])):
        with variant(isa):
            holds(name, dims, DTYPES[dtype], order)


@not_interpreted
@pytest.mark.parametrize("order", ORDERS)
def test_the_reference_supports_orders(order):
    holds("reference", DIMS[0], torch.float32, order)


@not_interpreted
@pytest.mark.parametrize("order", ORDERS)
def test_operators_and_fake_tensors_agree(order):
    q, k, v, _, dout = inputs(DIMS[0], torch.float32)
    t, o = api.prepare(q, k, v, {}, orders=(order, order[::-1]))
    o = o._replace(grad=True)
    operators, check = torch.ops.fastattn, torch.library.opcheck
    given = tuple(run_pass.arguments(FORWARD, t, o))
    check(operators.attention, given, test_utils="test_faketensor")
    outs = operators.attention(*given)
    given = dout, None, *outs, *t, *o, ["q", "k", "v"]
    check(operators.attention_backward, given, test_utils="test_faketensor")


@pytest.mark.slow
@not_interpreted
def test_vmap_and_double_backward():
    q, k, v, _, _ = (x.double() for x in inputs(DIMS[0], torch.float32))

    def attend(*given):
        return api.attend(*given, orders=("BHM", "HMB"))[0]

    plain = fastattn.attention(q, k, v)
    for found in torch.vmap(attend)(*(torch.stack([x, x]) for x in (q, k, v))):
        torch.testing.assert_close(found, plain)
    leaves = [x[:1, :, :3].detach().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(attend, leaves) and torch.autograd.gradgradcheck(attend, leaves)


@not_interpreted
def test_an_invalid_order_is_refused():
    q, k, v, _, _ = inputs(DIMS[0], torch.float32)
    t, o = api.prepare(q, k, v, {})
    for name, wrong in (("out_order", "BHH"), ("grad_order", "bhm"), ("out_order", "")):
        with pytest.raises(ValueError, match=f"^{name}: got '{wrong}', expected the letters of"):
            run_pass.run(FORWARD, ATTENTION, t, o._replace(**{name: wrong}))
    weights = t._replace(v=None, normaliser=torch.zeros(2, *q.shape[:3]))
    with pytest.raises(ValueError, match=r"^grad_order: got 'BHM', expected .* of weights"):
        run_pass.run(FORWARD, WEIGHTS, weights, o._replace(grad_order="BHM"))
