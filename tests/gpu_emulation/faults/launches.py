"""Slices of the launch path: the backend on the runtime of emu, which has two devices."""

import re
from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.backends.base import broadcast_strides
from fastattn.backends.native import cuda, libraries
from fastattn.call.spec import AttentionSpec
from tests.gpu_emulation import emulated
from tests.gpu_emulation.runtime import Runtime, launching
from tests.semantics import test_extents
from tests.support.cases import FEATURE, Dims, build
from tests.support.error_budget import Verdict

from .slices import DIM, SHAPES, named

FEATURES = [FEATURE[x] for x in ("softcap", "key_bias_grad", "sinks", "lengths")]
DIM["launches that ask for shared memory"] = 256


def slice_of(*passes):
    return named(*passes, launches=True)


def attend(dims, features=(), device=1, backward=True):
    """Make a call on a new stream; yield what is wrong with its values, and with where kernels
    ran."""
    runtime = Runtime()
    streams = [runtime.stream(0), runtime.stream(1)]
    problem = build(dims, features, torch.bfloat16)
    with launching(runtime, streams[device], device):
        found = problem.run(fastattn.attention, backward)
    yield from Verdict(problem, backward).about(found)
    for where in runtime.launches():
        if where[:2] != (device, str(device + 1)):
            yield f"{where[2]} ran on device {where[0]}, stream {where[1]}"
    if device == 0 and (found := [x for x in runtime.log() if x.startswith("set device")]):
        yield f"{found[0]}, which is the current one"


@slice_of("backward")
def launches():
    return attend(SHAPES["backward"][1], FEATURES)


@slice_of("backward")
def launches_on_the_current_device():
    return attend(SHAPES["backward"][1], device=0)


@slice_of("backward")
def launches_with_lengths_apart():
    """Lengths of 32 bits, and lengths of 64 bits that are not contiguous."""
    runtime = Runtime()
    problem = build(Dims(4, 2, 1, 37, 67, 24, 24), [FEATURE["lengths"]], torch.bfloat16)
    apart = torch.zeros(8, dtype=torch.int32)
    apart[::2] = problem.kwargs["key_lengths"]
    for lengths in (problem.kwargs["key_lengths"].int(), apart.long()[::2]):
        moved = replace(problem, kwargs=problem.kwargs | dict(key_lengths=lengths))
        with launching(runtime, runtime.stream()):
            yield from Verdict(problem).about(moved.run(fastattn.attention))


@slice_of("decode", "backward")
def launches_of_decoding():
    return attend(SHAPES["many tiles"][1], [FEATURE["sinks"]])


@slice_of("forward")
def launches_that_ask_for_shared_memory():
    """A block of these kernels has more than 48 KB."""
    return attend(SHAPES["wide"][1], backward=False)


@slice_of("backward")
def launches_of_nothing():
    """No rows, or no keys: the other side has gradients of zero."""
    for rows, keys in (0, 5), (5, 0):
        inputs = [torch.randn(1, 1, n, 8).bfloat16().requires_grad_() for n in (rows, keys, keys)]
        runtime = Runtime()
        with launching(runtime, runtime.stream()):
            out = fastattn.attention(*inputs)
            if any(x.any() for x in torch.autograd.grad(out, inputs, torch.ones_like(out))):
                yield "gradients of nothing"


@slice_of("forward")
def launches_of_too_many_blocks():
    """2^32 + 1 blocks, which in 32 bits would be one."""
    q, rows = torch.ones(1, 1, 1, 8, dtype=torch.bfloat16), torch.ones(8)
    sizes = dict(B=(1 << 32) + 1, H=1, Hk=1, M=1, N=1, D=8, Dv=8, left=1, right=1)
    spec = AttentionSpec(**sizes, dtype=q.dtype, device="cuda", scale=1.0)
    params = bytearray(libraries.form(spec))
    tensor = libraries.TENSOR.pack(q.data_ptr(), *broadcast_strides(q), libraries.DTYPE[q.dtype])
    lse = libraries.TENSOR.pack(rows.data_ptr(), 0, 0, 0, 0, 0)
    fields = {"q": tensor, "k": tensor, "v": tensor, "out": tensor, "lse": lse}
    fields["out_size"] = libraries.EXTENT.pack(spec.B, 1, 1, 8)
    fields["lse_size"] = libraries.EXTENT.pack(spec.B, 1, 1, 2)
    for field, x in fields.items():
        at = libraries.offset(field)
        params[at : at + len(x)] = x
    Runtime()
    code = emulated.binary().run(bytes(params), libraries.FORWARD, 0, 0, 80, None)
    return [] if code == 9 else [f"error {code}, expected 9"]


@slice_of("backward")
def launches_of_other_sizes():
    """A gradient that is too large, which no fault writes past, is refused."""
    runtime, packed = Runtime(), False
    leaves = test_extents.tensors(packed, torch.bfloat16)
    which, shape = libraries.BACKWARD, test_extents.changed(0, 1)
    with launching(runtime, runtime.stream()):
        try:
            test_extents.refuse(which, "dmask", shape, packed, backend=cuda.Cuda, leaves=leaves)
        except (AssertionError, pytest.fail.Exception) as error:
            yield str(error)


@slice_of("backward")
def each_launch_that_fails():
    """The error has the kernel and the text of the code, and no call follows it."""
    return each_that_fails(build(SHAPES["few rows"][1], (), torch.bfloat16))


@slice_of("forward")
def each_call_that_fails():
    """The same for a kernel that asks for shared memory, on a device that is not the current
    one."""
    problem = build(SHAPES["wide"][1], (), torch.bfloat16)
    return each_that_fails(problem, device=1, backward=False)


DIM["each call that fails"] = 256


def each_that_fails(problem, device=0, backward=True):
    right = Runtime()
    with launching(right, device=device):
        problem.run(fastattn.attention, backward)
    for at, call in enumerate(right.log()):
        kernel = re.search(r"[a-z]+_kernel|$", call)[0]
        runtime = Runtime()
        with launching(runtime, device=device):
            runtime.fail(at, 101)
            message = "no exception"
            try:
                problem.run(fastattn.attention, backward)
            except RuntimeError as caught:
                message = str(caught)
        if "invalid device ordinal (CUDA error 101" not in message or kernel not in message:
            yield f"{call} fails: got {message!r}"
        if len(runtime.log()) != at + 1:
            yield f"{call} fails: {len(runtime.log())} calls, expected {at + 1}"


@slice_of("backward")
def launches_in_two_streams():
    """They wait; then the streams run one kernel each in turn."""
    runtime = Runtime(at_once=False)
    problems = [build(SHAPES["backward"][1], FEATURES, torch.bfloat16, seed=x) for x in (1, 2)]
    streams, found = [runtime.stream() for _ in problems], []
    for problem, stream in zip(problems, streams):
        with launching(runtime, stream):
            found.append(problem.run(fastattn.attention))
    runtime.finish(*streams)
    for problem, got in zip(problems, found):
        yield from Verdict(problem).about(got)
