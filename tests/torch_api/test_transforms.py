"""All of torch's ways to differentiate a call are right on every backend, or raise an error that
says what to do; none gives a silent zero."""

import warnings
from functools import partial

import torch
import torch.autograd.functional as AF
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.backends import base
from fastattn.call.spec import Feature
from tests.support.marks import parametrize
from tests.support.torch_calls import rand

BACKENDS = [
    name
    for name, why in fastattn.available_backends().items()
    if why is None and "cpu" in (base.get(name).support.devices or ("cpu",))
]
ABLE = [
    name
    for name in BACKENDS
    if base.get(name).support.features & Feature.TANGENTS
    and torch.float64 in base.get(name).support.dtypes
]
EVERYTHING = dict(
    causal="bottom_right",
    key_lengths=torch.tensor([4]),
    softcap=2.0,
    dropout_p=0.3,
    seed=5,
)


SHAPES = (1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 3)
X = [rand(*shape, seed=at) for at, shape in enumerate(SHAPES)]  # q, k, v
U = [rand(*shape, seed=7 + at) for at, shape in enumerate(SHAPES)]
Q, K, V = X
QS = torch.stack([Q, 2 * Q, Q.sin()])


def leaves():
    return [x.clone().requires_grad_() for x in X]


# Each takes f, the call on q, k and v, and loss, a scalar function of them.


def duals(f, loss):
    with forward_ad.dual_level():
        pairs = [forward_ad.make_dual(x, u) for x, u in zip(X, U)]
        return forward_ad.unpack_dual(f(*pairs)).tangent


def duals_of_gradients(f, loss):
    with forward_ad.dual_level():
        q = forward_ad.make_dual(Q.clone().requires_grad_(), U[0])
        return forward_ad.unpack_dual(torch.autograd.grad(loss(q, K, V), q)[0]).tangent


def double_backward(f, loss):
    given = leaves()
    grads = torch.autograd.grad(loss(*given), given, create_graph=True)
    sum(x.sin().sum() for x in grads).backward()
    return [x.grad for x in given]


def third_backward(f, loss):
    q = Q.clone().requires_grad_()
    found = loss(q, K, V)
    for _ in range(3):
        (found,) = torch.autograd.grad(found.sin().sum(), q, create_graph=True)
    return found


def checkpointed(f, loss):
    q = Q.clone().requires_grad_()
    out = checkpoint(lambda q: f(q, K, V).sin(), q, use_reentrant=False)
    (found,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    return torch.autograd.grad(found.sin().sum(), q)


def batched_gradients(f, loss, **more):
    q = Q.clone().requires_grad_()
    out = f(q, K, V)
    batch = torch.stack([out.detach(), out.detach().sin()])
    return torch.autograd.grad(out, q, batch, is_grads_batched=True, **more)


def differentiated_direction(f, loss):
    """The gradient of a Hessian-vector product with respect to the vector."""
    return grad(lambda u: jvp(grad(loss), (*X,), (u, *U[1:]))[1].sin().sum())(U[0])


def total_by_vmap(f, qs):
    return vmap(lambda q: f(q, K, V))(qs).square().sum()


def through_a_module(f, loss):
    layer = nn.Linear(2, 2, dtype=torch.float64)
    given = dict(weight=rand(2, 2), bias=rand(2))
    return hessian(lambda p: f(functional_call(layer, p, Q), K, V).square().sum())(given)


def compiled_jvp(f, loss):
    torch._dynamo.reset()
    return torch.compile(lambda *x: jvp(f, x, (*U,))[1], fullgraph=True, backend="aot_eager")(*X)


def compiled_double_backward(f, loss):
    torch._dynamo.reset()
    given = leaves()
    run = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(run(*given), given[:1], create_graph=True)
    return torch.autograd.grad(found.sin().sum(), given)


def compiled_gradient(f, loss):
    torch._dynamo.reset()
    run = torch.compile(lambda q: grad(lambda q: loss(q, K, V))(q), backend="eager")
    return run(Q)


def compiled_in_parts(f, loss):
    """A gradient penalty around a graph compiled for forward only, which autograd traces."""
    torch._dynamo.reset()
    given = leaves()
    run = torch.compile(loss, fullgraph=True, backend="eager")
    grads = torch.autograd.grad(run(*given), given, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in grads), given)


TRANSFORMS = {
    "torch.func.jvp": lambda f, loss: jvp(f, (*X,), (*U,)),
    "jvp of one tensor": lambda f, loss: jvp(lambda k: f(Q, k, V), (K,), (U[1],)),
    "dual numbers": duals,
    "dual numbers through backward": duals_of_gradients,
    "linearize": lambda f, loss: linearize(f, *X)[1](*U),
    "jacfwd": lambda f, loss: jacfwd(f, (0, 1, 2))(*X),
    "jacrev": lambda f, loss: jacrev(f, (0, 1, 2))(*X),
    "hessian": lambda f, loss: hessian(loss, (0, 1, 2))(*X),
    "jacrev of jacfwd": lambda f, loss: jacrev(jacfwd(loss, (0, 1)), (0, 2))(*X),
    "jacrev of jacrev": lambda f, loss: jacrev(jacrev(loss))(*X),
    "grad of jvp": lambda f, loss: grad(lambda q: jvp(f, (q, K, V), (*U,))[1].sin().sum())(Q),
    "jvp of grad": lambda f, loss: jvp(grad(loss, (0, 1, 2)), (*X,), (*U,)),
    "grad of jvp of grad, by the direction": differentiated_direction,
    "grad of grad": lambda f, loss: grad(lambda q: grad(loss)(q, K, V).sin().sum())(Q),
    "double backward": double_backward,
    "functional.hvp": lambda f, loss: AF.hvp(loss, (*X,), (*U,)),
    "functional.vhp": lambda f, loss: AF.vhp(loss, (*X,), (*U,)),
    "functional.jvp": lambda f, loss: AF.jvp(f, (*X,), (*U,), create_graph=True),
    "functional.hessian": lambda f, loss: AF.hessian(loss, (*X,)),
    "functional.hessian, vectorized": lambda f, loss: AF.hessian(loss, (*X,), vectorize=True),
    "functional.hessian, forward mode outside": lambda f, loss: AF.hessian(
        loss, (*X,), vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "functional.jacobian, vectorized": lambda f, loss: AF.jacobian(f, (*X,), vectorize=True),
    "functional.jacobian, forward mode": lambda f, loss: AF.jacobian(
        f, (*X,), vectorize=True, strategy="forward-mode"
    ),
    "is_grads_batched": batched_gradients,
    "is_grads_batched, create_graph": partial(batched_gradients, create_graph=True),
    "vmap of jvp": lambda f, loss: vmap(lambda u: jvp(lambda q: f(q, K, V), (Q,), (u,))[1])(QS),
    "vmap of grad": lambda f, loss: vmap(grad(lambda q: loss(q, K, V)))(QS),
    "vmap of jvp of grad": lambda f, loss: vmap(
        lambda q, u: jvp(grad(lambda q: loss(q, K, V)), (q,), (u,))[1]
    )(QS, QS.cos()),
    "vmap of grad of grad": lambda f, loss: vmap(grad(lambda q: grad(loss)(q, K, V).sin().sum()))(
        QS
    ),
    "jvp of vmap": lambda f, loss: jvp(vmap(lambda q: f(q, K, V)), (QS,), (QS.cos(),)),
    "grad of vmap": lambda f, loss: grad(lambda qs: total_by_vmap(f, qs))(QS),
    "functional.vjp of vmap": lambda f, loss: AF.vjp(lambda qs: total_by_vmap(f, qs), QS),
    "vmap of vmap": lambda f, loss: vmap(vmap(lambda q: f(q, K, V)))(torch.stack([QS, QS + 1])),
    "functional_call": through_a_module,
    "checkpoint, double backward": checkpointed,
    "jvp of jvp": lambda f, loss: jvp(
        lambda q: jvp(lambda q: f(q, K, V), (q,), (U[0],))[1], (Q,), (U[0],)
    ),
    "grad of grad of grad": lambda f, loss: grad(
        lambda q: grad(lambda q: grad(loss)(q, K, V).sin().sum())(q).sin().sum()
    )(Q),
    "third backward": third_backward,
    "compiled: jvp": compiled_jvp,
    "compiled: torch.func.grad": compiled_gradient,
    "compiled: double backward": compiled_double_backward,
    "compiled by eager: double backward": compiled_in_parts,
}
REFUSED = {
    "jvp of jvp": "no forward mode over forward mode",
    "grad of grad of grad": "no third derivative",
    "third backward": "no third derivative",
    "compiled: jvp": "fastattn.attention_jvp, which compiles",
    # torch's message, the same for every operator.
    "compiled: torch.func.grad": "In order to use an autograd.Function with functorch transforms",
    "compiled: double backward": "does not currently support double backward",
}
FIRST_ORDER = ("jacrev", "is_grads_batched", "is_grads_batched, create_graph", "vmap of grad")
FIRST_ORDER += ("functional.jacobian, vectorized", "compiled: jvp", "compiled: torch.func.grad")
FIRST_ORDER += ("compiled: double backward", "grad of vmap", "functional.vjp of vmap")
FIRST_ORDER += ("vmap of vmap",)


def close(found, exact):
    found, exact = (torch.utils._pytree.tree_leaves(x) for x in (found, exact))
    assert len(found) == len(exact) and max(x.abs().max() for x in exact) > 1e-4
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def calls(attention, arguments):
    def f(q, k, v):
        return attention(q, k, v, **arguments)

    return f, lambda q, k, v: f(q, k, v).pow(3).sum()


def verdict(transform, name, arguments=EVERYTHING):
    """ "right", or the error message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of slow vmap and deprecations
        exact = (
            None
            if transform in REFUSED
            else TRANSFORMS[transform](*calls(fastattn.reference.attention, arguments))
        )
        try:
            ours = partial(fastattn.attention, backend=name)
            found = TRANSFORMS[transform](*calls(ours, arguments))
        except (NotImplementedError, RuntimeError, torch._dynamo.exc.Unsupported) as error:
            return str(error)
    close(found, exact)
    return "right"


@parametrize("name", BACKENDS, fast=1)
def test_the_table_of_transforms(name):
    for transform in TRANSFORMS:
        expected = REFUSED.get(transform, "right")
        if name not in ABLE and transform not in FIRST_ORDER:
            expected = "does not support tangents"
        assert expected in verdict(transform, name), transform
