"""Dispatch of a call: observers, handlers of tensor classes, and options converted to arguments."""

import pytest
import torch

import fastattn
from fastattn import api
from fastattn.call.spec import Place
from fastattn.dispatch import dispatcher


def tensors():
    return [torch.randn(1, 2, n, 8) for n in (3, 5, 5)]


# -- observers -------------------------------------------------------------------------------------


def test_an_observer_sees_every_call_and_gives_its_result():
    q, k, v = tensors()
    seen = []

    def observe(run, op, t, o):
        seen.append((op.name, t.q is q, o.causal))
        return run(op, t, o)

    expected = fastattn.attention(q, k, v, causal=True)
    with dispatcher.observed(observe):
        found = fastattn.attention(q, k, v, causal=True)
        fastattn.attention_weights(q, k)
        fastattn.scaled_dot_product_attention(q, k, v)
    fastattn.attention(q, k, v)
    plain = ("attention", True, "")  # weights need the LSE, from an extra pass
    assert seen == [("attention", True, "top_left"), plain, ("weights", True, ""), plain]
    assert torch.equal(found, expected)


def test_an_observer_may_call_inside():
    """`run` is not observed again; other calls are."""
    q, k, v = tensors()
    depth = [0]

    def observe(run, op, t, o):
        depth[0] += 1
        if depth[0] < 3:
            fastattn.attention(q, k, v)
        return run(op, t, o)

    with dispatcher.observed(observe):
        fastattn.attention(q, k, v)
    assert depth == [3]


def test_the_inner_observer_is_removed_after_its_block():
    q, k, v = tensors()
    seen = []

    def observer(name):
        def observe(run, *call):
            seen.append(name)
            return run(*call)

        return observe

    with dispatcher.observed(observer("outer")):
        with pytest.raises(KeyError), dispatcher.observed(observer("inner")):
            fastattn.attention(q, k, v)
            raise KeyError
        fastattn.attention(q, k, v)
    fastattn.attention(q, k, v)
    assert seen == ["inner", "outer"]


def test_gradients_of_an_observed_call():
    leaves = [x.requires_grad_() for x in tensors()]
    expected = torch.autograd.grad(fastattn.attention(*leaves).sum(), leaves)
    with dispatcher.observed(lambda run, *call: run(*call)):
        found = torch.autograd.grad(fastattn.attention(*leaves).sum(), leaves)
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


# -- handlers --------------------------------------------------------------------------------------


class Marked(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.mark.parametrize("at", range(3))
def test_a_handler_computes_calls_with_a_tensor_of_its_class(monkeypatch, at):
    given, seen = tensors(), []

    def handler(op, t, o):
        seen.append(type(t[at]).__name__)
        return dispatcher.call(
            op, t._replace(**{t._fields[at]: t[at].as_subclass(torch.Tensor)}), o
        )

    monkeypatch.setitem(dispatcher.HANDLERS, "Marked", handler)
    expected = fastattn.attention(*given)
    given[at] = given[at].as_subclass(Marked)
    assert torch.equal(fastattn.attention(*given), expected)
    assert seen == ["Marked"]


def test_forward_mode_refuses_tensors_with_a_handler(monkeypatch):
    q, k, v = tensors()
    monkeypatch.setitem(dispatcher.HANDLERS, "Marked", dispatcher.call)
    with pytest.raises(NotImplementedError, match="attention_jvp: got Markeds, expected plain"):
        fastattn.attention_jvp(q, k, v, q.as_subclass(Marked), None, None)


# -- options converted back to arguments -----------------------------------------------------------

SCALARS = {
    "nothing": {},
    "bottom right": dict(causal="bottom_right"),
    "dropout": dict(dropout_p=0.5, seed=3),
    "row_invariant": dict(row_invariant=True),
    "backend": dict(backend="reference"),
    "place": dict(place=Place(1, 2, 3, 4, 50, 60, True)),
    "everything": dict(
        causal="bottom_right", window=(1, 2), softcap=1.0, scale=2.0, place=Place(1, 2, 3, 4)
    ),
}


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_of_options_give_these_options(name):
    given = tensors()
    _, o = api.prepare(*given, SCALARS[name])
    seed = {x: y for x, y in SCALARS[name].items() if x == "seed"}
    assert api.prepare(*given, api.scalars_of(o) | seed)[1] == o
