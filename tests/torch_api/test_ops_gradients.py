"""Gradients of a call by autograd, and what has no derivative."""

import itertools

import pytest
import torch
import torch._dynamo.testing
from torch.autograd import forward_ad
from torch.func import grad, jvp

import fastattn
from fastattn import api
from fastattn.call.spec import DIFFERENTIABLE
from fastattn.dispatch.operation import FORWARD
from fastattn.dispatch.run_pass import arguments
from tests.support.marks import parametrize
from tests.support.torch_calls import everything, inputs, op_arguments, rand

# --------------------------------------------------------------------------------------- gradients

NAMES = ("q", "k", "v", "mask", "sinks")
SUBSETS = [s for n in range(1, 6) for s in itertools.combinations(NAMES, n)]


@parametrize("wanted", SUBSETS, ids="+".join, fast=7)
def test_gradcheck_of_every_subset_of_inputs(attention, wanted):
    q, k, v = inputs(B=1, H=2, Hk=1, M=3, N=4, D=2, Dv=3)
    rest = everything(H=2, M=3, N=4, B=1)
    tensors = dict(q=q, k=k, v=v, mask=rest.pop("mask"), sinks=rest.pop("sinks"))
    leaves = [tensors[name].requires_grad_() for name in wanted]

    def f(*leaves):
        given = tensors | dict(zip(wanted, leaves))
        return attention(given.pop("q"), given.pop("k"), given.pop("v"), **given, **rest,
                         return_lse=True)  # fmt: skip

    assert torch.autograd.gradcheck(f, leaves)


def test_gradients_of_the_lse_alone(attention):
    """That of v is 0."""
    leaves = [x.requires_grad_() for x in inputs()]
    found, exact = (
        torch.autograd.grad(f(*leaves, causal=True, return_lse=True)[1].sin().sum(), leaves[:n])
        for f, n in ((attention, 3), (fastattn.reference.attention, 2))
    )
    torch.testing.assert_close(found[:2], exact)
    assert found[2].eq(0).all()


def test_outputs_and_gradients_are_token_major(attention):
    q, k, v = (x.requires_grad_() for x in inputs())
    out = attention(q, k, v)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for x in (out, *grads):
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("constant", [False, True], ids=["whole", "constant_lse"])
@pytest.mark.parametrize("average", [False, True], ids=["heads", "mean"])
def test_gradcheck_of_weights(attention, average, constant):
    q, k, _ = inputs(B=1, H=2, Hk=1, M=3, N=4, D=2)
    rest = everything(H=2, M=3, N=4, B=1)
    leaves = [x.requires_grad_() for x in (q, k, rest.pop("mask"), rest.pop("sinks"))]
    fixed = dict(rest, backend=attention.backend, average_heads=average)
    if constant:
        fixed["lse"] = rand(1, 2, 3)

    def f(q, k, mask, sinks):
        return fastattn.attention_weights(q, k, mask=mask, sinks=sinks, **fixed)

    assert torch.autograd.gradcheck(f, leaves)


def test_weights_times_v_is_the_output(attention):
    q, k, v = inputs()
    rest = everything()
    weights = fastattn.attention_weights(q, k, **rest, backend=attention.backend)
    out = attention(q, k, v, **rest)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), out)
    mean = fastattn.attention_weights(q, k, **rest, average_heads=True, backend=attention.backend)
    torch.testing.assert_close(mean, weights.mean(1))


def test_weights_from_a_forward_pass_differentiate_the_normaliser(attention):
    q, k, v = (x.requires_grad_() for x in inputs())
    rest = everything() | dict(backend=attention.backend)
    _, normaliser = api.attend(q, k, v, **rest)
    found = api.weights_from(q, k, normaliser=normaliser, **rest)
    exact = fastattn.attention_weights(q, k, **rest)
    torch.testing.assert_close(found, exact)
    for a, b in zip(*(torch.autograd.grad(w.sin().sum(), (q, k)) for w in (found, exact))):
        torch.testing.assert_close(a, b)


# {operator suffix: {position of an argument: its name in errors}}.
N = len(DIFFERENTIABLE)
READ = {
    "_backward": {
        0: "gradient of out",
        1: "gradient of normaliser",
        2: "out",
        3: "normaliser",
    },
    "_jvp": {N: "out", N + 1: "normaliser"},
    "_second": {
        N: "out",
        N + 1: "normaliser",
        N + 2: "out",
        N + 3: "lse",
        N + 4: "gradient of out",
        N + 5: "gradient of lse",
    },
}
OTHERS = {
    "no rows": lambda x: x[..., :0, :] if x.ndim == 4 and x.shape[0] != 2 else x[..., :0],
    "fewer dimensions": lambda x: x[0],
    "another dtype": lambda x: x.half(),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("suffix, at", [(x, at) for x, of in READ.items() for at in of])
def test_operators_refuse_results_of_other_calls(suffix, at, other):
    """Kernels read saved results by the sizes of the call, so wrong shapes are refused."""
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 7, 7))
    t, o = api.prepare(q, k, v, dict(backend="cpu"))
    o = o._replace(grad=True)
    outs = torch.ops.fastattn.attention(*arguments(FORWARD, t, o))
    out, lse = outs[0], outs[1][0]
    u, none = (q, *(None,) * (len(DIFFERENTIABLE) - 1)), (None,) * 2
    given = {
        "_backward": (*outs, *outs, *t, *o, ["q"]),
        "_jvp": (*u, *outs, *t, *o),
        "_second": (*u, *outs, out, lse, out, lse, *none, *t, *o, ["q"]),
    }[suffix]
    run = getattr(torch.ops.fastattn, "attention" + suffix)
    run(*given)
    wrong = (*given[:at], OTHERS[other](given[at]), *given[at + 1 :])
    with pytest.raises(ValueError, match=rf"^{READ[suffix][at]}(\.dtype)?: got .*, expected "):
        run(*wrong)


# ------------------------------------------------------------------------- what has no derivative


def test_weights_have_a_first_derivative_alone(attention):
    q, k, _ = inputs()

    def weights(q):
        return fastattn.attention_weights(q, k, backend=attention.backend)

    why = "attention_weights has a first derivative|does not support tangents"
    leaf = q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(weights(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=why):
        (dq.square().sum() + leaf.sum()).backward()
    with pytest.raises(NotImplementedError, match=why):
        jvp(weights, (q,), (q,))
    with pytest.raises(NotImplementedError, match=why):
        jvp(grad(lambda q: weights(q).square().sum()), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=why):
        weights(forward_ad.make_dual(q, q))


def test_create_graph_gives_the_same_first_gradients(attention):
    q, k, v = (x.requires_grad_() for x in inputs())
    out = attention(q, k, v, **everything())
    once = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    again = torch.autograd.grad(out.sum(), (q, k, v), create_graph=True)
    assert all(a.equal(b) for a, b in zip(once, again))


def test_forward_mode_through_the_operator_and_compiled_is_an_error_never_a_zero(attention):
    q, k, v = inputs()

    def f(q):
        return attention(q, k, v)

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="NotImplementedError"):
        torch.compile(lambda q: jvp(f, (q,), (q,))[1], fullgraph=True, backend="aot_eager")(q)
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    compiled(q)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="attention_jvp, which compiles"):
            compiled(dual)
        with pytest.raises(NotImplementedError, match="attention_jvp, which compiles"):
            arguments = op_arguments(False)
            dual = forward_ad.make_dual(arguments[0], arguments[0])
            torch.ops.fastattn.attention(dual, *arguments[1:])
        with pytest.raises(NotImplementedError, match="attention_jvp, which compiles"):
            dual = forward_ad.make_dual(*2 * (arguments[0][None],))
            torch.vmap(lambda x: torch.ops.fastattn.attention(x, *arguments[1:]))(dual)
