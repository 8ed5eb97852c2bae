"""The plans of the fast path; its memory and threads."""

import ctypes
import gc
import struct
import sys

import numpy
import pytest
import torch

import fastattn
from fastattn import api
from fastattn.backends.native import libraries, marshalling
from fastattn.call.spec import Options, Tensors
from fastattn.dispatch import operation, run_pass
from fastattn.namespace import operator
from tests.package.test_fast_path import Subclass, plain, pytestmark  # noqa: F401
from tests.support.threads import in_threads


def path_of(make_plan):
    return make_plan, *api._FAST[1:]


def attend(q, k, v):
    return marshalling.attend(api._FAST, q, k, v, False, {})


def places(*names, widened=()):
    each = [(libraries.offset(name) if name else -1, 0, name in widened) for name in names]
    return struct.pack(f"={3 * len(each)}q", *(x for numbers in each for x in numbers))


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

    def plan(self, *args):
        form = bytes(range(256)) * (libraries.SIZE // 256 + 1)
        form, normaliser = form[: libraries.SIZE], (6000, (2, 3), (3, 1), None)
        out = (2, 3), (5, 1)
        where = places("q", "k", "v")
        return form, self.address, True, where, out, normaliser, None, None, None


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
            form = bytearray(library.plan()[0])
            lse = libraries.offset("lse")
            form[lse : lse + 8] = call[lse : lse + 8]
            for field, value in changed.items():
                at = libraries.offset(field)
                form[at : at + 8] = value.to_bytes(8, "little")
            assert call == bytes(form)
    assert len(library.calls) == 4


def test_tensors_lie_where_the_plan_has_their_places():
    """Whole numbers of 32 bits are widened; a tensor without a place is not passed."""
    library, x = Library(), plain()
    lengths = [torch.arange(n, 2 * n, dtype=torch.int32) for n in (3, 1000)]
    numbers = []

    def run(call, which):
        for name, like in zip(("lengths", "cu_q"), lengths):
            at = libraries.offset(name)
            address = int.from_bytes(ctypes.string_at(call + at, 8), "little")
            raw = ctypes.string_at(address, 8 * len(like))
            numbers.append(torch.frombuffer(bytearray(raw), dtype=torch.int64))
        return 0

    kept = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(run)
    library.address = ctypes.cast(kept, ctypes.c_void_p).value
    names = "q", "k", "v", "lengths", None, "cu_q"

    def make_plan(*args):
        made = library.plan()
        return *made[:3], places(*names, widened=("lengths", "cu_q")), *made[4:]

    more = lengths[0], torch.zeros(1, dtype=torch.int32), lengths[1]
    for _ in range(2):
        assert marshalling.attend(path_of(make_plan), *x, *more, {}) is not None
        assert [y.tolist() for y in numbers] == [y.tolist() for y in lengths]
        numbers.clear()


def test_a_plan_without_gradients_records_none():
    library, (q, k, v) = Library(), plain()
    assert marshalling.attend(path_of(library.plan), q, k, v.requires_grad_(), {}) is None
    with torch.no_grad():
        assert marshalling.attend(path_of(library.plan), q, k, v, {}) is not None


def test_a_call_that_the_kernels_refuse_takes_the_general_path():
    library = Library(status=libraries.NO_MEMORY)
    assert marshalling.attend(path_of(library.plan), *plain(), {}) is None
    assert len(library.calls) == 1


def test_a_plan_is_made_once_for_each_kind_of_call():
    library, made = Library(), []

    def make_plan(*args):
        made.append(args)
        plan = library.plan()
        count = sum(isinstance(x, torch.Tensor) for x in (*args, *args[-1].values()))
        return *plan[:3], places(*"qkv", *[None] * (count - 3)), *plan[4:]

    path, (q, k, v) = path_of(make_plan), plain(5, 7)
    wide = torch.cat([q, q], -1)
    kinds = [
        *((q, k, v, {}), (q, k, v, {"causal": True}), (q, k, v, {"causal": "bottom_right"})),
        *((q, k, v, {"scale": x}) for x in (0.0, -0.0, 1.0)),
        *((q, k, v, {"causal": x}) for x in (False, None, "", "top_left", "top_righ")),
        *((q, k, v, x, {}) for x in (None, False, True, 0, 1, 0.0, "", "x", 1 << 62)),
        *((q, k, v, {"window": x}) for x in ((), (1,), (0, 1), (1, 0), (1.0, 0), (None, 0))),
        *((q, k, v, {x: None}) for x in ("mask", "sinks")),
        *((q, k, v, {"mask": x}) for x in (q, q[0], q[0, 0], k, q.clone().requires_grad_())),
        *((q, k, v, x, {"mask": y}) for x, y in ((q, None), (None, q), (k, q), (q, k), (q, q))),
        *((q, k, v, {"scale": 1.0, "causal": True}), (wide[..., ::2], k, v, {})),
        *((wide[..., :16], k, v, {}), (q, k, v[..., :3], {}), (q, k[:, :2], v[:, :2], {})),
        *((q[:, :, :2], k, v, {}), [x.double() for x in (q, k, v)] + [{}]),
        [x.half() for x in (q, k, v)] + [{}],
    ]
    with torch.no_grad():
        for _ in range(2):
            for kind in kinds:
                assert marshalling.attend(path, *kind) is not None
            assert len(made) == len(kinds)
    kinds.append("with gradients")
    assert marshalling.attend(path, q, k, v, {}) is not None
    assert len(made) == len(kinds)
    assert marshalling.attend(path, q.clone(), k, v, {}) is not None
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
    plan = Library().plan()
    behind = struct.pack("=9q", *(libraries.SIZE - 7, 0, 0) * 3)
    gradient = plan[0], struct.pack("=3i", 0, 1, 2), (((), ()),) * 3, q, q, ()
    bad_gradients = [
        *(
            (),
            3,
            gradient[:5],
            (plan[0][1:], *gradient[1:]),
            (*gradient[:2], (((), ()),) * 2, q, q, ()),
        ),
        *((plan[0], struct.pack("=2i", 0, 1), *gradient[2:]), (*gradient[:3], 3, q, ())),
        (plan[0], struct.pack("=4i", 0, 1, 2, 3), *gradient[2:]),
        (plan[0], struct.pack("=3i", 0, 2, 1), *gradient[2:]),
        (plan[0], b"" * 12, *gradient[2:]),
        (plan[0], struct.pack("=13i", *range(13)), *gradient[2:]),
        (*gradient[:2], (((), ()), ((), ()), (1, 2, 3)), *gradient[3:]),
        (*gradient[:3], torch.zeros(1, 1, 1, 1, 1), q, ()),
    ]
    layout = (), ()
    bad_weights = (), 3, (plan[0],), (plan[0][1:], layout), (3, layout), (plan[0], ((), (), ()))
    for bad in (
        *((plan[0][1:], *plan[1:]), plan[:3], "plan", (*plan[:5], "bytes", *plan[6:])),
        *((*plan[:3], x, *plan[4:]) for x in (places("q"), places(*"qkvqk"[:4]), behind, 3)),
        *((*plan[:7], x, None) for x in bad_weights),
        *((*plan[:8], x) for x in bad_gradients),
    ):
        with pytest.raises((ValueError, TypeError, IndexError, SystemError)):
            marshalling.attend(path_of(lambda *args, bad=bad: bad), q, k, v, {})
    for args in ((), (api._FAST, q, k, v), (3, q, k, v, {}), ((), q, k, v, {})):
        with pytest.raises((TypeError, IndexError, SystemError)):
            marshalling.attend(*args)
    with pytest.raises((TypeError, SystemError)):
        marshalling.attend(api._FAST, q, k, v, 3)
    for args in ((), (3, (), ()), (object(), (q,), (q,)), (api._FAST, 3, 3)):
        with pytest.raises((TypeError, ValueError, SystemError)):
            marshalling.gradients(*args)
    for args in ((), (api._FAST, q, None, q, q, q, k, v), ((), q, None, q, q, q, k, v, {})):
        with pytest.raises((TypeError, SystemError)):
            marshalling.differentiate(*args)
    assert marshalling.differentiate(api._FAST, 3, None, q, "", q, k, v, False, {}) is None


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


def test_names_and_values_that_have_no_plan():
    x = plain()
    for name in ("nonsense", "causal ", "Scale", "é", 3):
        assert marshalling.attend(api._FAST, *x, False, {name: None}) is None
    for value in (1, object(), [1], (1, (2,)), b"x", 1j, "\ud800", numpy.float64(1)):
        assert marshalling.attend(api._FAST, *x, False, {"scale": value}) is None
    for value in (1 << 64, object(), (1,), "\ud800"):
        assert marshalling.attend(api._FAST, *x, value, {}) is None
    assert marshalling.attend(api._FAST, *x, False, dict(api.DEFAULTS)) is not None
    assert marshalling.attend(api._FAST, *x, *[x[0]] * 9, x[0], {}) is None  # too many tensors
    assert marshalling.attend(api._FAST, *x, *[0.5] * 200, {}) is None  # too many words
    assert marshalling.attend(api._FAST, *x, x[0][None], {}) is None  # too many dimensions


# ---------------------------------------------------------------------------------- memory, threads


@pytest.mark.slow
def test_calls_leave_nothing_behind():
    q, k, v = plain()
    leaves, mask = [x.clone().requires_grad_() for x in (q, k, v)], torch.randn(4, 4)
    arguments = {"causal": True, "scale": 0.25}
    forward, backward = (operator(f"attention{x}").default for x in ("", "_backward"))
    in_operator = run_pass.arguments(operation.FORWARD, Tensors(q, k, v), Options(grad=True))
    in_backward = [q, k, v, *[None] * (len(Tensors._fields) - 3), *Options(grad=True)]
    held = q, k, v, mask, *leaves, arguments, api._FAST, None, True, False, 0.25, torch.Tensor

    def calls(n):
        for _ in range(n):
            fastattn.attention(q, k, v)
            fastattn.attention(q, k, v, **arguments)
            fastattn.scaled_dot_product_attention(q, k, v)
            marshalling.attend(api._FAST, q, k, "v", False, {})
            marshalling.attend(api._FAST, q, k, v[0], False, {})
            fastattn.attention(q, k, v, mask=mask, return_lse=True)
            fastattn.scaled_dot_product_attention(q[0], k[0], v[0])
            fastattn.attention(*leaves, mask=mask)
            torch.autograd.grad(fastattn.attention(*leaves, mask=mask).sum(), leaves)
            fastattn.attention(q, k, v, mask=mask)
            fastattn.attention(q.as_subclass(Subclass), k, v)
            torch.autograd.grad(fastattn.attention(*leaves).sum(), leaves)
            with torch.no_grad():
                outs = forward.direct(*in_operator)
                backward.direct(q, None, *outs, *in_backward, ["q", "v"])
                backward.direct(q, outs[1], *outs, *in_backward, ["q"])
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


@pytest.mark.slow
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
