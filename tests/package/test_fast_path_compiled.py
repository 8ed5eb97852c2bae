"""The fast path in code that inductor generates: the results of the operators, in one call each."""

import pytest
import torch
from torch.nn import functional as F

import fastattn
from fastattn.call.spec import Options, Tensors
from fastattn.dispatch import fast_path
from fastattn.dispatch.operation import ATTENTION, BACKWARD, FORWARD
from fastattn.dispatch.run_pass import arguments
from tests.package.test_fast_path import (
    LAYOUTS,
    SHAPES,
    Dispatch,
    Mode,
    plain,
    pytestmark,  # noqa: F401
    ran,  # noqa: F401
    same,
    spied,
    tensors,
)
from tests.support.cases import DTYPES


@pytest.fixture
def ran_backward(monkeypatch):
    """A list to which each backward adds whether the fast path ran it."""
    return spied(monkeypatch, fast_path, "differentiate")


def operator(which):
    return ATTENTION.operator(which.suffix).default


@torch.no_grad()
def both_ways(t, o, wants=("q", "k", "v"), dnormaliser=None):
    """The results and the gradients by `direct`, then by the operators."""
    given = arguments(FORWARD, t, o)
    out, normaliser = operator(FORWARD)(*given)
    dout = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    groups = (dout, dnormaliser), (out, normaliser)
    backward = arguments(BACKWARD, t, o, groups, wants)
    found = *operator(FORWARD).direct(*given), *operator(BACKWARD).direct(*backward)
    return found, (*operator(FORWARD)(*given), *operator(BACKWARD)(*backward))


OPTIONS = {
    "plain": {},
    "causal": dict(causal="bottom_right"),
    "a window": dict(left=1, right=1),
    "a softcap and a scale": dict(softcap=2.0, scale=0.3),
    "laid out as rows": dict(out_order="BHM", grad_order="BHM"),
    "a place": dict(at_row=3, at_key=1, rows=9, keys=9),
}
BESIDE = {
    "a mask": dict(mask=torch.ones(4, 4).tril().bool()),
    "a float mask": dict(mask=torch.linspace(-1, 1, 4)),
    "lengths of 32 bits": dict(key_lengths=torch.tensor([2], dtype=torch.int32)),
    "slopes and sinks": dict(alibi_slopes=torch.full((8,), 0.5), sinks=torch.zeros(8)),
}


@pytest.mark.parametrize("name", [*OPTIONS, *BESIDE, "dropout"])
def test_calls_have_the_bits_and_strides_of_the_operators(ran, ran_backward, name):  # noqa: F811
    drops = dict(seed=torch.tensor([3])) if name == "dropout" else {}
    t = Tensors(*plain(), **BESIDE.get(name, {}), **drops)
    o = Options(grad=True, **OPTIONS.get(name, {}), dropout_p=0.5 * bool(drops))
    for wants in ("q", "k", "v"), ("v", "q"):
        assert all(map(same, *both_ways(t, o, wants)))
    assert ran == ran_backward == [True] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [x for x in SHAPES if not x.startswith("no ")])
def test_layouts_have_the_bits_and_strides_of_the_operators(ran, ran_backward, shape, dtype):  # noqa: F811
    for layout in LAYOUTS.values():
        t = Tensors(*map(layout, tensors(*SHAPES[shape], dtype=DTYPES[dtype])))
        assert all(map(same, *both_ways(t, Options(grad=True))))
    assert all(ran) and all(ran_backward) and ran_backward


def test_no_rows_or_keys(ran, ran_backward):  # noqa: F811
    for shape in ("no rows", "no keys", "no items"):
        t = Tensors(*tensors(*SHAPES[shape]))
        assert all(map(same, *both_ways(t, Options(grad=True))))
    assert ran == [True] * 3 and ran_backward == [False] * 3


def test_other_gradients_are_the_operators(ran_backward):
    t, o = Tensors(*plain(), mask=torch.randn(4, 4)), Options(grad=True)
    for given in (dict(wants=("q", "mask")), dict(dnormaliser=torch.ones(2, 1, 8, 4))):
        assert all(map(same, *both_ways(t, o, **given)))
    assert ran_backward == [False]  # the first asks for a mask's gradient


def test_calls_that_autograd_records_are_the_operators(ran, ran_backward):  # noqa: F811
    q, k, v = (x.requires_grad_() for x in plain())
    given = arguments(FORWARD, Tensors(q, k, v), Options(grad=True))
    out, normaliser = operator(FORWARD).direct(*given)
    found = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    expected = torch.autograd.grad(operator(FORWARD)(*given)[0].sum(), (q, k, v))
    assert all(map(same, found, expected)) and ran == [True]
    dout = torch.ones_like(out).requires_grad_()
    groups = (dout, None), (out.detach(), normaliser.detach())
    grads = operator(BACKWARD).direct(
        *arguments(BACKWARD, Tensors(q, k, v), Options(grad=True), groups, ["q"])
    )
    assert grads[0].requires_grad and ran_backward == [False]


@pytest.mark.parametrize("context", [Mode, Dispatch, torch.autograd.profiler.profile])
def test_what_sees_operators_sees_these(context, ran, ran_backward):  # noqa: F811
    t = Tensors(*plain())
    with context():
        found, expected = both_ways(t, Options(grad=True))
    assert all(map(same, found, expected))
    assert not any(ran) and not any(ran_backward)


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    with torch._inductor.utils.fresh_inductor_cache():
        yield lambda call, **how: torch.compile(call, fullgraph=True, **how)
    torch._dynamo.reset()


def graded(call, given):
    leaves = [x.detach().requires_grad_() for x in given]
    out = call(*leaves)
    return out, *torch.autograd.grad(out.sin().sum(), leaves)


CALLS = {
    "attention": lambda q, k, v: fastattn.attention(q * 1.5, k, v, causal=True),
    "torch's": lambda q, k, v: fastattn.scaled_dot_product_attention(q * 1.5, k, v),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_inductors_code_takes_it(name, compiled, ran, ran_backward):  # noqa: F811
    """From the second call on: torch runs the first in a mode."""
    call = CALLS[name]
    fast = compiled(call)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(*plain()), call(*plain()))
    assert ran[1:] == [True] * 3
    for _ in range(2):
        torch.testing.assert_close(graded(fast, plain()), graded(call, plain()))
    assert ran[-2:] == [True] * 2 and ran_backward[-1:] == [True]


@pytest.mark.slow
def test_inductors_code_of_any_size_takes_it(compiled, ran):  # noqa: F811
    fast = compiled(CALLS["attention"], dynamic=True)
    for n in (4, 6, 9):
        given = plain(n, n)
        torch.testing.assert_close(fast(*given), CALLS["attention"](*given))
    assert ran[1:] == [True] * 5


@pytest.mark.slow
def test_inductors_code_lowers_functions_in_each_call(compiled):
    factors = torch.ones(4)

    def call(q, k, v):
        return fastattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * factors[i])

    fast, given = compiled(call), plain()
    for _ in range(2):
        torch.testing.assert_close(fast(*given), call(*given))
        factors *= 2


MOST = {fastattn.attention: 110, fastattn.scaled_dot_product_attention: 150}


@pytest.mark.parametrize("call", MOST, ids=lambda x: x.__name__)
def test_compiled_code_checks_few_globals(call):
    """It makes each check before each call, in 70 ns."""
    found = []

    def count(guards):
        found.append(len(guards))
        return [True] * len(guards)

    torch._dynamo.reset()
    how = dict(backend="eager", options={"guard_filter_fn": count})
    compiled = torch.compile(lambda q, k, v: call(q, k, v), **how)
    torch.testing.assert_close(compiled(*plain()), F.scaled_dot_product_attention(*plain()))
    assert found and max(found) <= MOST[call]
