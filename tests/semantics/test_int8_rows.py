"""Decoding from int8 with queries of 16 bits, where kernels multiply integers: scores and outputs
are off by what the rounding to them allows, and rows that have none are multiplied as floats."""

import itertools
import shutil

import pytest
import torch

from fastattn.backends.native import libraries
from tests.semantics.test_packed import batch
from tests.semantics.test_storage import STORAGES, exact, kept, run, score_error
from tests.support import kernel_builds
from tests.support.backends import of_cpu_blocks, on_variants
from tests.support.cases import FEATURE, PLAIN
from tests.support.checkout import ROOT
from tests.support.kernel_builds import AMX_FLAGS as AVX512
from tests.support.kernel_builds import use_library  # noqa: F401

pytestmark = [pytest.mark.usefixtures("one_thread"), of_cpu_blocks]

halves = pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
KEYS_AT_ONCE = 16  # their P has one unit


def on_vectors(dtype):
    """Each instruction set that decodes so, while calls run on it: tiles of AMX multiply rounded
    rows of bfloat16."""
    return (isa for isa in on_variants("cpu", dtype) if not isa.startswith("amx"))


def stored_in_int8(dtype, sizes, d):
    """Arguments of a packed call of one key head."""
    return kept(batch((FEATURE["mqa"],), dtype, sizes, d), torch.int8)[0]


def with_a_large_column(features, dtype, size, d):
    """Queries of this size, one column a hundred times as large; the scale makes up for it."""
    if size * 100 > torch.finfo(dtype).max or size < torch.finfo(dtype).tiny:
        pytest.skip("out of the dtype's range")
    made = batch(features, dtype, ((1, 40), (2, 65)), d)
    made.given["q"][..., 7] *= 100
    made.given["q"] = (made.given["q"].float() * size).to(dtype)
    made.given["scale"] = d**-0.5 / size
    return made


@halves
@pytest.mark.parametrize(
    "storage, size",
    [*itertools.product(("int8", "int4"), (1.0, 1e4, 1e30, 2.0**-20, 1e-37)), ("int4", 1e35)],
)
def test_scores_of_queries_with_a_large_column(storage, dtype, size):
    """Queries are rounded to multiples of a 32767th of their largest number: a score is off by half
    of that times the sum of a key's |k|, or of 15 |scale| in four bits."""
    for features in (PLAIN, (FEATURE["mqa"],)):
        for d in (32, 96, 128, 576):
            made = with_a_large_column(features, dtype, size, d)
            made.given, plain = kept(made, STORAGES[storage])
            if storage == "int8":
                wide, off = exact(made.given)[1], score_error(made.given)
            else:
                wide, rows = run(plain, "reference")[1], made.given["k"].unflatten(-1, (-1, 20))
                scales = rows[..., 16:18].clone().view(torch.bfloat16).double()
                step = made.given["q"].abs().max().double() / 32767
                off = made.given["scale"] * step / 2 * (scales * 15 * 32).sum(-2).max()
            for isa in on_vectors(dtype) if storage == "int8" else on_variants("cpu", dtype):
                _, lse = run(made.given, "cpu")
                assert (lse.double() - wide).abs().max() <= off + 1e-5 * wide.abs().max(), isa


@halves
def test_outputs_of_values_of_very_different_sizes(dtype):
    """P times a value's scale is off by half of a 32767th of the largest of sixteen keys."""
    generator = torch.Generator().manual_seed(4)
    for rows, keys, d in ((1, 240, 64), (4, 77, 512), (3, 16, 96)):
        given = stored_in_int8(dtype, ((rows, keys),), d)
        given["q"].zero_()  # P is 1 for all
        sizes = torch.randint(0, 12, given["v_scale"].shape, generator=generator)
        given["v_scale"] = 4.0**-sizes
        wide, _ = exact(given)
        blocks = torch.arange(keys) // KEYS_AT_ONCE
        unit = torch.stack([given["v_scale"][blocks == b].max() for b in blocks]) / 32767
        moved = (unit[:, None, None] / 2 * given["v"].double().abs()).sum(0) / keys
        for isa in on_vectors(dtype):
            found, _ = run(given, "cpu")
            bound = moved + torch.finfo(dtype).eps * wide.abs() + 1e-6 * wide.abs().max()
            assert ((found.double() - wide).abs() <= bound).all(), isa


@halves
def test_rows_that_have_no_integers(dtype):
    """A query of NaN, of infinities or of numbers near the ends of the range does not change the
    bits of others. Values may have such scales, too."""
    tiny, huge = torch.finfo(dtype).tiny, min(1e30, torch.finfo(dtype).max)
    for rows in (1, 2):
        given = stored_in_int8(dtype, ((rows, 150),), 64)
        for isa in on_vectors(dtype):
            clean = run(given, "cpu")
            for bad in (torch.nan, torch.inf, -torch.inf, 0.0, tiny, huge):
                q = given["q"].clone()
                q[0, 1] = bad
                other = given | dict(q=q)
                found, wide = run(other, "cpu"), exact(other)
                others = torch.ones(q.shape[:2], dtype=torch.bool)
                others[0, 1] = False
                for x, y, z in zip(found, clean, wide, strict=True):
                    assert torch.equal(x[others], y[others]), (isa, bad)
                    if abs(bad) < torch.inf:  # (where all scores are one that is infinite)
                        close = dict(rtol=2.0**-7, atol=2.0**-7)
                        torch.testing.assert_close(x[0, 1].double(), z[0, 1], **close)
            for bad in (torch.nan, torch.inf, 1e-30):
                scales = given["v_scale"].clone()
                scales[33, 0] = bad
                other = given | dict(v_scale=scales)
                x, y = run(other, "cpu")[0], exact(other)[0].to(dtype)
                assert torch.equal(x.isfinite(), y.isfinite()), (isa, bad)
                torch.testing.assert_close(x, y, rtol=0.02, atol=0.02, equal_nan=True)
            if dtype == torch.bfloat16:  # float16 has no such outputs
                other = given | dict(v_scale=given["v_scale"] * 1e-30)
                x, y = run(other, "cpu")[0].double(), exact(other)[0]
                torch.testing.assert_close(x, y, rtol=0.02, atol=0.01 * y.abs().max().item())


@halves
def test_a_head_alone_has_the_bits_that_it_has_among_others(dtype):
    """Four rows are multiplied at once, and what remains row by row."""
    given = stored_in_int8(dtype, ((1, 700),), 128)
    q = torch.cat([given["q"] * x for x in (1, 2, 0.5)], 1)[:, :6]
    for isa in on_vectors(dtype):
        among = run(given | dict(q=q), "cpu")
        for h in range(q.shape[1]):
            alone = run(given | dict(q=q[:, h : h + 1]), "cpu")
            for x, y in zip(among, alone, strict=True):
                assert torch.equal(x[:, h : h + 1], y), (isa, h)


VNNI = '__builtin_cpu_supports("avx512vnni")'


@pytest.mark.slow  # it compiles kernels
def test_vnni_changes_no_bits(use_library, tmp_path):  # noqa: F811
    """It adds products to a sum, which takes two instructions without it."""
    if "avx512" not in libraries.cpu_isas():
        pytest.skip("needs AVX-512")
    made = batch((FEATURE["mqa"],), torch.bfloat16, ((1, 205), (4, 38), (1, 17)), 96)
    stored, results = (kept(made, torch.int8)[0], kept(made, "int4")[0]), {}
    for way in (VNNI, "false"):
        sources = tmp_path / str(len(results)) / "csrc"
        shutil.copytree(ROOT / "csrc", sources, ignore=shutil.ignore_patterns("cuda"))
        header = sources / "cpu" / "forward" / "integers.h"
        assert VNNI in header.read_text()
        header.write_text(header.read_text().replace(VNNI, way))
        library = libraries.CpuLibrary(kernel_builds.build(sources, sources.parent, *AVX512))
        use_library(library)
        results[way] = [x for given in stored for x in run(given, "cpu")]
    assert all(map(torch.equal, *results.values()))
