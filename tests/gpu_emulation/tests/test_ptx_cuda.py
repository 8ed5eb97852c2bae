"""nvcc's PTX of the CUDA kernels, run on the emulator by the unchanged tests of the source.

Other tests emulate the source as compiled by g++. Here nvcc's PTX runs, which exposes faults of
nvcc, faults in inline assembly, and differences between the two.
"""

from dataclasses import replace

import pytest
import torch

import fastattn
from tests.cuda import (
    test_cuda_decode,
    test_cuda_dense_masks,
    test_cuda_emulated,
    test_cuda_weights,
)
from tests.gpu_emulation.emulated import everywhere, survivors
from tests.gpu_emulation.emulator import needs_emulator
from tests.gpu_emulation.ptx import ours
from tests.support.cases import build, square

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    needs_emulator,
    ours.needs_nvcc,
    pytest.mark.slow,  # nvcc compiles each kernel
]


@pytest.fixture
def emulated(request):
    """Every call runs on the emulator with nvcc's kernels; at least one kernel must have run."""
    few_rows = request.function.__module__ == test_cuda_decode.__name__
    with everywhere(sm_count=test_cuda_decode.MANY * few_rows, ptx=True) as backend:
        yield backend
    assert backend.launches >= len(backend.findings) > 0


# Values are those of test_ptx_rows.py, but for weights.
test_features_of_weights = test_cuda_weights.test_features
test_a_given_lse_is_a_constant = test_cuda_weights.test_a_given_lse_is_a_constant
test_head_dims_of_weights = test_cuda_weights.test_head_dims

test_rows_of_finfo_min = test_cuda_dense_masks.test_a_row_of_finfo_min_is_the_mean
test_gradients_of_dense_masks = test_cuda_dense_masks.test_gradients_of_head_dims
test_gradients_of_finfo_min = test_cuda_dense_masks.test_rows_of_finfo_min_have_gradients
test_each_gradient_alone_is_the_same = test_cuda_emulated.test_each_gradient_alone_is_the_same
test_any_number_of_splits = test_cuda_decode.test_any_number_of_splits

test_schedules = test_cuda_emulated.test_every_schedule_gives_the_same_bits
test_schedules_of_decode = test_cuda_decode.test_every_schedule_gives_the_same_bits
test_schedules_of_weights = test_cuda_weights.test_every_schedule_gives_the_same_bits


@pytest.mark.parametrize("backward, empty", [(False, 1), (True, 2)], ids=["forward", "both"])
def test_each_wait_deleted_is_caught(backward, empty):
    """Except the wait at the end of a kernel, where no copy is in flight. Where dq is made, turns
    replace a barrier."""
    problem = build(square(1, 1, 150, 24), (), torch.bfloat16)
    problems = [problem, *[replace(problem, needs_grad=("k",))] * backward]

    def run():
        for each in problems:
            each.run(fastattn.attention, backward=backward)

    survived = survivors(run, ptx=True)
    assert len(survived) == empty and all(x.startswith("cp.async.wait_group") for x in survived)
