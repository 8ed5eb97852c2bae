"""The passes of forward mode and of second derivatives, on every backend that has them, against
torch's forward mode of the oracle in float64."""

import dataclasses
import itertools
import math

import pytest
import torch

from fastattn import api
from fastattn.backends import base
from fastattn.backends.shared import per_sequence
from fastattn.call import packed_layout
from fastattn.call.spec import Feature, Tangents
from fastattn.call.validation import describe
from tests.features import calls, factors
from tests.semantics.test_features import EMPTY
from tests.semantics.test_packed import batch
from tests.support.backends import (
    DECLARED,
    INTERPRETED,
    declares,
    every_backend,
    every_dtype,
    not_interpreted,
    on_variants,
    passed,
    small,
)
from tests.support.cases import DTYPES, FEATURE, PLAIN, Dims, build, square
from tests.support.marks import parametrize
from tests.support.tangents import complaints, directions, exact, passes

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = small(Dims(2, 2, 2, 70, 150, 17, 17), square(2, 2, 23, 7))
SIZES = small(
    dict(M=(5, 1, 17, 70), N=(9, 1, 33, 150), D=(3, 17, 64, 130), Dv=(17, 1, 40), B=(2, 1)),
    dict(M=(5, 1), N=(9, 1), D=(3, 17), Dv=(17, 1), B=(2, 1)),
)
SIZES |= dict(row_invariant=(False,), way=("any",), grad=("all",))
NARROW = tuple(x for x in DECLARED if x != "float64")
ROWS = factors.rows("dense", **factors.NEAR | SIZES | dict(dtype=NARROW))
IN_FLOAT64 = factors.rows("dense", **factors.IN_FLOAT64 | SIZES)


@every_backend
@parametrize("row", ROWS + IN_FLOAT64 * (not INTERPRETED), fast=30)
def test_rows(name, row):
    declares(name, DTYPES[row["dtype"]], Feature.TANGENTS)
    run_all(name, [calls.problem(row)])


@not_interpreted
@parametrize("row", IN_FLOAT64, fast=30)
def test_the_reference(row):
    run_all("reference", [calls.problem(row)])


def everywhere(name, problem, only=None):
    """Complaints about a backend on each of its variants, with and without forward's results."""
    given = directions(problem, only)
    wanted = exact(problem, *given)
    for isa in on_variants(name, problem.q.dtype):
        for known in (True, False):
            lines = complaints(name, problem, wanted, given, known=known)
            yield from (f"{isa or ''} {line}" for line in lines)


def agree(found, expected, tolerance=1e-5):
    for what, x in expected.items():
        size = max(1.0, float(x.abs().max())) if x.numel() else 1.0
        torch.testing.assert_close(found[what], x, rtol=0, atol=tolerance * size, msg=what)


def run_all(name, problems):
    passed([line for problem in problems for line in everywhere(name, problem)])


@every_backend
@pytest.mark.parametrize("dims", EMPTY.values(), ids=EMPTY)
def test_sizes_of_zero(name, dims):
    """Empty sums are 0; with D = 0, only values contribute to tangents."""
    declares(name, torch.float32, Feature.TANGENTS)
    problem = build(dims, (FEATURE["sinks"], FEATURE["lse_loss"]), torch.float32)
    problem.kwargs["scale"] = 1.0
    given = directions(problem)
    for known in (True, False):
        found = passes(name, problem, *given, known=known)
        agree(found, {x: y.float() for x, y in exact(problem, *given).items()})


INPUTS = ("q", "k", "v", "mask", "sinks")
EVERYTHING = tuple(
    FEATURE[x] for x in ("causal", "softcap", "bias_grad", "sinks", "dropout", "gqa", "lse_loss")
)


@every_backend
@pytest.mark.parametrize(
    "only", [*itertools.combinations(INPUTS, 1), *itertools.combinations(INPUTS, 4), ()], ids=str
)
def test_an_absent_tangent_is_zero(name, only):
    declares(name, torch.float32, Feature.TANGENTS)
    problem = build(square(2, 2, 19, 8), EVERYTHING, torch.float32)
    for _ in on_variants(name):
        moves, dout_t, dlse_t = directions(problem)
        zeros = {x: y if x in only else torch.zeros_like(y) for x, y in moves.items()}
        kept = {x: moves[x] for x in only}
        full = passes(name, problem, zeros, dout_t, dlse_t)
        agree(passes(name, problem, kept, dout_t, dlse_t), full)
        agree(
            passes(name, problem, kept, None, None),
            passes(name, problem, zeros, torch.zeros_like(dout_t), torch.zeros_like(dlse_t)),
        )
    passed(list(everywhere(name, problem, only)))


@pytest.mark.slow
@not_interpreted
@every_backend
def test_threads_change_no_bit(name, threads):
    declares(name, torch.float32, Feature.TANGENTS)
    for dims in (Dims(1, 4, 2, 517, 517, 24, 24), Dims(2, 6, 2, 130, 201, 16, 40)):
        problem = build(dims, EVERYTHING, torch.float32)
        given = directions(problem)
        for isa in on_variants(name):
            threads(1)
            first = passes(name, problem, *given)
            for count in (3, 2):
                threads(count)
                found = passes(name, problem, *given)
                assert all(torch.equal(found[x], y) for x, y in first.items()), isa


def call(problem):
    """The (spec, tensors) of a problem."""
    given = {x: y for x, y in problem.tensors().items() if x != "return_lse"}
    q, k, v = (given.pop(x) for x in "qkv")
    t, options = api.prepare(q, k, v, given)
    return dataclasses.replace(describe(t, options), tangents=True), t


@every_backend
@pytest.mark.parametrize(
    "features",
    [
        PLAIN,
        ("window", "sinks", "lse_loss", "alibi_batch", "lengths"),
        ("causal", "dropout", "bias_grad", "softcap", "mqa"),
        ("bottom_right", "key_bias_grad", "dropout"),
        ("head_bias_grad", "sinks", "gqa"),
    ],
    ids=str,
)
def test_packed(name, features):
    """Sequences of a batch have the bits of separate calls; shared gradients are summed."""
    declares(name, torch.float32, Feature.TANGENTS | Feature.PACKED)
    sizes = ((5, 7), (0, 3), (1, 1), (37, 51), (3, 0), (16, 64), (65, 129))
    made = batch([FEATURE[x] for x in features], torch.float32, sizes[: small(7, 4)])
    given = {x: y for x, y in made.given.items() if x != "return_lse"}
    where = [given.pop(x) for x in ("q", "k", "v", "cu_q", "cu_k")]
    t, options = api.prepare_packed(*where, *(None,) * 5, given)
    spec = dataclasses.replace(describe(t, options), tangents=True)
    draw = torch.Generator().manual_seed(0)

    def like(x):
        return torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype)

    moves = Tangents(**{x: like(t.given(x)) for x in made.needs_grad})
    dout = packed_layout.heads_first("dout", made.dout)
    dlse = like(dout[..., 0])
    grads = dout, dlse, like(dout), like(dlse)
    run = base.get(name)
    for _ in on_variants(name):
        before = run.forward(spec, t)
        outs = run.jvp(spec, t, moves, before)
        alone = per_sequence.jvp_in_turn(run, spec, t, moves, before)
        assert all(map(torch.equal, outs[2:], alone[2:]))
        found = run.second(spec, t, moves, outs, grads, made.needs_grad)
        expected = per_sequence.second_in_turn(run, spec, t, moves, outs, grads, made.needs_grad)
        agree(found, {x: y.to(found[x].dtype) for x, y in expected.items()})
        for x in "qkv":
            assert torch.equal(found[x], expected[x].to(found[x].dtype)), x


# ------------------------------------------------------------------------------------ hard values


def probability_sums(name, problem):
    """Sums of P over keys: with a tangent of ones, out_t = P V_t for V, and dV = P' dO_t for dO."""
    spec, t = call(problem)
    ones = torch.ones_like(problem.v)
    run = base.get(name)
    outs = run.jvp(spec, t, Tangents(v=ones), run.forward(spec, t))
    dout_t = torch.zeros_like(outs[0])
    dout_t[..., 0] = 1
    given = torch.zeros_like(outs[0]), None, dout_t, None
    found = run.second(spec, t, Tangents(), run.jvp(spec, t, Tangents()), given, ("q", "k", "v"))
    return outs[2][..., 0], found["v"][..., 0].sum(-1), found


@every_dtype
@every_backend
@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_huge_logits(name, dtype, size):
    """Each pass normalises with its own scores, so rows sum to 1 whichever kernel ran forward."""
    declares(name, DTYPES[dtype], Feature.TANGENTS)
    problem = build(Dims(1, 1, 1, 40, 70, 16, 16), (), DTYPES[dtype])
    if INTERPRETED:  # numpy sums q.k and k.q in different orders: make both exact
        problem.q, problem.k = (
            (x * 16).round().clamp(-63, 63) / 16 for x in (problem.q, problem.k)
        )
        size = 2.0 ** round(math.log2(size))
    problem.q = problem.q * (size if dtype != "float16" else min(size, 1e4))
    for isa in on_variants(name, DTYPES[dtype]):
        rows, total, found = probability_sums(name, problem)
        assert all(x.isfinite().all() for x in found.values())
        eps = torch.finfo(DTYPES[dtype]).eps
        # Triton's normaliser is in base 2: at 1e9 its two numbers resolve 1e-6 of a logit.
        room = 16 if name == "triton" and size > 1e6 else 8
        assert (rows - 1).abs().max() <= room * eps, isa
        assert abs(total.item() - 40) <= 200 * eps, isa


@every_dtype
@every_backend
def test_a_saturated_softcap_has_zero_tangent(name, dtype):
    declares(name, DTYPES[dtype], Feature.TANGENTS)
    problem = build(SHAPE, (FEATURE["softcap"],), DTYPES[dtype])
    problem.q = problem.q.sign() * 3e3
    problem.k = problem.k.sign()
    for isa in on_variants(name, DTYPES[dtype]):
        moves, dout_t, _ = directions(problem, ("q", "k"))
        found = passes(name, problem, moves, dout_t, None)
        assert not found["out_t"].any() and not found["lse_t"].any(), isa
        assert not found["dq_t"].any() and not found["dk_t"].any(), isa
        assert found["dv_t"].isfinite().all(), isa


@every_dtype
@every_backend
def test_rows_without_visible_keys_have_zero_tangent(name, dtype):
    """The tangent of a mask is not read where the mask hides."""
    declares(name, DTYPES[dtype], Feature.TANGENTS)
    for n in small((21, 150), (21,)):
        problem = build(Dims(1, 2, 2, n, n + 3, 8, 8), (FEATURE["bias_grad"],), DTYPES[dtype])
        problem.kwargs["mask"][:, :, 3:9] = -torch.inf
        moves, *incoming = directions(problem)
        hidden = problem.kwargs["mask"] == -torch.inf
        for isa in on_variants(name, DTYPES[dtype]):
            found = {}
            for value in (0.0, torch.nan, torch.inf):
                moves["mask"] = moves["mask"].masked_fill(hidden, value)
                found[value] = passes(name, problem, moves, *incoming)
                assert all(map(torch.equal, found[value].values(), found[0.0].values())), isa
            for what in ("out_t", "lse_t", "dq_t", "dmask_t"):
                assert not found[0.0][what][:, :, 3:9].any(), (what, isa)
            assert not found[0.0]["dmask_t"][hidden].any(), isa


@every_backend
def test_masks_of_finfo_min(name):
    """Rows of only finfo.min have uniform weights; in other rows finfo.min hides keys."""
    declares(name, torch.float32, Feature.TANGENTS)
    problem = build(Dims(1, 1, 1, 150, 200, 8, 8), (), torch.float32)
    mask = torch.zeros(150, 200)
    mask[:, 60:] = mask[70:75] = torch.finfo(torch.float32).min
    problem.kwargs["mask"] = mask
    for isa in on_variants(name):
        rows, total, found = probability_sums(name, problem)
        assert (rows - 1).abs().max() <= 1e-5 and abs(total.item() - 150) <= 1e-3, isa
        assert not found["v"][:, :, 60:].sum() > 5, isa
