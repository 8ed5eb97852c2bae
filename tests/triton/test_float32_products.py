"""How Triton's kernels multiply float32: what the user asks for, and sums of parts, which are as
accurate as IEEE products."""

from types import SimpleNamespace

import pytest
import torch

import fastattn
from fastattn.backends.triton import arguments, job, tile_configs
from tests.support.backends import INTERPRETED
from tests.support.cases import FEATURE, build, square
from tests.support.error_budget import Verdict

triton = pytest.importorskip("triton")
tl = triton.language
score = pytest.importorskip("fastattn.kernels.score")
tile = pytest.importorskip("fastattn.kernels.tile")

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs Triton's interpreter")
PARTS = sorted(set(tile_configs.PARTS.values()))
in_parts = pytest.mark.parametrize("precision", PARTS)


# ------------------------------------------------------------------------------------- the settings


def is_newer():
    return hasattr(torch.backends.cuda.matmul, "fp32_precision")


@pytest.fixture
def matmul():
    """torch's settings of products, restored afterwards."""
    found = torch.backends.cuda.matmul
    name = "fp32_precision" if is_newer() else "allow_tf32"
    before = getattr(found, name)
    setattr(found, name, "none" if is_newer() else False)
    yield found
    setattr(found, name, before)


@pytest.mark.skipif(not is_newer(), reason="torch 2.9 has the setting")
@pytest.mark.parametrize(
    "variable, unset", [(None, "parts"), ("tiles", "parts"), ("vector", "ieee")]
)
def test_torch_says_how_to_multiply_and_a_variable_if_it_does_not(
    matmul, monkeypatch, variable, unset
):
    monkeypatch.delenv("FASTATTN_FLOAT32", raising=False)
    if variable:
        monkeypatch.setenv("FASTATTN_FLOAT32", variable)
    assert arguments.precision() == unset
    for asked in ("ieee", "tf32"):
        matmul.fp32_precision = asked
        assert arguments.precision() == asked
    torch.set_float32_matmul_precision("highest")
    assert arguments.precision() == "ieee"
    torch.set_float32_matmul_precision("high")
    assert arguments.precision() == "tf32"


@pytest.mark.parametrize("variable, asked", [("tiles", "parts"), ("vector", "ieee")])
def test_before_torch_2_9_no_tf32_is_no_wish_for_ieee(monkeypatch, variable, asked):
    monkeypatch.setenv("FASTATTN_FLOAT32", variable)
    for allowed in (False, True):
        stub = SimpleNamespace(allow_tf32=allowed)
        monkeypatch.setattr(torch.backends.cuda, "matmul", stub)
        assert arguments.precision() == ("tf32" if allowed else asked)


# ------------------------------------------------------------------------------------- the products


@triton.jit
def product(a, b, out, F: tl.constexpr, BY_ROWS: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    if BY_ROWS:
        z = tile.by_rows(x, tl.trans(y), F)
    else:
        z = tile.dot(x, y, tl.full([SIZE, SIZE], 1, tl.float32), F) - 1
    tl.store(out + at, z)


def multiply(a, b, precision, by_rows=False):
    out, F = torch.empty_like(a), score.Flags(scaled=True, precision=precision)
    product[(1,)](a.contiguous(), b.contiguous(), out, F=F, BY_ROWS=by_rows, SIZE=len(a))
    return out


def randn(*shape, seed=0):
    return torch.randn(shape or (32, 32), generator=torch.Generator().manual_seed(seed))


@interpreted
@in_parts
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("cancels", [False, True])
def test_products_of_parts_are_as_accurate_as_ieee(precision, by_rows, cancels):
    """Errors are at most twice IEEE's, and 2^-21 of what is added up where that cancels."""
    a, b = randn(), randn(seed=1)
    if cancels:  # the second half of each sum is the first one's negative, but for 1 in 2^20
        a[:, 16:], b[16:] = a[:, :16], -b[:16] * (1 + 2**-20)
    exact, size = a.double() @ b.double(), 1 + a.double().abs() @ b.double().abs()
    ieee, found = (multiply(a, b, x, by_rows).double() for x in ("ieee", precision))
    error, of_ieee = (((x - exact).abs() / size).max() for x in (found, ieee))
    assert error < 2 * of_ieee + 2**-24 and error < 2**-21


LARGEST, SUBNORMAL = torch.finfo(torch.float32).max, 1e-40
SPECIAL = (torch.inf, -torch.inf, torch.nan, LARGEST, -LARGEST, SUBNORMAL, 0.0)


@interpreted
@in_parts
@pytest.mark.parametrize("sides", ["left", "right", "both"])
def test_infinity_and_nan_are_where_ieee_has_them(precision, sides):
    """Beside the largest and subnormal numbers, which are finite."""
    special = randn()
    for n, x in enumerate(SPECIAL):
        special[n, 3 * n] = x
    special[10, :2] = torch.tensor([torch.inf, -torch.inf])
    special[11] = 0
    special[11, 5] = -torch.inf
    plain = randn(seed=1) / 64
    plain[:, 7] = 0  # times infinity: NaN
    a, b = (plain, special.T) if sides == "right" else (special, plain)
    b = special.T / 64 if sides == "both" else b
    ieee, found = multiply(a, b, "ieee"), multiply(a, b, precision)
    finite = ieee.isfinite()
    assert torch.equal(finite, found.isfinite()) and not finite.all()
    assert torch.equal(ieee[~finite].nan_to_num(7.0), found[~finite].nan_to_num(7.0))
    a, b = (x.double().nan_to_num(0, 0, 0) for x in (a, b))
    error = (found.double() - a @ b).abs() / (1 + a.abs() @ b.abs())
    assert error[finite].max() < 2**-20


# ------------------------------------------------------------------------------------ whole calls


@pytest.fixture
def parts_everywhere(precision, monkeypatch):
    """Every pass of the interpreter multiplies in parts; the precisions that passes had."""
    seen, run = [], job.run

    def watched(kernel, grid, *args, **constants):
        if "F" in constants:
            seen.append(constants["F"].precision)
        return run(kernel, grid, *args, **constants)

    row = tile_configs.same(tile_configs.INTERPRETED)
    table = {(which, 64): row for which in tile_configs.PASSES}
    monkeypatch.setitem(tile_configs.PARTS, 0, precision)
    monkeypatch.setitem(tile_configs.OF_PRECISION, (0, precision), table)
    monkeypatch.setattr(job, "run", watched)
    job._tile.cache_clear()
    yield seen
    job._tile.cache_clear()


@interpreted
@in_parts
@pytest.mark.parametrize("features", [("causal", "gqa"), ("dropout", "key_bias_grad")], ids=str)
def test_calls_in_parts_are_within_the_budget_of_float32(
    precision, parts_everywhere, matmul, features
):
    problem = build(square(1, 2, 40, 16), [FEATURE[x] for x in features], torch.float32)
    complaints = Verdict(problem).complaints(fastattn.attention, backend="triton")
    assert not complaints and parts_everywhere.count(precision) >= 3


@interpreted
@in_parts
def test_a_call_with_infinity_is_as_ieee_has_it(precision, parts_everywhere, matmul):
    q, k, v = (randn(1, 1, 40, 16, seed=n) for n in range(3))
    q[0, 0, 3, 2], v[0, 0, 7, 1], v[0, 0, 8, 4] = torch.inf, -torch.inf, torch.nan
    found = fastattn.attention(q, k, v, causal=True, backend="triton")
    assert precision in parts_everywhere
    expected = fastattn.reference.attention(q, k, v, causal=True)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
