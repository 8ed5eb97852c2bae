"""Keys and values in eight bits and in four: their errors are as documented, what torch does with
such calls, and what is refused. In eight bits attention gives the bits that it gives for the
dequantised rows in the dtype of q. Decoding on the CPU does not round the dequantised numbers: it
errs no more than with rounded ones, against float64. Values of calls are in tests/features."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import KVCache
from fastattn.backends import base
from fastattn.call import quantisation
from fastattn.call.int4 import INT4, dequantised_int4, quantised_int4
from fastattn.call.quantisation import dequantised, quantised
from fastattn.call.spec import Feature
from fastattn.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.semantics.test_packed import batch
from tests.semantics.test_paged import in_pages
from tests.support.backends import (
    declares,
    every_backend,
    every_dtype,
    not_interpreted,
    on_variants,
)
from tests.support.cases import DTYPES, FEATURE, PLAIN

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = {name: dtype for dtype, name in quantisation.NAMES.items()}
STORAGES = NAMES | {"int4": "int4"}
every_storage = pytest.mark.parametrize("storage", STORAGES)
in_eight_bits = pytest.mark.parametrize("storage", NAMES)


def declares_storage(name, dtype, storage):
    declares(name, dtype, Feature.INT4 if storage == "int4" else Feature.QUANTISED)


def kept(made, storage):
    """(arguments with keys and values in few bits, arguments with these dequantised). Sizes of rows
    (and sizes and means of blocks of four bits) differ much, so those of another row or block, or
    of a value for a key, would show."""
    generator = torch.Generator().manual_seed(1)
    stored, plain = dict(made.given), dict(made.given)
    for at, name in enumerate("kv"):
        x = made.given[name]
        if storage == "int4":
            x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32))  # a row is of whole blocks
            size, mean = (
                torch.randint(-2, 2, (*x.shape[:2], x.shape[-1] // 32), generator=generator)
                for _ in range(2)
            )
            size, mean = (y.repeat_interleave(32, -1) for y in (size, mean))
            stored[name] = quantised_int4(x * 2.0**size + mean / 2)
            plain[name] = dequantised_int4(stored[name], torch.float64)
            continue
        by = torch.randint(-3 * at, 2, x.shape[:2], generator=generator)
        numbers, scale = quantised(x * 4.0 ** by[..., None], storage)
        stored[name], stored[f"{name}_scale"] = numbers, scale
        plain[name] = dequantised(numbers, scale, x.dtype)
    return stored, in_float64(plain) if storage == "int4" else plain


def in_float64(given):
    return {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in given.items()
    }


def run(given, name):
    with torch.no_grad():
        return fastattn.attention_packed(**given, backend=name, return_lse=True)


def equal(x, y):
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


def exact(stored):
    """The results in float64, for the numbers of eight bits times their scales."""
    given = in_float64(stored)
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


def near(found, rounded, wide, more):
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


STRANGE = {3: torch.nan, 150: 1e33, 170: torch.inf, 201: 1e-36, 202: 0.0, 370: -1.0}  # of keys


@every_backend
@in_eight_bits
@every_dtype
@pytest.mark.parametrize("sizes", (((40, 200), (90, 190)), ((1, 200), (4, 190))), ids=str)
def test_huge_and_tiny_scales(name, sizes, dtype, storage):
    """Also NaN and infinite scales: vector kernels compute such rows in place of tile kernels."""
    declares(name, DTYPES[dtype], Feature.QUANTISED)
    made = batch((FEATURE["bottom_right"], FEATURE["gqa"]), DTYPES[dtype], sizes, 32)
    stored, plain = kept(made, NAMES[storage])
    for x in "kv":
        scale = stored[f"{x}_scale"]
        for key, by in STRANGE.items():
            scale[key] = by
        plain[x] = dequantised(stored[x], scale, DTYPES[dtype])
    made.given = stored
    # Splits depend on max_k: it is the longest length, not the room in the table.
    paged = [in_pages(made, page) | dict(max_k=200) for page in (7, 48)]
    decoded = name == "cpu" and sizes[0][0] == 1 and dtype != "float64"  # without rounding
    wide, moved = exact(stored), (0, score_error(stored))  # of outputs, and of the LSE
    for isa in on_variants(name, DTYPES[dtype]):
        found, rounded, *of_pages = (run(given, name) for given in (stored, plain, *paged))
        for other in of_pages:
            assert all(map(equal, found, other)), isa
        if decoded:
            for results in zip(found, rounded, wide, moved, strict=True):
                near(*results)
        else:
            assert all(map(equal, found, rounded)), isa


# ------------------------------------------------------------------------------------- the numbers


@in_eight_bits
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


@in_eight_bits
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
@pytest.mark.parametrize("d", (33, 64, 160))
def test_a_nan_of_float8_among_numbers(name, d):
    """Of a value it makes its column NaN, of a key the rows that see it; others keep theirs."""
    declares(name, torch.float32, Feature.QUANTISED)
    for features in (PLAIN, (FEATURE["mqa"],)):
        made = batch(features, torch.float32, ((1, 70), (40, 70)), d)
        stored, _ = kept(made, torch.float8_e4m3fn)
        heads = stored["q"].shape[1] // stored["k"].shape[1]  # that see the first key head
        for isa in on_variants(name, torch.float32):
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
    for _ in on_variants(name, torch.bfloat16):
        _, lse = run(given, name)
        torch.testing.assert_close(lse.double(), wide, rtol=1e-3, atol=1e-3)


# Relative errors of outputs for a cache of normal data, (typical, worst), as `KVCache` documents.
DOCUMENTED = {
    "int8": (0.01, 0.015),
    "e4m3fn": (0.04, 0.07),
    "e5m2": (0.08, 0.14),
    "int4": (0.12, 0.18),
}


@not_interpreted
@every_storage
@pytest.mark.parametrize("D", (64, 128))
def test_the_error_is_as_documented(storage, D):
    """Errors against float64 of the appended rows: typical of all outputs, and in the worst row."""
    generator = torch.Generator().manual_seed(D)
    k, v = torch.randn(2, 4, 4, 1000, D, generator=generator)
    q = torch.randn(4, 8, 4, D, generator=generator)
    exact = fastattn.reference.attention(q.double(), k.double(), v.double(), causal="bottom_right")
    cache = KVCache(4, 4, D, capacity=1000, page_size=48, storage=STORAGES[storage])
    cache.append(k, v)
    error = cache.attention(q).double() - exact
    typical = error.norm() / exact.norm()
    worst = (error.norm(dim=-1) / exact.norm(dim=-1)).max()
    low, high = DOCUMENTED[storage]
    least = 0.75 if storage == "int4" else 0.5
    assert least * low < typical <= low and least * high < worst <= high


@every_storage
def test_memory_is_accounted(storage):
    sizes = dict(capacity=100, page_size=16, dtype=torch.bfloat16)
    for same in (None, torch.bfloat16):
        cache = KVCache(2, 3, 64, storage=same, **sizes)
        assert cache.nbytes == 2 * 14 * 16 * 3 * 64 * 2 and cache.k_scales is None
        assert cache.pages_free == 14 and "0 of 14 pages of 16 keys used" in repr(cache)
        assert cache.block_table.shape == (2, 7)
    assert KVCache(2, 3, 64, capacity=100).page_size == 100
    cache = KVCache(2, 3, 64, value_dim=32, storage=STORAGES[storage], **sizes)
    four = storage == "int4"  # 5 bits a number
    assert cache.nbytes == 14 * 16 * 3 * (40 + 20 if four else 64 + 32 + 2 * 4)
    assert cache.dtype == torch.bfloat16 and cache.storage == STORAGES[storage]
    assert cache.k_pages.shape == (14, 16, 3, 40 if four else 64)
    if four:
        assert cache.k_scales is None and cache.v_scales is None
        assert cache.k_pages.dtype == torch.uint8
    else:
        assert cache.k_scales.shape == cache.v_scales.shape == (14, 16, 3)
    assert quantisation.NAMES.get(cache.storage, "int4") in repr(cache)
    with pytest.raises(ValueError, match=r"k: got .*float32 on cpu, expected .*bfloat16"):
        cache.append(torch.zeros(2, 3, 1, 64), torch.zeros(2, 3, 1, 32))


# ------------------------------------------------------------------------------------ four bits


@every_backend
def test_row_invariant(name):
    """A row has the same bits alone and among others."""
    declares(name, torch.float32, Feature.INT4 | Feature.INVARIANT)
    for dtype in (torch.float32, torch.bfloat16):
        made = batch((FEATURE["bottom_right"], FEATURE["gqa"]), dtype, ((40, 200),), 64)
        made.given["row_invariant"] = True
        stored, _ = kept(made, "int4")
        for isa in on_variants(name, dtype):
            many, _ = run(stored, name)
            last, _ = run(stored | dict(q=stored["q"][-3:], cu_q=torch.tensor([0, 3])), name)
            assert torch.equal(many[-3:], last), (isa, dtype)


@every_backend
def test_a_block_of_nan(name):
    """One of values makes its columns NaN, one of keys the rows that see it; others keep theirs."""
    declares(name, torch.float32, Feature.INT4)
    for rows in (1, 40):
        made = batch(PLAIN, torch.float32, ((rows, 70), (rows, 20)), 64)
        stored, _ = kept(made, "int4")
        expected, _ = run(stored, name)
        values = stored["v"].clone()
        values[33, 1, 36:38] = values[33, 0, 36:38] | 255  # the scale of a head's second block
        for isa in on_variants(name, torch.float32):
            found, _ = run(stored | dict(v=values), name)
            assert found[:rows, 1, 32:].isnan().all(), isa
            found[:rows, 1, 32:] = expected[:rows, 1, 32:]
            torch.testing.assert_close(found, expected)
            keys = stored["k"].clone()
            keys[33, 1, 16:18] = 255
            found, _ = run(stored | dict(k=keys), name)
            assert found[:rows, 1].isnan().all() and not found[:rows, 0].isnan().any(), isa
            assert not found[rows:].isnan().any(), isa


@every_backend
@pytest.mark.parametrize("d, dv", ((0, 32), (32, 0)))
def test_rows_of_no_number(name, d, dv):
    """The mean of values; nothing."""
    declares(name, torch.float32, Feature.INT4)
    for sizes in (((1, 70), (2, 33)), ((20, 70),)):
        made = batch(PLAIN, torch.float32, sizes, 32)
        made.given |= {x: made.given[x][..., : dv if x == "v" else d] for x in "qkv"}
        stored, plain = kept(made, "int4")
        for _ in on_variants(name, torch.float32):
            for x, y in zip(run(stored, name), run(plain, "reference"), strict=True):
                torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------- torch; what is wrong


def some(storage="int8", **more):
    """Keys and values of 64 numbers, all 0."""
    given = dict(q=torch.zeros(5, 4, 64), cu_q=torch.tensor([0, 2, 5]))
    given |= dict(cu_k=torch.tensor([0, 8, 11]))
    if storage == "int4":
        return given | dict.fromkeys("kv", bytes_of(11, 2, 40)) | more
    given |= dict.fromkeys("kv", torch.zeros(11, 2, 64, dtype=NAMES[storage]))
    return given | dict.fromkeys(("k_scale", "v_scale"), torch.zeros(11, 2)) | more


def bytes_of(*shape):
    return torch.zeros(shape, dtype=INT4)


WRONG = {
    "k_scale and v_scale: got k_scale alone, expected both": dict(v_scale=None),
    "k.dtype: got torch.int8, expected": dict(k_scale=None, v_scale=None),
    "k.dtype: got torch.float32, expected torch.int8 or torch.float8_e4m3fn": dict(
        k=torch.zeros(11, 2, 64), v=torch.zeros(11, 2, 64)
    ),
    "v.dtype: got torch.float8_e4m3fn, expected torch.int8, as k has": dict(
        v=torch.zeros(11, 2, 64).to(torch.float8_e4m3fn)
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
        k=torch.zeros(11, 1, 2, 64, dtype=torch.int8),
        v=torch.zeros(11, 1, 2, 64, dtype=torch.int8),
        block_table=torch.zeros(2, 64).long(),
        key_lengths=torch.tensor([8, 3]),
        cu_k=None,
    ),
}


PAGED = dict(
    k=bytes_of(11, 1, 2, 40),
    v=bytes_of(11, 1, 2, 40),
    block_table=torch.zeros(2, 8).long(),
    key_lengths=torch.tensor([8, 3]),
    cu_k=None,
)
WRONG_INT4 = {
    "k_scale: got a tensor, expected None, because rows in four bits": dict(
        k_scale=torch.zeros(11, 2), v_scale=torch.zeros(11, 2)
    ),
    "v_scale: got a tensor, expected None, because rows in four bits": dict(
        v_scale=torch.zeros(11, 2)
    ),
    "v.dtype: got torch.float32, expected torch.uint8, as k has": dict(v=torch.zeros(11, 2, 64)),
    "v.dtype: got torch.int8, expected torch.uint8, as k has": dict(
        v=torch.zeros(11, 2, 40, dtype=torch.int8)
    ),
    "k.dtype: got torch.float32, expected torch.uint8, as v has": dict(k=torch.zeros(11, 2, 64)),
    "k.dtype: got torch.bfloat16, expected torch.uint8, as v has": dict(
        k=torch.zeros(11, 2, 64).bfloat16()
    ),
    "q.dtype: got torch.uint8, expected float32": dict(q=bytes_of(5, 4, 64)),
    "q.dtype: got torch.int64, expected float32": dict(q=torch.zeros(5, 4, 64).long()),
    r"q: got shape \(1, 4, 5, 48\), expected a head dim that is a multiple of 32": dict(
        q=torch.zeros(5, 4, 48)
    ),
    r"k: got shape \(1, 2, 11, 64\), expected rows of 40 bytes, 20 for 32 numbers": dict(
        k=bytes_of(11, 2, 64)
    ),
    r"k: got shape \(1, 2, 11, 20\), expected rows of 40 bytes": dict(k=bytes_of(11, 2, 20)),
    r"v: got shape \(1, 2, 11, 32\), expected rows of a multiple of 20 bytes": dict(
        v=bytes_of(11, 2, 32)
    ),
    r"v: got shape \(1, 2, 12, 40\), expected 11 rows, as k has": dict(v=bytes_of(12, 2, 40)),
    r"v: got shape \(1, 1, 11, 40\), expected 2 heads, as k has": dict(v=bytes_of(11, 1, 40)),
    "k: got 3 heads, expected a divisor of q's 4 heads": dict(
        k=bytes_of(11, 3, 40), v=bytes_of(11, 3, 40)
    ),
    r"k: got shape \(11, 40\), expected 3 dimensions": dict(k=bytes_of(11, 40)),
    r"v: got shape \(1, 11, 2, 40\), expected 3 dimensions": dict(v=bytes_of(1, 11, 2, 40)),
    r"k: got shape \(11, 2, 40\), expected 4 dimensions": PAGED | dict(k=bytes_of(11, 2, 40)),
    r"v: got shape \(9, 2, 1, 40\), expected 11 pages": PAGED | dict(v=bytes_of(9, 1, 2, 40)),
    r"k: got shape \(11, 2, 1, 60\), expected rows of 40": PAGED | dict(k=bytes_of(11, 1, 2, 60)),
    "mask.dtype: got torch.uint8, expected torch.bool": dict(mask=bytes_of(3, 8)),
}


@every_backend
@pytest.mark.parametrize(
    "storage, message", [*(("int8", x) for x in WRONG), *(("int4", x) for x in WRONG_INT4)]
)
def test_rows_that_do_not_fit(name, storage, message):
    declares_storage(name, torch.float32, storage)
    wrong = WRONG_INT4[message] if storage == "int4" else WRONG[message]
    for backend in (name, "reference"):
        fastattn.attention_packed(**some(storage), backend=backend)
        with pytest.raises(ValueError, match=message):
            fastattn.attention_packed(**some(storage) | wrong, backend=backend)
    if storage != "int4":
        with pytest.raises(TypeError, match="k_scale: got int"):
            fastattn.attention_packed(**some(storage, k_scale=3))


@not_interpreted
def test_other_calls_refuse_rows_in_four_bits():
    q, rows = torch.zeros(1, 4, 5, 64), bytes_of(1, 4, 5, 40)
    expected = "k.dtype: got torch.uint8, expected torch.float32, as q has; attention_packed"
    for call in (
        lambda: fastattn.attention(q, rows, rows),
        lambda: fastattn.attention_weights(q, rows),
        lambda: fastattn.attention_jvp(q, rows, rows, q, None, None),
    ):
        with pytest.raises(ValueError, match=expected):
            call()
    with pytest.raises(NotImplementedError, match="qv: got keys in four bits"):
        fastattn.attention_packed(**some("int4"), qv=torch.zeros(5, 4, 64))


@not_interpreted
def test_the_api_of_flash_attn_refuses_rows_in_four_bits():
    rows, cu = bytes_of(1, 8, 2, 40), torch.tensor([0, 5], dtype=torch.int32)
    q = torch.zeros(5, 2, 64)
    with pytest.raises(ValueError, match=r"k.dtype: got torch.uint8, expected q's dtype"):
        flash_attn_varlen_func(q, rows[0], rows[0], cu, cu, 5, 8)
    for more in ({}, dict(k=q[None], v=q[None], cache_seqlens=0)):
        with pytest.raises(ValueError, match=r"k_cache.dtype: got torch.uint8, expected q's dtype"):
            flash_attn_with_kvcache(q[None], rows, rows, **more)


@not_interpreted
@every_storage
def test_there_is_no_gradient(storage):
    given = some(storage)
    given["q"].requires_grad_()
    out = fastattn.attention_packed(**given)
    kind = r"torch.uint8 \(four bits" if storage == "int4" else rf"{NAMES[storage]} \(k_scale"
    with pytest.raises(NotImplementedError, match=f"{kind}.*no gradient.*float32"):
        out.sum().backward()


@not_interpreted
@every_storage
def test_autocast_leaves_the_rows(storage):
    made = batch(PLAIN, torch.float32, ((2, 8), (3, 3)), 64)
    made.given |= {x: torch.ones_like(made.given[x]) for x in "kv"}
    given = kept(made, STORAGES[storage])[0] | {x: some(storage)[x] for x in ("cu_q", "cu_k")}
    with torch.autocast("cpu", torch.bfloat16):
        out = fastattn.attention_packed(**given)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


@pytest.mark.slow
@not_interpreted
@every_storage
def test_calls_compile_and_are_exported(storage):
    stored, _ = kept(batch((FEATURE["bottom_right"],), torch.float32, d=64), STORAGES[storage])
    compiled = torch.compile(fastattn.attention_packed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**stored), fastattn.attention_packed(**stored))

    class Step(torch.nn.Module):
        def forward(self, **given):
            return fastattn.attention_packed(**given, max_q=65, max_k=129)

    given = {x: y for x, y in stored.items() if isinstance(y, torch.Tensor)}
    program = torch.export.export(Step(), (), given)
    assert torch.equal(program.module()(**given), Step()(**given))


@not_interpreted
@every_storage
def test_fake_tensors_have_the_shapes_of_results(storage):
    with torch._subclasses.FakeTensorMode() as mode:
        given = {x: mode.from_tensor(y) for x, y in some(storage).items()}
        out, lse = fastattn.attention_packed(**given, return_lse=True)
    assert out.shape == (5, 4, 64) and out.dtype == torch.float32 and lse.shape == (5, 4)


@not_interpreted
@every_storage
def test_flops_are_those_of_the_numbers(storage):
    counts = []
    plain = {x: y for x, y in some("int4").items() if x not in "kv"}
    for given in (some(storage), plain | dict.fromkeys("kv", torch.zeros(11, 2, 64))):
        with FlopCounterMode(display=False) as counter:
            fastattn.attention_packed(**given)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@every_storage
def test_backends_that_have_the_feature(storage):
    spec = fastattn.explain(**some(storage)).spec
    feature = Feature.INT4 if storage == "int4" else Feature.QUANTISED
    assert spec.features & feature and (spec.D, spec.Dv) == (64, 64)
    assert spec.storage == (INT4 if storage == "int4" else NAMES[storage])
    assert feature.name.lower() in str(spec) and not base.get("reference").support.why_not(spec)
    for name in base.names():
        declared = bool(base.get(name).support.features & feature)
        device = "cuda" if name in ("cuda", "triton") else "cpu"
        why = base.get(name).support.why_not(
            dataclasses.replace(spec, device=device, dtype=torch.bfloat16)
        )
        assert declared != (f"does not support {feature.name.lower()}" in " ".join(why))
