"""Few queries and many keys: the CPU has separate kernels for these, which split keys into chunks
and process the heads that share keys together."""

import pytest
import torch

import fastattn
from fastattn.backends.native import libraries
from tests.support.backends import every_backend, of_cpu_blocks, on_variants, variant
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


def masks(rows, keys, dtype):
    """By name: of each row and head, of a head's rows, of an item's keys, with keys far apart."""
    generator = torch.Generator().manual_seed(3)
    of_rows = torch.randn(2, 4, rows, keys, generator=generator).to(dtype)
    of_rows[of_rows > 1] = -torch.inf
    yield "float", of_rows
    yield "bool", of_rows > 0
    yield "shared by heads", of_rows[:, :1].contiguous()
    yield "padding", of_rows[:, :1, :1].contiguous()
    yield "keys apart", of_rows.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("dtype", (*WIDENING, torch.float32, torch.float64), ids=str)
def test_a_mask_alone_has_the_bits_that_it_has_beside_another_feature(dtype, rows):
    """A mask alone acts on rows of scores; beside slopes, here of 0, scores are turned for both."""
    generator = torch.Generator().manual_seed(4)
    shapes = (4, rows), (2, 333), (2, 333), (4, rows)
    q, k, v, dout = (torch.randn(2, h, n, 20, generator=generator).to(dtype) for h, n in shapes)
    slopes = torch.zeros(4)

    def results(mask, **given):
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in (q, k, v, mask)]
        out = fastattn.attention(*inputs[:3], mask=inputs[3], backend="cpu", **given)
        return [out, *torch.autograd.grad(out, [x for x in inputs if x.requires_grad], dout)]

    for isa in on_variants("cpu", dtype):
        for name, mask in masks(rows, 333, dtype):
            for x, y in zip(results(mask), results(mask, alibi_slopes=slopes)):
                assert torch.equal(x, y), (isa, name)
