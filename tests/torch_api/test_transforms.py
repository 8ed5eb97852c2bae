"""All of torch's ways to differentiate a call are right on every backend, or raise an error that
says what to do; none gives a silent zero. `pytest -s` of this file prints the table."""

import warnings
from functools import partial

import pytest
import torch
import torch.autograd.functional as AF
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.backends import base
from fastattn.call.spec import INDEX, Feature, Options
from fastattn.dispatch import functorch, vmap_fold

pytestmark = pytest.mark.usefixtures("one_thread")
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


def rand(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


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
FIRST_ORDER += ("compiled: double backward",)


def close(found, exact):
    found, exact = (torch.utils._pytree.tree_leaves(x) for x in (found, exact))
    assert len(found) == len(exact) and max(x.abs().max() for x in exact) > 1e-4
    for a, b in zip(found, exact):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


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


@pytest.mark.parametrize("name", BACKENDS)
def test_the_table_of_transforms(name):
    verdicts = {transform: verdict(transform, name) for transform in TRANSFORMS}
    expected = {x: REFUSED.get(x, "right") for x in TRANSFORMS}
    if name not in ABLE:
        expected |= {x: "does not support tangents" for x in TRANSFORMS if x not in FIRST_ORDER}
    print(f"\n{name}")
    for transform, text in verdicts.items():
        at = max(0, text.find(expected[transform]))
        line = text[max(text.rfind("\n", 0, at) + 1, at - 60) :].partition("\n")[0]
        print(f"  {transform:42} {line[:140].strip()}")
    for transform, text in verdicts.items():
        assert expected[transform] in text, transform


FOLDED = {
    "is_grads_batched": "Backward",
    "functional.jacobian, vectorized": "Backward",
    "functional.jacobian, forward mode": "Jvp",
    "jacfwd": "Jvp",
    "jacrev": "Backward",
    "vmap of jvp": "Jvp",
    "functional.hessian, vectorized": "Second",
    "vmap of jvp of grad": "Second",
}


@pytest.mark.parametrize("transform", FOLDED)
def test_batches_are_one_call(transform, monkeypatch):
    """At most one call per tensor with batched derivatives, not one per direction."""
    seen = []
    run = getattr(functorch.run_pass, FOLDED[transform].lower())
    counted = lambda *args: seen.append(1) or run(*args)  # noqa: E731
    monkeypatch.setattr(functorch.run_pass, FOLDED[transform].lower(), counted)
    assert verdict(transform, "reference") == "right"
    assert 1 <= len(seen) <= 3


def mapped(f, at, dropout):
    """jvp of examples that differ in the tensor `at`, by vmap and by a loop."""
    given = dict(q=Q, k=K, v=V, mask=rand(2, 3, 4), sinks=rand(2))
    own = dict(q=QS, k=rand(3, *K.shape), v=rand(3, *V.shape), mask=rand(3, 2, 3, 4))
    own["sinks"] = rand(3, 2)
    rest = dict(dropout_p=0.4, seed=3) if dropout else {}

    def one(x, u):
        def call(x):
            tensors = given | {at: x}
            q, k, v = (tensors.pop(name) for name in "qkv")
            return f(q, k, v, **tensors, **rest)

        return jvp(call, (x,), (u,)), jvp(grad(lambda x: call(x).pow(3).sum()), (x,), (u,))

    moves = own[at].cos()
    turns = [one(x, u) for x, u in zip(own[at], moves)]
    stacked = torch.utils._pytree.tree_map(lambda *x: torch.stack(x), *turns)
    fixed = own[at][0]
    alone = vmap(lambda u: one(fixed, u))(moves)  # several directions, one value of the tensor
    return vmap(one)(own[at], moves), stacked, alone, [one(fixed, u) for u in moves]


@pytest.mark.parametrize("name", ABLE)
@pytest.mark.parametrize("dropout", [False, True], ids=["kept", "dropout"])
@pytest.mark.parametrize("at", ["q", "k", "v", "mask", "sinks"])
def test_mapped_examples_equal_single_calls(name, at, dropout):
    both, turns, alone, each = mapped(partial(fastattn.attention, backend=name), at, dropout)
    close(both, turns)
    close(alone, torch.utils._pytree.tree_map(lambda *x: torch.stack(x), *each))
    exact = mapped(fastattn.reference.attention, at, dropout)
    close(both, exact[1])


def test_tangents_run_on_another_backend_if_needed(monkeypatch):
    """Tangents may use another backend than forward, but a backend named explicitly raises."""
    with pytest.MonkeyPatch.context() as patch:
        cpu = base.get("cpu")
        lacks = cpu.support.__class__(
            **{**vars(cpu.support), "features": cpu.support.features & ~Feature.TANGENTS}
        )
        patch.setattr(type(cpu), "support", lacks)
        base.choose.cache_clear()
        fastattn.dispatch.operation.forget_plans()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = jvp(lambda q: fastattn.attention(q, K, V, **EVERYTHING), (Q,), (U[0],))
        with pytest.raises(NotImplementedError, match="cpu: does not support tangents"):
            jvp(lambda q: fastattn.attention(q, K, V, backend="cpu"), (Q,), (U[0],))
    base.choose.cache_clear()
    fastattn.dispatch.operation.forget_plans()
    exact = jvp(lambda q: fastattn.reference.attention(q, K, V, **EVERYTHING), (Q,), (U[0],))
    close(found, exact)


@pytest.mark.parametrize("function", ["attention", "attention_weights", "attention_jvp"])
def test_vmap_compiles_whole(function):
    run = {
        "attention": lambda q: fastattn.attention(q, K, V),
        "attention_weights": lambda q: fastattn.attention_weights(q, K),
        "attention_jvp": lambda q: fastattn.attention_jvp(q, K, V, q.cos(), U[1], None)[1],
    }[function]
    torch._dynamo.reset()
    compiled = torch.compile(vmap(run), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(QS), vmap(run)(QS))
    if function != "attention_jvp":  # torch refuses its compiled second derivative
        given = [QS.clone().requires_grad_() for _ in range(2)]
        grads = [
            torch.autograd.grad(f(x).sin().sum(), x)[0]
            for f, x in zip((compiled, vmap(run)), given)
        ]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", ABLE)
def test_autograds_own_batches_fold_along_heads(name):
    sinks = rand(Q.shape[1])

    def of(attention):
        def loss(s):
            return attention(Q, K, V, sinks=s).sin().sum()

        forward = dict(vectorize=True, strategy="forward-mode")
        yield AF.jacobian(lambda s: attention(Q, K, V, sinks=s), sinks, **forward)
        yield AF.hessian(loss, sinks, vectorize=True, outer_jacobian_strategy="forward-mode")

    for found, exact in zip(
        of(partial(fastattn.attention, backend=name)), of(fastattn.reference.attention)
    ):
        close(found, exact)


def test_forward_mode_without_tangents_is_allowed():
    from torch.utils.flop_counter import FlopCounterMode

    q = Q.clone().requires_grad_()
    with forward_ad.dual_level(), FlopCounterMode(display=False):
        (found,) = torch.autograd.grad(fastattn.attention(q, K, V).sin().sum(), q)
    (exact,) = torch.autograd.grad(fastattn.attention(q, K, V).sin().sum(), q)
    torch.testing.assert_close(found, exact)


def test_a_constant_has_no_tangent():
    slopes = torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="alibi_slopes: got a tensor with a tangent"):
        jvp(lambda x: fastattn.attention(Q, K, V, alibi_slopes=x), (slopes,), (slopes,))


def test_packed_sequences_and_pages():
    cu_q, cu_k = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 4, 5, 6])
    q, k, v = rand(5, 2, 3), rand(6, 1, 3), rand(6, 1, 2)
    moves = q.cos(), k.cos(), v.cos()

    def packed(q, k, v):
        return fastattn.attention_packed(
            q, k, v, cu_q, cu_k, max_q=3, max_k=4, causal="bottom_right", backend="reference"
        )

    def one_by_one(q, k, v):
        found = []
        for b in range(3):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            own = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
            found.append(fastattn.reference.attention(*own, causal="bottom_right")[0])
        return torch.cat(found, 1).transpose(0, 1)

    for way in (
        lambda f: jvp(f, (q, k, v), moves),
        lambda f: jvp(grad(lambda *x: f(*x).pow(3).sum(), (0, 1, 2)), (q, k, v), moves),
        lambda f: grad(lambda *x: grad(lambda *y: f(*y).pow(3).sum())(*x).sin().sum())(q, k, v),
    ):
        close(way(packed), way(one_by_one))
    pages = dict(block_table=torch.zeros(1, 1, dtype=torch.int64), key_lengths=torch.tensor([4]))
    k, v = k[None, :4], v[None, :4]
    with pytest.raises(NotImplementedError, match="in pages"):
        jvp(
            lambda q: fastattn.attention_packed(
                q, k, v, torch.tensor([0, 5]), **pages, backend="reference"
            ),
            (q,),
            moves[:1],
        )


def test_a_hessian_vector_product_through_a_converted_encoder():
    """Hessian-vector products of parameters and inputs, against torch's math path."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    x = rand(2, 4, 8)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])

    def product():
        parameters = [p for p in encoder.parameters() if p.requires_grad]
        out = encoder(x, src_key_padding_mask=padding)
        grads = torch.autograd.grad(out.pow(3).sum(), parameters, create_graph=True)
        along = [torch.sin(torch.arange(p.numel()).double()).view_as(p) for p in parameters]
        return torch.autograd.grad(grads, parameters, along)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = product()
    fastattn.convert(encoder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of falling back to the reference
        close(product(), exact)


def test_directions_fold_with_their_inputs():
    """A mask with batched tangents is expanded; if both are batched, both are folded."""
    t = fastattn.call.spec.Tensors(Q, K, V, mask=rand(2, 1, 4))
    u, dims = [None] * 3 + [rand(3, 2, 1, 4), None], [None] * 3 + [0, None]
    fold = vmap_fold.fold_of(3, t, [None] * len(t), Options(), dims)
    tensors, moves = fold.moving(t, [None] * len(t), u, dims)
    mask, mask_t = tensors[INDEX["mask"]], moves[3]
    assert fold.along == "items" and mask.shape == mask_t.shape == (3, 2, 1, 4)
    assert torch.equal(mask[2], t.mask) and torch.equal(mask_t, u[3])


@pytest.mark.parametrize("average", [False, True])
def test_examples_with_sinks_of_their_own_fold_along_heads(average):
    """V examples with sinks (H,) become one call with sinks (V H,): sinks belong to heads."""
    t = fastattn.call.spec.Tensors(Q, K, V, mask=rand(2, 1, 4), sinks=rand(3, 2))
    dims = [None] * len(t)
    dims[INDEX["sinks"]] = 0
    fold = vmap_fold.fold_of(3, t, dims, Options(average_heads=average))
    if average:  # a mean over heads would mix the examples
        assert fold is None
        return
    folded = fold.tensors(t, dims)
    assert fold.along == "heads" and folded.q.shape[1] == 6 and folded.k.shape[1] == 3
    assert folded.mask.shape == (1, 6, 1, 4) and torch.equal(folded.sinks, t.sinks.flatten())
    o = fold.options(Options(dropout_p=0.5))
    assert (o.items_again, o.heads_again) == (0, 2)
