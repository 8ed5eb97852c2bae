"""`row_invariant=True`: the bits of a row do not depend on the number of rows of a call. Decoding
token by token, prompts in chunks and the whole at once give the same result."""

import itertools
import types

import numpy
import pytest
import torch

import fastattn
from fastattn import Place
from fastattn.call.spec import Feature
from tests.support.backends import (
    INTERPRETED,
    declares,
    every_backend,
    on_variants,
    small,
    variant,
    variants,
)
from tests.support.cases import DTYPES, FEATURE, FEATURES, PLAIN, Dims, build, name_of

pytestmark = pytest.mark.usefixtures("one_thread")

DIMS = Dims(2, 4, 2, 37, 70, 16, 16)
EDGES = (0, 1, 2, 3, 8, 17, 36, 37)  # calls of one row, of few, and of more rows
OTHERS = ("queries", "layout", "dout", "values", "heads", "lse", "place", "causal")
CASES = [PLAIN, *((f,) for f in FEATURES if f.group not in OTHERS)]


@pytest.fixture(autouse=True)
def products_of_rows_alone(monkeypatch):
    """Triton's interpreter multiplies with numpy. In its BLAS the bits of a row may depend on the
    place in the matrix (in OpenBLAS with AVX2 they do); on a GPU and with einsum they do not.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    def matmul(a, b, dtype):
        return numpy.einsum("...ij,...jk->...ik", a, b, dtype=dtype, casting="unsafe")

    alike = types.SimpleNamespace(**vars(numpy) | {"matmul": matmul})
    monkeypatch.setattr(interpreter, "np", alike)


def rows_of(given, first, end):
    """The arguments for rows `first` to `end`, with their place among all rows."""
    mine = dict(given, q=given["q"][:, :, first:end])
    mask = given.get("mask")
    if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
        mine["mask"] = mask[..., first:end, :]
    return mine | dict(place=Place(row=first, rows=given["q"].shape[2]))


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", CASES, ids=name_of)
def test_rows_have_their_bits_among_any_others(name, dtype, features):
    declares(name, DTYPES[dtype], Feature.INVARIANT)
    problem = build(DIMS, (*features, FEATURE["bottom_right"]), DTYPES[dtype])
    given = dict(problem.tensors(), row_invariant=True, return_lse=True, backend=name)
    for isa in on_variants(name, DTYPES[dtype]):
        with torch.no_grad():
            whole = fastattn.attention(**given)
            for first, end in itertools.pairwise(EDGES):
                found = fastattn.attention(**rows_of(given, first, end))
                for x, y in zip(whole, found, strict=True):
                    assert torch.equal(x[:, :, first:end], y), (isa, first)


@every_backend
@pytest.mark.parametrize("heads", (2, 4))
def test_decoding_over_pages_equals_the_full_pass(name, heads, threads):
    """A model's decoding: keys are appended with their rows; threads and pages vary."""
    declares(name, torch.float32, Feature.INVARIANT | Feature.PAGED)
    problem = build(DIMS, (FEATURE["left_window"], FEATURE["sinks"]), torch.float32)
    given = dict(window=(40, None), sinks=problem.kwargs["sinks"], row_invariant=True)
    N, M = DIMS.N, DIMS.M
    for isa in small(variants(name), [None]):
        with variant(isa), torch.no_grad():
            whole = fastattn.attention(
                problem.q, problem.k, problem.v, causal="bottom_right", backend=name, **given
            )
            cache = fastattn.KVCache(DIMS.B, DIMS.Hk, DIMS.D, capacity=N, page_size=6)
            for n, (first, end) in enumerate(itertools.pairwise((0, *range(8, 12), 30, M))):
                threads(1 + n % 3)
                keys = slice(0 if first == 0 else N - M + first, N - M + end)
                cache.append(problem.k[:, :, keys], problem.v[:, :, keys])
                found = cache.attention(problem.q[:, :, first:end], backend=name, **given)
                assert torch.equal(found, whole[:, :, first:end]), (isa, first)


@every_backend
@pytest.mark.parametrize("odd", (1e-30, 1e30, torch.inf, torch.nan))
@pytest.mark.parametrize("where", "qkv")
@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_rows_that_tiles_refuse(name, dtype, where, odd):
    """CPU vector kernels compute these rows, several at a time, in calls of any size."""
    declares(name, DTYPES[dtype], Feature.INVARIANT)
    problem = build(Dims(1, 2, 1, 20, 33, 8, 8), (), DTYPES[dtype])
    getattr(problem, where)[0, 0, 3, 2] = odd
    given = dict(problem.tensors(), row_invariant=True, return_lse=True, backend=name)
    for _ in on_variants(name, DTYPES[dtype]):
        with torch.no_grad():
            whole = fastattn.attention(**given)
            for first, end in itertools.pairwise((0, 1, 5, 20)):
                found = fastattn.attention(**rows_of(given, first, end))
                for x, y in zip(whole, found, strict=True):
                    torch.testing.assert_close(
                        x[:, :, first:end], y, rtol=0, atol=0, equal_nan=True
                    )
