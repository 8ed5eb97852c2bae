"""Keys and values in four bits: attention to them against a float64 oracle on the dequantised rows,
and what torch does with such calls."""

import dataclasses

import pytest
import torch

import fastattn
from fastattn.backends import base
from fastattn.call.int4 import INT4, dequantised_int4, quantised_int4
from fastattn.call.spec import Feature
from tests.semantics.test_int4_rows import random_rows
from tests.semantics.test_packed import FEW, batch
from tests.semantics.test_paged import in_pages
from tests.semantics.test_storage import run, same_on_threads
from tests.support.backends import FUSED, declares, every_dtype, not_interpreted, variant, variants
from tests.support.cases import DTYPES, FEATURE, PLAIN

pytestmark = pytest.mark.usefixtures("one_thread")

every_backend = pytest.mark.parametrize(
    "name", [*FUSED, pytest.param("reference", marks=not_interpreted)]
)
# Kernels may round values to q's dtype, so no bits are compared. The largest differences of
# outputs, in units of the largest value, and of the LSE.
CLOSE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-4),
    torch.float16: (1e-2, 2e-2),
    torch.bfloat16: (5e-2, 1e-1),
}


def kept(made):
    """(arguments with keys and values in four bits, the same in float64 with these dequantised).
    Sizes and means of blocks differ, so those of another block, or of a value for a key, show."""
    generator = torch.Generator().manual_seed(1)
    stored, plain = dict(made.given), dict(made.given)
    for name in "kv":
        x = made.given[name]
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32))  # a row is of whole blocks
        n = x.shape[-1] // 32
        size, mean = (
            torch.randint(-2, 2, (*x.shape[:2], n), generator=generator).repeat_interleave(32, -1)
            for _ in range(2)
        )
        stored[name] = quantised_int4(x * 2.0**size + mean / 2)
        plain[name] = dequantised_int4(stored[name], torch.float64)
    for name, x in plain.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            plain[name] = x.double()
    return stored, plain


def check(name, made, pages=()):
    """Assert results close to float64's on every instruction set, for keys in a row and in pages,
    which have the same bits."""
    stored, plain = kept(made)
    dtype = made.given["q"].dtype
    exact = run(plain | dict(row_invariant=False), "reference")  # it computes no row alone
    largest = max([1, *plain["v"].abs().nan_to_num().flatten().tolist()])
    made.given = stored
    for isa in variants(name, dtype):
        with variant(isa):
            found = run(stored, name)
            assert found[0].dtype == dtype and found[0].shape == exact[0].shape
            for x, y, close in zip(found, exact, CLOSE[dtype], strict=True):
                x = x.double()
                assert torch.equal(x.isinf(), y.isinf()), isa
                far = (x - y).nan_to_num(posinf=0, neginf=0).abs().max() if x.numel() else 0
                scale = largest if x.ndim == 3 else 1
                assert not x.isnan().any() and far <= close * scale, (isa, far)
            # Splits depend on max_k: it is the longest length, not the room in the table.
            most = dict(max_k=max(keys.stop - keys.start for keys in made.keys))
            for page in pages:
                for x, y in zip(found, run(in_pages(made, page) | most, name), strict=True):
                    assert torch.equal(x, y), (isa, page)


@every_backend
@every_dtype
def test_values_that_every_dtype_has(name, dtype):
    """Kernels round none of these: results are those of plain rows, but for the sums' order."""
    dtype = DTYPES[dtype]
    declares(name, dtype, Feature.INT4)
    generator = torch.Generator().manual_seed(3)
    for sizes in (FEW, ((1, 300), (40, 200))):
        made = batch((FEATURE["bottom_right"], FEATURE["gqa"]), dtype, sizes, 64)
        stored, plain = dict(made.given), dict(made.given)
        for x in "kv":
            n = torch.randint(0, 16, made.given[x].shape, generator=generator)
            n[..., ::32], n[..., 5::32] = 0, 15
            plain[x] = n / 8 - torch.randint(0, 3, (*n.shape[:2], 1), generator=generator)
            stored[x] = quantised_int4(plain[x])
            assert torch.equal(dequantised_int4(stored[x], torch.float32), plain[x])
            plain[x] = plain[x].to(dtype)
        close = 2 * torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 64)
        for isa in variants(name, dtype):
            with variant(isa):
                for x, y in zip(run(stored, name), run(plain, name), strict=True):
                    torch.testing.assert_close(x, y, rtol=close, atol=close)


def with_a_large_column(features, dtype, size, d):
    """Queries of this size, one column a hundred times as large; the scale makes up for it."""
    if size * 100 > torch.finfo(dtype).max or size < torch.finfo(dtype).tiny:
        pytest.skip("out of the dtype's range")
    made = batch(features, dtype, ((1, 40), (2, 65)), d)
    made.given["q"][..., 7] *= 100
    made.given["q"] = (made.given["q"].float() * size).to(dtype)
    made.given["scale"] = d**-0.5 / size
    return made


@every_backend
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("size", (1.0, 1e4, 1e35, 2.0**-20, 1e-37))
def test_scores_of_queries_with_a_large_column(name, dtype, size):
    """Kernels may round q to multiples of a 32767th of its largest number. A score is off by half
    of that, times the sum of a key's n * scale, at most. So is the LSE."""
    declares(name, dtype, Feature.INT4)
    for features in (PLAIN, (FEATURE["mqa"],)):
        for d in (32, 96, 128):
            made = with_a_large_column(features, dtype, size, d)
            stored, plain = kept(made)
            _, exact = run(plain, "reference")
            rows = stored["k"].unflatten(-1, (d // 32, 20))
            scales = rows[..., 16:18].clone().view(torch.bfloat16).float()
            most = (scales * 15 * 32).sum(-2).max()
            step = made.given["q"].abs().max().double() / 32767
            for isa in variants(name, dtype):
                with variant(isa):
                    _, lse = run(stored, name)
                    bound = made.given["scale"] * step * most / 2 + 1e-5 * exact.abs().max()
                    assert (lse.double() - exact).abs().max() <= bound, isa


@every_backend
@pytest.mark.parametrize("d, dv", ((576, 512), (1024, 32), (0, 32), (32, 0)))
def test_wide_and_empty_rows(name, d, dv):
    declares(name, torch.float32, Feature.INT4)
    for sizes in (((1, 70), (2, 33)), ((20, 70),)):
        made = batch(PLAIN, torch.float32, sizes, max(d, 32))
        made.given |= {name: made.given[name][..., :d] / 4 for name in "qk"}
        made.given["v"] = random_rows(torch.float32, *made.given["v"].shape[:2], dv) / 64
        check(name, made, (16,))


@every_backend
def test_row_invariant(name):
    """A row has the same bits alone and among others."""
    declares(name, torch.float32, Feature.INT4 | Feature.INVARIANT)
    for dtype in (torch.float32, torch.bfloat16):
        made = batch((FEATURE["bottom_right"], FEATURE["gqa"]), dtype, ((40, 200),), 64)
        made.given["row_invariant"] = True
        stored, _ = kept(made)
        check(name, made, (48,))
        for isa in variants(name, dtype):
            with variant(isa):
                many, _ = run(stored, name)
                last, _ = run(stored | dict(q=stored["q"][-3:], cu_q=torch.tensor([0, 3])), name)
                assert torch.equal(many[-3:], last), (isa, dtype)


@every_backend
def test_threads_change_no_bits(name, threads):
    declares(name, torch.float32, Feature.INT4)
    same_on_threads(name, threads, lambda made: kept(made)[0])


@every_backend
def test_a_block_of_nan(name):
    """One of values makes its columns NaN, one of keys the rows that see it; others keep theirs."""
    declares(name, torch.float32, Feature.INT4)
    for rows in (1, 40):
        made = batch(PLAIN, torch.float32, ((rows, 70), (rows, 20)), 64)
        stored, _ = kept(made)
        expected, _ = run(stored, name)
        values = stored["v"].clone()
        values[33, 1, 36:38] = values[33, 0, 36:38] | 255  # the scale of a head's second block
        for isa in variants(name, torch.float32):
            with variant(isa):
                found, _ = run(stored | dict(v=values), name)
                assert found[:rows, 1, 32:].isnan().all(), isa
                found[:rows, 1, 32:] = expected[:rows, 1, 32:]
                torch.testing.assert_close(found, expected)
                keys = stored["k"].clone()
                keys[33, 1, 16:18] = 255
                found, _ = run(stored | dict(k=keys), name)
                assert found[:rows, 1].isnan().all() and not found[:rows, 0].isnan().any(), isa
                assert not found[rows:].isnan().any(), isa


# --------------------------------------------------------------------------------- what torch does


def some(**more):
    rows = torch.zeros(11, 2, 40, dtype=INT4)
    cu_q, cu_k = torch.tensor([0, 2, 5]), torch.tensor([0, 8, 11])
    return dict(q=torch.zeros(5, 4, 64), k=rows, v=rows, cu_q=cu_q, cu_k=cu_k) | more


@every_backend
def test_there_is_no_gradient(name):
    declares(name, torch.float32, Feature.INT4)
    given = some(backend=name)
    given["q"].requires_grad_()
    out = fastattn.attention_packed(**given)
    with pytest.raises(NotImplementedError, match=r"torch.uint8 \(four bits.*no gradient.*float32"):
        out.sum().backward()


@every_backend
def test_autocast_leaves_the_rows(name):
    declares(name, torch.float32, Feature.INT4)
    rows = quantised_int4(torch.ones(11, 2, 64))
    with torch.autocast("cpu", torch.bfloat16):
        out = fastattn.attention_packed(**some(k=rows, v=rows, backend=name))
    assert out.dtype == torch.bfloat16 and (out == 1).all()


@every_backend
def test_calls_compile_and_are_exported(name):
    declares(name, torch.float32, Feature.INT4)
    stored, _ = kept(batch((FEATURE["bottom_right"],), torch.float32, d=64))
    stored["backend"] = name
    expected = fastattn.attention_packed(**stored)
    compiled = torch.compile(fastattn.attention_packed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**stored), expected)

    class Step(torch.nn.Module):
        def forward(self, q, k, v, cu_q, cu_k):
            return fastattn.attention_packed(q, k, v, cu_q, cu_k, max_q=65, max_k=129, backend=name)

    given = tuple(stored[name] for name in ("q", "k", "v", "cu_q", "cu_k"))
    program = torch.export.export(Step(), given)
    torch.testing.assert_close(program.module()(*given), Step()(*given))


@every_backend
def test_fake_tensors_have_the_shapes_of_results(name):
    declares(name, torch.float32, Feature.INT4)
    with torch._subclasses.FakeTensorMode() as mode:
        given = {x: mode.from_tensor(y) for x, y in some().items()}
        out, lse = fastattn.attention_packed(**given, return_lse=True, backend=name)
    assert out.shape == (5, 4, 64) and out.dtype == torch.float32 and lse.shape == (5, 4)


@every_backend
def test_flops_are_those_of_the_numbers(name):
    declares(name, torch.float32, Feature.INT4)
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for given in (some(), some(**dict.fromkeys("kv", torch.zeros(11, 2, 64)))):
        with FlopCounterMode(display=False) as counter:
            fastattn.attention_packed(**given, backend=name)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_backends_that_have_the_feature():
    spec = fastattn.explain(**some()).spec
    assert spec.features & Feature.INT4 and spec.storage == INT4
    assert (spec.D, spec.Dv) == (64, 64) and "int4" in str(spec)
    assert not base.get("reference").support.why_not(spec)
    for name in base.names():
        declared = bool(base.get(name).support.features & Feature.INT4)
        device = "cuda" if name in ("cuda", "triton") else "cpu"
        on = dataclasses.replace(spec, device=device, dtype=torch.bfloat16)
        assert declared or "does not support int4" in " ".join(base.get(name).support.why_not(on))
