"""The arguments of each call that the extension passes to the CUDA library do not depend on the
calls before. The stub library here launches nothing."""

import ctypes
import itertools
import random
import sys
from pathlib import Path

import pytest
import torch

import fastattn
from fastattn.backends.native import cuda, launcher, libraries, marshalling
from fastattn.backends.shared import gpu
from fastattn.call import spec, validation
from tests.support import launch_stub
from tests.support.backends import every_call

pytestmark = pytest.mark.skipif(
    marshalling.launch_on is None, reason=f"no extension: {libraries.extension_unavailable()}"
)
FIELDS = ("pass", "device", "multiprocessors", "architecture", "stream", "runs")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        return launch_stub.compiled_stub(tmp_path_factory.mktemp("stub"))
    except OSError:
        pytest.skip("the stub needs a C++ compiler")


def last(library):
    """The last run: FaParams, and the other arguments by name."""
    at = library.entry("stub_last", ctypes.c_void_p)()
    params = ctypes.string_at(at, libraries.SIZE)
    rest = (ctypes.c_int64 * len(FIELDS)).from_address(at + libraries.SIZE)
    return params, dict(zip(FIELDS, rest))


SIZES = {"square": (20, 70), "decoding": (1, 300)}
GIVEN = {
    "": {},
    "a mask": dict(mask=torch.zeros(1, 2, 1, 70, dtype=torch.bool)),
    "lengths": dict(key_lengths=torch.tensor([31])),
    "lengths of 32 bits": dict(key_lengths=torch.tensor([31], dtype=torch.int32)),
    "slopes and sinks": dict(alibi_slopes=torch.zeros(2), sinks=torch.zeros(2)),
}
LAYOUTS = [dict(column=c, first=f, row=r) for c, f, r in itertools.product((1, 2), (0, 1), (0, 8))]


def described(size, dtype, layout, given, **options):
    M, N = SIZES[size]
    shapes = ((1, 2, M, 16), (1, 2, N, 16), (1, 2, N, 16))
    q, k, v = (launch_stub.laid(s, dtype, **layout) for s in shapes)
    t = spec.Tensors(q, k, v, **given)
    return validation.describe(t, spec.Options(**options)), t


def calls():
    kinds = itertools.product((torch.bfloat16, torch.float16), LAYOUTS, GIVEN)
    found = [described("square", dtype, layout, GIVEN[name]) for dtype, layout, name in kinds]
    found += [described("decoding", torch.float16, layout, {}) for layout in LAYOUTS]
    found += [described("square", torch.float16, {}, {}, right=right) for right in (0, 5)]
    return found


def by_python(which, s, t, after):
    """FaParams as Python packs them, without the workspace and the number of threads."""
    form = launcher.prepared(s).form
    return marshalling._pack(form, launcher.PLACES[which], (*launcher.convert(s, t), *after), 0)


def without(params, *fields):
    for at in map(libraries.offset, fields):
        params = params[:at] + bytes(8) + params[at + 8 :]
    return params


@pytest.mark.parametrize("seed", range(3))
def test_each_call_is_passed_on_unchanged(seed, library, monkeypatch):
    """With any dtype, strides, alignment and tensors, after calls of all kinds; both passes."""
    backend = launch_stub.cuda_backend(library)
    # Conversion makes new tensors: reuse them, so that the extension and Python get the same.
    converted = {}
    real = launcher.convert

    def once(s, t):
        key = tuple(map(id, t))
        return converted.setdefault(key, (real(s, t), t))[0]

    monkeypatch.setattr(launcher, "convert", once)
    monkeypatch.setattr(cuda, "convert", once)
    some = calls()
    random.Random(seed).shuffle(some)
    for s, t in some:
        out, normaliser = backend.forward(s, t)
        params, rest = last(library)
        assert rest["pass"] == libraries.FORWARD
        (at,) = libraries.POINTER.unpack_from(params, libraries.WORKSPACE)
        assert at % 64 == 0 and bool(at) == (s.M <= 16)
        want = by_python(libraries.FORWARD, s, t, (out, normaliser))
        assert without(params, "workspace") == want
        dout = torch.zeros_like(out)
        for dlse, needs_grad in ((None, "qkv"), (torch.zeros_like(normaliser[0]), "qv")):
            grads = backend.backward(s, t, (out, normaliser), (dout, dlse), tuple(needs_grad))
            params, rest = last(library)
            (at,) = libraries.POINTER.unpack_from(params, libraries.WORKSPACE)
            assert rest["pass"] == libraries.BACKWARD and at and at % 64 == 0
            after = (out, normaliser, dout, dlse, *(grads.get(x) for x in spec.DIFFERENTIABLE))
            assert without(params, "workspace") == by_python(libraries.BACKWARD, s, t, after)


def test_a_library_of_another_abi_is_refused_before_its_entries_are_used(library, monkeypatch):
    monkeypatch.setattr(libraries, "FIELDS", "q k")
    found, entry = [], libraries.Library.entry
    monkeypatch.setattr(
        libraries.Library,
        "entry",
        lambda self, name, *x: (found.append(name), entry(self, name, *x))[1],
    )
    with pytest.raises(OSError, match=r"another version of .*: the fields of FaParams are"):
        libraries.CudaLibrary(library.path)
    assert found == ["fa_cuda_abi_fields"]


def test_the_device_its_chip_and_the_stream_are_those_of_the_call(library, monkeypatch):
    s, t = described("square", torch.float16, {}, {})
    chips = gpu.Chip(108, 80), gpu.Chip(132, 90), gpu.Chip(108, 80)
    for stream, chip in zip((0, 1 << 47, 7), chips):
        monkeypatch.setattr(cuda, "met", lambda device, chip=chip: chip)
        launch_stub.cuda_backend(library, stream).forward(s, t)
        found = last(library)[1]
        assert found["stream"] == stream
        assert (found["multiprocessors"], found["architecture"]) == chip
        assert found["device"] == -1  # the number of a CPU tensor's device


def test_a_warm_call_runs_few_functions_of_ours(library, monkeypatch):
    """The chip is known from the first call on, and no choice is made again."""
    folder, found = str(Path(cuda.__file__).parents[1]), []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            found.append(frame.f_code.co_name)

    backend = launch_stub.cuda_backend(library)
    q = torch.zeros(1, 2, 20, 16, dtype=torch.float16)
    with every_call(backend):
        fastattn.attention(q, q, q)  # makes the plan
        sys.setprofile(note)
        try:
            fastattn.attention(q, q, q)
        finally:
            sys.setprofile(None)
    of_backend = ["forward", "prepared", "_launch", "chip", "_check"]
    assert [x for x in found if x in of_backend] == of_backend
    assert not {"choose", "ordered", "met", "architecture", "kernels"} & set(found)
    assert len(found) <= 14, found


def test_the_stream_is_queried_by_device_index(monkeypatch):
    class OnTwo:
        def get_device(self):
            return 2

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda at: 100 + at, raising=False)
    assert cuda.Cuda().stream(OnTwo()) == 102


ERRORS = {
    "an error of CUDA": (
        700,
        r"at stub_kernel: an error of the stub \(CUDA error 700; it may be that of",
    ),
    "a tensor of another size": (
        libraries.BAD_EXTENT + libraries.WRITTEN.index("lse"),
        r"lse: got shape \(2, 1, 2, 20\), expected \(2, B, H, M\) = \(2, 1, 2, 20\); nothing",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_an_error_raises_and_the_next_call_runs(what, library):
    s, t = described("square", torch.float16, {}, {})
    backend = launch_stub.cuda_backend(library)
    fail = library.entry("stub_fail", None, ctypes.c_int64)
    code, message = ERRORS[what]
    fail(code)
    try:
        with pytest.raises(RuntimeError, match=message):
            backend.forward(s, t)
    finally:
        fail(0)
    before = last(library)[1]["runs"]
    backend.forward(s, t)
    assert last(library)[1]["runs"] == before + 1


@pytest.mark.parametrize("size", SIZES)
def test_a_workspace_is_of_the_inputs_device_and_large_enough(size, library, monkeypatch):
    made = []

    def room(q, size):
        made.append((q, torch.empty(size, dtype=torch.uint8)))
        return made[-1][1]

    monkeypatch.setattr(cuda, "_room", room)
    s, t = described(size, torch.float16, {}, {})
    launch_stub.cuda_backend(library).forward(s, t)
    params, rest = last(library)
    (at,) = libraries.POINTER.unpack_from(params, libraries.WORKSPACE)
    assert bool(made) == (size == "decoding") == bool(at)
    for q, x in made:
        chip = rest["multiprocessors"], rest["architecture"]
        want = library.workspace(params, libraries.FORWARD, *chip)
        assert q is t.q and x.data_ptr() <= at and at + want <= x.data_ptr() + x.numel()


def test_without_memory_an_error_raises_and_nothing_runs(library, monkeypatch):
    def full(q, size):
        raise torch.OutOfMemoryError("Tried to allocate")

    monkeypatch.setattr(cuda, "_room", full)
    s, t = described("decoding", torch.float16, {}, {})
    before = last(library)[1]["runs"]
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        launch_stub.cuda_backend(library).forward(s, t)
    assert last(library)[1]["runs"] == before


def test_without_the_extension_launches_have_the_same_arguments(library, monkeypatch):
    s, t = described("decoding", torch.float16, {}, {})
    backend = launch_stub.cuda_backend(library)
    found = []
    for way in (marshalling.launch_on, None):
        monkeypatch.setattr(cuda, "launch_on", way)
        backend.forward(s, t)
        params, rest = last(library)
        del rest["runs"]
        found.append((without(params, "workspace", "threads", "out", "lse"), rest))
    assert found[0] == found[1]


@pytest.mark.parametrize("arguments", [(), (1,) * 11, (0, 0, None, 0, 0, 0, 0, 0, b"", b"", ())])
def test_invalid_launch_arguments_are_refused(arguments):
    with pytest.raises((TypeError, ValueError)):
        marshalling.launch_on(*arguments)
