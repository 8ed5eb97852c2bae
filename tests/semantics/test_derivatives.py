"""Forward mode and second derivatives of calls, against torch's derivatives of the oracle; vmap;
and `attention_jvp`, with the derivatives of its results."""

import inspect
import random
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from torch.func import jvp, vmap

import fastattn
from fastattn.call.spec import DIFFERENTIABLE
from tests.features import calls, factors
from tests.fuzz import parts
from tests.support.marks import parametrize
from tests.torch_api.test_transforms import ABLE, EVERYTHING, K, Q, U, V, X, close, leaves

pytestmark = pytest.mark.usefixtures("one_thread")
every_able = pytest.mark.parametrize("name", ABLE)
ROWS = factors.rows(
    "dense",
    **factors.IN_FLOAT64,
    **dict(M=(5, 1, 9), N=(7, 1, 18), D=(3, 1, 8), Dv=(3, 1, 5), B=(2, 1), heads=((2, 2), (3, 1))),
    **dict(row_invariant=(False,), way=("any",), grad=("all",), lse=("loss",)),
)


@every_able
@parametrize("row", ROWS, fast=40)
def test_derivatives(name, row):
    """Forward mode, and forward over reverse: those of torch through the oracle."""
    problem = calls.problem(row)
    given = problem.tensors() | dict(return_lse=True)
    parts.same_derivatives(random.Random(0), given, problem.needs_grad, name)


@parametrize("seed", range(100), fast=30)
def test_vmap(seed):
    """Over some of a call's tensors, of it and of its gradients."""
    parts.PARTS["vmapped"](random.Random(seed))


# ----------------------------------------------------------------------------------- attention_jvp


def oracle_jvp(q, k, v, q_t, k_t, v_t, *, mask_t=None, sinks_t=None, return_lse=False, **given):
    """`attention_jvp`, computed by torch's forward mode through the oracle."""
    given.pop("backend", None)
    moves = dict(q=q_t, k=k_t, v=v_t, mask=mask_t, sinks=sinks_t)
    tensors = dict(q=q, k=k, v=v, **{x: given.pop(x, None) for x in ("mask", "sinks")})
    moving = {x: tensors[x] for x, u in moves.items() if u is not None}

    def f(moving):
        out, lse = fastattn.reference.attention(**tensors | moving, **given, return_lse=True)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    (out, lse), (out_t, lse_t) = jvp(f, (moving,), ({x: moves[x] for x in moving},))
    return (out, lse, out_t, lse_t) if return_lse else (out, out_t)


def moving():
    """Arguments of attention_jvp with a tangent for every tensor."""
    mask, sinks = V.new_ones(2, 1, 4).cumsum(-1), V.new_ones(2)
    beside = dict(mask=mask, sinks=sinks, mask_t=mask.cos(), sinks_t=sinks.sin(), **EVERYTHING)
    return (*X, *U), beside


@every_able
@pytest.mark.parametrize("still", [(), (0,), (1, 2), (0, 1, 2)], ids=str)
def test_attention_jvp_and_its_derivatives(name, still):
    """For out, LSE and their tangents, by tensors and tangents; None is a zero tangent."""
    tensors, beside = moving()
    tensors = [None if at - 3 in still else x for at, x in enumerate(tensors)]
    names = "mask", "sinks", "mask_t", "sinks_t"

    def loss(f, given):
        given = list(given)
        call = [None if x is None else given.pop(0) for x in tensors]
        found = f(*call, **beside | dict(zip(names, given)), return_lse=True, backend=name)
        return sum(x.sin().sum() * (at + 1) for at, x in enumerate(found)), found

    given = [x for x in (*tensors, *(beside[name] for name in names)) if x is not None]
    given = [x.clone().requires_grad_() for x in given]
    (found, results), (exact, wanted) = (
        loss(f, given) for f in (fastattn.attention_jvp, oracle_jvp)
    )
    close(results, wanted)
    close(torch.autograd.grad(found, given), torch.autograd.grad(exact, given))


@every_able
def test_attention_jvp_is_what_forward_mode_gives(name):
    tensors, beside = moving()
    moves = [beside.pop(x) for x in ("mask_t", "sinks_t")]
    own = [beside.pop(x) for x in ("mask", "sinks")]

    def f(q, k, v, mask, sinks):
        given = dict(beside, mask=mask, sinks=sinks, return_lse=True, backend=name)
        return fastattn.attention(q, k, v, **given)

    given = dict(zip(("mask", "sinks", "mask_t", "sinks_t"), own + moves))
    found = fastattn.attention_jvp(*tensors, **beside, **given, return_lse=True, backend=name)
    outs, tangents = jvp(f, (*X, *own), (*U, *moves))
    assert all(torch.equal(a, b) for a, b in zip(found, (*outs, *tangents)))


@every_able
@pytest.mark.parametrize("empty", ["mask", "lengths", "window"])
def test_a_row_without_visible_keys_is_constant(name, empty):
    hidden = dict(
        mask=dict(mask=torch.tensor([[True], [False], [True]])),
        lengths=dict(key_lengths=torch.tensor([0])),
        window=dict(causal="bottom_right", place=fastattn.Place(keys=4, rows=9)),
    )[empty]
    _, lse, out_t, lse_t = fastattn.attention_jvp(*X, *U, **hidden, return_lse=True, backend=name)
    dead = lse == -torch.inf
    assert dead.any() and (out_t[dead] == 0).all() and (lse_t[dead] == 0).all()
    assert out_t.isfinite().all() and lse_t.isfinite().all()


@parametrize("compiler", ["eager", "aot_eager", "inductor"], fast=1)
def test_attention_jvp_compiles_whole_and_is_differentiable(compiler):
    def f(*tensors):
        found = fastattn.attention_jvp(*tensors, softcap=2.0, causal=True, backend="reference")
        return found[0] * 2, found[1].sin()

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend=compiler)
    given = [x.clone().requires_grad_() for x in (*X, *U)]
    found, exact = compiled(*given), f(*given)
    close(found, exact)
    close(*(torch.autograd.grad(sum(x.sum() for x in y), given) for y in (found, exact)))
    close(compiled(Q, K, V, None, U[1], None), f(Q, K, V, None, U[1], None))


@pytest.mark.slow
def test_attention_jvp_compiles_once_for_every_size():
    def f(*tensors):
        return fastattn.attention_jvp(*tensors, causal=True, return_lse=True)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for B, M, N in ((5, 11, 13), (7, 9, 17), (10, 12, 15)):
        x = [torch.randn(B, 2, n, 6, requires_grad=True) for n in (M, N, N) * 2]
        found, exact = compiled(*x), f(*x)
        torch.testing.assert_close(found, exact)
        grads = (torch.autograd.grad(sum(y.sum() for y in z), x) for z in (found, exact))
        torch.testing.assert_close(*grads)
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1] > 0


def test_attention_jvp_maps():
    def f(q, u):
        return fastattn.attention_jvp(q, K, V, u, None, U[2], backend="reference")

    qs, us = torch.stack([Q, Q.sin()]), torch.stack([Q.cos(), Q])
    close(vmap(f)(qs, us), [torch.stack(x) for x in zip(*map(f, qs, us))])


def test_attention_jvp_under_autocast():
    tensors = [x.float() for x in (*X, *U)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, out_t = fastattn.attention_jvp(*tensors, backend="reference")
    assert out.dtype == out_t.dtype == torch.bfloat16
    _, exact = fastattn.attention_jvp(*tensors, backend="reference")
    torch.testing.assert_close(out_t.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (dict(q_t=Q[..., :1]), r"q_t.shape: got \(1, 2, 3, 1\), expected \(1, 2, 3, 2\), as q has"),
        (dict(k_t=K.float()), r"k_t.dtype: got torch.float32, expected torch.float64, as k has"),
        (dict(v_t=1.0), "v_t: got float, expected a torch.Tensor or None"),
        (dict(mask_t=V), "mask_t: got a tensor, expected None, because mask is None"),
        (
            dict(mask=torch.ones(3, 4) > 0, mask_t=V),
            "mask_t: got a tensor, expected None, because mask is no floating tensor",
        ),
        (dict(sink_t=V), r"attention_jvp\(\) .*sink_t"),
    ],
)
def test_tangents_that_do_not_fit(given, why):
    tangents = {x: given.pop(x, None) for x in ("q_t", "k_t", "v_t")}
    with pytest.raises((ValueError, TypeError), match=why):
        fastattn.attention_jvp(*X, **tangents, **given)


@pytest.mark.parametrize("what", ["array", "jagged", "k", "mask"])
def test_attention_jvp_raises_the_errors_of_attention(what):
    jagged = torch.nested.nested_tensor([Q[0], Q[0]], layout=torch.jagged)
    q, k = {"array": (Q.numpy(), K), "jagged": (jagged, K), "k": (Q, None)}.get(what, (Q, K))
    beside = dict(mask="all") if what == "mask" else {}
    with pytest.raises((ValueError, TypeError)) as theirs:
        fastattn.attention(q, k, V, **beside)
    with pytest.raises(type(theirs.value)) as ours:
        fastattn.attention_jvp(q, k, V, None, K, None, mask_t=V if beside else None, **beside)
    assert str(ours.value) == str(theirs.value)


def test_an_operator_refuses_a_tangent_of_another_shape():
    from fastattn import api

    t, o = api.prepare(*X, {})
    none = (None,) * (len(DIFFERENTIABLE) - 1)
    with pytest.raises(ValueError, match=r"q_t.shape: got \(1, 1, 1, 2\), expected \(1, 2, 3, 2\)"):
        torch.ops.fastattn.attention_jvp(Q[:1, :1, :1], *none, None, None, *t, *o)


@pytest.mark.parametrize("name", ABLE)
def test_tangents_of_absent_sinks_are_ignored(name):
    sinks = torch.tensor([-torch.inf, 0.5], dtype=torch.float64)
    moves = torch.tensor([torch.inf, 0.3], dtype=torch.float64)
    call = partial(fastattn.attention_jvp, *X, None, None, None, sinks=sinks, backend=name)
    _, out_t = call(sinks_t=moves)
    _, exact = call(sinks_t=moves.masked_fill(moves == torch.inf, 0))
    assert torch.equal(out_t, exact) and exact.abs().max() > 0
    s = sinks.clone().requires_grad_()
    (found,) = torch.autograd.grad(
        fastattn.attention_jvp(Q, K, V, U[0], None, None, sinks=s, backend=name)[1].sum(), s
    )
    assert found.isfinite().all()


def test_attention_jvp_has_the_arguments_of_attention():
    own = inspect.signature(fastattn.attention_jvp).parameters
    assert set(inspect.signature(fastattn.attention).parameters) < set(own)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck of torch 2.14
def test_the_operators_of_tangents_keep_torchs_rules():
    def given(x):
        return [y.detach().requires_grad_() for y in x]

    _, beside = moving()
    from fastattn import api

    t, o = api.prepare(*given(X), dict(mask=beside["mask"], backend="reference"))
    moves = (*given(U), *(None,) * (len(DIFFERENTIABLE) - 3))
    check = torch.library.opcheck
    check(torch.ops.fastattn.attention_jvp.default, (*moves, None, None, *t, *o))
    outs = fastattn.attention_jvp(*X, *U, mask=t.mask, return_lse=True, backend="reference")
    out, lse, out_t, lse_t = (x.detach() for x in outs)
    normaliser = torch.stack([lse, torch.zeros_like(lse)])
    check(torch.ops.fastattn.attention_jvp.default, (*moves, out, normaliser, *t, *o))
    # Inputs without a derivative must not be leaves.
    t = fastattn.call.spec.Tensors(*(None if x is None else x.detach() for x in t))
    grads = out.cos(), lse.cos(), out.sin().requires_grad_(), None
    rest = (out, normaliser, out_t, lse_t, *grads, *t, *o, ["q", "mask"])
    check(torch.ops.fastattn.attention_second.default, (*moves, *rest))


def test_modes_see_the_passes():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        given = leaves()
        loss = fastattn.attention(*given, backend="reference").pow(3).sum()
        grads = torch.autograd.grad(loss, given, create_graph=True)
        torch.autograd.grad(sum(x.sin().sum() for x in grads), given)
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    scores, D, Dv = 2 * 2 * 3 * 4, 2, 3
    assert counts["fastattn.attention_jvp"] == scores * (3 * D + 2 * Dv)
    assert counts["fastattn.attention_second"] == scores * (7 * D + 3 * Dv)
