"""The calls of tests/gpu/test_gpu_contact.py on the emulator: what `make gpu` rehearses."""

import pytest
import torch

import fastattn
from tests.gpu_emulation.emulated import everywhere
from tests.gpu_emulation.emulator import SCHEDULES, needs_emulator
from tests.gpu_emulation.ptx import ours
from tests.support import contact
from tests.support.backends import passed
from tests.support.cases import DTYPES, Dims, build
from tests.support.error_budget import Verdict

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator, pytest.mark.slow]
every_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
named = pytest.mark.parametrize


@pytest.fixture(autouse=True)
def emulated():
    """Every call runs on the emulator. A test sets its options."""
    with everywhere() as backend:
        yield backend


def run_all(problems):
    found = []
    for problem in problems:
        found += [f"{problem.name} {x}" for x in Verdict(problem).complaints(fastattn.attention)]
    passed(found)


@every_dtype
@named("dims", contact.HEAD_DIMS, ids=str)
def test_small_shapes(dims, dtype):
    run_all(contact.small_shapes(*dims, DTYPES[dtype], rows=19, keys=35))


@every_dtype
def test_tensors_that_tma_cannot_copy(dtype):
    run_all(contact.awkward_tensors(DTYPES[dtype]))


@every_dtype
def test_numbers_behind_lengths_change_no_bit(dtype):
    first = None
    for garbage, problem in contact.behind_lengths(DTYPES[dtype], rows=20):
        found = problem.run(fastattn.attention)
        first = first or found
        assert not (wrong := contact.different(first, found)), (garbage, wrong)


@every_dtype
def test_a_packed_neighbour_changes_no_bit(dtype):
    first = contact.packed_beside(1.0, DTYPES[dtype], "cpu")
    for garbage in (torch.nan, torch.inf):
        found = contact.packed_beside(garbage, DTYPES[dtype], "cpu")
        assert all(map(torch.equal, first, found)), garbage


def test_repeats_have_equal_bits(emulated):
    problem = build(Dims(1, 2, 1, 150, 200, 64, 64), (), torch.bfloat16)
    first = problem.run(fastattn.attention)
    for at, schedule in enumerate(SCHEDULES):
        emulated.options |= dict(schedule=schedule, seed=at + 2)
        found = problem.run(fastattn.attention)
        assert not (wrong := contact.different(first, found)), (schedule, wrong)


@ours.needs_nvcc
def test_kernels_of_sm_90_read_nothing_behind_sequences():
    """As nvcc compiled them. What they decline runs on kernels of sm_80."""
    dtype, first = torch.bfloat16, None
    with everywhere(architecture=90, ptx=True) as backend:
        for _, problem in contact.behind_lengths(dtype, rows=20):
            found = problem.run(fastattn.attention)
            first = first or found
            assert not contact.different(first, found)
        first = contact.packed_beside(1.0, dtype, "cpu")
        assert all(map(torch.equal, first, contact.packed_beside(torch.nan, dtype, "cpu")))
        run_all(contact.awkward_tensors(dtype)[:3])
    assert {"sm_90"} < set(backend.kernels), backend.kernels


def test_a_changed_bit_is_seen():
    x, y = torch.zeros(2), torch.tensor([0.0, 1e-45])
    assert contact.different(dict(out=x, dq=x), dict(out=x, dq=y)) == ["dq"]
