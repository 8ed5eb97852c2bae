"""What the tests run: every fused backend that takes CPU tensors, on every instruction set.

Under TRITON_INTERPRET=1 only Triton's kernels run, in Triton's interpreter: those tests have the
mark `interpreter`. The interpreter is a thousand times slower than a kernel, so `thinned` and
`small` give it fewer dtypes and smaller sizes, never fewer features.
"""

import importlib.util
import itertools
from contextlib import contextmanager

import pytest
import torch

import fastattn
from fastattn.backends import base
from fastattn.backends.native import libraries
from fastattn.backends.triton import arguments, tile_configs
from fastattn.backends.triton.launch_cache import interpreted
from fastattn.call.spec import Feature
from fastattn.dispatch import operation
from tests.support.cases import DTYPES

INTERPRETED = interpreted()
REASONS = {
    name: why
    for name, why in fastattn.available_backends().items()
    if "cpu" in (base.get(name).support.devices or ()) and (name == "triton") == INTERPRETED
}


def marks(why):
    """A test that backends share is slow in the interpreter: tests/features and tests/triton have
    fast ones."""
    interpreted = [pytest.mark.interpreter, pytest.mark.slow] * INTERPRETED
    return [pytest.mark.skip(reason=why)] * bool(why) + interpreted


FUSED = [pytest.param(name, marks=marks(why)) for name, why in REASONS.items()]
every_backend = pytest.mark.parametrize("name", FUSED)
DECLARED = [
    name
    for name, dtype in DTYPES.items()
    if any(dtype in base.get(x).support.dtypes for x in REASONS)
]
every_dtype = pytest.mark.parametrize("dtype", DECLARED)
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="hours in the interpreter; runs on a GPU")
needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="Triton is not installed"
)
of_cpu_blocks = pytest.mark.skipif(INTERPRETED, reason="sizes are of the C++ kernels' own blocks")


def small(sizes, interpreted):
    """`sizes`, or fewer and smaller ones for the interpreter."""
    return interpreted if INTERPRETED else sizes


def thinned(*lists):
    """Every combination of the lists; in the interpreter, each element of the first list once, and
    the elements of the others in turn."""
    if not INTERPRETED:
        return list(itertools.product(*lists))
    return list(zip(lists[0], *(itertools.cycle(x) for x in lists[1:])))


def variants(name, dtype=None):
    """The instruction sets to run backend `name` on; [None] for other backends than cpu. Tiles do
    not compute float64: there a tile's name selects the vector kernels, so it is left out."""
    if name != "cpu":
        return [None]
    tiles = dtype != torch.float64
    return [isa for isa in libraries.cpu_isas() if tiles or not isa.startswith("amx_")]


@contextmanager
def variant(isa):
    """Run the CPU kernels on one instruction set."""
    if isa is None:
        yield
        return
    before = libraries.cpu_isa()
    libraries.select_cpu_isa(isa)
    try:
        yield
    finally:
        libraries.select_cpu_isa(before)


def on_variants(name, dtype=None):
    """Each of the variants of backend `name`, while calls run on it."""
    for isa in variants(name, dtype):
        with variant(isa):
            yield isa


@contextmanager
def looked_at():
    """Make Triton inspect dense masks of any size for structure before it uses them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_configs, "STRUCTURED", 0)
        patch.setattr(tile_configs, "SHARING", 0)
        arguments.flags.cache_clear()
        yield
    arguments.flags.cache_clear()


def everywhere(name, verdict, tag=""):
    """Complaints about backend `name` on each of its variants."""
    found = []
    for isa in on_variants(name, verdict.problem.q.dtype):
        lines = verdict.complaints(fastattn.attention, backend=name)
        where = " ".join(x for x in (verdict.problem.name, isa, tag) if x)
        found += [f"{where}: {line}" for line in lines]
    return found


def declares(name, dtype, features=Feature.NONE):
    """Skip a test, with a reason, if the backend does not declare support for this."""
    support = base.get(name).support
    if dtype not in support.dtypes:
        pytest.skip(f"{name} declares no {dtype}")
    if missing := features & ~support.features:
        pytest.skip(f"{name} declares no {missing}")


def passed(found):
    assert not found, f"{len(found)} results out of budget:\n" + "\n".join(found[:12])


@contextmanager
def every_call(backend):
    """Every call inside runs on this backend, whichever backend it asks for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operation, "choose", lambda spec, requested, device: backend)
        operation.forget_plans()
        try:
            yield backend
        finally:
            operation.forget_plans()
