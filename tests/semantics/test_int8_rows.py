"""Decoding from int8 with queries of 16 bits, where kernels multiply integers: scores and outputs
are off by what the rounding to them allows, and rows that have none are multiplied as floats."""

import itertools
import shutil

import pytest
import torch

from fastattn.backends.native import libraries
from fastattn.call.spec import Feature
from tests.semantics.test_packed import batch
from tests.semantics.test_paged import in_pages
from tests.semantics.test_storage import STORAGES, exact, kept, run, score_error
from tests.support import kernel_builds
from tests.support.backends import declares, of_cpu_blocks, variant, variants
from tests.support.cases import FEATURE, PLAIN
from tests.support.checkout import ROOT
from tests.support.kernel_builds import AMX_FLAGS as AVX512
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), of_cpu_blocks]

on_cpu = pytest.mark.parametrize("name", ("cpu",))
halves = pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
KEYS_AT_ONCE = 16  # their P has one unit


def of_vectors(name, dtype):
    """The instruction sets that decode so: tiles of AMX multiply rounded rows of bfloat16."""
    return [isa for isa in variants(name, dtype) if not str(isa).startswith("amx")]


def stored_in_int8(features, dtype, sizes, d, dv=None):
    made = batch(features, dtype, sizes, d)
    if dv:
        generator = torch.Generator().manual_seed(2)
        shape = (*made.given["v"].shape[:2], dv)
        made.given["v"] = torch.randn(shape, generator=generator).to(dtype)
    made.given, _ = kept(made, torch.int8)
    return made


@on_cpu
@halves
@parametrize("d, dv", ((32, 32), (64, 96), (128, 128), (160, 32), (576, 512)), fast=4)
def test_every_width_and_number_of_keys(name, dtype, d, dv):
    """One row, and a few, of heads with their own keys or shared ones; in a row and in pages."""
    declares(name, dtype, Feature.QUANTISED)
    sizes = ((1, 1), (1, 17), (2, 40), (2, 129), (1, 300))  # rows that all sets decode
    for features in (PLAIN, (FEATURE["gqa"],), (FEATURE["mqa"], FEATURE["bottom_right"])):
        made = stored_in_int8(features, dtype, sizes, d, dv)
        out, lse = exact(made.given)
        off = score_error(made.given)
        most = (made.given["v"].double().abs() * made.given["v_scale"][..., None].double()).max()
        for isa in of_vectors(name, dtype):
            with variant(isa):
                found = run(made.given, name)
                assert (found[1].double() - lse).abs().max() <= off + 1e-5 * lse.abs().max(), isa
                rounding = torch.finfo(dtype).eps * out.abs().max()
                bound = rounding + (2 * off + 2.0**-12) * most
                assert (found[0].double() - out).abs().max() <= bound, isa
                for page in (7, 48, 128):
                    paged = run(in_pages(made, page) | dict(max_k=300), name)
                    assert all(map(torch.equal, found, paged)), (isa, page)


def with_a_large_column(features, dtype, size, d):
    """Queries of this size, one column a hundred times as large; the scale makes up for it."""
    if size * 100 > torch.finfo(dtype).max or size < torch.finfo(dtype).tiny:
        pytest.skip("out of the dtype's range")
    made = batch(features, dtype, ((1, 40), (2, 65)), d)
    made.given["q"][..., 7] *= 100
    made.given["q"] = (made.given["q"].float() * size).to(dtype)
    made.given["scale"] = d**-0.5 / size
    return made


@on_cpu
@halves
@pytest.mark.parametrize(
    "storage, size",
    [*itertools.product(("int8", "int4"), (1.0, 1e4, 1e30, 2.0**-20, 1e-37)), ("int4", 1e35)],
)
def test_scores_of_queries_with_a_large_column(name, storage, dtype, size):
    """Queries are rounded to multiples of a 32767th of their largest number: a score is off by half
    of that times the sum of a key's |k|, or of 15 |scale| in four bits."""
    declares(name, dtype, Feature.INT4 if storage == "int4" else Feature.QUANTISED)
    for features in (PLAIN, (FEATURE["mqa"],)):
        for d in (32, 96, 128):
            made = with_a_large_column(features, dtype, size, d)
            made.given, plain = kept(made, STORAGES[storage])
            if storage == "int8":
                wide, off = exact(made.given)[1], score_error(made.given)
            else:
                wide, rows = run(plain, "reference")[1], made.given["k"].unflatten(-1, (-1, 20))
                scales = rows[..., 16:18].clone().view(torch.bfloat16).double()
                step = made.given["q"].abs().max().double() / 32767
                off = made.given["scale"] * step / 2 * (scales * 15 * 32).sum(-2).max()
            for isa in of_vectors(name, dtype) if storage == "int8" else variants(name, dtype):
                with variant(isa):
                    _, lse = run(made.given, name)
                    assert (lse.double() - wide).abs().max() <= off + 1e-5 * wide.abs().max(), isa


@on_cpu
@halves
def test_outputs_of_values_of_very_different_sizes(name, dtype):
    """P times a value's scale is off by half of a 32767th of the largest of sixteen keys."""
    declares(name, dtype, Feature.QUANTISED)
    generator = torch.Generator().manual_seed(4)
    for rows, keys in ((1, 240), (4, 77), (3, 16)):
        made = stored_in_int8((FEATURE["mqa"],), dtype, ((rows, keys),), 64)
        made.given["q"].zero_()  # P is 1 for all
        sizes = torch.randint(0, 12, made.given["v_scale"].shape, generator=generator)
        made.given["v_scale"] = 4.0**-sizes
        wide, _ = exact(made.given)
        blocks = torch.arange(keys) // KEYS_AT_ONCE
        unit = torch.stack([made.given["v_scale"][blocks == b].max() for b in blocks]) / 32767
        moved = (unit[:, None, None] / 2 * made.given["v"].double().abs()).sum(0) / keys
        for isa in of_vectors(name, dtype):
            with variant(isa):
                found, _ = run(made.given, name)
                bound = moved + torch.finfo(dtype).eps * wide.abs() + 1e-6 * wide.abs().max()
                assert ((found.double() - wide).abs() <= bound).all(), isa


@on_cpu
@halves
def test_rows_that_have_no_integers(name, dtype):
    """A query of NaN, of infinities or of numbers near the ends of the range does not change the
    bits of others. Values may have such scales, too."""
    declares(name, dtype, Feature.QUANTISED)
    tiny, huge = torch.finfo(dtype).tiny, min(1e30, torch.finfo(dtype).max)
    for rows in (1, 2):
        made = stored_in_int8((FEATURE["mqa"],), dtype, ((rows, 150),), 64)
        for isa in of_vectors(name, dtype):
            with variant(isa):
                clean = run(made.given, name)
                for bad in (torch.nan, torch.inf, -torch.inf, 0.0, tiny, huge):
                    q = made.given["q"].clone()
                    q[0, 1] = bad
                    given = made.given | dict(q=q)
                    found, wide = run(given, name), exact(given)
                    others = torch.ones(q.shape[:2], dtype=torch.bool)
                    others[0, 1] = False
                    for x, y, z in zip(found, clean, wide, strict=True):
                        assert torch.equal(x[others], y[others]), (isa, bad)
                        if abs(bad) < torch.inf:  # (where all scores are one that is infinite)
                            close = dict(rtol=2.0**-7, atol=2.0**-7)
                            torch.testing.assert_close(x[0, 1].double(), z[0, 1], **close)
                for bad in (torch.nan, torch.inf, 1e-30):
                    scales = made.given["v_scale"].clone()
                    scales[33, 0] = bad
                    given = made.given | dict(v_scale=scales)
                    x, y = run(given, name)[0], exact(given)[0].to(dtype)
                    assert torch.equal(x.isfinite(), y.isfinite()), (isa, bad)
                    torch.testing.assert_close(x, y, rtol=0.02, atol=0.02, equal_nan=True)
                if dtype == torch.bfloat16:  # float16 has no such outputs
                    given = made.given | dict(v_scale=made.given["v_scale"] * 1e-30)
                    x, y = run(given, name)[0].double(), exact(given)[0]
                    torch.testing.assert_close(x, y, rtol=0.02, atol=0.01 * y.abs().max().item())


@on_cpu
@halves
def test_a_head_alone_has_the_bits_that_it_has_among_others(name, dtype):
    """Four rows are multiplied at once, and what remains row by row."""
    declares(name, dtype, Feature.QUANTISED)
    made = stored_in_int8((FEATURE["mqa"],), dtype, ((1, 700),), 128)
    q = torch.cat([made.given["q"] * x for x in (1, 2, 0.5)], 1)[:, :6]
    for isa in of_vectors(name, dtype):
        with variant(isa):
            among = run(made.given | dict(q=q), name)
            for h in range(q.shape[1]):
                alone = run(made.given | dict(q=q[:, h : h + 1]), name)
                for x, y in zip(among, alone, strict=True):
                    assert torch.equal(x[:, h : h + 1], y), (isa, h)


VNNI = '__builtin_cpu_supports("avx512vnni")'


@pytest.mark.slow  # it compiles kernels
def test_vnni_changes_no_bits(monkeypatch, tmp_path):
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
        monkeypatch.setattr(libraries, "cpu", lambda: library)  # noqa: B023  used at once
        results[way] = [x for given in stored for x in run(given, "cpu")]
    assert all(map(torch.equal, *results.values()))
