"""Seeded faults of synchronisation in the GPU kernels: the call named with each must fail, by a
wrong value, a finding of the emulator, or a refused launch. A fault that does not compile is an
error in the table. A fault marked as surviving gives the reason, and must still survive.
"""

import pytest

from tests.gpu_emulation.emulator import needs_emulator
from tests.gpu_emulation.faults import calls, table
from tests.gpu_emulation.ptx import ours

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator, pytest.mark.slow]


def cases(found):
    """Names that need nvcc have its mark. found: {name: the call}"""
    marks = {x: [ours.needs_nvcc] if call.startswith("sm90") else [] for x, call in found.items()}
    return [pytest.param(x, marks=marks[x]) for x in found]


@pytest.mark.parametrize("title", cases({x.title: x.seen_by for x in table.every().values()}))
def test_a_fault_is_detected(title):
    fault = table.every()[title]
    found = calls.detect(fault)
    if fault.survives:
        assert not found, f"{title}: expected no complaint ({fault.survives}), got {found}"
    else:
        assert found, f"{title}: {fault.seen_by} did not detect it"


@pytest.mark.parametrize("name", cases({x.seen_by: x.seen_by for x in table.every().values()}))
def test_the_source_without_faults_passes(name):
    assert not calls.detect(calls.NO_FAULT, name)


@pytest.mark.parametrize("old, times", [("no such code", 0), ("block_sync", 3)])
def test_an_edit_matches_the_source_once(old, times):
    edit = table.Edit("cuda/sm80/forward.cuh", old, "")
    fault = table.Fault("a fault", "forward", (edit,), "")
    with pytest.raises(AssertionError, match=f"a fault: '{old}' is in .* {times} times"):
        calls.detect(fault)


def test_a_fault_that_does_not_compile_is_an_error():
    edit = table.Edit("cuda/sm80/forward.cuh", "now = after(now)) {", "now = after(one)) {")
    with pytest.raises(AssertionError, match=r"error: .one. was not declared"):
        calls.detect(table.Fault("a fault", "forward", (edit,), ""))
