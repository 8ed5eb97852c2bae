"""Seeded faults of the GPU kernels: each breaks one line of the sources, the assembly, the launch
path, the kernels of sm90, or the code compiled by nvcc or Triton. The slice named with the fault
must fail.

The tables are beside this file. A slice fails by a wrong value, a finding of the emulator, or a
refused launch. A fault that does not compile is an error in the table. A fault marked as surviving
gives the reason, and must still survive.
"""

import pytest

from tests.gpu_emulation.emulator import needs_emulator
from tests.gpu_emulation.faults import detect, slices, table
from tests.gpu_emulation.ptx import ours
from tests.support.backends import needs_triton

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator, pytest.mark.slow]
MARKS = {"ptx": [ours.needs_nvcc], "sm90": [ours.needs_nvcc], "triton": [needs_triton]}


def run_by(name):
    return MARKS.get(slices.parts(name)[0], [])


def faults_of(kind):
    faults = table.of(kind).values()
    cases = [pytest.param(x.title, marks=run_by(x.seen_by)) for x in faults]
    return pytest.mark.parametrize("title", cases)


def detected(title):
    fault = table.every()[title]
    found = detect.detect(fault)
    if fault.survives:
        assert not found, f"{title}: expected no complaint ({fault.survives}), got {found}"
    else:
        assert found, f"{title}: {fault.seen_by} did not detect it"


@faults_of("kernels")
def test_a_fault_of_a_kernel_is_detected(title):
    detected(title)


@faults_of("assembly")
def test_a_fault_of_the_assembly_is_detected(title):
    detected(title)


@faults_of("launch")
def test_a_fault_of_the_launch_path_is_detected(title):
    detected(title)


@faults_of("compiled")
def test_a_fault_of_a_compiled_kernel_is_detected(title):
    detected(title)


@faults_of("hopper")
def test_a_fault_of_a_hopper_kernel_is_detected(title):
    detected(title)


SLICES = sorted({x.seen_by for x in table.every().values()})


@pytest.mark.parametrize("name", [pytest.param(x, marks=run_by(x)) for x in SLICES])
def test_the_source_without_faults_passes(name):
    assert not detect.detect(detect.NO_FAULT, name)


def test_the_first_list_is_in_the_table():
    numbers = [f"{x:02}" for x in (*range(1, 44), *range(50, 61))]
    assert sorted(x.number for x in table.every().values() if x.number) == sorted([*numbers, "21b"])
    assert len(table.every()) >= 80


@pytest.mark.parametrize("old, times", [("no such code", 0), ("block_sync", 3)])
def test_an_edit_matches_the_source_once(old, times):
    edit = table.Edit("cuda/sm80/forward.cuh", old, "")
    fault = table.Fault("a fault", "forward", (edit,), "")
    with pytest.raises(AssertionError, match=f"a fault: '{old}' is in .* {times} times"):
        detect.detect(fault)


@pytest.mark.parametrize("old, times", [("no such code", 0), (r"bar\.sync 0;", 3)])
@ours.needs_nvcc
def test_an_edit_of_a_compiled_kernel_matches_once(old, times):
    fault = table.Fault("a fault", "ptx forward", (table.Edit("forward_kernel", old, ""),), "")
    with pytest.raises(AssertionError, match=f"a fault: .* is in forward_kernel {times} times"):
        detect.detect(fault)


@ours.needs_nvcc
def test_an_edit_changes_a_kernel_that_runs():
    fault = table.Fault("a fault", "ptx forward", (table.Edit("dq_kernel", "a", ""),), "")
    with pytest.raises(AssertionError, match="a fault: ptx forward runs no dq_kernel"):
        detect.detect(fault)


def test_a_fault_that_does_not_compile_is_an_error():
    edit = table.Edit("cuda/sm80/forward.cuh", "now = after(now)) {", "now = after(one)) {")
    with pytest.raises(AssertionError, match=r"error: .one. was not declared"):
        detect.detect(table.Fault("a fault", "forward", (edit,), ""))
