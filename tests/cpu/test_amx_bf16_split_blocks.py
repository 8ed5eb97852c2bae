"""Blocks of values that planes do not hold are computed by the vector kernels, alone."""

from dataclasses import replace

import pytest
import torch

import fastattn
from tests.cpu.test_amx import every_tiled, on_tiles
from tests.cpu.test_amx_bf16_split import (
    BLOCK,
    VECTORS,
    case,
    computed,
    every_multiplied,
    same,
)
from tests.support.backends import variant
from tests.support.cases import FEATURE, Dims, build
from tests.support.error_budget import Verdict
from tests.support.marks import parametrize
from tests.support.naive import visible

pytestmark = on_tiles


# ---------------------------------------------------------------------------- blocks without planes

VALUES = {"inf": torch.inf, "-inf": -torch.inf, "nan": torch.nan, "3e38": 3e38, "1e-40": 1e-40}
WITHOUT_PLANES = [("float32", x) for x in VALUES] + [("float16", x) for x in ("inf", "-inf", "nan")]
every_value = pytest.mark.parametrize(
    "dtype, value", WITHOUT_PLANES, ids=[" ".join(x) for x in WITHOUT_PLANES]
)
SHAPES = {
    "100 rows": Dims(2, 1, 1, 100, 192, 33, 40),
    "70 rows of 3 heads": Dims(1, 6, 2, 70, 192, 33, 40),
    "12 rows of 8 heads": Dims(1, 16, 2, 12, 192, 33, 40),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def key_of_row(dims, row):
    """A key among the second 128 that `row` is the first to see under causal="bottom_right". With
    few rows, every row sees it."""
    return max(128, dims.N - dims.M + row) if dims.M > 16 else 156


def hidden_from_half(dims):
    """A mask that hides many keys from the first half of the rows."""
    mask = torch.ones(dims.M, dims.N, dtype=torch.bool)
    mask[: dims.M // 2, 120:-1] = False
    return mask


BANDS = {
    "full": lambda dims: {},
    "causal": lambda dims: {"causal": "bottom_right"},
    "window": lambda dims: {"causal": "bottom_right", "window": (9, 0)},
    "mask": lambda dims: {"mask": hidden_from_half(dims)},
}


def place(problem, name, value, at):
    """The problem with `value` in the last head of the last item of one tensor: in key `at` of k or
    v; in row 37 of q or dout, or row 2 if there are few."""
    spoiled = getattr(problem, name).clone()
    if name in ("q", "dout"):
        at = 37 if problem.q.shape[2] > 37 else 2
    spoiled[-1, -1, at, 3] = VALUES.get(value, value)
    return replace(problem, **{name: spoiled})


def seen_keys(problem):
    """(M,N) bool: what the band and the mask show."""
    band = (problem.kwargs.get(x) for x in ("causal", "window", "key_lengths"))
    seen = visible(problem.q, problem.k, *band)[0][-1, 0]
    seen = seen & problem.kwargs.get("mask", torch.ones(()).bool())
    return seen.expand(problem.q.shape[2], problem.k.shape[2])


def touched(problem, name, at):
    """(B,H,M) bool: the rows that contain the value of `place`, or see the key that does."""
    (batch, heads, m, _), (_, key_heads, _, _) = problem.q.shape, problem.k.shape
    found = torch.zeros(batch, heads, m, dtype=torch.bool)
    sharing = slice(heads - heads // key_heads, None)  # the heads of the last key head
    if name in ("k", "v"):
        found[-1, sharing] = seen_keys(problem)[:, at]
    else:
        found[-1, -1, 37 if m > 37 else 2] = True
    return found


def blocks_of(rows):
    """All rows of the blocks that contain one of `rows`: in gradients a block uses one kernel."""
    m = rows.shape[2]
    blocks = torch.nn.functional.pad(rows, (0, -m % BLOCK)).unflatten(2, (-1, BLOCK))
    return blocks.any(-1).repeat_interleave(BLOCK, 2)[:, :, :m]


# name -> for shapes with more rows: how many rows of a head see the key of row 64, or of row 40.
SEEING = {
    "full": {(100, 64): 100, (100, 40): 100, (70, 64): 70, (70, 40): 70},
    "causal": {(100, 64): 36, (100, 40): 60, (70, 64): 6, (70, 40): 30},
    "window": {(100, 64): 10, (100, 40): 10, (70, 64): 6, (70, 40): 10},
    "mask": {(100, 64): 50, (100, 40): 50, (70, 64): 35, (70, 40): 35},
}


@every_tiled
@every_shape
@parametrize("band", BANDS, fast=2)
@every_value
def test_a_row_without_bf16_split_runs_on_vector_kernels(isa, dtype, value, band, shape):
    """Its out and LSE are those of the vector kernels, bit for bit; every other row has the bits
    that it has without the value."""
    dims = SHAPES[shape]
    clean = case(dims, dtype, **BANDS[band](dims))
    before = computed(isa, clean, everything=False)
    for name, row in (("q", 64), ("k", 64), ("k", 40), ("v", 64), ("v", 40)):
        at = key_of_row(dims, row)
        problem, rows = place(clean, name, value, at), touched(clean, name, at)
        if name != "q" and dims.M > 16:
            assert rows[-1, -1].sum() == SEEING[band][dims.M, row]
        vectors, found = (computed(x, problem, everything=False) for x in (VECTORS, isa))
        for result in ("out", "lse"):
            assert same(found[result][rows], vectors[result][rows]), (name, row, result)
            assert same(found[result][~rows], before[result][~rows]), (name, row, result)


def kinds(x):
    """0 where x is finite, otherwise a number for each of inf, -inf and NaN."""
    return x.float().nan_to_num(3, 1, -1).masked_fill(x.isfinite(), 0)


@every_tiled
@every_shape
@parametrize("band", ["full", "causal"], fast=1)
@every_value
def test_non_finite_values_appear_in_every_pass(isa, dtype, value, band, shape):
    """Infinities and NaN are in the results of every pass where the vector kernels have them. The
    results of other heads, items and blocks of rows do not change."""
    dims = SHAPES[shape]
    clean, at = case(dims, dtype, **BANDS[band](dims)), key_of_row(dims, 64)
    before = computed(isa, clean)
    for name in ("q", "k", "v", "dout"):
        problem, rows = place(clean, name, value, at), touched(clean, name, at)
        vectors, found = (computed(x, problem) for x in (VECTORS, isa))
        for results in (vectors, found):  # each kernel writes its own choice of a row's zeros
            results["weights"] = results["weights"].masked_fill(~seen_keys(problem), 0)
        for result, expected in vectors.items():
            assert torch.equal(kinds(found[result]), kinds(expected)), (name, result)
            if result in ("dq", "weights"):
                apart = ~blocks_of(rows)
                assert same(found[result][apart], before[result][apart]), (name, result)
            apart = slice(0, dims.H // dims.Hk) if dims.B == 1 else slice(None)
            if result in ("dk", "dv"):
                apart = slice(0, 1)
            assert same(found[result][0, apart], before[result][0, apart]), (name, result)


@every_tiled
@every_value
def test_non_finite_values_in_one_of_several_chunks(isa, dtype, value):
    """Few rows take their keys in chunks of 512, and the kernel is chosen for each chunk."""
    clean = case(Dims(1, 4, 1, 3, 1100, 32, 32), dtype)
    for name, places in (("q", (0,)), ("k", (5, 700, 1099)), ("v", (700,)), ("dout", (0,))):
        for at in places:
            problem = place(clean, name, value, at)
            vectors, found = (computed(x, problem) for x in (VECTORS, isa))
            for result, expected in vectors.items():
                assert torch.equal(kinds(found[result]), kinds(expected)), (name, at, result)


LARGEST, SMALLEST = 2.0**30, 2.0**-99  # the least number without planes, and the least with them
ONE = torch.tensor(1.0)
INNER = float(torch.nextafter(ONE, torch.tensor(0.0)))


@every_tiled
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [LARGEST, -LARGEST, SMALLEST * INNER, -SMALLEST / 2, 1e-45])
def test_the_first_values_without_bf16_split(isa, value, name, shape):
    problem = place(case(SHAPES[shape]), name, value, 150)
    vectors, found = (computed(x, problem, everything=False) for x in (VECTORS, isa))
    rows = touched(problem, name, 150)
    assert all(same(found[x][rows], vectors[x][rows]) for x in vectors)


@every_tiled
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [LARGEST * INNER, -SMALLEST, 0.0, -0.0])
def test_the_last_values_with_bf16_split(isa, value, name, shape):
    """Rows with these values stay on tiles. Zeros have planes, so padding keeps rows on tiles."""
    if name == "q" and abs(value) > 1:
        value = 8.0  # a larger q gives one key all the weight, and all kernels agree
    problem = place(case(SHAPES[shape]), name, value, 150)
    vectors, found = (computed(x, problem, everything=False) for x in (VECTORS, isa))
    rows = touched(problem, name, 150)
    assert not same(found["out"][rows], vectors["out"][rows])


@every_tiled
@every_multiplied
@pytest.mark.parametrize("m, heads", [(70, 1), (5, 3)])
def test_rows_decide_alone(isa, dtype, m, heads):
    """The bits of a row do not depend on other rows of its block, even if none has planes."""
    problem = case(Dims(1, heads, 1, m, 300, 32, 32), dtype)
    shaken, spoiled = problem.q.clone(), problem.q.clone()
    shaken[:, :, 1:] *= 40  # makes their pivots change repeatedly
    spoiled[:, :, 1:] = torch.nan
    first, second, third = (
        computed(isa, replace(problem, q=q), everything=False) for q in (problem.q, shaken, spoiled)
    )
    for name, value in first.items():
        assert same(second[name][:, :, 0], value[:, :, 0]), name
        assert same(third[name][:, :, 0], value[:, :, 0]), name
        assert not same(second[name], value) and third[name][:, :, 1:].isnan().all(), name


@every_tiled
@pytest.mark.parametrize("value", [1e-31, torch.nan], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("m", [12, 64])
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_a_neighbour_without_bf16_split_changes_no_score(isa, size, m, name, value):
    """Far from zero the scores of tiles and of vectors differ by more than 1. Each row uses one of
    the two in every pass: its weights sum to 1, and dV agrees with them."""
    if name != "q" and value != value:
        return  # every row would be NaN
    clean = build(Dims(1, 2, 1, m, 300, 64, 64), (), torch.float32)
    clean = replace(clean, q=clean.q * size, k=clean.k * size)
    problem = place(clean, name, value, 7)
    problem = replace(problem, dout=problem.dout.masked_fill(problem.q.isnan().any(3, True), 0))
    found = computed(isa, problem)
    numbers = ~problem.q.isnan().any(3)
    weights = found["weights"].double()
    assert ((weights.sum(3) - 1).abs()[numbers] < 1e-5).all()
    if numbers.all():
        expected = (weights.mT @ problem.dout.double()).sum(1, keepdim=True)
        assert (found["dv"] - expected).norm() < 1e-5 * expected.norm()


@every_tiled
def test_rows_on_vector_kernels_see_their_own_keys(isa):
    """A NaN that one row sees is not multiplied by the zero weights of another row."""
    clean = build(Dims(1, 1, 1, 64, 64, 32, 32), (), torch.float32)
    clean.kwargs["causal"] = True
    for rows in ((3,), (3, 4), (3, 4, 5)):
        problem = place(clean, "v", torch.nan, 5)
        problem.q[0, 0, list(rows), 0] = 1e-31
        out = computed(isa, problem, everything=False)["out"]
        assert out[0, 0, :5].isfinite().all(), rows
        assert out[0, 0, 5:, 3].isnan().all(), rows


@every_tiled
def test_nan_keys_outside_a_window_change_nothing(isa):
    """Gradients take keys by 32s. A NaN in a key that no row sees is not multiplied by zero."""
    clean = build(Dims(1, 1, 1, 96, 96, 32, 32), (), torch.float32)
    clean.kwargs |= dict(causal=True, window=(8, 0))
    problem = place(place(clean, "k", torch.nan, 40), "v", torch.nan, 40)
    problem.q[0, 0, 70, 0] = 1e-31
    found = computed(isa, problem)
    assert found["dq"][0, 0, 64:].isfinite().all() and found["dq"][0, 0, 40:49].isnan().any()
    assert found["dk"][0, 0, 64:].isfinite().all() and found["dv"][0, 0, 64:].isfinite().all()


@every_tiled
@pytest.mark.parametrize("name", ["plain", *FEATURE])
def test_features_where_keys_have_no_bf16_split(isa, name):
    """The scores and gradients that vectors compute instead of tiles support every feature."""
    features = () if name == "plain" else (FEATURE[name],)
    clean = build(Dims(1, 2, 2, 100, 150, 33, 40), features, torch.float32)
    for changed in "kv":
        spoiled = getattr(clean, changed).clone()
        spoiled[:, :, [20, 75, 140], 3] = VALUES["1e-40"]
        verdict = Verdict(replace(clean, **{changed: spoiled}))
        with variant(isa):
            complaints = verdict.complaints(fastattn.attention, backend="cpu")
        assert not complaints, (changed, complaints)


@every_tiled
def test_small_gradients_of_scores_run_on_vector_kernels(isa):
    """Only small ones do. Scaling by a power of two leaves the bits of a gradient as they are,
    unless another kernel computes it."""
    clean = case(Dims(1, 2, 1, 100, 150, 33, 40))
    clean.dlse.zero_()
    expected = computed(isa, clean)
    for exponent, stays in ((-30, True), (-12, True), (12, True), (-45, False)):
        factor = 2.0**exponent
        found = computed(isa, replace(clean, v=clean.v * factor, dout=clean.dout * factor))
        for name in ("dq", "dk"):
            assert same(found[name] / factor / factor, expected[name]) == stays, (name, exponent)
