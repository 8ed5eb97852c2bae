"""The whole call with the extension and without it, and caches that confuse no two calls."""

import json
import os
import subprocess
import sys

import pytest
import torch

import fastattn
from fastattn import api
from fastattn.dispatch import operation
from tests.package.test_marshalling import needs_extension
from tests.support.backends import INTERPRETED
from tests.support.threads import in_threads

pytestmark = pytest.mark.skipif(INTERPRETED, reason="about the native library")


# --------------------------------------------------------------- the whole call, both ways

PROGRAM = """
import hashlib, json, os, sys, warnings
import torch, fastattn
from fastattn.backends.native import marshalling
torch.set_num_threads(1)
fastattn.backends.native.libraries.poison(True)

def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))

def digest(tensors):
    state = hashlib.sha256()
    for x in tensors:
        state.update(str((x.shape, x.stride(), x.dtype)).encode())
        state.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()

features = dict(
    plain={},
    band=dict(causal="bottom_right", window=(3, 1)),
    scalars=dict(softcap=2.0, scale=0.3),
    mask=dict(mask=rand(5, 7)),
    bools=dict(mask=rand(2, 1, 5, 7) > -1),
    lengths=dict(key_lengths=torch.tensor([7, 3])),
    apart=dict(key_lengths=torch.tensor([5, 9, 4, 9])[::2].int()),
    slopes=dict(alibi_slopes=rand(4).abs()),
    each=dict(alibi_slopes=rand(2, 4).double().abs()),
    sinks=dict(sinks=rand(4)),
    dropout=dict(dropout_p=0.3, seed=5),
    everything=dict(
        mask=rand(4, 1, 7), causal=True, key_lengths=torch.tensor([7, 3]),
        alibi_slopes=rand(4).abs(), softcap=3.0, sinks=rand(4), dropout_p=0.2, seed=9,
    ),
)
SHAPES = [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)]
found = {"extension": marshalling.extension is not None}
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    for name, given in features.items():
        q, k, v = (rand(*s, seed=i).to(dtype) for i, s in enumerate(SHAPES))
        given = dict(given)
        tensors = [q, k, v.transpose(1, 2).contiguous().transpose(1, 2)]
        for extra in ("mask", "sinks"):
            if given.get(extra) is not None and given[extra].is_floating_point():
                given[extra] = given[extra].to(dtype).requires_grad_()
        leaves = [x.requires_grad_() for x in tensors] + [given[x] for x in ("mask", "sinks")
                  if x in given and given[x].requires_grad]
        out, lse = fastattn.attention(*tensors, **given, return_lse=True)
        grads = torch.autograd.grad(out.float().sin().sum() + lse[lse.isfinite()].sum(), leaves)
        with torch.no_grad():
            again = fastattn.attention(*tensors, **given)
            weights = fastattn.attention_weights(q, k, **given)
        wq = fastattn.attention_weights(q, k, average_heads=True, **given)
        dw = torch.autograd.grad(wq.float().sin().sum(), (q, k))
        found[f"{name} {dtype}"] = digest([out, lse, *grads, again, weights, wq, *dw])

q = rand(2, 4, 5, 8)
wrong = [
    *(dict(q=x) for x in ("q", None, q.long(), q.to_sparse(), q.to("meta"))),
    *(dict(k=x) for x in (q[0], q.double(), None)),
    *(dict(v=x) for x in (q[:1], None)),
    *(dict(mask=x) for x in (rand(3, 3), q.long(), 1.0)),
    *(dict(key_lengths=torch.tensor(x)) for x in ([9, 1], [1.0, 2.0], [1])),
    *(dict(scale=x) for x in (True, "1", [1], float("nan"), torch.tensor(1.0))),
    *(dict(causal=x) for x in ("left", [1], 2)),
    *(dict(window=x) for x in (3, (True, 1), (-1, 0), (1, 2, 3))),
    *(dict(dropout_p=x) for x in (2.0, None)),
    *(dict(backend=x) for x in (3, "cudnn", "cuda")),
    *(dict(sinks=rand(3)), dict(softcap=-1.0), dict(seed=1.5, dropout_p=0.5), dict(nonsense=1)),
    dict(alibi_slopes=rand(5).requires_grad_()),
]
for at, one in enumerate(wrong):
    for grad in (False, True):
        try:
            with torch.set_grad_enabled(grad):
                fastattn.attention(**(dict(q=q, k=q, v=q) | one))
        except Exception as error:
            found[f"wrong {at} {grad}"] = f"{type(error).__name__}: {error}"
        else:
            found[f"wrong {at} {grad}"] = "no error"
print(json.dumps(found))
"""


def run(program, **environment):
    where = os.path.dirname(os.path.dirname(fastattn.__file__))
    path = os.pathsep.join(x for x in (where, os.environ.get("PYTHONPATH")) if x)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@needs_extension
def test_calls_have_the_same_bits_and_errors_the_same_text():
    pytest.importorskip("numpy", reason="digests are of numpy's bytes")
    found, without = (json.loads(run(PROGRAM, FASTATTN_EXTENSION=x)) for x in ("auto", "off"))
    assert (found.pop("extension"), without.pop("extension")) == (True, False)
    assert found == without
    assert [x for x in found.values() if x == "no error"] == []


# ---------------------------------------------------------------------- caches confuse no two calls


LOW, HIGH = dict(rtol=2e-2, atol=1e-2), dict(rtol=1e-4, atol=1e-5)


def exact(q, k, v, **given):
    return fastattn.reference.attention(q.double(), k.double(), v.double(), **given)


def test_calls_that_differ_in_anything_follow_one_another(one_thread):
    """In every order, twice: nothing cached by one call affects another."""
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in "qkv")
    leaf = q.clone().requires_grad_()

    def transposed():
        t = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        return fastattn.attention(*t), exact(q, k, v)

    def offset():
        t = [torch.cat([torch.full_like(x, torch.nan), x])[1:] for x in (q, k, v)]
        return fastattn.attention(*t), exact(q, k, v)

    def autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = fastattn.attention(q, k, v)
        assert out.dtype == torch.bfloat16
        return out, exact(*(x.bfloat16() for x in (q, k, v)))

    def gradient():
        out = fastattn.attention(leaf, k, v)
        assert out.requires_grad
        (grad,) = torch.autograd.grad(out.sum(), leaf)
        other = leaf.detach().double().requires_grad_()
        return grad, torch.autograd.grad(exact(other, k, v).sum(), other)[0]

    def no_grad():
        with torch.no_grad():
            out = fastattn.attention(leaf, k, v)
        assert not out.requires_grad
        return out, exact(q, k, v)

    def inference():
        with torch.inference_mode():
            out = fastattn.attention(q, k, v).clone()
        return out, exact(q, k, v)

    def meta():
        out = fastattn.attention(*(x.to("meta") for x in (q, k, v)))
        assert out.is_meta
        return fastattn.attention(q, k, v), exact(q, k, v)

    def slopes(*shape):
        s = torch.rand(*shape) + 0.1
        return fastattn.attention(q, k, v, alibi_slopes=s), exact(q, k, v, alibi_slopes=s.double())

    def given(**given):
        return fastattn.attention(q, k, v, **given), exact(q, k, v, **given)

    calls = [
        *(transposed, offset, autocast, gradient, no_grad, inference, meta, given),
        *(lambda: slopes(2), lambda: slopes(1, 2)),
        *(lambda x=x: given(scale=x) for x in (1, 1.0, 2.0, None)),
        *(lambda x=x: given(causal=x) for x in (False, True, "top_left", "bottom_right")),
        *(lambda x=x: given(window=x) for x in ((1, 2), (None, 2), (1, None), None)),
        lambda: (fastattn.attention(q.double(), k.double(), v.double()), exact(q, k, v)),
        lambda: (fastattn.attention(q, k[:, :1], v[:, :1]), exact(q, k[:, :1], v[:, :1])),
        lambda: (fastattn.attention(q, k, v[..., :4]), exact(q, k, v[..., :4])),
        lambda: (fastattn.attention(q, k, v, backend="reference"), exact(q, k, v)),
    ]
    for order in (calls, calls[::-1], calls[::2] + calls[1::2]):
        for call in order:
            found, right = call()
            low = found.dtype == torch.bfloat16
            torch.testing.assert_close(found.double(), right, **(LOW if low else HIGH))


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_true_is_refused_as_a_number_after_1(name):
    q = torch.randn(1, 2, 3, 4)
    fastattn.attention(q, q, q, **{name: 1})
    fastattn.attention(q, q, q, **{name: 1.0})
    with pytest.raises(TypeError, match=f"{name}: got True"):
        fastattn.attention(q, q, q, **{name: True})
    fastattn.attention(q, q, q, window=(1, 1))
    with pytest.raises(TypeError, match="window left: got True"):
        fastattn.attention(q, q, q, window=(True, 1))


def test_results_ignore_the_default_device():
    q, k, v = (torch.randn(1, 2, 6, 8).requires_grad_() for _ in "qkv")
    expected = fastattn.attention(q, k, v)
    with torch.device("meta"):
        found = fastattn.attention(q, k, v)
        grads = torch.autograd.grad(found, (q, k, v), torch.ones_like(expected))
    assert found.equal(expected)
    assert all(x.device.type == "cpu" for x in grads)


def test_hooks_that_change_what_is_saved_are_read_as_they_leave_it():
    """Backward's plan depends on the tensors that it gets, not on those that forward had."""
    q, k, v = (torch.randn(1, 2, 6, 8).requires_grad_() for _ in "qkv")
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x.double())
    with hooks:
        out = fastattn.attention(q, k, v)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    right = torch.autograd.grad(fastattn.attention(q, k, v).sum(), (q, k, v))
    for a, b in zip(found, right):
        torch.testing.assert_close(a.float(), b)


MANY = """
import gc, sys, torch, fastattn
torch.set_num_threads(1)

class Subclass(torch.Tensor):
    pass

q, k, v = (torch.randn(1, 2, 6, 8) for _ in "qkv")
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
mask = torch.randn(6, 6)
held = q, k, v, mask, *leaves, torch.Tensor, torch.nn.Parameter, None, True, False

def calls(n):
    for _ in range(n):
        fastattn.attention(q, k, v, mask=mask)
        torch.autograd.grad(fastattn.attention(*leaves).sum(), leaves)
        fastattn.attention(q.as_subclass(Subclass), k, v)
    gc.collect()
    return [sys.getrefcount(x) for x in held], sys.getallocatedblocks()

before, blocks = calls(500)  # caches fill
after, more = calls(500)
assert all(abs(a - b) < 100 for a, b in zip(before, after)), (before, after)
assert more - blocks < 500, more - blocks  # none a call
"""


@pytest.mark.slow
def test_a_call_leaves_no_references():
    run(MANY)


def test_many_threads_of_python_call_at_once(one_thread):
    """Each thread has its own sizes: short kernels hold the GIL and longer ones release it."""
    rights = {}
    for n in (3, 8, 17, 64, 200):
        x = torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(n))
        leaf = x.clone().requires_grad_()
        out = fastattn.attention(leaf, x, x, causal=True)
        rights[n] = x, out.detach(), torch.autograd.grad(out.sum(), leaf)[0]

    def work(first):
        for at in range(60):
            x, right, gradient = rights[list(rights)[(first + at) % len(rights)]]
            leaf = x.clone().requires_grad_()
            out = fastattn.attention(leaf, x, x, causal=True)
            if at % 7 == 0:
                operation.forget_plans()
                api._remembered.cache_clear()
            (found,) = torch.autograd.grad(out.sum(), leaf)
            assert out.equal(right) and found.equal(gradient)

    in_threads(work)
