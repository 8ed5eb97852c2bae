"""The CUDA kernels of `attention_weights`, forward and backward, in the emulator, with the budgets
of tests/semantics/test_weights.py."""

import pytest
import torch

import fastattn
from fastattn.backends.native import launcher
from tests.gpu_emulation.emulated import DTYPES as NAMES
from tests.gpu_emulation.emulated import survivors
from tests.gpu_emulation.emulator import SCHEDULES, needs_emulator
from tests.semantics.test_weights import (
    MEANS,
    WITHOUT_V,
    about_weights,
    ask,
    of_constant_lse,
    with_identity,
)
from tests.support.backends import passed
from tests.support.cases import (
    DTYPES,
    PAIRS,
    PLAIN,
    SINGLES,
    Dims,
    build,
    name_of,
    negative_logits,
    square,
)
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator]
every_dtype = pytest.mark.parametrize("dtype", NAMES)
every_mean = pytest.mark.parametrize("mean", MEANS)
ALONE = [PLAIN, *((f,) for f in WITHOUT_V)]
TOGETHER = [pair for pair in PAIRS if all(f in WITHOUT_V for f in pair)]
SHAPES = (square(1, 2, 5, 3), square(2, 2, 63, 17), square(1, 1, 131, 32))
SMALL = square(1, 2, 37, 17)


def judge(problems, average):
    passed([line for problem in problems for line in about_weights(None, problem, average)])


def weights(problem, average, **more):
    options = problem.kwargs | more
    return fastattn.attention_weights(problem.q, problem.k, average_heads=average, **options)


@every_dtype
@every_mean
@parametrize("features", ALONE, ids=name_of, fast=1)
def test_features(emulated, features, mean, dtype):
    judge([build(dims, features, DTYPES[dtype]) for dims in SHAPES], mean == "mean")


@parametrize("features", TOGETHER, ids=name_of, fast=18)
def test_pairs_of_features(emulated, features):
    """Each in one dtype and either averaged or not, in turn."""
    turn = TOGETHER.index(features)
    judge([build(SMALL, features, DTYPES[NAMES[turn % 2]])], turn // 2 % 2 == 1)


@pytest.mark.slow
@every_mean
@parametrize("features", ALONE, ids=name_of, fast=13)
def test_a_given_lse_is_a_constant(emulated, features, mean):
    average = mean == "mean"
    problem = with_identity(build(SMALL, features, torch.bfloat16), average)
    verdict, lse = of_constant_lse(problem, average)
    got = ask(problem, None, average, lse=lse)
    if "sinks" in problem.needs_grad:
        assert not got.pop("dsinks").any()  # dsinks is 0 for a constant normaliser
    passed(verdict.about(got))


@pytest.mark.slow
def test_a_given_lse_may_have_any_strides(emulated):
    problem = with_identity(build(square(2, 3, 70, 24), (), torch.bfloat16), False)
    lse = torch.randn(2, 3, 70) + 4
    expected = ask(problem, None, False, lse=lse)
    stepped = torch.full((70, 6, 2), torch.nan).permute(2, 1, 0)[:, ::2].copy_(lse)
    found = ask(problem, None, False, lse=stepped)
    assert all(torch.equal(x, found[name]) for name, x in expected.items())


# Padded size -> head dims. The last is odd, so that its rows are not aligned.
HEAD_DIMS = {
    "32": (32, 8, 1),
    "64": (64, 40, 33),
    "96": (96, 80, 95),
    "128": (128, 112, 97),
    "192": (192, 160, 131),
    "256": (256, 200, 255),
}


@pytest.mark.slow
@every_dtype
@parametrize("general", [False, True], ids=["plain", "general"], fast=1)
@parametrize("padded", HEAD_DIMS, fast=1)
def test_head_dims(emulated, padded, general, dtype):
    """In every kernel, with a band that ends inside tiles, averaged or not."""
    features = [f for (f,) in SINGLES if f.name in ("bottom_right", "softcap")[: 1 + general]]
    for average, d in enumerate(HEAD_DIMS[padded]):
        judge([build(Dims(1, 2, 1, 70, 67, d, d), features, DTYPES[dtype])], average % 2 == 1)


HIDING = [x for x in ALONE if x and x[0].group in ("causal", "window", "lengths", "mask")]


@parametrize("features", [PLAIN, *HIDING], ids=name_of, fast=11)
def test_hidden_keys_do_not_change_results(emulated, features):
    judge([negative_logits(build(square(1, 2, 67, 16), features, torch.bfloat16))], False)


@pytest.mark.slow
@parametrize("M", [0, 1, 16, 63, 64, 65, 127, 128, 129], fast=6)
@parametrize("N", [0, 1, 31, 32, 33, 63, 64, 65, 128, 129], fast=2)
def test_lengths_around_tiles(emulated, M, N):
    for average in (False, True):
        judge([build(Dims(1, 2, 1, M, N, 24, 24), (), torch.float16)], average)


def test_empty_batches_and_no_heads(emulated):
    nothing = torch.empty(0, 2, 3, 8, dtype=torch.float16)
    assert fastattn.attention_weights(nothing, nothing).shape == (0, 2, 3, 3)
    nothing = torch.empty(2, 0, 3, 8, dtype=torch.float16)
    assert fastattn.attention_weights(nothing, nothing).shape == (2, 0, 3, 3)
    mean = fastattn.attention_weights(nothing, nothing, average_heads=True)
    assert mean.shape == (2, 3, 3) and mean.isnan().all()  # the mean of nothing


@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_tiles_that_no_row_sees_are_written(emulated, causal):
    """torch.empty is full of NaN here, and the window hides most tiles of keys."""
    q, k = torch.randn(1, 2, 150, 16).half(), torch.randn(1, 2, 300, 16).half()
    for average in (False, True):
        found = fastattn.attention_weights(
            q, k, window=(3, 3), causal=causal, average_heads=average
        )
        assert not found.isnan().any() and (found != 0).sum(-1).max() <= 7
        torch.testing.assert_close(
            found.float().sum(-1), torch.ones(found.shape[:-1]), atol=2e-3, rtol=0
        )


@parametrize("dim", [16, 200], fast=1)  # wide kernels take a minute to build
def test_a_single_key_at_either_end_of_a_tile_is_found(emulated, dim):
    """Each item's row sees only the item's last key."""
    lengths = torch.tensor([1, 31, 32, 33, 63, 64, 65, 66])
    q, k = torch.randn(8, 1, 1, dim).half(), torch.randn(8, 1, 66, dim).half()
    found = fastattn.attention_weights(
        q, k, key_lengths=lengths, causal="bottom_right", window=(0, 0)
    )
    expected = torch.eye(66).half()[lengths - 1]
    torch.testing.assert_close(found[:, 0, 0], expected, rtol=2**-10, atol=0)


@every_mean
@pytest.mark.parametrize("layout", ["in pairs", "odd start", "gaps", "transposed"])
def test_outputs_of_any_strides(emulated, monkeypatch, layout, mean):
    """The same bits as in contiguous memory, and nothing else is written."""
    problem = build(square(2, 2, 67, 24), (), torch.bfloat16)
    expected = weights(problem, mean == "mean")
    memories = []

    def empty(shape, dtype, device):
        wide = torch.full((*shape[:-1], 2 * shape[-1]), torch.nan, dtype=dtype)
        start, step = {"odd start": (1, 1), "gaps": (0, 2)}.get(layout, (0, 1))
        part = wide[..., start::step][..., : shape[-1]]
        memories.append((wide, part))
        return part.mT if layout == "transposed" else part  # 67 x 67 weights

    monkeypatch.setattr(launcher, "empty", empty)
    found = weights(problem, mean == "mean")
    ((wide, part),) = memories
    assert torch.equal(found, expected)
    part.fill_(torch.nan)
    assert wide.isnan().all()


@pytest.mark.slow
@every_mean
@parametrize("lazy", [False, True], ids=["eager", "lazy"], fast=1)
@parametrize("schedule", SCHEDULES, fast=1)
def test_every_schedule_gives_the_same_bits(emulated, schedule, lazy, mean):
    average = mean == "mean"
    features = [f for (f,) in SINGLES if f.name in ("causal", "dropout")]
    problem = build(Dims(1, 3, 3, 130, 70, 40, 40), features, torch.bfloat16)
    problem, lse = with_identity(problem, average), torch.full((1, 3, 130), 4.0)
    expected = ask(problem, None, average, lse=lse)
    for seed in range(2):
        emulated.options = dict(schedule=schedule, lazy=lazy, seed=seed)
        found = ask(problem, None, average, lse=lse)
        assert all(torch.equal(x, found[name]) for name, x in expected.items())


# --- every synchronisation is needed --------------------------------------------------------------


@pytest.mark.slow
@every_mean
def test_each_site_deleted_is_caught(mean):
    features = [f for (f,) in SINGLES if f.name == "key_bias_grad"]
    problem = build(square(1, 2, 150, 40), features, torch.bfloat16)
    problem, lse = with_identity(problem, mean == "mean"), torch.zeros(1, 2, 150)
    survived = survivors(lambda: ask(problem, None, mean == "mean", lse=lse))
    assert survived == {"backward: nothing is on its way"}  # the last groups are empty
