"""On a GPU, before the other tests: small shapes of every kernel, and what new kernels likely get
wrong there. tests/cuda/test_contact_emulated.py runs the same calls on the emulator."""

import pytest
import torch

import fastattn
from fastattn.backends.native.cuda import lacks_sm_90
from tests.support import contact
from tests.support.backends import declares
from tests.support.cases import FEATURE, Dims, build
from tests.support.gpu import (
    BACKENDS,
    DEVICE,
    DTYPES,
    attend,
    check,
    compiled,  # noqa: F401  a fixture
    judged,
    on_device,
    on_every_backend,
    on_gpu,
)

pytestmark = [*on_gpu, pytest.mark.usefixtures("compiled")]
every_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
REPEATS = 1000


@every_dtype
@pytest.mark.parametrize("dims", contact.HEAD_DIMS, ids=str)
@judged
def test_small_shapes(name, dims, dtype):
    check(name, contact.small_shapes(*dims, DTYPES[dtype]))


@every_dtype
@judged
def test_tensors_that_tma_cannot_copy(name, dtype):
    check(name, contact.awkward_tensors(DTYPES[dtype]))


@every_dtype
@on_every_backend
def test_numbers_behind_lengths_change_no_bit(name, dtype):
    declares(name, DTYPES[dtype])
    first = None
    for garbage, problem in contact.behind_lengths(DTYPES[dtype]):
        found = attend(on_device(problem), name)
        first = first or found
        assert not (wrong := contact.different(first, found)), (garbage, wrong)


@every_dtype
@on_every_backend
def test_a_packed_neighbour_changes_no_bit(name, dtype):
    declares(name, DTYPES[dtype])
    first = contact.packed_beside(1.0, DTYPES[dtype], DEVICE, name)
    for garbage in (torch.nan, torch.inf):
        found = contact.packed_beside(garbage, DTYPES[dtype], DEVICE, name)
        assert all(map(torch.equal, first, found)), garbage


@pytest.mark.parametrize("dim", [64, 128])
@on_every_backend
def test_a_thousand_repeats_have_equal_bits(name, dim):
    """Blocks add to dq in turn: a wrong turn shows once in many runs."""
    dims = Dims(2, 4, 2, 500, 700, dim, dim)
    problem = on_device(build(dims, (FEATURE["causal"],), torch.bfloat16))
    first = attend(problem, name)
    for at in range(REPEATS):
        assert not (wrong := contact.different(first, attend(problem, name))), (at, wrong)


@pytest.mark.skipif(bool(BACKENDS["cuda"]), reason=f"cuda: {BACKENDS['cuda']}")
def test_kernels_of_sm_90_serve():
    """On a GPU that has them: no check, no driver and no address keeps them from a plain call."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels of sm_90 need compute capability 9.0")
    if why := lacks_sm_90():
        pytest.skip(f"the library has no kernels of sm_90: {why}")
    for dim in (64, 128):
        x = torch.randn(1, 2, 300, dim, device=DEVICE, dtype=torch.bfloat16)
        kernels = fastattn.explain(x, x, x, backend="cuda").kernels
        assert kernels["forward"] == "sm_90", kernels
