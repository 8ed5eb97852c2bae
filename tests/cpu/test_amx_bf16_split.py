"""float32 and float16 on AMX's tiles, which multiply bfloat16: a number is split into planes,
three bfloat16 terms for a float32 and two for a float16. This must cost no accuracy at any size
of the values. The vector kernels compute what cannot be split exactly, without an effect on
other results."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.backends.native import libraries
from tests.cpu.test_amx import TILED, every_tiled
from tests.support.backends import INTERPRETED, variant
from tests.support.cases import DTYPES, FEATURE, Dims, build
from tests.support.error_budget import Verdict, oracle
from tests.support.naive import visible

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(INTERPRETED, reason="no test of Triton"),
    pytest.mark.skipif(not TILED, reason="neither AMX nor its model runs here: no AVX-512"),
]
VECTORS = "avx512"  # computes the blocks without planes
BLOCK = 32  # rows in gradients that use the same kernel together
every_planed = pytest.mark.parametrize("dtype", ["float32", "float16"])


def case(dims, dtype="float32", **arguments):
    """Random tensors, and incoming gradients for out and the LSE."""
    problem = build(dims, (FEATURE["lse_loss"],), DTYPES[dtype])
    return replace(problem, kwargs=problem.kwargs | arguments)


def computed(isa, problem, everything=True):
    """{"out", "lse"} and, if `everything`, "dq", "dk", "dv" and "weights"."""
    arguments = {x: y for x, y in problem.kwargs.items() if x != "return_lse"}
    with variant(isa):
        found = problem.run(fastattn.attention, everything, backend="cpu")
        if everything:
            found["weights"] = fastattn.attention_weights(
                problem.q, problem.k, **arguments, backend="cpu"
            )
    return found


def same(x, y):
    """Equal bit for bit, except that any NaN equals any other."""
    kept = {"nan": 0.0, "posinf": torch.inf, "neginf": -torch.inf}
    whole = {4: torch.int32, 2: torch.int16}[x.element_size()]
    bits = (z.nan_to_num(**kept).contiguous().view(whole) for z in (x, y))
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(*bits)


def differ(found, expected):
    """The names of the results that differ."""
    return [name for name, value in expected.items() if not same(found[name], value)]


# ----------------------------------------------------------------------------------------- accuracy

# Allowed errors as a share of torch's: forward and backward. Both float16 results are rounded to
# float16; the last 2% are chance.
SHARE = {"float32": (0.5, 1.0), "float16": (1.02, 1.02)}
SHARE_OF_SMALL_HEADS = 0.6  # forward: scores of few terms have fewer roundings than exp
SHARE_OF_LONG_GRADIENTS = 0.57
# torch's sum over long keys for few rows errs three times as much on one vendor's chips as on
# another's, ours does not: it is compared with the result's size.
ERROR_OF_FEW_ROWS = 2.0**-22.5
BIAS = {"float32": 2.0**-25, "float16": 2.0**-18}


def errors_beside_torch(isa, dtype, dims, causal, backward):
    """name -> norms of (our error, torch's error, the exact result)."""
    problem = build(dims, (), DTYPES[dtype])

    def results(attention, dtype, **more):
        given = [x.to(dtype).requires_grad_(backward) for x in (problem.q, problem.k, problem.v)]
        out = attention(*given, **more)
        if not backward:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, given, problem.dout.to(dtype))]

    sdpa = torch.nn.functional.scaled_dot_product_attention
    exact = results(sdpa, torch.float64, is_causal=causal)
    theirs = results(sdpa, DTYPES[dtype], is_causal=causal)
    with variant(isa):
        ours = results(fastattn.attention, DTYPES[dtype], causal=causal, backend="cpu")
    return {
        name: tuple(float(x.norm()) for x in (mine - right, other - right, right))
        for name, mine, other, right in zip(("out", "dq", "dk", "dv"), ours, theirs, exact)
    }


def complaints_beside_torch(dtype, errors, forward=None):
    forward, backward = forward or SHARE[dtype][0], SHARE[dtype][1]
    share = {name: forward if name == "out" else backward for name in errors}
    return [
        f"{name}: {mine / other:.3f} of torch's error, not {share[name]}"
        for name, (mine, other, _) in errors.items()
        if not mine <= share[name] * other
    ]


@every_tiled
@every_planed
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("n, d", [(700, 64), (300, 128), (350, 40)])
def test_errs_no_more_than_torch(isa, n, d, causal, dtype):
    """float32 outputs: half as much as torch, or as its fused kernel, which takes these inputs."""
    errors = errors_beside_torch(isa, dtype, Dims(1, 1, 1, n, n, d, d), causal, True)
    forward = SHARE_OF_SMALL_HEADS if dtype == "float32" and d < 64 else None
    assert not complaints_beside_torch(dtype, errors, forward)


@every_tiled
@every_planed
@pytest.mark.parametrize("m", [3, 48])
def test_errs_no_more_than_torch_on_long_keys(isa, m, dtype):
    """Many keys, where one running sum over all of them would be the largest error."""
    errors = errors_beside_torch(isa, dtype, Dims(1, 2, 2, m, 2048, 64, 64), False, False)
    assert not complaints_beside_torch(dtype, errors)
    if dtype == "float32" and m < 16:
        assert errors["out"][0] <= ERROR_OF_FEW_ROWS * errors["out"][2]


@every_tiled
@pytest.mark.parametrize("m, n, long", [(48, 2048, ("dq",)), (2048, 64, ("dk", "dv"))])
def test_errs_less_than_torch_in_long_gradients(isa, m, n, long):
    """One running sum over all keys or rows would be the largest error. In float16 it never is."""
    errors = errors_beside_torch(isa, "float32", Dims(1, 1, 1, m, n, 64, 64), False, True)
    for name in long:
        mine, other, _ = errors[name]
        assert mine <= SHARE_OF_LONG_GRADIENTS * other, (name, mine / other)


@every_tiled
@every_planed
def test_rounding_has_no_sign(isa, dtype):
    """The error of leaving out small terms of products is unbiased: the mean of positive values is
    off by far less than the bound of one rounding."""
    problem = case(Dims(1, 2, 2, 130, 600, 32, 32), dtype)
    for x in (problem.q, problem.k, problem.v, problem.dout):
        x.abs_()
    exact, found = oracle(problem), computed(isa, problem)
    for name in ("out", "dv"):
        off = float((found[name].double() - exact[name]).mean() / exact[name].mean())
        assert abs(off) < BIAS[dtype], (name, off)


@every_tiled
@every_planed
@pytest.mark.parametrize("m", [100, 5])
def test_lse_is_float32_for_every_dtype_of_q(isa, m, dtype):
    """With one key the LSE is the score itself, where a product of the last planes matters: its
    error is that of float32, except for the lower precision of e^x."""
    problem = case(Dims(1, 8, 2, m, 150, 64, 64), dtype, window=(0, 0))
    exact = oracle(problem)["lse"]
    mine, theirs = (
        float((computed(x, problem, everything=False)["lse"] - exact).norm())
        for x in (isa, VECTORS)
    )
    assert mine <= 2 * theirs, mine / theirs


# ------------------------------------------------------------------------------------------- ranges

# The error that is always allowed, relative to the largest number in a column or row, is little
# more than the vector kernels' error: with two of an operand's three planes, nearly every column
# errs twice as much.
FLOOR = 2.0**-21
BY_CHANCE = 0.04  # the share of columns or rows that may exceed it by up to half


def powers(n, low, high):
    """Powers of ten, in random order."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(5))
    return 10.0 ** torch.linspace(low, high, n, dtype=torch.float64)[order]


def rows(low, high):
    def sized_by_rows(x):
        return x * powers(x.shape[2], low, high)[:, None]

    return sized_by_rows


def columns(low, high):
    return lambda x: x * powers(x.shape[3], low, high)


def opposite_columns(low, high):
    return lambda x: x / powers(x.shape[3], low, high)


def one(value):
    def put(x):
        x = x.clone()
        x[:, :, 70, 3] = value
        return x

    return put


def behind_small_weights(low, high):
    """{tensor: change}: one key has a weight of about 2^low in every row and the only value in
    column 0. Weights are split into planes, too."""

    def key(x):
        x = x.clone()
        x[..., 0] = 0
        x[:, :, 5, 0] = low
        return x

    def query(x):
        x = x.clone()
        x[..., 0] = 4
        return x

    def value(x):
        x = x.clone()
        x[..., 0] = 0
        x[:, :, 5, 0] = high
        return x

    return {"q": query, "k": key, "v": value}


def opposite(size):
    return {"q": size, "k": 1 / size}


# name -> {tensor: a factor, or a function of it}. Errors are judged by columns, except for the
# gradients of tensors with rows of different sizes, which are judged by rows.
RANGES = {
    **{f"v 1e{e}": {"v": 10.0**e} for e in (-38, -35, -31, -30, -29, -20, -10, 8, 9, 10, 20, 37)},
    **{f"dout 1e{e}": {"dout": 10.0**e} for e in (-38, -30, -29, -20, -10, 8, 9, 20, 37)},
    **{f"q 1e{e}, k 1e{-e}": opposite(10.0**e) for e in (-35, -29, -20, -10, 8, 10, 20, 29, 35)},
    "v and dout 1e-10": {"v": 1e-10, "dout": 1e-10},
    "v and dout 1e-14": {"v": 1e-14, "dout": 1e-14},  # dS is too small for planes
    "v and dout 1e-16": {"v": 1e-16, "dout": 1e-16},
    "v and dout 1e-18": {"v": 1e-18, "dout": 1e-18},
    "v and dout 1e8": {"v": 1e8, "dout": 1e8},
    "v and dout 1e16": {"v": 1e16, "dout": 1e16},
    "v 1e-25, dout 1e25": {"v": 1e-25, "dout": 1e25},
    "v 1e25, dout 1e-25": {"v": 1e25, "dout": 1e-25},
    "q and k 1e-3": {"q": 1e-3, "k": 1e-3},
    "q 1e-20": {"q": 1e-20},
    "k 1e-20": {"k": 1e-20},
    "k and dout 1e-12": {"k": 1e-12, "dout": 1e-12},
    "columns of v 1e-38 to 1e-28": {"v": columns(-38, -28)},
    "columns of q and k 1e±8": {"q": columns(-8, 8), "k": opposite_columns(-8, 8)},
    "columns of q and k 1e±25": {"q": columns(-25, 25), "k": opposite_columns(-25, 25)},
    "columns of q and k 1e±35": {"q": columns(-35, 35), "k": opposite_columns(-35, 35)},
    **{
        f"{kind.__name__} of {name} 1e{low} to 1e{high}": {name: kind(low, high)}
        for name in ("q", "k", "v", "dout")
        for kind in (rows, columns)
        for low, high in ((-12, 0), (-20, 0), (-35, 0), (-28, 8), (-35, 35))
        if high <= 0 or name in ("v", "dout")
    },
    **{
        f"one of {name} {value:.0e}": {name: one(value)}
        for name in ("q", "k", "v", "dout")
        for value in (3e38, 2.0**30, 1e-40, 2.0**-100)
    },
    "behind weights of 2^-86": behind_small_weights(-86.0, 1.0),
    "2^29 behind weights of 2^-86": behind_small_weights(-86.0, 2.0**29),
    "2^-29 behind weights of 2^-58": behind_small_weights(-58.0, 2.0**-29),
}
HALF_RANGES = {  # float16; 6e-8 is its smallest number
    **{f"v {x:.0e}": {"v": x} for x in (6e-8, 1e-6, 1e-4, 1e4)},
    **{f"dout {x:.0e}": {"dout": x} for x in (1e-6, 1e-4, 1e3)},
    "q 1e4, k 1e-4": opposite(1e4),
    "q 1e-4, k 1e4": opposite(1e-4),
    "columns of q and k 1e±4": {"q": columns(-4, 4), "k": opposite_columns(-4, 4)},
    "rows of v 1e-7 to 1e4": {"v": rows(-7, 4)},
    "columns of v 1e-7 to 1e4": {"v": columns(-7, 4)},
    "columns of dout 1e-7 to 1e3": {"dout": columns(-7, 3)},
    "behind weights of 2^-9": behind_small_weights(-9.0, 1.0),
}


def ranged(changes, dims, dtype):
    problem = case(dims, dtype)
    problem.dlse.zero_()  # or its gradients would hide those of a small dout
    for name, change in changes.items():
        value = getattr(problem, name).double()
        value = change(value) if callable(change) else value * change
        setattr(problem, name, value.to(DTYPES[dtype]))
    return problem


def sizes(problem, exact):
    """name -> the expected size of each result if the terms of its sums had random signs:
    cancellation is no measure of rounding. For dq and dk, also the error that is allowed where dS,
    or its product with k or q, would be subnormal."""
    q, k, v, dout = (getattr(problem, x).double() for x in ("q", "k", "v", "dout"))
    groups, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    p = (scale * (q @ k.mT) - exact["lse"].unsqueeze(-1)).exp().nan_to_num(0)

    def key_heads(x):
        return x.unflatten(1, (-1, groups)).sum(2)

    terms = p.square() * (dout.square() @ v.square().mT)
    found = {
        "out": p.square() @ v.square(),
        "dq": scale**2 * (terms @ k.square()),
        "dk": scale**2 * key_heads(terms.mT @ q.square()),
        "dv": key_heads(p.square().mT @ dout.square()),
    }
    tiny = torch.finfo(torch.float32).tiny
    rest = {
        "dq": tiny * k.abs().clamp(min=6).sum(2, keepdim=True),
        "dk": tiny * key_heads(q.abs().clamp(min=6).sum(2, keepdim=True)),
    }
    return {name: x.sqrt() for name, x in found.items()}, rest


def out_of_range(problem, exact, found, vectors, by_rows=()):
    """One line for each result with rows or columns that err too much. Values for which the oracle
    or the vector kernels overflow are left to other tests."""
    lines = []
    terms, rest = sizes(problem, exact)
    for name, right in exact.items():
        if name == "lse":
            right, mine, theirs = (x[name].unsqueeze(-1) for x in (exact, found, vectors))
        else:
            mine, theirs = found[name], vectors[name]
        axis = 3 if name in (*by_rows, "weights") else 2
        judged = (right.abs() < torch.finfo(mine.dtype).max) & theirs.isfinite()
        if not judged.any():
            lines += [f"{name}: nothing is judged"] * (name in ("out", "lse"))
            continue

        def rms(x, right=right, axis=axis, judged=judged):
            error = (x.double() - right).masked_fill(~judged, 0)
            return error.square().mean(axis, keepdim=True).sqrt()

        size = torch.maximum(right.abs(), terms.get(name, torch.zeros(())))
        size = size.masked_fill(~judged, 0).nan_to_num(0).amax(axis, keepdim=True)
        # Two planes hold 16 bits of a float16 product, which may round to another float16.
        times = 1.1 if mine.dtype == torch.float32 else 1.25
        allowed = torch.maximum(times * rms(theirs), FLOOR * size)
        if name in rest:
            least = rest[name] if axis == 2 else rest[name].amax(3, keepdim=True)
            allowed = torch.maximum(allowed, least)
        error = rms(mine)
        over = ~(error <= allowed)
        if over.double().mean() > BY_CHANCE or not (error <= 1.5 * allowed).all():
            at = tuple(int(x) for x in over.nonzero()[0])
            lines.append(
                f"{name}{list(at)}: error {error[at] / size[at]:.3g} of the largest, not "
                f"{allowed[at] / size[at]:.3g}; {int(over.sum())} of {over.numel()} are over"
            )
    return lines


def row_sized(changes):
    """The gradients to judge by rows, because a few large rows would hide the others."""
    scaled = {x for x, how in changes.items() if getattr(how, "__name__", "") == "sized_by_rows"}
    if scaled & {"dout", "v"}:
        return "dq", "dk"
    return ("dq", "dk", "dv") if scaled else ()


def judge_range(isa, changes, dims, dtype):
    problem = ranged(changes, dims, dtype)
    exact = oracle(problem)
    exact["weights"] = fastattn.attention_weights(
        problem.q.double(), problem.k.double(), backend="reference"
    )
    vectors, found = (computed(x, problem) for x in (VECTORS, isa))
    lines = out_of_range(problem, exact, found, vectors, row_sized(changes))
    assert not lines, "\n".join(lines)


@every_tiled
@pytest.mark.parametrize("what", RANGES)
def test_small_and_large_values_err_no_more(isa, what):
    """Compared with the vector kernels: values that have planes keep all of them, and values that
    have none are never split. Some blocks of 128 keys have such values and others do not."""
    judge_range(isa, RANGES[what], Dims(1, 2, 2, 100, 200, 33, 40), "float32")


FEW = ("v 1e-30", "v 1e-20", "v 1e9", "q 1e20, k 1e-20", "columns of v 1e-28 to 1e8")
FEW += ("rows of v 1e-35 to 1e35", "one of k 3e+38")


@every_tiled
@pytest.mark.parametrize("what", FEW)
def test_small_and_large_values_of_a_few_rows(isa, what):
    judge_range(isa, RANGES[what], Dims(1, 8, 2, 5, 200, 33, 40), "float32")


@every_tiled
@pytest.mark.parametrize("what", HALF_RANGES)
def test_small_and_large_halves_err_no_more(isa, what):
    judge_range(isa, HALF_RANGES[what], Dims(1, 2, 2, 100, 200, 33, 40), "float16")


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
@pytest.mark.parametrize("band", BANDS)
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
@pytest.mark.parametrize("band", ["full", "causal"])
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
@every_planed
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


# ---------------------------------------------------------------------------- keys that no row sees


def masked(m, n):
    """Hide a few keys in between, one in the middle, and the last 20."""
    draw = torch.rand(m, n, generator=torch.Generator().manual_seed(0))
    hidden = torch.zeros(n, dtype=torch.bool)
    hidden[3:9] = hidden[n // 2] = hidden[-20:] = True
    return {"mask": (draw < 0.8) & ~hidden}, hidden


def padded(m, n):
    hidden = torch.arange(n) >= n - 20
    return {"mask": ~hidden.view(1, 1, 1, n)}, hidden


def windowed(m, n, step):
    """Hide whole steps of keys before the first that any row sees."""
    first = (n - m - 20) // step * step
    return {"causal": "bottom_right", "window": (20, 0)}, torch.arange(n) < first


def masked_in_a_window(m, n):
    """Hide keys that the mask shows only to rows with a window that does not include them."""
    distance = torch.arange(m).view(m, 1) + n - m - torch.arange(n)
    hidden = torch.zeros(n, dtype=torch.bool)
    hidden[n - 6 :: 2] = hidden[n - m // 2 - 5] = True
    mask = ~(hidden & (distance >= 0) & (distance <= 5))
    return {"causal": "bottom_right", "window": (5, 0), "mask": mask}, hidden


# name -> (m, n) -> (arguments, the keys (N,) bool that they hide from all rows)
HIDING = {
    "causal": lambda m, n: ({"causal": True}, torch.arange(n) >= m),
    "window": lambda m, n: ({"window": (None, 3)}, torch.arange(n) >= m + 3),
    "lengths": lambda m, n: ({"key_lengths": torch.tensor([n - 30])}, torch.arange(n) >= n - 30),
    "steps before a window": lambda m, n: windowed(m, n, 32),
    "keys before a window": lambda m, n: windowed(m, n, 1),
    "mask": masked,
    "padding mask": padded,
    "mask in a window": masked_in_a_window,
}
# How keys are hidden that kernels still read: they are multiplied by weights of 0.
READ = ("keys before a window", "mask", "padding mask", "mask in a window")
UNSEEN_SHAPES = {
    "70 rows": Dims(1, 2, 1, 70, 150, 33, 40),
    "100 rows": Dims(1, 1, 1, 100, 290, 33, 40),
    "3 rows of 4 heads": Dims(1, 8, 2, 3, 150, 33, 40),
    "3 rows, chunks": Dims(1, 4, 1, 3, 1100, 32, 32),
}
UNSEEN = {
    "float32": (torch.nan, torch.inf, -torch.inf, 3e38, 1e-40),
    "float16": (torch.nan, torch.inf, -torch.inf, 6e4, 6e-8),
}


def unseen(dtype, how):
    """[(tensors, value)] to fill hidden keys with. Where these are read, v gets no NaN, as 0 * NaN
    is NaN, and no 3e38, which makes dP infinite."""
    values = UNSEEN[dtype]
    if how not in READ:
        return [(("k", "v"), value) for value in values]
    return [(("k",), value) for value in values] + [(("k", "v"), x) for x in (1e36, values[-1])]


def filled(problem, names, keys, value):
    changed = {x: getattr(problem, x).clone() for x in names}
    for x in changed.values():
        x[:, :, keys] = min(value, torch.finfo(x.dtype).max) if value < torch.inf else value
    return replace(problem, **changed)


@every_tiled
@every_planed
@pytest.mark.parametrize("shape", UNSEEN_SHAPES)
@pytest.mark.parametrize("how", HIDING)
def test_a_key_hidden_from_all_rows_changes_no_bit(isa, how, shape, dtype):
    """Neither the contents of the key nor its lack of planes has an effect."""
    dims = UNSEEN_SHAPES[shape]
    arguments, hidden = HIDING[how](dims.M, dims.N)
    clean = case(dims, dtype, **arguments)
    expected = computed(isa, clean)
    assert hidden.any() and not expected["weights"][..., hidden].any()
    for names, value in unseen(dtype, how):
        found = computed(isa, filled(clean, names, hidden, value))
        if how in READ and not abs(value) < torch.inf:
            found.pop("dq")  # it has 0 * NaN, as in torch
        for name, mine in found.items():
            right = expected[name]
            if name in ("dk", "dv"):
                assert not mine[:, :, hidden].any(), (names, value, name)
                mine, right = mine[:, :, ~hidden], right[:, :, ~hidden]
            assert same(mine, right), (names, value, name)


# Three causal rows see only three to six of the first keys and would run another kernel.
APPENDED = [
    (how, shape)
    for how in ("causal", "window", "lengths", "padding mask")
    for shape, dims in UNSEEN_SHAPES.items()
    if dims.M > 16 or how not in ("causal", "window")
]


@every_tiled
@every_planed
@pytest.mark.parametrize("how, shape", APPENDED)
def test_a_key_hidden_from_all_rows_equals_an_absent_one(isa, how, shape, dtype):
    """Appended keys with any contents."""
    dims = UNSEEN_SHAPES[shape]
    arguments, hidden = HIDING[how](dims.M, dims.N)
    whole = case(dims, dtype, **arguments)
    kept = int((~hidden).sum())
    cut = replace(whole, k=whole.k[:, :, :kept].clone(), v=whole.v[:, :, :kept].clone())
    if how in ("lengths", "padding mask"):
        cut.kwargs = {"return_lse": True}
    expected = computed(isa, cut)
    for names, value in unseen(dtype, how)[-2:]:
        found = computed(isa, filled(whole, names, hidden, value))
        found["weights"] = found["weights"][..., :kept]
        found |= {name: found[name][:, :, :kept] for name in ("dk", "dv")}
        assert not differ(found, expected), (names, value)


# ------------------------------------------------------------------------------------------- choice


@every_tiled
def test_the_compute_unit_of_each_dtype_is_named(isa):
    with variant(isa):
        units = libraries.cpu_units()
    assert units["float32"]["many rows"] == units["float16"]["many rows"] == isa
    assert units["float64"] == dict.fromkeys(units["float64"], VECTORS)


@every_tiled
@every_planed
@pytest.mark.parametrize("m, d", [(70, 33), (3, 33), (70, 64)])
def test_the_tiles_are_in_use(isa, dtype, m, d):
    """Otherwise everything above would test the vector kernels."""
    problem = case(Dims(1, 4, 1, m, 150, d, 40), dtype)
    vectors, found = (computed(x, problem) for x in (VECTORS, isa))
    assert not same(found["lse"], vectors["lse"])


@every_tiled
@pytest.mark.parametrize("exponent, vectors", [(59, False), (60, True), (127, True)])
def test_a_scale_that_makes_tiny_products_visible_runs_on_vector_kernels(isa, exponent, vectors):
    """Products below the least normal number are 0 on tiles."""
    clean = case(Dims(1, 4, 1, 70, 150, 33, 40), scale=2.0**exponent)
    half = 2.0 ** (-exponent / 2)
    problem = replace(clean, q=clean.q * half, k=clean.k * half)
    theirs, found = (computed(x, problem) for x in (VECTORS, isa))
    assert (not differ(found, theirs)) == vectors


WITHOUT_FLOAT32 = """
import torch
from fastattn import attention, attention_weights, native
torch.set_num_threads(1)
def results(dtype, m):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(1, *shape, generator=generator).to(dtype)
    given = [draw(4, m, 33).requires_grad_()] + [draw(1, 150, 33).requires_grad_() for _ in "kv"]
    out, lse = attention(*given, causal="bottom_right", return_lse=True, backend="cpu")
    weights = attention_weights(*given[:2], backend="cpu")
    grads = torch.autograd.grad(out, given, draw(4, m, 33))
    return [x.detach() for x in (lse, out, weights, *grads)]
cases = [(dtype, m) for dtype in (torch.float32, torch.float16) for m in (70, 3)]
isa = {isa!r}
assert native.cpu_isa() == isa
units, found = native.cpu_units(), [results(*x) for x in cases]
assert set(units["float32"].values()) == {{"avx512"}}, units
native.select_cpu_isa("avx512")
for (dtype, m), first in zip(cases, found):
    again = [torch.equal(x, y) for x, y in zip(first, results(dtype, m))]
    assert all(again) or dtype != torch.float32, (m, again)
    assert not again[0] or dtype == torch.float32, "float16 has its tiles"
assert units["float16"]["many rows"] == isa, units
"""


def in_a_process(code, **environment):
    command = [sys.executable, "-c", code]
    given = os.environ | environment
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)


@every_tiled
def test_float32_can_be_left_to_the_vector_kernels(isa):
    """Bit for bit, and only float32."""
    code = WITHOUT_FLOAT32.format(isa=isa)
    found = in_a_process(code, FASTATTN_CPU_ISA=isa, FASTATTN_FLOAT32="vector")
    assert found.returncode == 0, found.stderr


@every_tiled
def test_an_unknown_value_of_FASTATTN_FLOAT32_is_refused(isa):
    code = "from fastattn import native; print(native.cpu_unavailable()); native.cpu()"
    found = in_a_process(code, FASTATTN_CPU_ISA=isa, FASTATTN_FLOAT32="vectors")
    assert found.returncode and "RuntimeError" in found.stderr
    for message in (found.stdout, found.stderr.splitlines()[-1]):
        what, _, expected = message.partition("expected")
        assert "FASTATTN_FLOAT32: got 'vectors'" in what and "vector" in expected, message
