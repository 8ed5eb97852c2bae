"""Batches of calls fold into one call; and transforms of packed batches, pages and modules."""

import warnings
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import fastattn
from fastattn.backends import base
from fastattn.call.spec import INDEX, Feature, Options
from fastattn.dispatch import functorch, vmap_fold
from tests.support.marks import parametrize
from tests.support.torch_calls import rand
from tests.torch_api.test_transforms import ABLE, EVERYTHING, QS, K, Q, U, V, close, verdict

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
    run = functorch.run_pass.run

    def counted(which, *given):
        if which.suffix == f"_{FOLDED[transform].lower()}":
            seen.append(1)
        return run(which, *given)

    monkeypatch.setattr(functorch.run_pass, "run", counted)
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


@parametrize("name", ABLE, fast=1)
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
        fastattn.dispatch.operation.forget_plans()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = jvp(lambda q: fastattn.attention(q, K, V, **EVERYTHING), (Q,), (U[0],))
        with pytest.raises(NotImplementedError, match="cpu: does not support tangents"):
            jvp(lambda q: fastattn.attention(q, K, V, backend="cpu"), (Q,), (U[0],))
    fastattn.dispatch.operation.forget_plans()
    exact = jvp(lambda q: fastattn.reference.attention(q, K, V, **EVERYTHING), (Q,), (U[0],))
    close(found, exact)


@parametrize("function", ["attention", "attention_weights", "attention_jvp"], fast=1)
def test_vmap_compiles_whole(function):
    run = {
        "attention": lambda q: fastattn.attention(q, K, V),
        "attention_weights": lambda q: fastattn.attention_weights(q, K),
        "attention_jvp": lambda q: fastattn.attention_jvp(q, K, V, q.cos(), U[1], None)[1],
    }[function]
    compiled = torch.compile(vmap(run), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(QS), vmap(run)(QS))
    if function != "attention_jvp":  # torch refuses its compiled second derivative
        given = [QS.clone().requires_grad_() for _ in range(2)]
        grads = [
            torch.autograd.grad(f(x).sin().sum(), x)[0]
            for f, x in zip((compiled, vmap(run)), given)
        ]
        torch.testing.assert_close(*grads)


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
    assert (o.dropout_batch_period, o.dropout_head_period) == (0, 2)
