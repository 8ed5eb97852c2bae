"""Helpers for the tests on a GPU: move problems there, and bring results back for judgement."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch

import fastattn
from tests.support import cases
from tests.support.backends import declares, passed
from tests.support.error_budget import Verdict

# torch warns of cuBLAS in deterministic mode (conftest) unless this is set before its first use.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICE = "cuda"
BACKENDS = {
    x: why for x, why in fastattn.available_backends().items() if x not in ("cpu", "reference")
}
# The head dim of most tests, by dtype, so that they share kernels. IEEE products of float32 are
# unrolled into single instructions, which compile in seconds only for few columns.
DIM = {"float32": 16, "bfloat16": 64, "float16": 64}
DTYPES = {name: cases.DTYPES[name] for name in DIM}

on_gpu = [
    pytest.mark.gpu,
    # autograd's threads use cuBLAS without a CUDA context; torch makes one and warns.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
on_every_backend = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.skip(reason=f"{name}: {why}")] if why else [])
        for name, why in BACKENDS.items()
    ],
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
EVERYTHING = tuple(
    cases.FEATURE[name]
    for name in ("causal", "softcap", "alibi", "key_bias_grad", "sinks", "dropout", "lse_loss")
)

FOUR_ITEMS = replace(cases.FEATURE["lengths"], dims=lambda dims: replace(dims, B=4))


def build(dims, features, dtype):
    """The CPU's case. With lengths it has four items at any size: full, empty, half and one key."""
    features = [FOUR_ITEMS if f.name == "lengths" else f for f in features]
    return cases.build(dims, features, dtype)


def moved(x, device=None):
    """A copy of x on the device with its memory layout: strides, offset, and the memory between."""
    if not isinstance(x, torch.Tensor):
        return x
    memory = x.new_empty(0).set_(x.detach().untyped_storage()).to(device or DEVICE)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def on_device(problem, device=None):
    changed = {f.name: moved(getattr(problem, f.name), device) for f in fields(problem)}
    changed["kwargs"] = {name: moved(x, device) for name, x in problem.kwargs.items()}
    return replace(problem, **changed)


def brought_back(found):
    return {name: x.cpu() for name, x in found.items()}


def attend(problem, name):
    return problem.run(fastattn.attention, backend=name)


def check(name, problems, run=attend, verdict=Verdict):
    """Run each problem by `run(problem on the device, backend)` and judge the results."""
    for problem in problems:
        declares(name, problem.q.dtype)
    found = []
    for problem in problems:
        got = run(on_device(problem), name)
        if not compiling.now:
            lines = verdict(problem).about(brought_back(got))
            found += [f"{problem.name}: {line}" for line in lines]
    passed(found)


# --------------------------------------------------------------------------- kernels ahead of time


class Compiling(threading.local):
    now = False


compiling = Compiling()


def judged(test):
    """For tests that are one call of `check`: on every backend, with kernels made by `compiled`."""
    test.judged = True
    return on_every_backend(test)


@pytest.fixture(scope="module")
def compiled(request):
    """Compile the kernels of the module's chosen `judged` tests, on every core.

    A kernel compiles at its first launch, for seconds; all in sequence take an hour. Errors here
    are ignored: they recur, and are reported, in the test itself.
    """
    chosen = [
        item
        for item in request.session.items
        if item.module is request.module and getattr(item.function, "judged", False)
    ]
    if not chosen:
        return
    launch(chosen[0])  # alone: it sets up the compiler and the driver
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(launch, chosen[1:]))


def launch(item):
    if item.get_closest_marker("skip"):
        return
    compiling.now = True
    # Run backward on the calling thread: autograd has only one thread for all work on a GPU.
    try:
        with torch.autograd.set_multithreading_enabled(False):
            item.function(**item.callspec.params)
    except (Exception, pytest.skip.Exception):  # pytest's skip is not an Exception
        pass
    finally:
        compiling.now = False
