"""exp, log and tanh of the CPU kernels: errors as exp_tanh.h states them, no subnormal results."""

import ctypes

import numpy as np
import pytest

from fastattn.backends.native import libraries
from tests.support.backends import variant

pytestmark = pytest.mark.skipif(
    bool(libraries.cpu_unavailable()), reason=str(libraries.cpu_unavailable())
)
ISAS = [] if libraries.cpu_unavailable() else libraries.cpu_isas()
every_isa = pytest.mark.parametrize("isa", ISAS)
every_real = pytest.mark.parametrize("real", [np.float32, np.float64])
EXP, TANH, LOG = range(3)
LEAST = {np.float32: 100, np.float64: 900}  # exp is 0 below 2^-LEAST
# The logarithm of 2^127.5 or 2^1023.5: above it, only AVX-512 returns finite numbers.
MOST = {np.float32: 88.37, np.float64: 709.4}
WITHOUT_FMA = {np.float32: 46, np.float64: 356}


def call(isa, which, x):
    """Run the vector function of the kernels for `isa`."""
    y, size = np.empty_like(x), ctypes.c_int64
    entry = libraries.cpu().entry(
        "fa_cpu_vector_function", None, size, size, ctypes.c_void_p, ctypes.c_void_p, size
    )
    with variant(isa):
        entry(which, int(x.dtype == np.float64), x.ctypes.data, y.ctypes.data, x.size)
    return y


def worst(got, exact):
    """The largest error in units of the last place; `exact` is a wider float."""
    ulp = np.spacing(np.abs(exact).astype(got.dtype)).astype(np.longdouble)
    return float(np.max(np.abs(got.astype(np.longdouble) - exact) / ulp))


def between(low, high, real, count=200_000):
    return np.random.default_rng(0).uniform(low, high, count).astype(real)


def fused(isa):
    return isa != "generic"


needs_long_double = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 63, reason="long double is no wider than double here"
)


@needs_long_double
@every_real
@every_isa
def test_error_of_exp(isa, real):
    low, high = -LEAST[real] * np.log(2), MOST[real]
    limit = 1.5 if fused(isa) else WITHOUT_FMA[real]
    for x in (between(low, 0, real), between(0, high, real)):
        assert worst(call(isa, EXP, x), np.exp(x.astype(np.longdouble))) <= limit
    x = between(-1, 1, real)
    limit = 1.5 if fused(isa) else 2
    assert worst(call(isa, EXP, x), np.exp(x.astype(np.longdouble))) <= limit


@needs_long_double
@every_real
@every_isa
def test_error_of_tanh(isa, real):
    for most in (1e-3, 0.7, 2, 10, 100):
        x = between(-most, most, real)
        assert worst(call(isa, TANH, x), np.tanh(x.astype(np.longdouble))) <= 2


@needs_long_double
@every_real
@every_isa
def test_error_of_log(isa, real):
    """For sums of exponentials: near 1, of long rows, and of any other size."""
    tiny, largest = np.log(np.finfo(real).tiny), np.log(np.finfo(real).max)
    any_size = np.exp(between(tiny, largest, np.float64)).astype(real)
    ends = np.array([np.finfo(real).tiny, np.finfo(real).max, 1, 2, np.sqrt(2)], real)
    for x in (between(1, 2, real), between(1, 1e6, real), between(0.5, 1, real), any_size, ends):
        assert worst(call(isa, LOG, x), np.log(x.astype(np.longdouble))) <= 1


@every_real
@every_isa
def test_exp_is_zero_or_normal(isa, real):
    """For numbers with every exponent and both signs; the result is 0 below the stated bound."""
    integer = np.uint32 if real == np.float32 else np.uint64
    mantissa = np.finfo(real).nmant
    exponents = np.arange(1 << (8 if real == np.float32 else 11), dtype=integer)
    bits = np.random.default_rng(0).integers(0, 1 << mantissa, (64, exponents.size), dtype=integer)
    size = (bits | exponents << integer(mantissa)).view(real)
    size = np.concatenate([size.ravel(), between(0, 2 * LEAST[real], real)])
    for x in (size[~(size > 2.0**20) | np.isinf(size)], -size):
        y = call(isa, EXP, x)
        assert not ((y != 0) & (np.abs(y) < np.finfo(real).tiny)).any()
        bound = real(-LEAST[real]) * np.log(real(2))
        assert not y[x < bound * (1 + 1e-5)].any()
        assert (y[x > bound * (1 - 1e-5)] >= 2.0 ** -LEAST[real] / 2).all()
        assert (np.isnan(y) == np.isnan(x)).all()


@every_real
@every_isa
def test_special_values(isa, real):
    most = np.finfo(real).max
    x = np.array([0, -0.0, np.inf, -np.inf, np.nan, 2.0**20, -most, -1e30], real)
    expected = [1, 1, np.inf, 0, np.nan, np.inf, 0, 0]
    np.testing.assert_array_equal(call(isa, EXP, x), np.array(expected, real))
    x = np.array([0, -0.0, np.inf, -np.inf, np.nan, most, -most, 1e30, -1e30], real)
    expected = [0, 0, 1, -1, np.nan, 1, -1, 1, -1]
    np.testing.assert_array_equal(call(isa, TANH, x), np.array(expected, real))
    x = np.array([1, np.inf, np.nan], real)
    np.testing.assert_array_equal(call(isa, LOG, x), np.array([0, np.inf, np.nan], real))
