"""Values of any size on planes: very small and very large ones err no more than on vectors."""

import pytest
import torch

import fastattn
from tests.cpu.test_amx import every_tiled, on_tiles
from tests.cpu.test_amx_bf16_split import VECTORS, case, computed
from tests.support.cases import DTYPES, Dims
from tests.support.error_budget import oracle
from tests.support.marks import parametrize

pytestmark = on_tiles


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
@parametrize("what", RANGES, fast=43)
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
