"""sdpa, patch and unpatch: calls of torch's function run on ours, or unchanged on torch's. Patches
are counted, overlap across threads, and leave those of other libraries."""

import contextlib
import os
import pickle
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import fastattn
from fastattn.dropin import patching
from fastattn.require_torch import TORCH_VERSION
from tests.support.ways import rand

TORCHS = F.scaled_dot_product_attention
# torch warns of nested tensors (a prototype), torch.jit (deprecated), and its slow vmap of sdpa.
pytestmark = [
    pytest.mark.usefixtures("nothing_is_small", "undone"),
    pytest.mark.filterwarnings(
        "ignore:The PyTorch API of nested tensors",
        "ignore:`?torch.jit",
        "ignore:There is a performance",
    ),
]


Q, K, V = rand(2, 4, 5, 8), rand(2, 4, 7, 8, seed=1), rand(2, 4, 7, 8, seed=2)
KEEP = rand(2, 1, 5, 7, seed=3) > -0.5


def jagged(*lengths):
    rows = [rand(n, 4, 8, seed=n) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


def same(found, wanted):
    if found.is_nested:
        found, wanted = found.values(), wanted.values()
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


# ------------------------------------------------------------------------------- what runs on ours

OURS = {
    "plain": lambda: F.scaled_dot_product_attention(Q, K, V),
    "causal": lambda: F.scaled_dot_product_attention(Q, K, V, is_causal=True, scale=0.3),
    "by name": lambda: F.scaled_dot_product_attention(query=Q, key=K, value=V, attn_mask=KEEP),
    "grouped heads": lambda: F.scaled_dot_product_attention(Q, K[:, :2], V[:, :2], enable_gqa=True),
    "two dimensions": lambda: F.scaled_dot_product_attention(Q[0, 0], K[0, 0], V[0, 0]),
    "upper left": lambda: F.scaled_dot_product_attention(Q, K, V, causal_upper_left(5, 7)),
    "lower right": lambda: F.scaled_dot_product_attention(Q, K, V, causal_lower_right(5, 7)),
    "jagged": lambda: F.scaled_dot_product_attention(*[jagged(3, 6)] * 3),
    "double": lambda: F.scaled_dot_product_attention(Q.double(), K.double(), V.double()),
    "3-D, viewed": lambda: F.scaled_dot_product_attention(Q[0], K[0], V[0]).view(4 * 5, 8),
    "a choice of both": lambda: within(sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])),
    "another name": lambda: nn.functional.scaled_dot_product_attention(Q, K, V, KEEP),
}


@pytest.mark.parametrize("name", OURS)
def test_attention_on_our_kernels(name, calls):
    wanted = OURS[name]()
    with fastattn.sdpa():
        found = OURS[name]()
    assert len(calls) == 1
    same(found, wanted)


def test_with_a_default_device_and_with_autocast(calls):
    with fastattn.sdpa(), torch.device("cpu"), torch.autocast("cpu", torch.bfloat16):
        found = F.scaled_dot_product_attention(Q, K, V)
    assert len(calls) == 1 and found.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_modules_of_torch(mode, padded, calls):
    """Layer and module call our function, but in eval without gradients torch's fast path."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(mode == "train")
    x, padding = rand(2, 6, 16), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])

    def run():
        out = model(x, src_key_padding_mask=padding if padded else None)
        weighed = layer.self_attn(x, x, x, need_weights=False)[0]
        return out, weighed, torch.autograd.grad(out[:, :4].sum(), list(model.parameters()))

    wanted = run()
    with fastattn.sdpa():
        found = run()
    assert len(calls) == 3
    same(found[0][:, :4], wanted[0][:, :4])
    same(found[1], wanted[1])
    for a, b in zip(found[2], wanted[2]):
        same(a, b)
    with torch.no_grad(), fastattn.sdpa():
        same(layer.eval()(x), layer(x))


# ----------------------------------------------------------------------------- what stays torch's


class Kind(torch.Tensor):
    """A tensor subclass that overrides nothing."""


class Mode(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def within(manager, *args):
    with manager:
        return F.scaled_dot_product_attention(*(args or (Q, K, V)))


def call_by_mode():
    with Mode() as mode:
        out = F.scaled_dot_product_attention(Q, K, V)
    assert TORCHS in mode.seen
    return out


def call_by_jvp():
    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.jvp(partial(F.scaled_dot_product_attention, key=K, value=V), (Q,), (Q,))[
            1
        ]


class Module(nn.Module):
    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q)


def call_traced():
    return torch.jit.trace(Module(), (Q,), check_trace=False)(Q)


def strided():
    return torch.nested.nested_tensor([Q[0], Q[1]])


def summed(q):
    return F.scaled_dot_product_attention(q, K, V).sum()


TORCH_S = {
    "MATH": lambda: within(sdpa_kernel(SDPBackend.MATH)),
    "FLASH": lambda: within(sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    "a priority": lambda: within(
        sdpa_kernel(list(SDPBackend.__members__.values())[1:6][::-1], True)
    ),
    "a subclass": lambda: F.scaled_dot_product_attention(Q.as_subclass(Kind), K, V),
    "a mask of a subclass": lambda: F.scaled_dot_product_attention(Q, K, V, KEEP.as_subclass(Kind)),
    "a mode": call_by_mode,
    "func.grad": lambda: torch.func.grad(summed)(Q),
    "vmap": lambda: torch.vmap(F.scaled_dot_product_attention)(Q, K, V),
    "jvp": call_by_jvp,
    "fx": lambda: torch.fx.symbolic_trace(Module())(Q),
    "jit.trace": call_traced,
    "jit.script": lambda: torch.jit.script(Module())(Q),
    "export": lambda: torch.export.export(Module(), (Q,)).module()(Q),
    "export, strictly": lambda: torch.export.export(Module(), (Q,), strict=True).module()(Q),
    "meta": lambda: F.scaled_dot_product_attention(*(x.to("meta") for x in (Q, K, V))),
    "strided nested": lambda: F.scaled_dot_product_attention(*[strided()] * 3),
    "wide heads": lambda: F.scaled_dot_product_attention(
        *(x.repeat(1, 1, 1, 130) for x in (Q, K, V))
    ),
}


@pytest.mark.parametrize("name", TORCH_S)
def test_attention_on_torchs_kernels(name, calls):
    wanted = TORCH_S[name]()
    with fastattn.sdpa():
        found = TORCH_S[name]()
    assert not calls
    assert type(found) is type(wanted)
    if found.is_nested:
        found, wanted = found.to_padded_tensor(0.0), wanted.to_padded_tensor(0.0)
    if not found.is_meta:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_small_calls_cost_less_on_torchs(calls, monkeypatch):
    monkeypatch.setattr(patching, "SMALL", 2 * 4 * 5 * 8 * 7 + 1)
    with fastattn.sdpa():
        F.scaled_dot_product_attention(Q, K, V)
        assert not calls
        F.scaled_dot_product_attention(Q, torch.cat([K, K], 2), torch.cat([V, V], 2))
        assert len(calls) == 1


def test_a_mask_with_is_causal_runs_as_in_torch(calls):
    """torch's flash kernel applies a mask together with is_causal; from 2.14 on it refuses."""
    given = Q, Q, Q, KEEP[..., :5]
    if TORCH_VERSION >= (2, 14):
        for patched in (contextlib.nullcontext(), fastattn.sdpa()):
            with patched, pytest.raises(RuntimeError, match="should not be set when is_causal"):
                F.scaled_dot_product_attention(*given, is_causal=True)
        return
    wanted = TORCHS(*given, is_causal=True)
    with fastattn.sdpa():
        found = F.scaled_dot_product_attention(*given, is_causal=True)
    assert len(calls) == 1
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


WRONG = {
    "is_causal that is no bool": ((Q, K, V, None, 0.0, "bottom_right"), {}),
    "enable_gqa that is no bool": ((Q, K, V), dict(enable_gqa=2.5)),
    "a mask of one dimension": ((Q, K, V, KEEP[0, 0, 0]), {}),
    "grouped heads of no heads": ((Q[0, 0], K[0, 0], V[0, 0]), dict(enable_gqa=True)),
    "no tensor": ((Q, K, [1]), {}),
    "no values": ((Q, K), {}),
    "too many": ((Q, K, V, None, 0.0, False, 1.0), {}),
    "unknown name": ((Q, K, V), dict(mask=None)),
    "one dimension": ((Q[0, 0, 0], K, V), {}),
    "dtypes": ((Q.double(), K, V), {}),
    "head dims": ((Q, K[..., :3], V), {}),
    "heads": ((Q, K[:, :3], V[:, :3]), {}),
    "mask dtype": ((Q, K, V, KEEP.int()), {}),
    "mask size": ((Q, K, V, KEEP[..., :6]), {}),
    "dropout": ((Q, K, V), dict(dropout_p=1.5)),
    "scale": ((Q, K, V), dict(scale="a")),
    "integers": ((Q.int(), K.int(), V.int()), {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_raise_what_torch_raises(name):
    args, kwargs = WRONG[name]
    with pytest.raises(Exception) as wanted:
        TORCHS(*args, **kwargs)
    with fastattn.sdpa(), pytest.raises(type(wanted.value)) as found:
        F.scaled_dot_product_attention(*args, **kwargs)
    if name not in ("no values", "too many", "unknown name"):  # Python raises for those
        assert str(found.value) == str(wanted.value)
        assert found.value.__context__ is None  # our own error is not shown


# ----------------------------------------------------------------------------------- torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("first", ["patched", "plain"])
def test_compiled_before_and_after(first):
    """Patched and plain calls compile to one graph each, in either order."""
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Module(), backend=count, fullgraph=True)
    wanted = TORCHS(Q, Q, Q)
    if first == "plain":
        compiled(Q)
    for _ in range(3):
        with fastattn.sdpa():
            same(compiled(Q), wanted)
        torch.testing.assert_close(compiled(Q), wanted, rtol=0, atol=0)
    assert count.frame_count == 2
    targets = ["fastattn" in str(g.graph) for g in count.graphs]
    assert sorted(targets) == [False, True]


@pytest.mark.slow
def test_compiled_graphs_keep_to_the_rules():
    """Compiled code uses torch's function under sdpa_kernel, transforms, or invalid arguments."""

    def graph(function, *args):
        torch._dynamo.reset()
        count = EagerAndRecordGraphs()
        with fastattn.sdpa():
            torch.compile(function, backend=count)(*args)
        return "fastattn" in "".join(str(g.graph) for g in count.graphs)

    def math(q):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, q, q)

    assert graph(Module(), Q) and graph(Module(), Q[0])
    assert not graph(math, Q)
    assert not graph(torch.func.grad(summed), Q)
    if TORCH_VERSION < (2, 14):  # later, torch refuses a mask together with is_causal
        both = KEEP[..., :5], 0.0, True
        assert not graph(lambda q: F.scaled_dot_product_attention(q, q, q, *both), Q)


# ----------------------------------------------------------------------------- patches that overlap


def test_patches_are_counted(calls):
    fastattn.patch()
    fastattn.patch()
    fastattn.unpatch()
    F.scaled_dot_product_attention(Q, K, V)
    fastattn.unpatch()
    F.scaled_dot_product_attention(Q, K, V)
    assert len(calls) == 1
    with fastattn.sdpa(), pytest.raises(RuntimeError, match="got no patch to undo"):
        fastattn.unpatch()


def test_an_exception_restores_and_a_decorator_patches(calls):
    with pytest.raises(KeyError), fastattn.sdpa():
        raise KeyError
    assert F.scaled_dot_product_attention is TORCHS

    @fastattn.sdpa()
    def decorated():
        return F.scaled_dot_product_attention(Q, K, V)

    decorated(), decorated()
    assert len(calls) == 2


def test_blocks_overlap_across_threads(calls):
    entered, left = threading.Event(), threading.Event()

    def other():
        with fastattn.sdpa():
            entered.set()
            left.wait(10)
            F.scaled_dot_product_attention(Q, K, V)

    thread = threading.Thread(target=other)
    with fastattn.sdpa():
        thread.start()
        assert entered.wait(10)
    assert F.scaled_dot_product_attention is not TORCHS
    left.set()
    thread.join()
    assert len(calls) == 1


def test_a_function_taken_inside_sdpa_is_torchs_afterwards(calls):
    with fastattn.sdpa():
        kept = F.scaled_dot_product_attention
    for function in (kept, pickle.loads(pickle.dumps(kept))):
        torch.testing.assert_close(function(Q, K, V), TORCHS(Q, K, V), rtol=0, atol=0)
    assert not calls


@pytest.fixture
def restored():
    yield
    F.scaled_dot_product_attention = TORCHS


def test_another_librarys_patch_over_ours_stays(calls, restored):
    """Another library's patch over ours stays, and calls ours again in the next `sdpa()`."""
    with fastattn.sdpa():
        beneath = F.scaled_dot_product_attention

        def theirs(*args, **kwargs):
            return beneath(*args, **kwargs)

        F.scaled_dot_product_attention = theirs
    assert F.scaled_dot_product_attention is theirs
    F.scaled_dot_product_attention(Q, K, V)
    assert len(calls) == 0
    with fastattn.sdpa():
        F.scaled_dot_product_attention(Q, K, V)
    assert F.scaled_dot_product_attention is theirs and len(calls) == 1
    F.scaled_dot_product_attention = TORCHS
    with fastattn.sdpa():
        F.scaled_dot_product_attention(Q, K, V)
    assert len(calls) == 2


def test_torchs_own_put_back_is_patched_again(calls, restored):
    """Another library patched first, and restores torch's function before our patch is undone."""
    F.scaled_dot_product_attention = lambda *args, **kwargs: TORCHS(*args, **kwargs)
    fastattn.patch()
    F.scaled_dot_product_attention = TORCHS
    with fastattn.sdpa():
        F.scaled_dot_product_attention(Q, K, V)
    assert len(calls) == 1
    fastattn.unpatch()
    assert F.scaled_dot_product_attention is TORCHS
    with fastattn.sdpa():
        F.scaled_dot_product_attention(Q, K, V)
    assert F.scaled_dot_product_attention is TORCHS and len(calls) == 2


def test_a_patch_that_never_calls_ours_is_replaced(calls, restored):
    """Also after an earlier patch that did call ours and has been removed."""
    with fastattn.sdpa():
        beneath = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = lambda *args, **kwargs: beneath(*args, **kwargs)
    theirs = F.scaled_dot_product_attention = lambda *args, **kwargs: TORCHS(*args, **kwargs)
    with fastattn.sdpa():
        F.scaled_dot_product_attention(Q, K, V)
    assert F.scaled_dot_product_attention is theirs and len(calls) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_while_another_thread_patches():
    """The child gets a lock that is free, although another thread held it at the fork."""
    held, done = threading.Event(), threading.Event()

    def other():
        with patching._lock:
            held.set()
            done.wait(0.2)

    thread = threading.Thread(target=other)
    thread.start()
    assert held.wait(10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about fork with threads, from 3.12 on
        child = os.fork()
    if child == 0:
        taken = patching._lock.acquire(timeout=5)
        os._exit(0 if taken else 1)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_another_librarys_patch_under_ours_runs_if_ours_declines(calls, restored):
    seen = []
    theirs = F.scaled_dot_product_attention = lambda *x, **y: seen.append(x)
    with fastattn.sdpa(), sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(Q, K, V)
    assert F.scaled_dot_product_attention is theirs
    assert len(seen) == 1 and not calls
    F.scaled_dot_product_attention = TORCHS
    with fastattn.sdpa():
        pass
