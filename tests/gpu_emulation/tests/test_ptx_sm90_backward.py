"""The backward kernels of csrc/cuda/sm90 as nvcc compiled them for sm_90a, held to float64 with the
checker on: every instance, feature class and edge of a tile."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fastattn
from tests.gpu_emulation.emulated import DTYPES as NAMES
from tests.gpu_emulation.emulator import SCHEDULES, needs_emulator
from tests.gpu_emulation.ptx import ours
from tests.gpu_emulation.tests.test_ptx_sm90 import around, on_hopper, reasons, unnoticed
from tests.semantics.test_packed import batch, complaints
from tests.support import large_logits
from tests.support.backends import passed
from tests.support.cases import (
    DTYPES,
    FEATURE,
    PLAIN,
    SINGLES,
    Dims,
    build,
    name_of,
    with_nan_behind,
)
from tests.support.error_budget import Verdict

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    needs_emulator,
    ours.needs_nvcc,
    pytest.mark.slow,
]
every_dtype = pytest.mark.parametrize("dtype", NAMES)

KEYS = 128  # of a block
# Rows of a tile of plain kernels without a band, with one, and of general ones: tiles.h.
ROWS = {64: (128, 96, 64), 128: (80, 64, 48)}
BACKWARD = "sm_90"


every_order = pytest.mark.parametrize("deterministic", [True, False], ids=["turns", "any order"])


def run_all(problems, declined=(), deterministic=True, **options):
    """Every backward pass is one of sm_90's, or declined for such a reason; and right."""
    found = []
    with on_hopper(**options) as backend:
        for problem in problems:
            given = dict(deterministic=deterministic)
            lines = Verdict(problem).complaints(fastattn.attention, **given)
            found += [f"{problem.name} {line}" for line in lines]
    backwards = backend.kernels[1::2]
    assert len(backwards) == len(problems)
    others = {x for x in backwards if x != BACKWARD}
    assert all(any(why in x for why in declined) for x in others), backwards
    passed(found)


SHAPES = (Dims(2, 2, 2, 63, 63, 24, 24), Dims(1, 4, 2, 81, 139, 64, 40))
GRADIENT_OF_MASK = "the gradient of a mask"


@every_dtype
@pytest.mark.parametrize("features", [PLAIN, *SINGLES], ids=name_of)
def test_features(dtype, features):
    problems = [build(dims, features, DTYPES[dtype]) for dims in SHAPES]
    by_mask = "mask" in problems[0].needs_grad
    run_all(problems, declined=[*reasons(features), *([GRADIENT_OF_MASK] * by_mask)])


@pytest.mark.parametrize("name", ["", "causal", "bottom_right", "window", "lengths", "softcap"])
@pytest.mark.parametrize("N", [1, *around(KEYS, 2 * KEYS)])
@every_order
def test_edges_of_tiles(N, name, deterministic):
    features = [FEATURE[name]] if name else []
    rows = ROWS[64][2 if name == "softcap" else name not in ("", "lengths")]
    run_all(
        [
            build(Dims(1, 1, 1, M, N, 64, 64), features, torch.bfloat16)
            for M in (17, *around(rows, 2 * rows))
        ],
        deterministic=deterministic,
    )


HEAD_DIMS = {"64": [(64, 64), (8, 24), (40, 64)], "128": [(128, 128), (72, 128), (104, 8)]}


@every_dtype
@pytest.mark.parametrize("name", ["", "bottom_right", "softcap", "window"])
@pytest.mark.parametrize("padded", HEAD_DIMS)
def test_head_dims(padded, name, dtype):
    features = [FEATURE[name]] if name else []
    dims = [Dims(1, 2, 1, 150, 2 * KEYS + 7, *x) for x in HEAD_DIMS[padded]]
    run_all([build(x, features, DTYPES[dtype]) for x in dims])


@pytest.mark.parametrize("name", ["", "softcap"])
def test_states_are_at_multiples_of_16_bytes(name):
    """Bulk copies need that, whatever number of tiles all heads have."""
    features = [FEATURE[name]] if name else []
    run_all([build(Dims(1, 1, 1, M, 70, 128, 128), features, torch.bfloat16) for M in (17, 97)])


@pytest.mark.parametrize("name", ["", "bottom_right", "window", "lengths", "sinks", "softcap"])
@pytest.mark.parametrize("D", [64, 128])
@every_order
def test_heads_and_items(name, D, deterministic):
    """Rows of several query heads pass; some blocks have no rows, and some rows no keys."""
    features = [FEATURE[name]] if name else []
    problem = build(Dims(2, 6, 2, 300, 210, D, D), features, torch.float16)
    run_all([problem], deterministic=deterministic)


@pytest.mark.parametrize("name", ["", "bottom_right"])
def test_every_schedule_gives_the_same_bits(name):
    """Blocks add to dq in one order, whichever runs first."""
    features = [FEATURE[name]] if name else []
    problem = build(Dims(1, 2, 1, 200, 500, 64, 64), features, torch.bfloat16)
    found = []
    for schedule, lazy in itertools.product(SCHEDULES, (True, False)):
        with on_hopper(schedule=schedule, lazy=lazy, seed=len(found)):
            found.append(problem.run(fastattn.attention))
    for other in found[1:]:
        assert all(torch.equal(x, other[name]) for name, x in found[0].items())


@pytest.mark.parametrize("name", ["", "bottom_right", "window", "softcap"])
def test_any_order_is_right_in_every_schedule(name):
    """A block adds to dq once another one has stored the first sums, whichever runs first."""
    features = [FEATURE[name]] if name else []
    problem = build(Dims(1, 2, 1, 200, 500, 64, 64), features, torch.bfloat16)
    for seed, way in enumerate(itertools.product(SCHEDULES, (True, False))):
        options = dict(zip(("schedule", "lazy"), way), seed=seed)
        run_all([problem], deterministic=False, **options)


@pytest.mark.parametrize("D, backward", [(16, "sm_90"), (136, "sm_80: its head dim is over 128")])
def test_large_logits(D, backward):
    """Backward needs both numbers of forward's LSE, also if kernels of sm_80 run it."""
    problem = large_logits.far_logits(torch.bfloat16, M=37, N=270)
    wide = {x: F.pad(getattr(problem, x), (0, D - 16)) for x in "qk"}
    with on_hopper() as backend:
        lines = list(large_logits.complaints(replace(problem, **wide)))
    assert backend.kernels[:2] == ["sm_90", backward]
    passed(lines)


SIZES = ((5, 7), (0, 3), (1, 1), (137, 251), (3, 0), (17, 192), (1, 40), (97, 129), (129, 20))


@pytest.mark.parametrize("names", ["", "bottom_right", "window sinks", "causal alibi dropout gqa"])
@every_order
def test_packed(names, deterministic):
    made = batch([FEATURE[x] for x in names.split()], torch.bfloat16, SIZES)
    made.given["deterministic"] = deterministic
    with on_hopper() as backend:
        passed(list(complaints(made, made.run())))
    assert backend.kernels[1] == BACKWARD


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("more", [{}, dict(causal="bottom_right"), dict(softcap=3.0)])
def test_nan_behind_a_length_is_not_read(d, more):
    """TMA fills with zeros only what is behind the tensor."""
    problem = build(Dims(2, 2, 1, 70, 300, d, d), (), torch.bfloat16)
    lengths = torch.tensor([201, 17])
    problem = replace(problem, kwargs=dict(key_lengths=lengths, **more))
    spoiled = with_nan_behind(problem, lengths)
    with on_hopper() as backend:
        right, found = (x.run(fastattn.attention) for x in (problem, spoiled))
    assert set(backend.kernels[1::2]) == {BACKWARD}
    assert all(torch.equal(x, found[name]) for name, x in right.items())


@pytest.mark.parametrize("more", [{}, dict(causal=True), dict(softcap=3.0)])
def test_nan_in_another_sequence_is_not_read(more):
    """Boxes of rows and keys reach into the next sequence."""
    made = batch((), torch.bfloat16, ((70, 60), (90, 100)), 64)
    found = []
    for factor in (1.0, torch.nan):
        given = {**made.given, **more}
        for name in "qkv":
            given[name] = given[name].clone()
            given[name][(60 if name in "kv" else 70) :] *= factor
            given[name].requires_grad_()
        dout = made.dout.clone()
        dout[70:] *= factor
        with on_hopper() as backend:
            out = fastattn.attention_packed(**given)
            grads = torch.autograd.grad(out, [given[x] for x in "qkv"], dout)
        assert set(backend.kernels[1::2]) == {BACKWARD}
        found.append([x[:n] for x, n in zip(grads, (70, 60, 60), strict=True)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_the_error_is_that_of_other_kernels():
    """At logits of thousands the normaliser's second number matters."""
    problem = build(Dims(1, 1, 1, 200, 300, 64, 64), (), torch.float16)
    problem = replace(problem, q=problem.q * 256)
    errors = []
    exact = replace(problem.to(torch.float64)).run(fastattn.attention, backend="reference")
    for architecture in (80, 90):
        with on_hopper() as backend:
            backend.architecture = architecture
            found = problem.run(fastattn.attention)
        errors.append(
            {x: (y.double() - exact[x]).norm() / exact[x].norm() for x, y in found.items()}
        )
    assert all(errors[1][x] <= 1.2 * errors[0][x] for x in ("dq", "dk", "dv")), errors


# What these kernels decline, and what they say.
DECLINED = {
    "odd head dim": (Dims(1, 2, 2, 40, 70, 60, 64), {}, "head dims are not multiples of 8"),
    "wide": (Dims(1, 1, 1, 40, 70, 136, 64), {}, "its head dim is over 128"),
    "no scale": (Dims(1, 1, 1, 40, 70, 64, 64), dict(scale=1e-35), "its scale is below 1e-30"),
    "a dense mask": (Dims(1, 1, 1, 130, 130, 64, 64), dict(mask=True), "skip tiles of its mask"),
    "unaligned rows": (Dims(1, 2, 2, 40, 70, 64, 64), {}, "multiples of 16 bytes"),
}


@pytest.mark.parametrize("case", DECLINED)
def test_declined_calls_say_why_and_run(case):
    dims, kwargs, why = DECLINED[case]
    problem = build(dims, (), torch.bfloat16)
    if kwargs.get("mask"):
        kwargs = dict(mask=torch.ones(dims.M, dims.N, dtype=torch.bool).tril())
    if case == "unaligned rows":
        wide = torch.full((*problem.k.shape[:3], 68), torch.nan, dtype=torch.bfloat16)
        wide[..., :64] = problem.k
        problem = replace(problem, k=wide[..., :64])
    with on_hopper() as backend:
        lines = list(Verdict(replace(problem, kwargs=kwargs)).complaints(fastattn.attention))
    assert backend.kernels[1].startswith("sm_80: ") and why in backend.kernels[1], backend.kernels
    passed(lines)


# What no run notices if it is deleted: ptxas needs the first; registers that the second orders were
# ordered by the one before; a thread that sends dq fences for others, and the checker follows no
# fence of global memory; and lanes of a warp run together here.
HARMLESS = ("setmaxnreg.inc", "wgmma.fence", "fence.proxy.async", "bar.warp.sync")


@every_order
def test_each_synchronisation_deleted_is_noticed(deterministic):
    problem = build(Dims(1, 2, 1, 200, 300, 64, 64), [FEATURE["bottom_right"]], torch.bfloat16)
    runs = [dict(schedule=1), dict(schedule=2), dict(schedule=3, lazy=False)]
    # With two blocks of keys there is one order only, so bits repeat.
    given = dict(deterministic=deterministic)
    survived = unnoticed([problem], runs, "backward_kernel", **given)
    assert not [x for x in survived if not x.startswith(HARMLESS)], survived
