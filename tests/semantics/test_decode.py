"""Few queries and many keys: the CPU has separate kernels for these, which split keys into chunks
and process the heads that share keys together."""

import pytest
import torch

import fastattn
from fastattn.backends.native import libraries
from tests.support.backends import every_backend, of_cpu_blocks, variant
from tests.support.cases import PLAIN, Dims, build

pytestmark = [of_cpu_blocks, pytest.mark.usefixtures("one_thread")]

# Several chunks of keys, the last not full; rows and columns that do not fill a vector.
SHAPES = {
    "one_row": Dims(1, 4, 2, 1, 1111, 40, 24),
    "three_rows": Dims(1, 4, 2, 3, 1111, 16, 33),
    "more_heads_than_lanes": Dims(1, 37, 1, 1, 600, 17, 64),
}


@every_backend
@pytest.mark.parametrize("queries", [1, 4])
def test_non_finite_values_stay_in_their_rows(name, queries):
    """A NaN key makes the rows that see it NaN, and no others; a hidden one has no effect."""
    q, k, v = (torch.randn(2, 2, n, 32) for n in (queries, 900, 900))
    k[0, 0, 800] = torch.nan
    out = fastattn.attention(q, k, v, backend=name)
    assert out[0, 0].isnan().all() and out[0, 1].isfinite().all() and out[1].isfinite().all()
    lengths = torch.tensor([800, 900])
    assert fastattn.attention(q, k, v, key_lengths=lengths, backend=name).isfinite().all()


WIDENING = {torch.float16: ("generic", "avx2", "avx512"), torch.bfloat16: ("avx2", "avx512")}


@pytest.mark.parametrize("lying", ("contiguous", "columns apart", "rows apart"))
@pytest.mark.parametrize("shape", (*SHAPES, "last_vector"))
@pytest.mark.parametrize("dtype", WIDENING, ids=str)
def test_sixteen_bits_give_the_bits_of_the_same_numbers_in_float32(dtype, shape, lying):
    """Rows are widened on load, which is exact, so sums have the same bits."""
    dims = SHAPES.get(shape, Dims(1, 2, 2, 1, 130, 31, 47))
    problem = build(dims, PLAIN, dtype)
    q, k, v = problem.q, problem.k, problem.v
    if lying == "columns apart":
        k, v = (x.repeat_interleave(2, -1)[..., ::2] for x in (k, v))
    elif lying == "rows apart":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    given = dict(backend="cpu", return_lse=True)
    for isa in set(libraries.cpu_isas()) & set(WIDENING[dtype]):
        with variant(isa), torch.no_grad():
            out, lse = fastattn.attention(q, k, v, **given)
            wide, expected = fastattn.attention(q.float(), k.float(), v.float(), **given)
        assert torch.equal(lse, expected) and torch.equal(out, wide.to(dtype)), isa
