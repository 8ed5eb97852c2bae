"""Conditions that a first call may meet on a user's machine, and the messages about them: caches
that cannot be written, an older driver, a CUDA graph being captured, no memory left on the GPU.

Here the emulator provides CUDA's runtime, and a stub Triton's driver. On a GPU a separate process
meets the same conditions.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

import fastattn
from fastattn.backends.native import cuda, launcher, libraries
from fastattn.backends.shared import cuda_errors, gpu
from fastattn.backends.triton import backend as triton
from fastattn.backends.triton import launch_cache
from fastattn.call import spec, validation
from tests.gpu_emulation.emulated import binary
from tests.gpu_emulation.emulator import needs_emulator
from tests.gpu_emulation.runtime import Runtime, launching
from tests.support import launch_stub as stub
from tests.support.backends import passed
from tests.support.cases import build, square
from tests.support.error_budget import Verdict
from tests.support.fresh_python import python
from tests.support.gpu import on_every_backend
from tests.support.marks import parametrize

NOWHERE = "/dev/null/home"  # no user, not even root, can make a folder there
compiled_triton = pytest.mark.skipif(
    triton.interpreted() or not importlib.util.find_spec("triton"),
    reason="no Triton, or its interpreter",
)
ADVICE = {
    2: r"memory is full: .+ torch\.cuda\.empty_cache\(\)",
    35: "update the driver, or .+ CUDACXX=",
    209: "no code that this GPU runs: .+ CUDAARCHS=",
    222: "update the driver, or .+ TRITON_PTXAS_PATH=",
    900: "make one call of the same kind before, outside the capture",
    901: "make one call of the same kind before, outside the capture",
}


@pytest.fixture
def problem():
    return build(square(1, 2, 40, 32), (), torch.bfloat16)


def test_an_error_code_and_its_text_get_the_same_advice():
    for code, words in {
        2: "out of memory",
        35: "CUDA driver version is insufficient for CUDA runtime version",
        200: "device kernel image is invalid",
        209: "no kernel image is available for execution on the device",
        222: "the provided PTX was compiled with an unsupported toolchain.",
        900: "operation not permitted when stream is capturing",
        901: "operation failed due to a previous error during capture",
    }.items():
        assert cuda_errors.advice(code) == cuda_errors.advice(f"Triton Error [CUDA]: {words}") != ""
    assert cuda_errors.advice(700) == cuda_errors.advice("an illegal memory access") == ""


# ----------------------------------------------------------------------------- CUDA C++, emulated


@pytest.fixture
def emulated_gpu(monkeypatch):
    """Use the emulator's library of kernels, and report the GPU as usable."""
    runtime = Runtime()
    monkeypatch.setattr(libraries, "cuda", binary)
    monkeypatch.setattr(libraries, "cuda_unavailable", lambda: None)
    monkeypatch.setattr(gpu, "unavailable", lambda oldest=0: None)
    monkeypatch.setattr(gpu, "architecture", lambda device: 120)
    monkeypatch.setattr(gpu, "processors", lambda device: 132)
    return runtime


@pytest.mark.slow
@needs_emulator
def test_an_older_driver_is_a_reason_emulated(emulated_gpu):
    emulated_gpu.driver(12040)
    message = cuda.unavailable.__wrapped__()
    assert "driver version is insufficient" in message and cuda_errors.advice(35) in message
    assert "(CUDA 13.0 there, 12.4 in the driver)" in message
    emulated_gpu.driver(13010)
    assert cuda.unavailable.__wrapped__() is None


@needs_emulator
@pytest.mark.parametrize("cache", ["kept", "nowhere", "off"])
def test_a_warning_if_the_driver_has_to_translate_ptx_emulated(
    cache, emulated_gpu, monkeypatch, tmp_path
):
    """Once; the warning says if every process has to, because the cache cannot be written."""
    monkeypatch.setenv("CUDA_CACHE_PATH", NOWHERE if cache == "nowhere" else str(tmp_path))
    monkeypatch.setenv("CUDA_CACHE_DISABLE", str(int(cache == "off")))
    device = torch.device("cuda", 0)
    assert cuda.met.__wrapped__(device) == (132, 120)
    emulated_gpu.driver(13000, 120)
    with pytest.warns(UserWarning, match="no code for sm_120: .+ CUDAARCHS=120-real") as caught:
        cuda.met.__wrapped__(device)
    (text,) = (str(x.message) for x in caught)
    assert ("in every process" in text) == (cache != "kept"), text
    assert ("Not a directory" in text) == (cache == "nowhere")


@needs_emulator
@pytest.mark.parametrize("code", ADVICE)
def test_a_launch_error_says_how_to_fix_it_emulated(code, problem):
    """The next call is right."""
    runtime = Runtime()
    with launching(runtime):
        runtime.fail(1, code)
        with pytest.raises(RuntimeError, match=rf"CUDA error {code}; .*{ADVICE[code]}"):
            problem.run(fastattn.attention)
        passed(Verdict(problem).about(problem.run(fastattn.attention)))


@needs_emulator
def test_a_first_call_may_be_captured_emulated(problem):
    runtime = Runtime()
    stream = runtime.stream()
    with launching(runtime, stream):
        with runtime.recording(stream) as graph:
            found = problem.run(fastattn.attention)
        runtime.replay(graph)
        passed(Verdict(problem).about(found))


@needs_emulator
def test_no_room_for_a_workspace_is_torchs_own_error_emulated(problem, monkeypatch):
    def full(*size, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    runtime = Runtime()
    with launching(runtime):
        with monkeypatch.context() as patch:
            patch.setattr(launcher, "empty", full)
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
                problem.run(fastattn.attention)
        passed(Verdict(problem).about(problem.run(fastattn.attention)))


# ------------------------------------------------------------------------------ Triton, with a stub


def triton_call():
    q, k, v = (torch.zeros(1, 2, n, 16, dtype=torch.bfloat16) for n in (20, 70, 70))
    t = spec.Tensors(q, k, v)
    s = validation.describe(t, spec.Options())
    return lambda: triton.Triton().forward(s, t)


@compiled_triton
@parametrize(
    "words, code",
    [
        ("out of memory", 2),
        ("the provided PTX was compiled with an unsupported toolchain.", 222),
        ("operation not permitted when stream is capturing", 900),
    ],
    ids=["memory", "driver", "capture"],
    fast=2,
)
def test_a_triton_error_says_how_to_fix_it_stubbed(words, code):
    """The next call launches its kernels."""
    call = triton_call()
    with stub.stubbed(80) as made:
        load, launched = made.utils.load_binary, []

        def failing(*args):
            raise RuntimeError(f"Triton Error [CUDA]: {words}")

        made.utils.load_binary = failing
        made.launched = lambda *args: launched.append(args)
        with pytest.raises(RuntimeError, match=rf"at forward_kernel: .+{words}: .*{ADVICE[code]}"):
            call()
        made.utils.load_binary = load
        call()
        assert len(launched) == 1


@compiled_triton
def test_a_cache_of_triton_that_cannot_be_written_stubbed(monkeypatch):
    """Another cache is used in this process, with a warning; without any, no kernel is compiled."""
    from triton import knobs

    with stub.stubbed(80) as made:
        monkeypatch.setenv("TRITON_CACHE_DIR", f"{NOWHERE}/.triton")
        launched = []
        made.launched = lambda *args: launched.append(args)
        with monkeypatch.context() as patch:
            patch.setattr(launch_cache, "find_cache", lambda: None)
            with pytest.raises(OSError, match=NOWHERE):
                triton_call()()
        assert not launched
        with pytest.warns(
            UserWarning, match=r"/dev/null/home/.+ \(.+\): .+ TRITON_CACHE_DIR names"
        ):
            launch_cache.find_cache.__wrapped__()
        try:
            triton_call()()
            assert launched and any(Path(knobs.cache.dir).iterdir())
        finally:
            knobs.cache.dir = knobs.env  # back to the environment variable
            launch_cache._kept.pop().cleanup()


# ----------------------------------------------------------------------------------------- on a GPU

PROGRAM = """
import sys, warnings
import torch, fastattn
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 300, 64, dtype=torch.bfloat16, device="cuda").unbind()
call = lambda: fastattn.attention(q, k, v, causal=True, backend=sys.argv[1])
want = scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True)
right = lambda out: (out - want).abs().max().item() < 0.03
"""
CAPTURED = """
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        out = call()
except RuntimeError as error:
    print("told" if "outside the capture" in str(error) else repr(error))
else:
    graph.replay()
    print("right" if right(out) else "wrong")
"""
FULL = """
call() if sys.argv[2] == "loaded" else None
held, size = [], 1 << 30
while size >= 1 << 9:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
try:
    call()
    print("room was left")
except torch.OutOfMemoryError:
    print("told")
except RuntimeError as error:
    print("told" if "memory is full" in str(error) else repr(error))
held.clear()
torch.cuda.empty_cache()
print("right" if right(call()) else "wrong")
"""
CALLED = """
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    print("right" if right(call()) else "wrong")
print(*(x.message for x in said))
"""


def in_a_process(program, *arguments, **environment):
    return python("-c", PROGRAM + program, *arguments, **environment).stdout.splitlines()


@pytest.mark.gpu
@on_every_backend
def test_a_first_call_inside_a_capture(name):
    assert in_a_process(CAPTURED, name) in (["right"], ["told"])


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["loaded", "first"])
@on_every_backend
def test_no_memory_left(name, when):
    first, then = in_a_process(FULL, name, when)
    assert first in ("told", "room was left") and then == "right"


@pytest.mark.gpu
@on_every_backend
def test_a_home_that_cannot_be_written(name):
    """Neither Triton's cache nor CUDA's can be written."""
    away = dict(HOME=NOWHERE, TRITON_HOME=NOWHERE, CUDA_CACHE_PATH=f"{NOWHERE}/cache")
    first, stderr = in_a_process(CALLED, name, **away)
    assert first == "right" and ("Triton's cache" in stderr) == (name == "triton"), stderr


@pytest.mark.gpu
def test_a_driver_too_old_for_the_library_is_a_reason():
    if why := libraries.cuda_unavailable():
        pytest.skip(why)
    library = libraries.cuda()
    older = library.version(1) // 1000 < library.version(0) // 1000
    assert bool(library.driver_error()) == older
    assert (cuda_errors.advice(35) in (cuda.unavailable() or "")) == older
