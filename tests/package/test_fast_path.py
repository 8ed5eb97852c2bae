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


def spied(monkeypatch, module, name):
    """A list to which each call of a function of the extension, which `module` imported, adds
    whether the fast path ran it."""
    found = []

    def function(*args):
        result = getattr(marshalling, name)(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(module, name, function)
    return found


@pytest.fixture
def ran(monkeypatch):
    """A list to which each call adds whether the fast path ran it."""
    return spied(monkeypatch, fast_path, "attend")


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
    assert all(ran) and ran


def masks():
    return torch.tensor([[True, False, True, True]] * 4), torch.randn(2, 1, 1, 4)


def in_pages(*x, **given):
    q, k, v = x[0].transpose(1, 2).flatten(0, 1), *(y.transpose(1, 2) for y in x[1:])
    pages = torch.tensor([[1], [0]])
    where = dict(block_table=pages, key_lengths=torch.tensor([3, 4]), max_q=5)
    return fastattn.attention_packed(q, k, v, torch.tensor([0, 3, 8]), **where | given)


def packed(*x, dtype=torch.int64, **given):
    rows = (y.transpose(1, 2).flatten(0, 1) for y in x)
    cu = torch.tensor([0, 3, 8], dtype=dtype)
    return fastattn.attention_packed(*rows, cu, cu, max_q=5, max_k=5, **given)


def of(name, value):
    return lambda *x: fastattn.attention(*x, **{name: value() if callable(value) else value})


def torchs(*where, **given):
    """torch's function of tensors without their first dimensions."""
    return lambda *x: fastattn.scaled_dot_product_attention(*(y[where] for y in x), **given)


TAKEN = {  # on q, k, v (2, 8, 4, 16)
    "a mask": of("mask", lambda: masks()[0]),
    "a float mask": of("mask", lambda: masks()[1]),
    "a mask of no row": of("mask", lambda: torch.zeros(2, 8, 4, 4, dtype=torch.bool)),
    "a window": of("window", (1, None)),
    "another window": of("window", (0, 1)),
    "lengths": of("key_lengths", lambda: torch.tensor([3, 0])),
    "lengths of 32 bits": of("key_lengths", lambda: torch.tensor([3, 0], dtype=torch.int32)),
    "slopes": of("alibi_slopes", lambda: torch.rand(8)),
    "slopes of items": of("alibi_slopes", lambda: torch.rand(2, 8)),
    "sinks": of("sinks", lambda: torch.randn(8)),
    "a softcap": of("softcap", 2.0),
    "a backend": of("backend", "cpu"),
    "invariant rows": of("row_invariant", True),
    "no dropout": of("dropout_p", 0.0),
    "the LSE": lambda *x: fastattn.attention(*x, return_lse=True),
    "the LSE beside a mask": lambda *x: fastattn.attention(*x, mask=masks()[0], return_lse=True),
    "dropout of a seed": lambda *x: fastattn.attention(*x, dropout_p=0.5, seed=torch.tensor([5])),
    "a packed batch": packed,
    "a packed batch, offsets of 32 bits": lambda *x: packed(*x, dtype=torch.int32),
    "a packed batch, causal, with its LSE": lambda *x: packed(*x, causal=True, return_lse=True),
    "pages": in_pages,
    "pages in eight bits": lambda q, *x: in_pages(
        q,
        *((y * 50).to(torch.int8) for y in x),
        **{f"{name}_scale": torch.rand(2, 4, 8) for name in "kv"},
    ),
    "torch's, a mask": torchs(attn_mask=masks()[0]),
    "torch's, a float mask": torchs(attn_mask=masks()[1]),
    "torch's, a scale": torchs(scale=-0.5),
    "torch's, a whole scale": torchs(scale=2),
    "torch's, grouped": lambda q, k, v: fastattn.scaled_dot_product_attention(
        q, k[:, ::4], v[:, ::4], enable_gqa=True
    ),
    "torch's, one head for all": lambda q, k, v: fastattn.scaled_dot_product_attention(
        q, k[:, :1], v[:, :1]
    ),
    "torch's, one item for all": lambda q, k, v: fastattn.scaled_dot_product_attention(
        q, k[:1], v[:1]
    ),
    "torch's of three dimensions": torchs(0),
    "torch's of three dimensions, a mask": torchs(0, attn_mask=masks()[0], is_causal=False),
    "torch's of two dimensions": torchs(0, 0, is_causal=True),
    "torch's of five dimensions": torchs(None),
}


def test_keys_that_are_copied_take_the_general_path(ran):
    """Those of fewer heads than values have: each is repeated."""
    q, k, v = tensors((2, 8, 4, 16), (2, 2, 4, 16), (2, 4, 4, 16))
    for _ in range(2):
        found = fastattn.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.testing.assert_close(found, expected)
    assert ran == [False] * 2


@pytest.mark.parametrize("name", TAKEN)
def test_features_have_the_bits_and_strides_of_the_general_path(ran, name):
    given = tensors(*[(2, 8, 4, 16)] * 3)
    for layout in LAYOUTS.values():
        found = []
        for context in (contextlib.nullcontext, general):
            torch.manual_seed(0)
            with context():
                out = TAKEN[name](*map(layout, given))
                found.append(out if isinstance(out, tuple) else (out,))
        assert all(map(same, *found))
    assert ran and (all(ran) or "five" in name)


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


def negated(at):
    def run(*args):
        lazy = torch.complex(args[at], -args[at]).conj().imag
        return fastattn.attention(*args[:at], lazy, *args[at + 1 :])

    return run


def without_flash():
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def of_two_items(x, lengths):
    both = (y.expand(2, -1, -1, -1) for y in x)
    return fastattn.attention(*both, key_lengths=lengths)[1:]


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
    "a subclass": lambda q, k, v: fastattn.attention(q, k.as_subclass(Subclass), v),
    "a negated q": negated(0),
    "a negated k": negated(1),
    "a negated v": negated(2),
    "a negated mask": lambda *x: fastattn.attention(
        *x, mask=torch.complex(torch.zeros(4, 4), torch.zeros(4, 4)).conj().imag
    ),
    "a mask of a subclass": lambda *x: fastattn.attention(
        *x, mask=torch.zeros(4, 4).as_subclass(Subclass)
    ),
    "a function": lambda *x: fastattn.attention(*x, score_mod=lambda s, b, h, i, j: s),
    "a place": lambda *x: fastattn.attention(*x, place=fastattn.Place()),
    "slopes that are converted": lambda *x: fastattn.attention(
        *x, alibi_slopes=torch.zeros(8, dtype=torch.bfloat16)
    ),
    "lengths with gaps": lambda *x: of_two_items(x, torch.tensor([4, 0, 4])[::2]),
    "lengths of 32 bits with gaps": lambda *x: of_two_items(
        x, torch.tensor([4, 0, 4], dtype=torch.int32)[::2]
    ),
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
    assert marshalling.attend(made, *plain(), False, {}) is None
    inside = False
    assert marshalling.attend(made, *plain(), False, {}) is not None


@pytest.mark.slow
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
    "scale too large": ("scale", lambda t: 1 << 70),
    "causal not UTF-8": ("causal", lambda t: "\ud800"),
    "causal bottom": ("causal", lambda t: "bottom"),
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
