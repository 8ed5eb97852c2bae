"""The fast path: the calls that it takes have the results of the general path, and no other calls
take it."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import fastattn
from fastattn import api
from fastattn.backends.native import libraries, marshalling
from fastattn.dispatch import fast_path
from fastattn.dispatch.dispatcher import observed
from tests.support.backends import INTERPRETED
from tests.support.cases import DTYPES

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="about the native library"),
    pytest.mark.skipif(
        not hasattr(marshalling.extension, "attend"),
        reason=f"no extension: {libraries.extension_unavailable()}",
    ),
]


class Subclass(torch.Tensor):
    pass


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.fixture
def ran(monkeypatch):
    """A list to which each call adds whether the fast path ran it."""
    found = []

    def attend(*args):
        out = marshalling.attend(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(fast_path, "attend", attend)
    return found


@contextlib.contextmanager
def general():
    """In the block all calls take the general path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_path, "attend", lambda *args: None)
        yield


def tensors(*shapes, dtype=torch.float32):
    made = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=made).to(dtype) for shape in shapes]


def plain(m=4, n=4, dtype=torch.float32):
    return tensors((1, 8, m, 16), (1, 8, n, 16), (1, 8, n, 16), dtype=dtype)


def same(x, y):
    return x.equal(y) and x.stride() == y.stride() and x.dtype == y.dtype


# ------------------------------------------------------------------------- the calls that it takes

SHAPES = {
    "one row": ((1, 8, 1, 16),) * 3,
    "few rows": ((1, 8, 4, 16),) * 3,
    "one row on many keys": ((2, 4, 1, 8), (2, 4, 700, 8), (2, 4, 700, 8)),
    "many rows": ((1, 2, 300, 32),) * 3,
    "grouped heads": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
    "another head dim of values": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    "no rows": ((2, 4, 0, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "no keys": ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 8)),
    "no items": ((0, 4, 5, 8),) * 3,
}
LAYOUTS = {
    "contiguous": lambda x: x,
    "rows first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other": lambda x: torch.cat([x, x], -1)[..., ::2],
    "at an offset": lambda x: torch.cat([x, x], 2)[:, :, x.shape[2] :],
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "columns first": lambda x: x.mT.contiguous().mT,
}


CALLS = {  # a call, the name of its causal argument, and what it gets with it
    "attention": (fastattn.attention, "causal", (True, "bottom_right")),
    "torch's": (fastattn.scaled_dot_product_attention, "is_causal", (True,)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_have_the_bits_and_strides_of_the_general_path(ran, shape, dtype, name):
    call, causal, alignments = CALLS[name]
    for layout in LAYOUTS.values():
        q, k, v = map(layout, tensors(*SHAPES[shape], dtype=DTYPES[dtype]))
        if name == "torch's":
            k, v = (x.repeat_interleave(q.shape[1] // max(x.shape[1], 1), 1) for x in (k, v))
        for given in ({}, {"scale": 0.3}, *({causal: x} for x in alignments)):
            found = call(q, k, v, **given)
            with general():
                assert same(found, call(q, k, v, **given))
    takes = name == "attention" or shape != "another head dim of values"
    assert ran == [takes] * len(ran) and ran


def test_settings_of_torch_act_as_on_the_general_path(ran):
    q, k, v = plain()
    expected = fastattn.attention(q, k, v)
    with torch.inference_mode():
        found = fastattn.attention(q, k, v)
        assert found.is_inference() and found.equal(expected)
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory
    try:
        assert fastattn.attention(q, k, v).equal(expected)
    finally:
        torch.use_deterministic_algorithms(False)
    leaf = torch.nn.Parameter(q)
    with torch.no_grad():
        found = fastattn.attention(leaf, k, v)
    assert type(found) is torch.Tensor and not found.requires_grad
    assert ran == [True] * 4


def test_a_patched_function_of_torch_takes_it(ran):
    q, k, v = plain(64, 512)
    with fastattn.sdpa():
        F.scaled_dot_product_attention(q, k, v)
        fastattn.attention(q, k, v)
    assert ran == [True, True]


# --------------------------------------------------------------------- the calls that it does not


def under(context, call=fastattn.attention):
    def run(*args, **given):
        with context():
            return call(*args, **given)

    return run


def in_vmap(q, k, v):
    return torch.func.vmap(lambda x: fastattn.attention(x, k, v))(q[None])[0]


def traced(q, k, v):
    return torch.jit.trace(fastattn.attention, (q, k, v), check_trace=False)(q, k, v)


def with_a_gradient(at):
    def run(*args):
        leaf = args[at].clone().requires_grad_()
        return fastattn.attention(*args[:at], leaf, *args[at + 1 :])

    return run


def negated(at):
    def run(*args):
        lazy = torch.complex(args[at], -args[at]).conj().imag
        return fastattn.attention(*args[:at], lazy, *args[at + 1 :])

    return run


def without_flash():
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


OTHERS = {
    "a mode of functions": under(Mode),
    "a mode of operators": under(Dispatch),
    "a default device": under(lambda: torch.device("cpu")),
    "a profiler": under(torch.autograd.profiler.profile),
    "an observer": under(lambda: observed(lambda run, *call: run(*call))),
    "forward mode": under(forward_ad.dual_level),
    "vmap": in_vmap,
    "torch.jit.trace": traced,
    "no flash kernel": under(without_flash, fastattn.scaled_dot_product_attention),
    "a gradient of q": with_a_gradient(0),
    "a gradient of k": with_a_gradient(1),
    "a gradient of v": with_a_gradient(2),
    "a subclass": lambda q, k, v: fastattn.attention(q, k.as_subclass(Subclass), v),
    "a negated q": negated(0),
    "a negated k": negated(1),
    "a negated v": negated(2),
    "a backend": lambda *x: fastattn.attention(*x, backend="cpu"),
    "a mask": lambda *x: fastattn.attention(*x, mask=torch.zeros(4, 4)),
    "a window": lambda *x: fastattn.attention(*x, window=(None, None)),
    "the LSE": lambda *x: fastattn.attention(*x, return_lse=True)[0],
    "a scale of another type": lambda *x: fastattn.attention(*x, scale=1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_take_the_general_path(ran, name):
    q, k, v = plain()
    found = OTHERS[name](q, k, v)
    assert not any(ran[:1])  # a mode's handler calls the function again, without the mode
    scale = 1.0 if "scale" in name else None
    expected = F.scaled_dot_product_attention(q, k, v, scale=scale)
    torch.testing.assert_close(found.detach().as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize(
    "call", (fastattn.attention, fastattn.scaled_dot_product_attention), ids=lambda x: x.__name__
)
def test_a_mode_sees_the_call_and_nothing_else(ran, call):
    """The path reads nothing of tensors, not even requires_grad, while a mode is active."""
    seen = []

    class Recording(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    given = plain()
    with Recording():
        call(*given)
    fast, seen[:] = list(seen), []
    with general(), Recording():
        call(*given)
    assert fast == seen and len(seen) == 1


def test_a_call_with_a_parameter_leaves_its_path_to_tensors(ran):
    """One plan is for both: the first call decides nothing about the other type."""
    q, k, v = (torch.randn(1, 3, 5, 24) for _ in range(3))
    with torch.no_grad():
        for first in (torch.nn.Parameter(q), q):
            fastattn.scaled_dot_product_attention(first, k, v)
    assert ran == [True, True]


def test_autocast_takes_the_general_path(ran):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fastattn.attention(*plain()).dtype == torch.bfloat16
        assert fastattn.scaled_dot_product_attention(*plain()).dtype == torch.bfloat16
    assert ran == [False, False]


def test_tensors_without_memory_take_the_general_path(ran):
    q, k, v = plain()
    assert fastattn.attention(*(x.to("meta") for x in (q, k, v))).is_meta
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert type(fastattn.attention(*fake)) is torch._subclasses.FakeTensor
    assert ran == [False, False]


def test_calls_inside_context_parallel_are_refused(ran, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args: None)
    inside = True
    states = *fast_path._GLOBALS[:-1], lambda: inside
    made = *api._FAST[:2], states, *api._FAST[3:]
    assert marshalling.attend(made, *plain(), {}) is None
    inside = False
    assert marshalling.attend(made, *plain(), {}) is not None


def test_compiled_code_has_no_fast_path(ran):
    q, k, v = plain()
    for call in (fastattn.attention, fastattn.scaled_dot_product_attention):
        compiled = torch.compile(lambda q, k, v, call=call: call(q, k, v), backend="eager")
        torch.testing.assert_close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert ran == []


WRONG = {
    **{f"{x} of rank {n}": (x, lambda t, n=n: t[(0,) * (4 - n)]) for x in "qkv" for n in range(4)},
    **{f"{x} of rank 5": (x, lambda t: t[None]) for x in "qkv"},
    **{f"{x} of float64": (x, lambda t: t.double()) for x in "qkv"},
    **{f"{x} of int64": (x, lambda t: t.long()) for x in "qkv"},
    **{f"{x} complex": (x, lambda t: t.to(torch.complex64)) for x in "qkv"},
    **{f"{x} on meta": (x, lambda t: t.to("meta")) for x in "qkv"},
    **{f"{x} sparse": (x, lambda t: t.to_sparse()) for x in "qkv"},
    **{f"{x} no tensor": (x, lambda t: t.tolist()) for x in "qkv"},
    **{f"{x} None": (x, lambda t: None) for x in "qkv"},
    **{f"{x} with other columns": (x, lambda t: t[..., :5]) for x in "qk"},
    **{f"{x} with other rows": (x, lambda t: t[:, :, :3]) for x in "kv"},
    **{f"{x} with other heads": (x, lambda t: t[:, :3]) for x in "qkv"},
    **{f"{x} with other items": (x, lambda t: t.expand(2, -1, -1, -1)) for x in "qkv"},
    "causal": ("causal", lambda t: "left"),
    "causal 1": ("causal", lambda t: 1),
    "scale": ("scale", lambda t: "1"),
    "scale True": ("scale", lambda t: True),
    "scale nan": ("scale", lambda t: float("nan")),
    "unknown": ("nonsense", lambda t: 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_those_of_the_general_path(name):
    """Of every call twice, because the second might have a plan; and results of calls that are
    right, such as torch's function has of other ranks."""
    at, change = WRONG[name]
    for call, causal in (
        (fastattn.attention, "causal"),
        (fastattn.scaled_dot_product_attention, "is_causal"),
    ):
        given = dict(zip("qkv", plain()))
        given[causal if at == "causal" else at] = change(given.get(at))
        args = [given.pop(x) for x in "qkv"]
        found = [outcome(call, args, given) for _ in range(2)]
        with general():
            expected = outcome(call, args, given)
        assert found == [expected] * 2


def outcome(call, args, given):
    try:
        out = call(*args, **given)
    except Exception as error:
        return type(error), str(error)
    return out.tolist() if out.device.type == "cpu" else out.shape, out.stride(), out.dtype


@pytest.mark.parametrize(
    "wrong", [dict(causal=1), dict(return_lse=0), dict(row_invariant=0)], ids=str
)
def test_a_warm_path_takes_no_number_for_a_bool(wrong, ran):
    """1 equals True, and 0 False: a plan of the call with bools must not serve it."""
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    for causal in (True, False):
        fastattn.attention(q, k, v, causal=causal)
    assert ran == [True, True]
    with pytest.raises((TypeError, ValueError), match=r"got [01].*, expected"):
        fastattn.attention(q, k, v, **wrong)
