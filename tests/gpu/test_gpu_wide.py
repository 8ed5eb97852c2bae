"""On a GPU: head dims past 256, forward and decoding by Triton, and those past 128 with two
products of q and k. tests/triton/test_triton_wide.py has the same in the interpreter."""

from dataclasses import replace

import pytest

import fastattn
from tests.support.cases import FEATURE, Dims, build
from tests.support.error_budget import Verdict
from tests.support.gpu import BACKENDS, DTYPES, check, every_dtype, on_gpu

pytestmark = [*on_gpu, pytest.mark.skipif(bool(BACKENDS["triton"]), reason=str(BACKENDS["triton"]))]

SIZES = {
    "576 and 512": Dims(2, 4, 1, 129, 331, 576, 512),
    "575 and 511": Dims(1, 2, 2, 70, 203, 575, 511),
    "300 and 77": Dims(1, 2, 1, 70, 203, 300, 77),
    "192 and 128": Dims(2, 4, 2, 129, 331, 192, 128),
    "129 and 200": Dims(1, 2, 2, 129, 203, 129, 200),
    "few rows of 576": Dims(2, 16, 1, 2, 1300, 576, 512),
    "one row of 192": Dims(1, 16, 1, 1, 1300, 192, 128),
}
FEATURES = {
    "plain": (),
    "causal": ("causal",),
    "everything": ("causal", "lengths", "softcap", "alibi", "sinks", "dropout", "bool_mask"),
}


def forward(problem, name):
    return problem.run(fastattn.attention, False, backend=name)


def with_view(problem, name):
    """The values are a view of the keys, on the device, too."""
    return forward(replace(problem, v=problem.k[..., : problem.v.shape[-1]]), name)


def verdict(problem):
    return Verdict(problem, backward=False)


@every_dtype
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dims", SIZES.values(), ids=SIZES)
def test_forward(dims, features, dtype):
    chosen = [FEATURE[x] for x in FEATURES[features]]
    check("triton", [build(dims, chosen, DTYPES[dtype])], forward, verdict)


@every_dtype
@pytest.mark.parametrize("dims", SIZES.values(), ids=SIZES)
def test_values_that_are_the_first_columns_of_keys(dims, dtype):
    problem = build(replace(dims, Dv=min(dims.Dv, dims.D)), (FEATURE["causal"],), DTYPES[dtype])
    problem.v = problem.k[..., : problem.v.shape[-1]]
    check("triton", [problem], with_view, verdict)
