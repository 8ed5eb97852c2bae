"""The launch path of the CUDA kernels, from the backend through csrc/cuda/launch.h to a runtime
that emulates two devices, streams, graphs and errors (tests/gpu_emulation/emu/runtime.cpp)."""

from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.backends.native import cuda, libraries
from tests.gpu_emulation.emulated import NARROW
from tests.gpu_emulation.emulator import needs_emulator
from tests.gpu_emulation.runtime import Launched, Runtime, launching
from tests.semantics import test_extents
from tests.support.backends import passed
from tests.support.cases import FEATURE, Dims, build, square
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize

pytestmark = [needs_emulator, pytest.mark.usefixtures("one_thread")]
NAMES = ("causal", "softcap", "alibi", "key_bias_grad", "sinks", "dropout", "lse_loss")
EVERYTHING = tuple(FEATURE[name] for name in NAMES)
SHAPES = {
    "square": square(2, 2, 97, 64),
    "decoding": Dims(2, 4, 2, 5, 300, 64, 64),
    "wide": Dims(1, 2, 1, 40, 40, 256, 256),  # more shared memory than the default limit
}
every_shape = parametrize("shape", SHAPES, fast=2)  # wide kernels take a minute to build
INVALID_VALUE, INVALID_CONFIGURATION, INVALID_DEVICE = 1, 9, 101
CODES = {
    INVALID_VALUE: "invalid argument",
    INVALID_DEVICE: "invalid device ordinal",
    719: "unrecognized error code",
}


def runtime_of(shape, **options):
    return Runtime(wide=SHAPES[shape].D > NARROW, **options)


def problem_of(shape, features=EVERYTHING, seed=0):
    return build(SHAPES[shape], features, torch.bfloat16, seed=seed)


def attend(problem):
    return problem.run(fastattn.attention)


@every_shape
@parametrize("device", [0, 1], fast=1)
def test_a_call_runs_where_it_should(shape, device):
    """On its device, even if that is not the current one, and on the caller's stream. All kernel
    arguments are in memory of that device, also lengths, which are converted first."""
    runtime = runtime_of(shape)
    stream = [runtime.stream(0), runtime.stream(1)][device]
    problem = problem_of(shape, (*EVERYTHING, FEATURE["lengths"]))
    problem.kwargs["key_lengths"] = problem.kwargs["key_lengths"].to(torch.int32)
    with launching(runtime, stream, device):
        passed(Verdict(problem).about(attend(problem)))
    launches = runtime.launches()
    assert launches and {x[:2] for x in launches} == {(device, str(device + 1))}
    assert ["set device 1"] * device == [x for x in runtime.log() if x.startswith("set device")]


def test_weights_run_there_too():
    runtime = Runtime()
    q, k = (x.requires_grad_() for x in (problem_of("square").q, problem_of("square").k))
    with launching(runtime, runtime.stream(0)):
        fastattn.attention_weights(q, k, causal=True).float().square().sum().backward()
    assert len(runtime.launches()) >= 3 and {x[1] for x in runtime.launches()} == {"1"}


@pytest.mark.parametrize("whose", ["a host pointer", "a pointer of another device"])
def test_memory_of_another_device_is_detected(whose, monkeypatch):
    spec, t = call_of(problem_of("square", ()))
    runtime = Runtime()
    with launching(runtime) as backend:
        k = t.k if "host" in whose else runtime.memory(t.k, 1)
        there = backend.moved(t)._replace(k=k)
        monkeypatch.setattr(Launched, "moved", lambda self, t: there)
        with pytest.raises(AssertionError, match=whose):
            backend.forward(spec, t)


def call_of(problem):
    """The spec and the tensors that the backend's forward gets for a call."""
    caught = []

    class Caught(Exception):
        pass

    class Catching(Launched):
        def forward(self, spec, t):
            caught.append((spec, t))
            raise Caught

    with launching(Runtime()) as backend:
        backend.__class__ = Catching
        with pytest.raises(Caught):
            fastattn.attention(problem.q, problem.k, problem.v, **problem.kwargs)
    return caught[0]


# --------------------------------------------------------------------------------------- streams


@pytest.mark.slow
@every_shape
def test_streams_share_nothing(shape):
    """Two calls wait, each in its stream; then their kernels run in alternation. Memory that Python
    has freed meanwhile may be reused in the order of the stream."""
    runtime = runtime_of(shape, at_once=False)
    problems = [problem_of(shape, seed=seed) for seed in (1, 2)]
    streams, found = [runtime.stream() for _ in problems], []
    for problem, stream in zip(problems, streams, strict=True):
        with launching(runtime, stream):
            found.append(attend(problem))
    assert any(x.isnan().any() for x in found[0].values()), "nothing has run yet"
    runtime.finish(*streams)
    for problem, got in zip(problems, found, strict=True):
        passed(Verdict(problem).about(got))


@pytest.mark.slow
@every_shape
def test_a_graph_replays_with_new_values(shape):
    """With inputs that kernels read directly: the graph does not record torch's conversions."""
    features = tuple(FEATURE[x] for x in ("causal", "softcap", "alibi", "dropout"))
    runtime = runtime_of(shape)
    stream = runtime.stream()
    with launching(runtime, stream) as backend:
        old = problem_of(shape, features, seed=1)
        inputs = ("q", "k", "v", "dout")
        here = replace(old, **{x: backend.mode.there(getattr(old, x)) for x in inputs})
        with runtime.recording(stream) as graph:
            found = attend(here)
        for seed in (2, 3):
            new = replace(problem_of(shape, features, seed=seed), kwargs=old.kwargs)
            for x in inputs:
                getattr(here, x).copy_(getattr(new, x))
            runtime.replay(graph)
            passed(Verdict(new).about(found))


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.slow
@every_shape
@pytest.mark.parametrize("code", CODES)
def test_each_failing_call_is_reported(shape, code):
    """With its text and the kernel's name; nothing is called after it; the next call is right."""
    problem = problem_of(shape, ())
    with launching(runtime := runtime_of(shape)):
        attend(problem)
        calls = len(runtime.log())
    assert calls > 4
    for at in range(calls):
        runtime = runtime_of(shape)
        with launching(runtime):
            runtime.fail(at, code)
            with pytest.raises(
                RuntimeError, match=rf"failed at \w+: {CODES[code]} \(CUDA error {code};"
            ):
                attend(problem)
            assert len(runtime.log()) == at + 1
            if at == calls - 1:
                passed(Verdict(problem).about(attend(problem)))


@pytest.mark.parametrize(
    "device, streams_device, says",
    [(5, 0, "cudaSetDevice: invalid device ordinal"), (0, 1, "_kernel: invalid resource handle")],
    ids=["no such device", "a stream of another device"],
)
def test_errors_of_the_runtime_are_raised(device, streams_device, says):
    runtime = Runtime(apart=False)
    problem = problem_of("square", ())
    with launching(runtime, runtime.stream(streams_device)) as backend:
        backend.binary = type(backend.binary)(runtime.emulator, device)
        with pytest.raises(RuntimeError, match=says):
            fastattn.attention(problem.q, problem.k, problem.v)


@parametrize("shape, asked", [("square", False), ("wide", True)], fast=1)
@pytest.mark.parametrize("device", [0, 1])
def test_shared_memory_over_48_kilobytes_is_requested(shape, asked, device):
    """A block has 48 KB by default; a larger limit applies to one device only."""
    problem, runtime = problem_of(shape, ()), runtime_of(shape)
    with launching(runtime, device=device):
        fastattn.attention(problem.q, problem.k, problem.v)
    sizes = [int(x.split()[1]) for x in runtime.log() if x.startswith("allow")]
    assert len(sizes) == asked and all(48 << 10 < x <= 99 << 10 for x in sizes)


def test_a_tensor_of_an_old_runtime_changes_nothing():
    """It outlives its runtime, and its memory is reused: freeing it overwrites nothing."""
    runtime = Runtime(at_once=False)
    old = runtime.memory(torch.ones(64), 0, runtime.stream())
    runtime = Runtime(at_once=False)
    stream = runtime.stream()
    new = runtime.memory(torch.ones(64), 0, stream)
    del old
    runtime.finish(stream)
    assert (new == 1).all()


# ------------------------------------------------------------------- sizes of what kernels write

WRITTEN = [x for x in test_extents.CASES if x[0] < libraries.JVP]
FIRST = {  # the first kernel of each pass
    libraries.FORWARD: "",  # no kernel comes before it
    libraries.BACKWARD: "delta_kernel",
    libraries.WEIGHTS: "weights_kernel",
    libraries.WEIGHTS_BACKWARD: "delta_kernel",
}


@pytest.mark.parametrize("which", FIRST, ids=test_extents.NAMES.get)
def test_tensors_of_other_sizes_are_refused(which):
    """No kernel of the pass is launched."""
    for name, packed in (x[1:] for x in WRITTEN if x[0] == which):
        leaves = test_extents.tensors(packed, torch.bfloat16, D=16)
        runtime, shape = Runtime(), test_extents.changed(0, 1)
        with launching(runtime, runtime.stream()):
            test_extents.refuse(which, name, shape, packed, backend=cuda.Cuda, leaves=leaves)
        assert not any(FIRST[which] in x for *_, x in runtime.launches()), (name, packed)
