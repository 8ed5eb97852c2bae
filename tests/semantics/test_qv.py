"""attention(..., qv=): scores q.k + qv.v, against the formula in float64; packed, in pages; with
keys and values side by side in memory, which are read in place."""

import math

import pytest
import torch
from torch.func import jvp, vmap

import fastattn
from fastattn.call import qv as module
from tests.support.backends import every_backend, not_interpreted

pytestmark = pytest.mark.usefixtures("one_thread")
B, H, Hk, M, N = 2, 4, 2, 19, 37


def tensors(D, Dv, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = dict(q=(B, H, M, D), k=(B, Hk, N, D), v=(B, Hk, N, Dv), qv=(B, H, M, Dv))
    return {x: torch.randn(*size, generator=draw).to(dtype) for x, size in shapes.items()}


def formula(q, k, v, qv, **given):
    """The definition: (out, lse)."""
    wide = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    return fastattn.reference.attention(*wide, v, **given, return_lse=True)


ADJACENT = {
    "v, k": (lambda x, D, Dv: (x[..., Dv:], x[..., :Dv]), True),
    "k, v": (lambda x, D, Dv: (x[..., :D], x[..., D : D + Dv]), True),
    "apart by one column": (lambda x, D, Dv: (x[..., Dv + 1 :], x[..., :Dv]), False),
    "copies": (lambda x, D, Dv: (x[..., Dv:].clone(), x[..., :Dv].clone()), False),
    "another row": (lambda x, D, Dv: (x[..., Dv:].flip(2), x[..., :Dv]), False),
    # The first row of one begins where that of the other ends; other rows do not.
    "v after the first k": (lambda x, D, Dv: (dense(x, 0, D), dense(x, D, Dv)), False),
    "k after the first v": (lambda x, D, Dv: (dense(x, Dv, D), dense(x, 0, Dv)), False),
    "v of one head": (lambda x, D, Dv: (x[..., Dv:], x[:, :1, :, :Dv].expand(B, Hk, N, Dv)), False),
}


def dense(x, first, columns):
    """Rows of x's memory without gaps, from its number `first` on."""
    return x.flatten()[first:][: B * Hk * N * columns].view(B, Hk, N, columns)


@every_backend
@pytest.mark.parametrize("how", ADJACENT)
def test_columns_side_by_side_are_read_in_place(name, how):
    D, Dv = 8, 16
    part, in_place = ADJACENT[how]
    x = torch.randn(B, Hk, N, D + Dv + (how == "apart by one column"))
    k, v = part(x, D, Dv)
    q, qv = torch.randn(B, H, M, D), torch.randn(B, H, M, Dv)
    with torch.no_grad():
        wide_q, wide_k = module.joined(q, k, v, qv)
        assert (wide_k.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == in_place
        found = fastattn.attention(q, k, v, qv=qv, causal=True, backend=name)
        copied = fastattn.attention(q, k.clone(), v.clone(), qv=qv, causal=True, backend=name)
    torch.testing.assert_close(found, copied, rtol=1e-5, atol=1e-5)
    expected, _ = formula(*(x.double() for x in (q, k, v, qv)), causal=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert wide_q.shape[-1] == wide_k.shape[-1] == D + Dv


@every_backend
def test_views_have_gradients_of_their_own(name):
    """A view of k and v is no view of one tensor to autograd: each has its own gradient."""
    x = torch.randn(B, Hk, N, 24)
    k, v = x[..., 16:].requires_grad_(), x[..., :16].requires_grad_()
    q, qv = torch.randn(B, H, M, 8), torch.randn(B, H, M, 16)
    found = torch.autograd.grad(
        fastattn.attention(q, k, v, qv=qv, backend=name).square().sum(), (k, v)
    )
    own = [y.detach().clone().requires_grad_() for y in (k, v)]
    out, _ = formula(q, *own, qv)
    for y, z in zip(found, torch.autograd.grad(out.square().sum(), own), strict=True):
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@not_interpreted
def test_transforms_and_compiled_code():
    given = tensors(8, 16, torch.float64)
    moves = tensors(8, 16, torch.float64, seed=1)
    order = ("q", "k", "v", "qv")

    def call(q, k, v, qv):
        return fastattn.attention(q, k, v, qv=qv, causal=True)

    def exact(q, k, v, qv):
        return formula(q, k, v, qv, causal=True)[0]

    primals, tangents = (tuple(x[name] for name in order) for x in (given, moves))
    for x, y in zip(jvp(call, primals, tangents), jvp(exact, primals, tangents), strict=True):
        torch.testing.assert_close(x, y)
    batch = [torch.stack([x, 2 * x]) for x in primals]
    torch.testing.assert_close(vmap(call)(*batch)[1], call(*(2 * x for x in primals)))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*primals), call(*primals))
    leaves = [x[:1, :, :3, :].clone().requires_grad_() for x in primals]
    assert torch.autograd.gradcheck(call, leaves) and torch.autograd.gradgradcheck(call, leaves)


@not_interpreted
@pytest.mark.parametrize("moving", ["q", "k", "v", "qv", "q k v qv", ""])
def test_the_call_with_tangents(moving):
    given = tensors(8, 16, torch.float64)
    moves = {
        x: y if x in moving.split() else None for x, y in tensors(8, 16, torch.float64, 1).items()
    }
    zero = {x: torch.zeros_like(y) for x, y in given.items()}
    found = fastattn.attention_jvp(
        given["q"],
        given["k"],
        given["v"],
        *(moves[x] for x in ("q", "k", "v")),
        qv=given["qv"],
        qv_t=moves["qv"],
        causal=True,
        return_lse=True,
    )
    tangents = tuple(zero[x] if moves[x] is None else moves[x] for x in given)
    exact = jvp(lambda *x: formula(*x, causal=True), tuple(given.values()), tangents)
    for x, y in zip(found, (*exact[0], *exact[1]), strict=True):
        torch.testing.assert_close(x, y)


@not_interpreted
def test_tangents_of_other_shapes_raise():
    given = tensors(8, 16, torch.float64)
    q, k, v, qv = given.values()
    with pytest.raises(ValueError, match=r"qv_t.shape: got \(2, 4, 19, 8\), expected"):
        fastattn.attention_jvp(q, k, v, None, None, None, qv=qv, qv_t=q)
    with pytest.raises(ValueError, match="qv_t: got a tensor, expected None, because qv is None"):
        fastattn.attention_jvp(q, k, v, None, None, None, qv_t=q)
    with pytest.raises(TypeError, match="k_t: got int, expected a torch"):
        fastattn.attention_jvp(q, k, v, None, 1, None, qv=qv)


@not_interpreted
def test_explain_counts_both_columns():
    given = tensors(64, 512, torch.bfloat16)
    found = fastattn.explain(**given)
    assert (found.spec.D, found.spec.Dv) == (576, 512) and found.spec.scale == 1 / math.sqrt(576)


WRONG = {
    "columns": (dict(qv=torch.randn(B, H, M, 7)), ValueError, r"qv: got shape .*7\), expected"),
    "heads": (dict(qv=torch.randn(B, Hk, M, 16)), ValueError, r"expected that of q with the"),
    "rank": (dict(qv=torch.randn(H, M, 16)), ValueError, "qv: got shape"),
    "dtype": (dict(qv=torch.randn(B, H, M, 16).double()), ValueError, "qv: got torch.float64 on"),
    "kind": (dict(qv=3.0), TypeError, "qv: got float, expected a torch.Tensor"),
    "v": (dict(v=torch.randn(B, Hk, N + 1, 16)), ValueError, "v: got shape .* expected that of k"),
    "v's dtype": (dict(v=torch.randn(B, Hk, N, 16).half()), ValueError, "v: got torch.float16"),
    "a scalar": (dict(v=torch.tensor(1.0)), ValueError, "qv: got shape"),
}


@not_interpreted
@pytest.mark.parametrize("what", WRONG)
def test_wrong_shapes_and_dtypes_raise(what):
    changed, error, text = WRONG[what]
    given = tensors(8, 16, torch.float32) | changed
    with pytest.raises(error, match=text):
        fastattn.attention(**given)


@not_interpreted
def test_rows_in_eight_bits_raise():
    cu = torch.tensor([0, 5])
    q, qv = torch.randn(5, H, 8), torch.randn(5, H, 8)
    k, scale = torch.ones(5, Hk, 8, dtype=torch.int8), torch.ones(5, Hk)
    with pytest.raises(NotImplementedError, match="qv: got keys or values in eight bits"):
        fastattn.attention_packed(q, k, k, cu, cu, k_scale=scale, v_scale=scale, qv=qv)
