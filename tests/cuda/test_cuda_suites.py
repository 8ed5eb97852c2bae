"""Tests of the CPU's kernels and tests of a GPU, run on the CUDA kernels in the emulator.

The tests are unchanged, and run on the backend `emulated` only. Of the GPU's tests, only those that
no test of the emulator covers are chosen: all would take an hour.
"""

import types
from dataclasses import replace

import pytest

from fastattn.backends import base
from fastattn.backends.native.cuda import Cuda
from fastattn.dispatch import operation
from tests.gpu import test_gpu, test_gpu_calls
from tests.gpu_emulation.emulated import Emulated
from tests.gpu_emulation.emulator import needs_emulator
from tests.semantics import (
    test_packed,
    test_place,
    test_row_invariant,
    test_special_values,
    test_vmap_dropout,
)
from tests.support import gpu

pytestmark = [pytest.mark.usefixtures("one_thread", "emulated"), needs_emulator, pytest.mark.slow]
CHOSEN = {
    test_special_values: "",  # all tests
    test_vmap_dropout: "each_draws one_call_is",
    test_place: "draws_go_on",
    test_row_invariant: "rows_have",
    test_packed: "draws of_nothing invalid_batches",
    test_gpu: "past_the_end nothing_to_attend nan_query sizes_of_zero",
    test_gpu_calls: "same",
}
IN_FLOAT32 = "strides_past more_heads inference_then backward_twice window_edge"
IN_FLOAT32 = (*IN_FLOAT32.split(), "infinite_mask")  # these kernels have no float32


class OnTheCpu(Emulated):
    """Calls of few rows use decode, as on a GPU."""

    support = replace(Cuda.support, devices=frozenset({"cpu"}))

    def unavailable(self):
        return None


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setitem(base._BACKENDS, "emulated", OnTheCpu(8))
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    operation.forget_plans()
    yield
    operation.forget_plans()


def of_backends(test):
    return [m for m in getattr(test, "pytestmark", []) if m.args[:1] == ("name",)]


def clone(test):
    """The same function, with only the backend `emulated`."""
    copy = types.FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__)
    copy.__kwdefaults__, copy.__doc__ = test.__kwdefaults__, test.__doc__
    marks = [m for m in test.pytestmark if m not in of_backends(test)]
    copy.pytestmark = [*marks, pytest.mark.parametrize("name", ["emulated"]).mark]
    return copy


def chosen(module, words):
    tests = {x: y for x, y in vars(module).items() if x.startswith("test_") and of_backends(y)}
    tests = {x: y for x, y in tests.items() if not any(word in x for word in IN_FLOAT32)}
    wanted = words.split() or ["test_"]
    found = {x: y for x, y in tests.items() if any(word in x for word in wanted)}
    assert all(any(word in x for x in found) for word in wanted), (module, wanted)
    prefix = "test_on_a_gpu" if module in (test_gpu, test_gpu_calls) else "test"
    return {x.replace("test", prefix, 1): clone(y) for x, y in found.items()}


def test_a_skip_while_compiling_skips_only_that_test():
    """The fixture that compiles a module's kernels runs its tests, also those that skip what a
    backend does not declare."""

    def skipped():
        assert gpu.compiling.now
        pytest.skip("declares no such dtype")

    params = types.SimpleNamespace(params={})
    item = types.SimpleNamespace(
        get_closest_marker=lambda name: None, function=skipped, callspec=params
    )
    gpu.launch(item)
    assert not gpu.compiling.now


for module, words in CHOSEN.items():
    globals().update(chosen(module, words))
