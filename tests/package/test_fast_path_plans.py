"""The plans of the fast path; its memory and threads."""

import ctypes
import gc
import sys

import pytest
import torch

import fastattn
from fastattn import api
from fastattn.backends.native import libraries, marshalling
from fastattn.dispatch import operation
from tests.package.test_fast_path import Subclass, plain, pytestmark  # noqa: F401
from tests.support.threads import in_threads


def path_of(make_plan):
    return make_plan, *api._FAST[1:]


def attend(q, k, v):
    return marshalling.attend(api._FAST, q, k, v, {})


class Library:
    """A stand-in for fa_cpu_run. It keeps the FaCall of each run."""

    def __init__(self, status=0):
        self.calls = []
        entry = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)

        def run(call, which):
            self.calls.append((ctypes.string_at(call, libraries.SIZE), which))
            return status

        self.kept = entry(run)
        self.address = ctypes.cast(self.kept, ctypes.c_void_p).value

    def plan(self, q, k, v, causal, scale):
        form = bytes(range(256)) * (libraries.SIZE // 256 + 1)
        return form[: libraries.SIZE], (2, 3), (5, 1), 6000, True, self.address


def test_a_call_has_the_addresses_and_the_threads_of_its_own(one_thread):
    library, (q, k, v) = Library(), plain()
    path = path_of(library.plan)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for x in (q, q.clone()):
            out = marshalling.attend(path, x, k, v, {})
            assert (out.shape, out.stride()) == ((2, 3), (5, 1))
            call, which = library.calls[-1]
            assert which == libraries.FORWARD
            changed = dict(q=x.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr())
            changed["threads"] = threads
            form = bytearray(library.plan(q, k, v, None, None)[0])
            lse = libraries.offset("lse")
            form[lse : lse + 8] = call[lse : lse + 8]
            for field, value in changed.items():
                at = libraries.offset(field)
                form[at : at + 8] = value.to_bytes(8, "little")
            assert call == bytes(form)
    assert len(library.calls) == 4


def test_a_call_that_the_kernels_refuse_takes_the_general_path():
    library = Library(status=libraries.NO_MEMORY)
    assert marshalling.attend(path_of(library.plan), *plain(), {}) is None
    assert len(library.calls) == 1


def test_a_plan_is_made_once_for_each_kind_of_call():
    library, made = Library(), []

    def make_plan(*args):
        made.append(args)
        return library.plan(*args)

    path, (q, k, v) = path_of(make_plan), plain(5, 7)
    wide = torch.cat([q, q], -1)
    kinds = [
        *((q, k, v, {}), (q, k, v, {"causal": True}), (q, k, v, {"causal": "bottom_right"})),
        *((q, k, v, {"scale": x}) for x in (0.0, -0.0, 1.0)),
        *((q, k, v, {"scale": 1.0, "causal": True}), (wide[..., ::2], k, v, {})),
        *((wide[..., :16], k, v, {}), (q, k, v[..., :3], {}), (q, k[:, :2], v[:, :2], {})),
        *((q[:, :, :2], k, v, {}), [x.double() for x in (q, k, v)] + [{}]),
        [x.half() for x in (q, k, v)] + [{}],
    ]
    for _ in range(2):
        for kind in kinds:
            assert marshalling.attend(path, *kind) is not None
        assert len(made) == len(kinds)
    same = torch.randn(1, 8, 5, 16)
    equal = (same, k, v, {"causal": False}), (same, k, v, {"scale": None}), (q, k, v, False, None)
    for kind in equal:
        assert marshalling.attend(path, *kind) is not None
    assert len(made) == len(kinds)
    marshalling.forget_plans()
    assert marshalling.attend(path, q, k, v, {}) is not None
    assert len(made) == len(kinds) + 1


def test_a_plan_that_cannot_be_made():
    """A kind of call that the general path runs has a plan that says so. An error is no plan."""
    answers, made = iter([None, ValueError("of the call"), KeyboardInterrupt()]), []

    def make_plan(*args):
        made.append(args)
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    q, k, v = plain(3, 11)
    path = path_of(make_plan)
    assert [marshalling.attend(path, q, k, v, {}) for _ in range(3)] == [None] * 3
    assert len(made) == 1
    assert marshalling.attend(path, k, q, q, {}) is None
    assert len(made) == 2
    with pytest.raises(KeyboardInterrupt):
        marshalling.attend(path, k, q, q, {})


def test_misuse_raises_and_does_not_crash():
    q, k, v = plain()
    plan = Library().plan(q, k, v, False, None)
    for bad in ((plan[0][1:], *plan[1:]), plan[:3], "plan", (*plan[:3], "bytes", *plan[4:])):
        with pytest.raises((ValueError, TypeError, IndexError, SystemError)):
            marshalling.attend(path_of(lambda *args, bad=bad: bad), q, k, v, {})
    for args in ((), (api._FAST, q, k, v), (3, q, k, v, {}), ((), q, k, v, {})):
        with pytest.raises((TypeError, IndexError, SystemError)):
            marshalling.attend(*args)
    with pytest.raises((TypeError, SystemError)):
        marshalling.attend(api._FAST, q, k, v, 3)


def test_a_change_of_the_backends_is_a_change_of_the_plans(monkeypatch):
    x = plain()
    assert attend(*x) is not None
    reference = fastattn.backends.base.get("reference")
    with monkeypatch.context() as patch:
        patch.setattr(operation, "choose", lambda *args: reference)
        operation.forget_plans()
        assert attend(*x) is None
    operation.forget_plans()
    assert attend(*x) is not None


def test_arguments_that_a_plan_does_not_see():
    """A plan is for q, k, v, causal and scale. Others may be given as their defaults."""
    x = plain()
    others = set(api.DEFAULTS) - {"causal", "scale"}
    assert len(others) >= 10 and {"mask", "dropout_p"} < others
    for name in others:
        for value in (True, 1, 0.5, x[0], "x"):
            assert marshalling.attend(api._FAST, *x, {name: value}) is None
        default = {name: api.DEFAULTS[name]}
        assert marshalling.attend(api._FAST, *x, default) is not None
    assert marshalling.attend(api._FAST, *x, dict(api.DEFAULTS, dropout_p=-0.0)) is not None
    for name in ("nonsense", "causal ", "Scale", "é"):
        assert marshalling.attend(api._FAST, *x, {name: None}) is None


# ---------------------------------------------------------------------------------- memory, threads


def test_calls_leave_nothing_behind():
    q, k, v = plain()
    leaves, mask = [x.clone().requires_grad_() for x in (q, k, v)], torch.randn(4, 4)
    arguments = {"causal": True, "scale": 0.25}
    held = q, k, v, mask, *leaves, arguments, api._FAST, None, True, False, 0.25, torch.Tensor

    def calls(n):
        for _ in range(n):
            fastattn.attention(q, k, v)
            fastattn.attention(q, k, v, **arguments)
            fastattn.scaled_dot_product_attention(q, k, v)
            marshalling.attend(api._FAST, q, k, "v", {})
            marshalling.attend(api._FAST, q, k, v[0], {})
            fastattn.attention(q, k, v, mask=mask)
            fastattn.attention(q.as_subclass(Subclass), k, v)
            torch.autograd.grad(fastattn.attention(*leaves).sum(), leaves)
        gc.collect()
        return [sys.getrefcount(x) for x in held], sys.getallocatedblocks()

    calls(500)  # caches fill
    before, blocks = calls(100)
    after, more = calls(600)
    assert all(abs(x - y) < 50 for x, y in zip(before, after)), (before, after)
    assert abs(more - blocks) < 500, more - blocks


def test_the_number_of_plans_is_bounded():
    library = Library()
    path = path_of(library.plan)
    first = sys.getrefcount(path)
    x = torch.zeros(1, 1, 3000, 1)
    for n in range(1, 3000):
        assert marshalling.attend(path, x[:, :, :n], x, x, {}) is not None
    assert 100 < sys.getrefcount(path) - first <= 512
    marshalling.forget_plans()
    assert sys.getrefcount(path) == first


def test_many_threads_call_at_once(one_thread):
    """Short kernels hold the GIL and longer ones release it, while plans are forgotten. Calls with
    a gradient and without one take turns."""
    calls = [plain(m, n) for m, n in ((1, 1), (3, 5), (64, 64), (300, 200), (2, 2000))]

    def with_gradient(q, k, v):
        sinks, bias = torch.zeros(q.shape[1]), torch.zeros(q.shape[2], k.shape[2])
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias, sinks)]
        arguments = dict(zip(("mask", "sinks"), leaves[3:]), dropout_p=0.2, seed=1)
        out = fastattn.attention(*leaves[:3], **arguments)
        return out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)

    rights = [(attend(*x), *with_gradient(*x)) for x in calls]

    def work(first):
        for at in range(40):
            which = (first + at) % len(calls)
            found = attend(*calls[which]), *with_gradient(*calls[which])
            assert all(map(torch.equal, found, rights[which]))
            if at % 7 == 0:
                operation.forget_plans()
                api._remembered.cache_clear()

    in_threads(work)
