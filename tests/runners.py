"""What the tests run: every backend but the reference, on every instruction set it has here."""

from contextlib import contextmanager

import pytest

import fastattn
from fastattn import backend, native

REASONS = {name: why for name, why in fastattn.backends().items() if name != "reference"}
FUSED = [
    pytest.param(name, marks=[pytest.mark.skip(reason=f"{name}: {why}")] if why else [])
    for name, why in REASONS.items()
]
every_backend = pytest.mark.parametrize("name", FUSED)


def variants(name):
    """The instruction sets to run backend `name` on; one nameless variant for other backends."""
    return native.cpu_isas() if name == "cpu" else [None]


@contextmanager
def variant(isa):
    """Run the CPU kernels on one instruction set."""
    if isa is None:
        yield
        return
    before = native.cpu_isa()
    native.select_cpu_isa(isa)
    try:
        yield
    finally:
        native.select_cpu_isa(before)


def everywhere(name, verdict, tag=""):
    """Complaints about backend `name` on each of its variants."""
    found = []
    for isa in variants(name):
        with variant(isa):
            lines = verdict.complaints(fastattn.attention, backend=name)
        where = " ".join(x for x in (verdict.problem.name, isa, tag) if x)
        found += [f"{where}: {line}" for line in lines]
    return found


def declares(name, dtype):
    """Skip, with the backend's own reason, what it says it does not support."""
    if dtype not in backend.get(name).support.dtypes:
        pytest.skip(f"{name} declares no {dtype}")


def passed(found):
    assert not found, f"{len(found)} results out of budget:\n" + "\n".join(found[:12])
