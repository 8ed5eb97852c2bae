"""The kernels of csrc/cuda/sm90 as nvcc compiled them for sm_90a, held to float64 with the checker
on: every instance, feature class and edge of a tile."""

import itertools
from dataclasses import replace

import pytest
import torch

import fastattn
from tests.gpu_emulation.emulated import DTYPES as NAMES
from tests.gpu_emulation.emulated import everywhere
from tests.gpu_emulation.emulator import SCHEDULES, needs_emulator
from tests.gpu_emulation.ptx import ours
from tests.semantics.test_packed import batch, complaints
from tests.semantics.test_paged import in_pages
from tests.support.backends import passed
from tests.support.cases import (
    DTYPES,
    FEATURE,
    PLAIN,
    SINGLES,
    Dims,
    build,
    expanded,
    name_of,
    square,
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

# Rows of a block, and keys of a tile of plain kernels: csrc/cuda/sm90/tiles.h.
ROWS = (128, 192)  # of general kernels, and of plain ones for head dim 64
KEYS = {64: 128, 96: 160, 128: 176, 192: 112, 256: 80}
UNMASKED_KEYS = 176  # of the kernels of head dim 64 for all features but masks
FORWARD = "sm_90"


def on_hopper(**options):
    return everywhere(architecture=90, ptx=True, **options)


def run_all(problems, declined=(), **options):
    """Every forward pass is one of sm_90's, or declined for such a reason; and right."""
    found = []
    with on_hopper(**options) as backend:
        for problem in problems:
            lines = Verdict(problem, backward=False).complaints(fastattn.attention)
            found += [f"{problem.name} {line}" for line in lines]
    others = {x for x in backend.kernels if x != FORWARD}
    assert all(any(why in x for why in declined) for x in others), backend.kernels
    assert backend.launches >= len(backend.findings) > 0
    passed(found)


# Dense masks of whole tiles have kernels of sm80 that skip some.
SHAPES = (square(2, 2, 63, 24), square(1, 2, 105, 64), Dims(1, 4, 2, 81, 139, 64, 40))


# What calls with some features are declined for.
WIDTHS, PLACES = "not multiples of 8", "at multiples of 16 bytes"
OF_FEATURES = {
    "wide_values": WIDTHS,
    "narrow_values": WIDTHS,
    "offset_slices": PLACES,
    "column_major": PLACES,
    "column_major_dout": PLACES,
}


def reasons(features):
    return [OF_FEATURES[x.name] for x in features if x.name in OF_FEATURES]


@every_dtype
@pytest.mark.parametrize("features", [PLAIN, *SINGLES], ids=name_of)
def test_features(dtype, features):
    problems = [build(dims, features, DTYPES[dtype]) for dims in SHAPES]
    run_all(problems, declined=reasons(features))


def around(*sizes):
    return sorted({size + off for size in sizes for off in (-1, 0, 1)})


UNMASKED = ("alibi", "softcap")


@pytest.mark.parametrize(
    "name", ["", "causal", "bottom_right", "window", "lengths", "sinks", *UNMASKED]
)
@pytest.mark.parametrize("M", [17, *around(64, *ROWS, 2 * ROWS[0])])
def test_edges_of_tiles(M, name):
    features = [FEATURE[name]] if name else []
    tile = UNMASKED_KEYS if name in UNMASKED else KEYS[64]
    keys = [1, 15, *around(tile, 2 * tile)]
    run_all([build(Dims(1, 1, 1, M, N, 64, 64), features, torch.bfloat16) for N in keys])


HEAD_DIMS = {
    "64": [(64, 64), (8, 24), (40, 64)],
    "96": [(96, 96), (80, 72)],
    "128": [(128, 128), (112, 128), (104, 8)],
    "192 and 128": [(192, 128), (136, 128)],
    "192": [(192, 192), (160, 160), (136, 184)],
    "256": [(256, 256), (200, 256), (256, 64)],
}


@every_dtype
@pytest.mark.parametrize("name", ["bottom_right", "softcap", "window"])
@pytest.mark.parametrize("padded", HEAD_DIMS)
def test_head_dims(padded, name, dtype):
    if padded == "256" and name == "softcap":
        pytest.skip("declined: no general kernel is as wide")
    dims = [Dims(1, 2, 1, 150, 2 * KEYS[int(padded.split()[0])] + 7, *x) for x in HEAD_DIMS[padded]]
    run_all([build(x, [FEATURE[name]], DTYPES[dtype]) for x in dims])


@pytest.mark.parametrize("sm_count", [1, 3, 4])
def test_persistent_blocks(sm_count):
    """A block has several tasks, of several heads and items, some without keys."""
    dims = Dims(2, 4, 2, 300, 410, 64, 64)
    names = ("bottom_right", "lengths", "sinks")
    run_all([build(dims, [FEATURE[x]], torch.bfloat16) for x in names], sm_count=sm_count)


def test_every_schedule_gives_the_same_bits():
    problem = build(Dims(1, 2, 1, 200, 500, 64, 64), [FEATURE["bottom_right"]], torch.bfloat16)
    found = []
    for schedule, lazy, sm_count in itertools.product(SCHEDULES, (True, False), (0, 2)):
        with on_hopper(schedule=schedule, lazy=lazy, sm_count=sm_count, seed=len(found)):
            found.append(problem.run(fastattn.attention, backward=False))
    for other in found[1:]:
        assert all(torch.equal(x, other[name]) for name, x in found[0].items())


SIZES = ((5, 7), (0, 3), (1, 1), (137, 251), (3, 0), (17, 192), (1, 40), (65, 129), (129, 20))


@pytest.mark.parametrize("names", ["", "bottom_right", "window sinks", "causal alibi dropout gqa"])
@pytest.mark.parametrize("sm_count", [0, 3])
def test_packed(names, sm_count):
    made = batch([FEATURE[x] for x in names.split()], torch.bfloat16, SIZES)
    with on_hopper(sm_count=sm_count) as backend, torch.no_grad():
        found = made.run(backward=False)
    assert set(backend.kernels) == {FORWARD}
    passed(list(complaints(made, found)))


@pytest.mark.parametrize("page", [8, 16, 24, 64, 192, 256])
def test_pages(page):
    made = batch((), torch.bfloat16, SIZES)
    with on_hopper() as backend, torch.no_grad():
        found = dict(out=fastattn.attention_packed(**in_pages(made, page)))
    assert set(backend.kernels) == {FORWARD}
    passed(list(complaints(made, found)))


@pytest.mark.parametrize("d", [64, 128])
def test_nan_behind_a_length_is_not_read(d):
    """TMA fills with zeros only what is behind the tensor."""
    problem = build(Dims(2, 2, 1, 70, 300, d, d), (), torch.bfloat16)
    lengths = torch.tensor([201, 17])
    spoiled = with_nan_behind(problem, lengths)
    with on_hopper():
        right, found = (
            fastattn.attention(x.q, x.k, x.v, key_lengths=lengths) for x in (problem, spoiled)
        )
    assert torch.equal(right, found)


def test_expanded_tensors():
    """A dimension of stride 0 has size 1 in a tensor map."""
    problem = build(Dims(2, 2, 2, 40, 70, 64, 64), (), torch.bfloat16)
    of_one = replace(problem, q=problem.q[:, :1].expand_as(problem.q))
    run_all([expanded(of_one)])


# What these kernels decline, and what they say.
DECLINED = {
    "few rows": (Dims(1, 2, 2, 16, 70, 64, 64), dict(softcap=3.0), "few rows with a mask"),
    "odd head dim": (Dims(1, 2, 2, 40, 70, 60, 64), {}, "head dims are not multiples of 8"),
    "wide and general": (Dims(1, 1, 1, 40, 70, 256, 256), dict(softcap=3.0), "is over 192"),
    "a dense mask": (Dims(1, 1, 1, 130, 130, 64, 64), dict(mask=True), "skip tiles of its mask"),
    "unaligned rows": (Dims(1, 2, 2, 40, 70, 64, 64), {}, "multiples of 16 bytes"),
    "rows in one place": (Dims(1, 2, 2, 40, 70, 64, 64), {}, "in one place"),
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
    if case == "rows in one place":
        problem = replace(problem, v=problem.v[:, :, :1].expand_as(problem.v))
    with on_hopper() as backend:
        lines = list(
            Verdict(replace(problem, kwargs=kwargs), backward=False).complaints(fastattn.attention)
        )
    assert all(x.startswith("sm_80: ") and why in x for x in backend.kernels), backend.kernels
    passed(lines)


def unnoticed(problems, runs, kernel, backward=True, **more):
    """The instructions of a kernel that can be deleted one at a time without a finding, or another
    bit, in any of these runs of any of the problems. It is the last kernel of a call. more:
    arguments that the oracle has not."""
    found, right = set(), []
    for problem in problems:
        with on_hopper() as backend:
            right.append(problem.run(fastattn.attention, backward, **more))
        found |= {x for x in backend.findings[-1].sites if x.endswith(f" of {kernel}")}
    assert found
    for problem, of_all in zip(problems, right):
        for options, site in itertools.product(runs, sorted(found)):
            if site not in found:
                continue
            try:
                with on_hopper(disabled=site, **options):
                    other = problem.run(fastattn.attention, backward, **more)
            except AssertionError:
                found.remove(site)
            else:
                if not all(torch.equal(x, other[name]) for name, x in of_all.items()):
                    found.remove(site)
    return found


# What no run notices if it is deleted: ptxas needs the first; registers that the second orders were
# ordered by the one before; turns of the warpgroups order no memory, which mbarriers do; and lanes
# of a warp run together here.
HARMLESS = ("setmaxnreg.inc", "wgmma.fence", "bar.sync", "bar.warp.sync")


def test_each_synchronisation_deleted_is_noticed():
    # A product of hidden keys alone adds zeros: before a tile with a right edge the last keys of a
    # tile are hidden, before one with a left edge the last keys of the leftmost tile are.
    problem = build(Dims(1, 2, 1, 200, 570, 64, 64), [FEATURE["bottom_right"]], torch.bfloat16)
    both = replace(problem, kwargs=problem.kwargs | dict(window=(230, None)))
    runs = [dict(schedule=x, lazy=x < 3, sm_count=1) for x in (1, 2, 3)]
    survived = unnoticed([problem, both], runs, "forward_kernel", backward=False)
    assert not [x for x in survived if not x.startswith(HARMLESS)], survived
