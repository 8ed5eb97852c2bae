"""Compare a call with the oracle; reduce one that fails to the smallest row that still does."""

import shlex
from contextlib import contextmanager

import pytest

from fastattn.backends import base
from fastattn.backends.triton import job
from tests.features import factors
from tests.features.caches import cached
from tests.features.calls import Expected, dense, packed, selected
from tests.support.backends import INTERPRETED, REASONS, variant, variants
from tests.support.cases import DTYPES
from tests.support.error_budget import on_threads, one_thread

MAKE = dict(dense=dense, packed=packed, paged=packed, selected=selected, cache=cached)


def ways(row):
    """Where a call may run: instruction sets of the CPU kernels, or names of other backends."""
    found = []
    for name, why in REASONS.items():
        support = base.get(name).support
        if not why and DTYPES[row["dtype"]] in support.dtypes:
            found += [isa or name for isa in variants(name, DTYPES[row["dtype"]])]
    by_reference = not INTERPRETED and not row.get("row_invariant")
    return found + ["reference"] * by_reference


@contextmanager
def on(way):
    """Yields the arguments of a call that runs so."""
    if way in (*REASONS, "reference"):
        with pytest.MonkeyPatch.context() as patch:  # few rows of many keys are split, as on a GPU
            patch.setattr(job, "processors", lambda device: 13)
            yield dict(backend=way)
        return
    if way.partition("-")[0] in ("emulator", "nvcc", "triton"):  # GPU kernels on a CPU
        from tests.gpu_emulation.ways import WAYS

        with WAYS[way]():
            yield {}
        return
    with variant(way):
        yield {}


def complaints(form, row, way):
    """One line for each result that is not the oracle's."""
    try:
        with one_thread():
            call = MAKE[form](row)
            expected = Expected(call)
            with on(way) as more, on_threads(row["threads"]):
                found = call.run(**more)
            missing = [f"{name}: got none" for name in expected.exact.keys() - found.keys()]
            return missing or expected.about(found)
    except Exception as error:  # a call that raises is a failure too, which may be reduced
        return [f"{type(error).__name__}: {error}"]


def smallest(form, row, way, found):
    """The row with as many factors at their defaults as still fail alike: with an error, or not."""
    for name, levels in factors.FORMS[form].items():
        smaller = row | {name: levels[0]}
        if smaller != row and factors.allowed(smaller):
            other = complaints(form, smaller, way)
            if other and ("Error: " in other[0]) == ("Error: " in found[0]):
                row = smaller
    return row


def report(form, row, way):
    """None if the call is right; else what is wrong, and a command that repeats it, reduced."""
    found = complaints(form, row, way)
    if not found:
        return None
    row = smallest(form, row, way, found)
    given = [f"{name}={level}" for name, level in factors.changed(row, factors.FORMS[form]).items()]
    again = shlex.join(["python", "-m", "tests.features", form, way, *given])
    reduced = complaints(form, row, way)[:3]
    return "\n".join([*found[:3], "The smallest call that fails:", *reduced, again])
