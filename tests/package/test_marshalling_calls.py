"""The whole call with the extension and without it, and caches that confuse no two calls."""

import itertools
import json

import pytest
import torch

import fastattn
from tests.package.test_marshalling import needs_extension
from tests.support.backends import INTERPRETED
from tests.support.fresh_python import python

pytestmark = pytest.mark.skipif(INTERPRETED, reason="about the native library")


# --------------------------------------------------------------- the whole call, both ways

PROGRAM = """
import hashlib, json
import torch
from fastattn.backends.native import libraries, marshalling
from tests.features import checking, factors
torch.set_num_threads(1)
libraries.poison(True)
found = {"extension": marshalling.extension is not None}
for form in ("dense", "packed", "selected"):
    for number, row in enumerate(factors.rows(form)):
        state = hashlib.sha256()
        for name, x in checking.MAKE[form](row).run().items():
            state.update(f"{name} {x.shape} {x.stride()} {x.dtype}".encode())
            state.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found[f"{form} {number}"] = state.hexdigest()
print(json.dumps(found))
"""


def digests(extension):
    found = python("-W", "ignore", "-c", PROGRAM, FASTATTN_EXTENSION=extension)
    return json.loads(found.stdout)


@pytest.mark.slow
@needs_extension
def test_calls_have_the_same_bits():
    pytest.importorskip("numpy", reason="digests are of numpy's bytes")
    found, without = (digests(x) for x in ("auto", "off"))
    assert (found.pop("extension"), without.pop("extension")) == (True, False)
    assert found == without and len(found) > 300


# ---------------------------------------------------------------------- caches confuse no two calls


def test_calls_that_differ_in_one_argument_follow_one_another(one_thread):
    """In every order, twice: nothing cached by one call affects another."""
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    slopes = torch.rand(2) + 0.1
    calls = [
        *({}, dict(alibi_slopes=slopes), dict(alibi_slopes=slopes[None])),
        *(dict(scale=x) for x in (1, 1.0, 2.0, None)),
        *(dict(causal=x) for x in (False, True, "top_left", "bottom_right")),
        *(dict(window=x) for x in ((1, 2), (None, 2), (1, None), None)),
        *(dict(softcap=2.0), dict(sinks=slopes)),
    ]
    wide = [x.double() for x in (q, k, v)]
    for given in (*calls, *calls[::-1], *calls[::2], *calls[1::2]):
        exact = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        right = fastattn.reference.attention(*wide, **exact)
        for x, tolerance in ((wide, 1e-12), ((q, k, v), 1e-5)):
            found = fastattn.attention(*x, **(exact if x is wide else given))
            torch.testing.assert_close(found.double(), right, rtol=10 * tolerance, atol=tolerance)


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


@pytest.mark.slow
def test_settings_of_torch_follow_one_another():
    """Autocast, gradients, inference mode and tensors without data, in every order."""
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    leaf = q.clone().requires_grad_()

    def autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fastattn.attention(q, k, v)

    def no_grad():
        with torch.no_grad():
            return fastattn.attention(leaf, k, v)

    def inference():
        with torch.inference_mode():
            return fastattn.attention(q, k, v)

    ways = {
        autocast: (torch.bfloat16, False, "cpu"),
        no_grad: (torch.float32, False, "cpu"),
        inference: (torch.float32, False, "cpu"),
        lambda: fastattn.attention(leaf, k, v): (torch.float32, True, "cpu"),
        lambda: fastattn.attention(*(x.to("meta") for x in (q, k, v))): (
            *(torch.float32, False, "meta"),
        ),
    }
    right = fastattn.reference.attention(q, k, v)
    for order in itertools.permutations(ways):
        for way in order:
            out = way()
            assert (out.dtype, out.requires_grad, out.device.type) == ways[way]
            if out.device.type == "cpu":
                error = 2e-2 if out.dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(out.float(), right, rtol=error, atol=error)


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
