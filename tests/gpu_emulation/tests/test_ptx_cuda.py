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
from tests.cuda.test_cuda_packed import MANY, SIZES
from tests.gpu_emulation.emulated import everywhere, survivors
from tests.gpu_emulation.emulator import needs_emulator
from tests.gpu_emulation.ptx import ours
from tests.semantics.test_packed import CUT, FEW, batch, complaints
from tests.semantics.test_paged import in_pages
from tests.support.backends import passed
from tests.support.cases import FEATURE, build, square

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


# Every feature, in kernels of head dim 32; kernels of other head dims; other choices of kernels.
test_features = test_cuda_emulated.test_features
test_features_of_decode = test_cuda_decode.test_features
test_features_of_weights = test_cuda_weights.test_features
test_a_given_lse_is_a_constant = test_cuda_weights.test_a_given_lse_is_a_constant

test_planes_of_dense_masks = test_cuda_dense_masks.test_mask_planes
test_rows_of_finfo_min = test_cuda_dense_masks.test_a_row_of_finfo_min_is_the_mean
test_gradients_of_dense_masks = test_cuda_dense_masks.test_gradients_of_head_dims
test_gradients_of_finfo_min = test_cuda_dense_masks.test_rows_of_finfo_min_have_gradients

test_head_dims = test_cuda_emulated.test_head_dims
test_head_dims_of_decode = test_cuda_decode.test_head_dims
test_head_dims_of_weights = test_cuda_weights.test_head_dims

test_each_gradient_alone_is_the_same = test_cuda_emulated.test_each_gradient_alone_is_the_same
test_any_number_of_splits = test_cuda_decode.test_any_number_of_splits
test_rows_around_tiles = test_cuda_decode.test_rows_around_tiles

test_schedules = test_cuda_emulated.test_every_schedule_gives_the_same_bits
test_schedules_of_decode = test_cuda_decode.test_every_schedule_gives_the_same_bits
test_schedules_of_weights = test_cuda_weights.test_every_schedule_gives_the_same_bits


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("names", ["", CUT[0]])
def test_packed(names):
    made = batch([FEATURE[x] for x in names.split()], torch.bfloat16, SIZES)
    with everywhere(ptx=True):
        passed(list(complaints(made, made.run())))


@pytest.mark.slow
@pytest.mark.parametrize("page", [0, 20, 128])
@pytest.mark.parametrize("sizes, processors", [(SIZES, 0), (FEW, MANY)])
def test_pages(page, sizes, processors):
    made = batch((), torch.bfloat16, sizes)
    given = in_pages(made, page) if page else made.given
    with everywhere(sm_count=processors, ptx=True), torch.no_grad():
        found = dict(out=fastattn.attention_packed(**given))
    passed(list(complaints(made, found)))
