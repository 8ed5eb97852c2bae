"""Gradients on the fast path: those of the general path, and where that runs instead."""

import contextlib
import gc

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn.backends.native import marshalling
from fastattn.dispatch import dispatcher
from tests.package.test_fast_path import (
    LAYOUTS,
    SHAPES,
    Dispatch,
    Mode,
    general,
    of,
    plain,
    pytestmark,  # noqa: F401
    ran,  # noqa: F401
    same,
    spied,
    tensors,
    torchs,
)
from tests.support.cases import DTYPES


@pytest.fixture
def ran_backward(monkeypatch):
    """A list to which each backward of a call that the fast path ran adds whether it ran that."""
    return spied(monkeypatch, dispatcher, "gradients")


def leaves(*given, which="qkv"):
    return [x.detach().requires_grad_(name in which) for name, x in zip("qkv", given)]


def graded(call, given, dout=None):
    out = call(*given)
    x = [x for x in given if x.requires_grad]
    dout = (
        torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
        if dout is None
        else dout
    )
    return out, *torch.autograd.grad(out, x, dout)


CALLS = {
    "plain": fastattn.attention,
    "causal": of("causal", "bottom_right"),
    "a mask": of("mask", lambda: torch.ones(4, 4).tril().bool()),
    "a window": of("window", (1, 1)),
    "lengths of 32 bits": of("key_lengths", lambda: torch.tensor([2], dtype=torch.int32)),
    "slopes": of("alibi_slopes", lambda: torch.rand(8)),
    "constant sinks": of("sinks", lambda: torch.randn(8)),
    "a softcap": of("softcap", 2.0),
    "dropout": lambda *x: fastattn.attention(*x, dropout_p=0.5, seed=torch.tensor([3])),
    "the LSE": lambda *x: fastattn.attention(*x, return_lse=True)[0],
    "torch's": torchs(...),
    "torch's, causal": torchs(..., is_causal=True),
    "torch's, a mask": torchs(..., attn_mask=torch.randn(4, 4)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_have_the_gradients_of_the_general_path(ran, ran_backward, name):  # noqa: F811
    for which in ("qkv", "q", "kv"):
        found = []
        for context in (contextlib.nullcontext, general):
            torch.manual_seed(0)
            with context():
                found.append(graded(CALLS[name], leaves(*plain(), which=which)))
        assert all(map(same, *found))
    assert ran == ran_backward == [True] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [x for x in SHAPES if not x.startswith("no ")])
def test_layouts_have_the_gradients_of_the_general_path(ran_backward, shape, dtype):
    for layout in LAYOUTS.values():
        given = leaves(*map(layout, tensors(*SHAPES[shape], dtype=DTYPES[dtype])))
        out = fastattn.attention(*given).detach()
        for dout in (torch.ones(1, dtype=out.dtype).expand(out.shape), out.mT.contiguous().mT):
            found = graded(fastattn.attention, given, dout)
            with general():
                assert all(map(same, found, graded(fastattn.attention, given, dout)))
    assert all(ran_backward) and ran_backward


def test_no_rows_or_keys_take_the_general_path(ran):  # noqa: F811
    for shape in ("no rows", "no keys", "no items"):
        out, *grads = graded(fastattn.attention, leaves(*tensors(*SHAPES[shape])))
        assert not out.any() and not any(x.any() for x in grads)
    assert ran == [False] * 3


def trained(name):
    def call(*x):
        shape = dict(mask=(4, 4), sinks=(8,))[name]
        return fastattn.attention(*x, **{name: torch.zeros(shape, requires_grad=True)})

    return call


GENERAL = {  # the forward pass, too
    "a mask that is trained": trained("mask"),
    "sinks that are trained": trained("sinks"),
    "drawn dropout": lambda *x: fastattn.attention(*x, dropout_p=0.5),
    "torch's of three dimensions": torchs(0),
}


@pytest.mark.parametrize("of_keys", [lambda x: x[:, :1], lambda x: x[:1]], ids=["head", "item"])
def test_one_head_or_item_of_keys_for_all(ran, of_keys):  # noqa: F811
    q, k, v = tensors(*[(2, 8, 4, 16)] * 3)
    given = leaves(q, of_keys(k), of_keys(v))
    found = graded(fastattn.scaled_dot_product_attention, given)
    expected = graded(F.scaled_dot_product_attention, given)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert ran == [of_keys(k).shape[1] == 1]


@pytest.mark.parametrize("name", GENERAL)
def test_other_calls_with_gradients_take_the_general_path(ran, name):  # noqa: F811
    given = leaves(*plain())
    GENERAL[name](*given).sum().backward()
    assert all(x.grad is not None for x in given) and ran == [False]


def under(context):
    def run(out, given, dout):
        with context():
            return torch.autograd.grad(out, given, dout)

    return run


def twice(out, given, dout):
    first = torch.autograd.grad(out, given, dout, retain_graph=True)
    second = torch.autograd.grad(out, given, dout)
    assert all(map(torch.equal, first, second))
    return second


def with_graph(out, given, dout):
    grads = torch.autograd.grad(out, given, dout, create_graph=True)
    assert all(x.requires_grad for x in grads)
    sum(x.sum() for x in grads).backward()
    return [x.detach() for x in grads]


def batched(out, given, dout):
    grads = torch.autograd.grad(out, given, torch.stack([dout, dout]), is_grads_batched=True)
    return [x[1] for x in grads]


def negated(out, given, dout):
    lazy = torch.complex(dout, -dout).conj().imag
    return torch.autograd.grad(out, given, lazy)


BACKWARDS = {  # and whether the fast path runs it
    "twice": (twice, [True, True]),
    "a graph of the gradients": (with_graph, [False, False]),
    "batched": (batched, [False]),
    "a negated gradient": (negated, [False]),
    "a mode, which sees torch.autograd.grad alone": (under(Mode), [True]),
    "a mode of operators": (under(Dispatch), [False]),
    "a profiler": (under(torch.autograd.profiler.profile), [False]),
    "forward mode": (under(forward_ad.dual_level), [False]),
    "autocast": (under(lambda: torch.autocast("cpu", dtype=torch.bfloat16)), [False]),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_backwards_that_others_see(ran_backward, name):
    run, fast = BACKWARDS[name]
    given = leaves(*plain())
    out = fastattn.attention(*given, causal=True)
    dout = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    found = run(out, given, dout)
    assert ran_backward == fast
    expected = F.scaled_dot_product_attention(*given, is_causal=True)
    for x, y in zip(found, torch.autograd.grad(expected, given, dout)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_losses_on_the_lse_take_the_general_path(ran_backward):
    given = leaves(*plain())
    out, lse = fastattn.attention(*given, return_lse=True)
    found = torch.autograd.grad(out.sum() + lse.sum(), given)
    assert ran_backward == [False]
    with general():
        out, lse = fastattn.attention(*given, return_lse=True)
        expected = torch.autograd.grad(out.sum() + lse.sum(), given)
    assert all(map(same, found, expected))
    _, lse = fastattn.attention(*given, return_lse=True)
    assert not any(x.isnan().any() for x in torch.autograd.grad(lse.sum(), given[:2]))
    assert ran_backward == [False, False]


def other_layout(x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("change", [torch.clone, other_layout, lambda x: x.double().float()])
def test_hooks_may_return_other_tensors(ran_backward, change):
    """Of the same layout: then the fast path reads them."""
    given = leaves(*plain())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, change):
        out = fastattn.attention(*given)
    found = torch.autograd.grad(out.sum(), given)
    assert ran_backward == [change is not other_layout]
    assert all(
        map(torch.equal, found, graded(fastattn.attention, given, torch.ones(out.shape))[1:])
    )


def test_a_hook_that_doubles_is_seen(ran_backward):
    given = leaves(*plain())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: 2 * x):
        out = fastattn.attention(*given)
    found = torch.autograd.grad(out.sum(), given)
    with general():
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: 2 * x):
            out = fastattn.attention(*given)
        assert all(map(torch.equal, found, torch.autograd.grad(out.sum(), given)))
    assert ran_backward == [True]


def test_a_tensor_that_changes_after_the_call_is_refused():
    given = leaves(*plain())
    out = fastattn.attention(*given)
    with torch.no_grad():
        given[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_checkpoint_computes_the_call_again(ran, ran_backward):  # noqa: F811
    given = leaves(*plain())
    out = checkpoint(fastattn.attention, *given, use_reentrant=False)
    found = torch.autograd.grad(out.sum(), given)
    assert ran == [True] and ran_backward == [True]  # the second call ends when it has saved
    assert all(
        map(torch.equal, found, graded(fastattn.attention, given, torch.ones(out.shape))[1:])
    )


def test_one_tensor_for_all_and_parameters(ran_backward):
    x = torch.nn.Parameter(plain()[0])
    found = graded(lambda x: fastattn.attention(x, x, x), [x])[1]
    expected = graded(lambda x: F.scaled_dot_product_attention(x, x, x), [x])[1]
    torch.testing.assert_close(found, expected)
    assert all(ran_backward)


def test_what_a_call_of_gradients_takes():
    """Autograd casts gradients itself, and drops unwanted ones: calls of it do not show these."""
    given = leaves(*plain(), which="kv")
    out = fastattn.attention(*given)
    *_, plan = out.grad_fn.call
    saved, dout = out.grad_fn.saved_tensors, torch.ones(out.shape)
    with torch.no_grad():
        nothing, *grads = marshalling.gradients(plan, saved, (dout, None))
        assert nothing is None and [x is None for x in grads] == [True, False, False]
        for wrong in (dout.double(), dout[:, :1], dout[0], None, 3):
            assert marshalling.gradients(plan, saved, (wrong, None)) is None
        for tensors in (saved[1:], (*saved, dout), (None, *saved[1:]), (dout[0], *saved[1:])):
            assert marshalling.gradients(plan, tensors, (dout, None)) is None
    assert marshalling.gradients(plan, saved, (dout, None)) is None  # it might be differentiated


@pytest.mark.slow
def test_a_plan_holds_no_tensors(ran_backward):
    given = leaves(*tensors(*[(1, 3, 11, 24)] * 3))
    graded(fastattn.attention, given)
    assert ran_backward == [True]
    ours = {id(x) for x in given}
    gc.collect()
    held = (x for x in gc.get_objects() if type(x) is tuple)
    held = [y for x in held for y in x if isinstance(y, torch.Tensor)]
    assert not [x for x in held if x.shape == (1, 3, 11, 24) and id(x) not in ours]


def test_the_node_is_named_as_on_the_general_path(ran):  # noqa: F811
    given = leaves(*plain())
    names = [fastattn.attention(*given).grad_fn.name()]
    with general():
        names.append(fastattn.attention(*given).grad_fn.name())
    assert names[0] == names[1] and ran == [True]
