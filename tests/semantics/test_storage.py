"""Keys and values in eight bits: attention gives the bits that it gives for the dequantised rows in
the dtype of q, in any storage; and its error is as documented. Decoding on the CPU does not round
the dequantised numbers: it errs no more than with rounded ones, measured against float64."""

import dataclasses
import random

import pytest
import torch

import fastattn
from fastattn import KVCache
from fastattn.backends import base
from fastattn.call import quantisation
from fastattn.call.quantisation import dequantised, quantised
from fastattn.call.spec import Feature
from tests.kv_cache.test_cache import Model, check_changes
from tests.semantics.test_packed import batch
from tests.semantics.test_paged import in_pages
from tests.support.backends import (
    declares,
    every_backend,
    every_dtype,
    not_interpreted,
    variant,
    variants,
)
from tests.support.cases import DTYPES, FEATURE, PLAIN
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {name: dtype for dtype, name in quantisation.NAMES.items()}
every_storage = pytest.mark.parametrize("storage", NAMES)


def kept(made, storage):
    """(arguments with keys and values in eight bits and scales, arguments with these dequantised).
    Sizes of rows differ much, so a scale of another row, or of a value for a key, would show."""
    generator = torch.Generator().manual_seed(1)
    stored, plain = dict(made.given), dict(made.given)
    for at, name in enumerate("kv"):
        x = made.given[name]
        by = torch.randint(-3 * at, 2, x.shape[:2], generator=generator)
        numbers, scale = quantised(x * 4.0 ** by[..., None], storage)
        stored[name], stored[f"{name}_scale"] = numbers, scale
        plain[name] = dequantised(numbers, scale, x.dtype)
    return stored, plain


def run(given, name):
    with torch.no_grad():
        return fastattn.attention_packed(**given, backend=name, return_lse=True)


def same(name, made, storage, pages=(), scales=None):
    """Assert equal bits on every instruction set, for contiguous keys and for pages. `scales`
    replaces the scales of some keys. Rows that may be decoded are compared with `exact`."""
    stored, plain = kept(made, NAMES[storage])
    for key, by in (scales or {}).items():
        for x in "kv":
            stored[f"{x}_scale"][key] = by
            plain[x] = dequantised(stored[x], stored[f"{x}_scale"], made.given[x].dtype)
    decoded = rows_decoded(name, made)
    moved = (0, score_error(stored))  # outputs, and their LSE
    wide = exact(stored) if decoded.any() else (None, None)
    for isa in variants(name, made.given["q"].dtype):
        with variant(isa):
            expected = run(plain, name)
            made.given = stored
            # Splits depend on max_k: it is the longest length, not the room in the table.
            most = dict(max_k=max(keys.stop - keys.start for keys in made.keys))
            lying = {"in a row": stored} | {page: in_pages(made, page) | most for page in pages}
            first = run(stored, name)
            for where, given in lying.items():
                results = zip(expected, run(given, name), wide, first, moved, strict=True)
                for x, y, z, one, more in results:
                    assert equal(x[~decoded], y[~decoded]), (isa, where)
                    if decoded.any():
                        assert equal(one[decoded], y[decoded]), (isa, where)
                        near(y[decoded], x[decoded], z[decoded], more)


def equal(x, y):
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


MOST_DECODED = 16  # rows of a sequence, of those that the CPU's kernels may decode


def rows_decoded(name, made):
    """(T,) bool: the rows of sequences that may be decoded, where eight bits are not rounded."""
    decoded = torch.zeros(len(made.given["q"]), dtype=torch.bool)
    wide = made.given["q"].dtype == torch.float64
    if name == "cpu" and not wide and not made.given.get("row_invariant"):
        for rows in made.rows:
            decoded[rows] = rows.stop - rows.start <= MOST_DECODED
    return decoded


def exact(stored):
    """The results in float64, for the numbers of eight bits times their scales."""
    given = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in stored.items()
    }
    for x in "kv":
        given[x] = stored[x].double() * given.pop(f"{x}_scale")[..., None]
    return run(given, "reference")


def score_error(stored):
    """How far a score may be off because q became integers: of 16 bits with keys in int8."""
    q, k, scales = stored["q"], stored["k"].double(), stored["k_scale"].double().abs()
    if stored["k"].dtype != torch.int8 or q.dtype.itemsize != 2:
        return 0
    step = q.abs().max().double() / 32767
    usual = scales.where(scales < 1e6, 0)  # of others, scores are off by more than they are
    most = (k.abs().sum(-1) * usual).max()
    return step / 2 * most * abs(stored.get("scale", q.shape[-1] ** -0.5))


def near(found, rounded, wide, more=0):
    """Assert that `found` errs no more than twice what results for rounded numbers err, and
    `more`."""
    wide = wide.to(found.dtype).double()
    assert torch.equal(found.isnan(), wide.isnan())
    number = wide.isfinite()
    assert torch.equal(found[~number].nan_to_num(), wide[~number].to(found.dtype).nan_to_num())
    if number.any():
        error, other = (
            (x.double() - wide)[number].nan_to_num(torch.inf).abs().max() for x in (found, rounded)
        )
        bound = 2 * other + 4 * torch.finfo(found.dtype).eps * wide[number].abs().max()
        assert error <= bound + more


@every_backend
@every_storage
@every_dtype
def test_quantised_cache_with_huge_and_tiny_scales(name, dtype, storage):
    """Also NaN and infinite scales: vector kernels compute such rows in place of tile kernels."""
    declares(name, DTYPES[dtype], Feature.QUANTISED)
    strange = {3: torch.nan, 150: 1e33, 170: torch.inf, 201: 1e-36, 202: 0.0, 370: -1.0}
    for sizes in (((40, 200), (90, 190)), ((1, 200), (4, 190))):
        made = batch((FEATURE["bottom_right"], FEATURE["gqa"]), DTYPES[dtype], sizes, 32)
        same(name, made, storage, (48,), strange)


@every_backend
@every_storage
def test_threads_change_no_bits(name, storage, threads):
    declares(name, torch.float32, Feature.QUANTISED)
    same_on_threads(name, threads, lambda made: kept(made, NAMES[storage])[0])


def same_on_threads(name, threads, stored):
    """Assert equal bits on one thread and on three. stored: of a batch, its arguments."""
    for dtype in (torch.float32, torch.bfloat16):
        for sizes in (((1, 3000), (2, 1500)), ((70, 600), (200, 90))):
            given = stored(batch((FEATURE["mqa"],), dtype, sizes, 64))
            threads(1)
            expected = run(given, name)
            threads(3)
            for x, y in zip(expected, run(given, name), strict=True):
                assert torch.equal(x, y)


# ------------------------------------------------------------------------------------- the numbers


@every_storage
@every_dtype
def test_a_row_is_as_close_as_its_dtype_allows(dtype, storage):
    """The error of a row is at most half a step; steps of int8 have one size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, 64, generator=generator, dtype=torch.float64).to(DTYPES[dtype])
    x *= 2.0 ** torch.randint(-9, 9, (50, 4, 1), generator=generator)
    numbers, scale = quantised(x, NAMES[storage])
    assert numbers.dtype == NAMES[storage] and scale.dtype == torch.float32
    exact = numbers.double() * scale.double()[..., None]
    most = x.double().abs().amax(-1, keepdim=True)
    step = {
        "int8": most / 127,
        "e4m3fn": exact.abs() / 8 + most / 448 / 2**9,
        "e5m2": exact.abs() / 4 + most / 57344 / 2**16,
    }[storage]
    assert ((exact - x.double()).abs() <= step / 2 * (1 + 2.0**-14)).all()
    assert (numbers.double().abs().amax(-1) == torch.tensor({"int8": 127, "e4m3fn": 448}.get(
        storage, 57344)).double()).all()  # fmt: skip
    again = dequantised(numbers, scale, torch.float64)
    assert torch.equal(again, exact)


@every_storage
def test_zeros_and_non_finite_values_survive_quantisation(storage):
    x = torch.ones(6, 8, dtype=torch.float64)
    x[0] = 0
    x[1, 3] = torch.nan
    x[2, 3] = torch.inf
    x[3, 3] = -torch.inf
    x[4] = 1e200  # its scale overflows float32
    numbers, scale = quantised(x, NAMES[storage])
    found = dequantised(numbers, scale, torch.float64)
    assert scale[0] == 0 and not found[0].any()
    assert found[1:5].isnan().all() and torch.allclose(found[5], x[5], rtol=1e-6)
    tiny = torch.full((3, 8), 1e-44)
    assert (dequantised(*quantised(tiny, NAMES[storage]), torch.float32) <= 2e-44).all()
    for columns in (0, 1):
        numbers, scale = quantised(torch.ones(3, columns), NAMES[storage])
        assert numbers.shape == (3, columns) and scale.shape == (3,)


@every_backend
@every_dtype
@pytest.mark.parametrize("storage", ("e4m3fn", "e5m2"))
@pytest.mark.parametrize("columns", (1, 64))
def test_every_pattern_of_float8(name, columns, storage, dtype):
    """All 256 bit patterns, also subnormals, zeros, NaN, infinities: each is one key's value, in
    one column or, in turn, in each of 64."""
    dtype = DTYPES[dtype]
    declares(name, dtype, Feature.QUANTISED)
    patterns = torch.arange(256)[:, None, None] + torch.arange(columns) * 5
    v = (patterns % 256).to(torch.uint8).view(NAMES[storage])
    cu = torch.arange(257)
    ones = torch.ones(256, 1)
    q = torch.ones(256, 1, columns, dtype=dtype)
    k = torch.ones(256, 1, columns).to(NAMES[storage])
    for isa in variants(name, dtype):
        with variant(isa), torch.no_grad():
            out = fastattn.attention_packed(
                *(q, k, v, cu, cu), k_scale=ones, v_scale=ones * 0.5, backend=name
            )
        exact = (v.double() * 0.5).to(dtype)
        assert torch.equal(out.nan_to_num(7.0, 8.0, 9.0), exact.nan_to_num(7.0, 8.0, 9.0)), isa


@every_backend
@pytest.mark.parametrize("d", (33, 64, 160))
def test_a_nan_of_float8_among_numbers(name, d):
    """Of a value it makes its column NaN, of a key the rows that see it; others keep theirs."""
    declares(name, torch.float32, Feature.QUANTISED)
    for features in (PLAIN, (FEATURE["mqa"],)):
        made = batch(features, torch.float32, ((1, 70), (40, 70)), d)
        stored, _ = kept(made, torch.float8_e4m3fn)
        heads = stored["q"].shape[1] // stored["k"].shape[1]  # that see the first key head
        for isa in variants(name, torch.float32):
            with variant(isa):
                clean, _ = run(stored, name)
                for pattern, key, column in ((127, 3, 0), (255, 37, d - 1), (127, 69, d // 2)):
                    changed = {x: stored[x].clone() for x in "kv"}
                    for x in changed.values():
                        x.view(torch.uint8)[[key, 70 + key], 0, column] = pattern
                    found, _ = run(stored | dict(v=changed["v"]), name)
                    assert found[:, :heads, column].isnan().all(), isa
                    found[:, :heads, column] = clean[:, :heads, column]
                    torch.testing.assert_close(found, clean)
                    found, _ = run(stored | dict(k=changed["k"]), name)
                    assert found[:, :heads].isnan().all(), isa
                    torch.testing.assert_close(found[:, heads:], clean[:, heads:])


@every_backend
@pytest.mark.parametrize(
    "storage, q, k, k_scale, scale",
    (
        ("int8", 1e38, 0, 1.0, 1e6),
        ("int8", 1e-19, 100, 1e35, 1e-20),
        ("e4m3fn", 2.0**120, 256, 2.0**-126, 0.1),
    ),
)
def test_factors_leave_the_range_of_float32_only_with_the_score(
    name, storage, q, k, k_scale, scale
):
    """Their products may leave it, and scores are in it."""
    declares(name, torch.bfloat16, Feature.QUANTISED)
    row = torch.full((20, 1, 64), k).to(NAMES[storage])
    given = dict(q=torch.full((1, 1, 64), q, dtype=torch.bfloat16), k=row, v=row, scale=scale)
    given |= dict(cu_q=torch.tensor([0, 1]), cu_k=torch.tensor([0, 20]))
    given |= dict(k_scale=torch.full((20, 1), k_scale), v_scale=torch.ones(20, 1))
    _, wide = exact(given)
    for isa in variants(name, torch.bfloat16):
        with variant(isa):
            _, lse = run(given, name)
            torch.testing.assert_close(lse.double(), wide, rtol=1e-3, atol=1e-3)


# Relative errors of outputs for a cache of normal data, (typical, worst), as `KVCache` documents.
DOCUMENTED = {"int8": (0.01, 0.015), "e4m3fn": (0.04, 0.07), "e5m2": (0.08, 0.14)}


@not_interpreted
@every_storage
@pytest.mark.parametrize("D", (64, 128))
def test_the_error_is_as_documented(storage, D):
    """Errors against float64 of the appended rows: typical of all outputs, and in the worst row."""
    generator = torch.Generator().manual_seed(D)
    k, v = torch.randn(2, 4, 4, 1000, D, generator=generator)
    q = torch.randn(4, 8, 4, D, generator=generator)
    exact = fastattn.reference.attention(q.double(), k.double(), v.double(), causal="bottom_right")
    cache = KVCache(4, 4, D, capacity=1000, page_size=48, storage=NAMES[storage])
    cache.append(k, v)
    error = cache.attention(q).double() - exact
    typical = error.norm() / exact.norm()
    worst = (error.norm(dim=-1) / exact.norm(dim=-1)).max()
    low, high = DOCUMENTED[storage]
    assert low / 2 < typical <= low and high / 2 < worst <= high


# ---------------------------------------------------------------------------------------- the cache


class Stored(Model):
    """A model with rows that are the dequantised rows of its cache."""

    def __init__(self, page_size, storage, dtype=torch.float32, **more):
        super().__init__(page_size, storage=storage, dtype=dtype, **more)

    def new(self, n):
        sizes = 4.0 ** torch.randint(-2, 3, (n, 2, 2, 1), generator=self.generator)
        return tuple(x * y for x, y in zip(super().new(n), sizes.unbind(1), strict=True))

    @staticmethod
    def compare(found, expected):  # decoding does not round the numbers
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    def append(self, counts):
        super().append(counts)
        for mine, n in zip(self.rows, counts, strict=True):
            for at in range(len(mine) - n, len(mine)):
                mine[at] = tuple(
                    dequantised(*quantised(x, self.cache.storage), torch.float32) for x in mine[at]
                )


@not_interpreted
@every_storage
@parametrize("page_size", (None, 1, 4, 16, 7), fast=2)
def test_any_sequence_of_changes_keeps_scales_with_their_rows(page_size, storage):
    changes = ("packed", "packed", "fork", "evict", "truncate")
    model, chance = Stored(page_size, NAMES[storage], grow=True), random.Random(page_size or 0)
    check_changes(model, chance, 40, 3, changes)


@not_interpreted
def test_growth_keeps_scales():
    for page_size in (None, 1, 4, 7):
        model = Stored(page_size, torch.int8, capacity=3, grow=True)
        for counts in ([2, 2, 2], [9, 0, 1], [30, 30, 1]):
            model.append(counts)
            model.check()


def test_memory_of_scales_is_accounted():
    sizes = dict(capacity=100, page_size=16, dtype=torch.bfloat16)
    for storage in (None, torch.bfloat16):
        cache = KVCache(2, 3, 64, storage=storage, **sizes)
        assert cache.nbytes == 2 * 14 * 16 * 3 * 64 * 2 and cache.k_scales is None
    cache = KVCache(2, 3, 64, value_dim=32, storage=torch.int8, **sizes)
    assert cache.nbytes == 14 * 16 * 3 * (64 + 32 + 2 * 4)
    assert cache.dtype == torch.bfloat16 and cache.storage == torch.int8
    assert cache.k_scales.shape == cache.v_scales.shape == (14, 16, 3)
    assert "int8" in repr(cache)
    with pytest.raises(ValueError, match=r"k: got .*float32 on cpu, expected .*bfloat16"):
        cache.append(torch.zeros(2, 3, 1, 64), torch.zeros(2, 3, 1, 32))


def test_a_non_finite_row_makes_its_head_nan():
    """Only the head that has one returns NaN, as in a cache without storage."""
    for bad in (torch.nan, torch.inf):
        cache = KVCache(1, 2, 8, capacity=9, page_size=4, storage=torch.int8)
        k = torch.ones(1, 2, 5, 8)
        v = k.clone()
        v[0, 1, 2, 3] = bad
        cache.append(k, v)
        out = cache.attention(torch.ones(1, 2, 1, 8))
        assert torch.allclose(out[0, 0], torch.ones(1, 8)) and out[0, 1].isnan().all()


# ------------------------------------------------------------------------------------ what is wrong


def some():
    return dict(
        q=torch.zeros(5, 4, 8),
        k=torch.zeros(11, 2, 8, dtype=torch.int8),
        v=torch.zeros(11, 2, 8, dtype=torch.int8),
        cu_q=torch.tensor([0, 2, 5]),
        cu_k=torch.tensor([0, 8, 11]),
        k_scale=torch.zeros(11, 2),
        v_scale=torch.zeros(11, 2),
    )


WRONG = {
    "k_scale and v_scale: got k_scale alone, expected both": dict(v_scale=None),
    "k.dtype: got torch.int8, expected": dict(k_scale=None, v_scale=None),
    "k.dtype: got torch.float32, expected torch.int8 or torch.float8_e4m3fn": dict(
        k=torch.zeros(11, 2, 8), v=torch.zeros(11, 2, 8)
    ),
    "v.dtype: got torch.float8_e4m3fn, expected torch.int8, as k has": dict(
        v=torch.zeros(11, 2, 8).to(torch.float8_e4m3fn)
    ),
    r"v_scale: got shape \(2, 11\), expected \(S, Hk\) = \(11, 2\)": dict(
        v_scale=torch.zeros(2, 11)
    ),
    r"k_scale: got shape \(11,\), expected \(S, Hk\)": dict(k_scale=torch.zeros(11)),
    "k_scale.dtype: got torch.float64, expected torch.float32": dict(
        k_scale=torch.zeros(11, 2).double()
    ),
    "v_scale: got a tensor that requires grad": dict(v_scale=torch.zeros(11, 2).requires_grad_()),
    r"k_scale: got shape \(11, 2\), expected \(P, page, Hk\) = \(11, 1, 2\)": dict(
        k=torch.zeros(11, 1, 2, 8, dtype=torch.int8),
        v=torch.zeros(11, 1, 2, 8, dtype=torch.int8),
        block_table=torch.zeros(2, 8).long(),
        key_lengths=torch.tensor([8, 3]),
        cu_k=None,
    ),
}


@every_backend
@pytest.mark.parametrize("message", WRONG)
def test_scales_that_do_not_fit(name, message):
    declares(name, torch.float32, Feature.QUANTISED)
    for backend_name in (name, "reference"):
        fastattn.attention_packed(**some(), backend=backend_name)
        with pytest.raises(ValueError, match=message):
            fastattn.attention_packed(**(some() | WRONG[message]), backend=backend_name)
    with pytest.raises(TypeError, match="k_scale: got int"):
        fastattn.attention_packed(**(some() | dict(k_scale=3)))


@not_interpreted
def test_quantised_keys_and_values_have_no_gradient():
    given = some()
    given["q"].requires_grad_()
    out = fastattn.attention_packed(**given)
    with pytest.raises(NotImplementedError, match=r"torch.int8 \(k_scale.*no gradient.*float32"):
        out.sum().backward()


@not_interpreted
def test_autocast_leaves_quantised_tensors():
    given = some() | {x: torch.ones(11, 2, 8).to(torch.float8_e4m3fn) for x in "kv"}
    given |= {x: torch.ones(11, 2) for x in ("k_scale", "v_scale")}
    with torch.autocast("cpu", torch.bfloat16):
        out = fastattn.attention_packed(**given)
    assert out.dtype == torch.bfloat16 and (out == 1).all()


@not_interpreted
@every_storage
def test_quantised_calls_compile(storage):
    stored, _ = kept(batch((FEATURE["bottom_right"],), torch.float32), NAMES[storage])
    compiled = torch.compile(fastattn.attention_packed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**stored), fastattn.attention_packed(**stored))


def test_backends_that_support_quantised_caches():
    spec = fastattn.explain(**some()).spec
    assert spec.features & Feature.QUANTISED and spec.storage == torch.int8
    assert not base.get("triton").support.why_not(dataclasses.replace(spec, device="cuda"))
    (why,) = (x for x in base.get("cuda").support.why_not(spec) if "quantised" in x)
    assert "does not support" in why
