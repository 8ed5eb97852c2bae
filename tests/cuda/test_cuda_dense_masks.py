"""M x N masks in the CUDA kernels, on the emulator: the cases of test_dense_masks.py, and the
number of tiles that are computed."""

from dataclasses import replace

import pytest
import torch

import fastattn
from tests.cuda.test_cuda_emulated import SCHEDULES
from tests.gpu_emulation.emulated import survivors
from tests.gpu_emulation.emulator import needs_emulator
from tests.semantics.test_dense_masks import (
    BESIDE,
    FORMS,
    NO_MEAN,
    M,
    N,
    case,
    keep,
    mask_of,
    same,
)
from tests.support.backends import passed
from tests.support.cases import FEATURE, Dims, build
from tests.support.error_budget import Verdict

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator]
BF16, F16 = torch.bfloat16, torch.float16
ONE_HEAD = Dims(1, 1, 1, M, N, 16, 24)
HIDING = [x for x in FORMS if x != "PLAIN"] + ["bool"]


def out(problem):
    return problem.run(fastattn.attention, backward=False)


def judged(problem):
    passed(Verdict(problem).complaints(fastattn.attention))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("pattern", NO_MEAN)
def test_bits_are_those_of_every_number_added(emulated, pattern, dtype):
    given = dtype, BESIDE.get(pattern, ""), ONE_HEAD
    expected = case(pattern, "PLAIN", *given).run(fastattn.attention)
    for form in HIDING:
        found = case(pattern, form, *given).run(fastattn.attention)
        assert not (off := same(found, expected)), f"{form}: {off}"


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["causal", "left padding", "one visible"])
def test_a_row_of_finfo_min_is_the_mean(emulated, pattern):
    problem = case(pattern, "finfo.min", BF16, dims=ONE_HEAD)
    rows = [5, 6, 7, 8, M - 1]
    problem.kwargs["mask"][rows] = torch.finfo(BF16).min
    mean = problem.v.double().mean(2, keepdim=True).expand(1, 1, 5, -1)
    found = out(problem)["out"][:, :, rows].double()
    torch.testing.assert_close(found, mean, rtol=0, atol=4 * torch.finfo(BF16).eps)


BESIDE_WIDE = {64: "", 128: "dropout+softcap", 192: "sinks", 256: "dropout"}


@pytest.mark.slow
@pytest.mark.parametrize("D", BESIDE_WIDE)
def test_gradients_of_head_dims(emulated, D):
    """Bit for bit, for heads that share keys and see different blocks of them. One head sees
    nothing; its row in PLAIN is a mean."""
    first = torch.tensor([0, 0, 96, 400]).view(4, 1, 1)
    i, j = torch.arange(140)[:, None], torch.arange(333)
    shown = (j >= first) & (j < first + 40 + i // 2) | (j > 300) & (i > 130) & (first == 0)
    features = [FEATURE[x] for x in BESIDE_WIDE[D].split("+") if x]
    problem = build(Dims(1, 4, 2, 140, 333, D, D), features, BF16)
    problem.dout[:, 3] = 0

    def run(form):
        problem.kwargs["mask"] = mask_of(form, shown, BF16)
        return problem.run(fastattn.attention)

    expected = run("PLAIN")
    for form in ("bool", "-inf"):
        found = run(form)
        assert not found["out"][:, 3].any()
        off = [x for x in same(found, expected) if x not in ("out", "lse")]
        assert not off, f"{form}: {off}"


@pytest.mark.slow
@pytest.mark.parametrize("features", ["causal", "window", "lengths", "bottom_right"])
def test_masks_inside_of_bands(emulated, features):
    """The block that adds to a gradient just before is hidden or outside the band."""
    dims = Dims(2, 1, 1, 200, 450, 16, 24)
    i, j = torch.arange(200)[:, None], torch.arange(450)
    problem = build(dims, [FEATURE[features]], BF16)
    shown = ((i // 64 + j // 128) % 2 == 0) | (j % 200 == i)

    def run(form):
        problem.kwargs["mask"] = mask_of(form, shown, BF16)
        return problem.run(fastattn.attention)

    expected = run("PLAIN")
    for form in ("bool", "-inf"):
        assert not same(run(form), expected), form
    judged(problem)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_same_bits(emulated, schedule):
    """Blocks wait only for blocks that see the tile, in any order of execution."""
    problem = case("blocks", "-inf", BF16, dims=Dims(1, 2, 1, M, N, 16, 16))
    expected = problem.run(fastattn.attention)
    for seed in range(2):
        emulated.options = dict(schedule=schedule, lazy=True, seed=seed)
        assert not same(problem.run(fastattn.attention), expected)


@pytest.mark.slow
@pytest.mark.parametrize("D", [16, 256])
def test_rows_of_finfo_min_have_gradients(emulated, D):
    """All their keys have the same weight although other rows of the tile have scores, and rows of
    the next tile are not affected."""
    problem = build(Dims(1, 2, 1, 140, 333, D, D), [], BF16)
    i, j = torch.arange(140)[:, None], torch.arange(333)
    problem.q, problem.k = (x.round().clamp(-2, 2) for x in (problem.q, problem.k))
    problem.kwargs["mask"] = mask_of("finfo.min", (j > 200) & (i != 7), BF16)
    judged(problem)
    mean = problem.dout[:, :, 7].double().sum(1) / 333
    dv = problem.run(fastattn.attention)["dv"][0, 0, :200].double()
    torch.testing.assert_close(dv, mean.expand(200, -1), rtol=2**-7, atol=2**-12)


def products(emulated, problem, backward=False, **arguments):
    """The number of matrix multiplications in a call."""
    problem = replace(problem, kwargs=arguments)
    problem.run(fastattn.attention, backward=backward)
    return emulated.findings[-1].multiplies


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("form", HIDING)
def test_hidden_keys_cost_no_work(emulated, form, backward):
    """No more products than with the equivalent argument, and none where nothing is seen."""
    plain = build(Dims(1, 1, 1, 300, 300, 16, 16), [], BF16)
    i, j = torch.arange(300)[:, None], torch.arange(300)

    def counted(**arguments):
        return products(emulated, plain, backward, **arguments)

    for shown, told in (
        (j <= i, dict(causal=True)),
        ((j <= i + 70) & (j >= i - 70), dict(window=(70, 70))),
        ((j < 100) & (i >= 0), dict(key_lengths=torch.tensor([100]))),
        (j >= 0 * i, {}),
    ):
        assert counted(mask=mask_of(form, shown, BF16)) == counted(**told), told
    least = counted(mask=mask_of(form, (i < 0) & (j < 0), BF16))
    assert least == (counted() if form == "finfo.min" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 128, 256])
def test_hidden_keys_cost_no_work_in_backward(emulated, D):
    """For head dims with different tiles."""
    problem = build(Dims(1, 1, 1, 256, 256, D, D), [], BF16)
    i, j = torch.arange(256)[:, None], torch.arange(256)
    everything = products(emulated, problem, True, mask=mask_of("PLAIN", j >= 0 * i, BF16))
    blocks = products(emulated, problem, True, mask=mask_of("bool", i // 64 == j // 64, BF16))
    assert blocks == everything / 4


@pytest.mark.slow
def test_numbers_that_are_no_structure(emulated):
    """-1e9 and NaN in a mask are ordinary numbers: their rows get them added."""
    problem = case("causal", "-inf", BF16, dims=ONE_HEAD)
    mask = torch.where(keep("causal"), 0.0, -1e9)
    mask[: M // 2] = -1e9
    problem.kwargs["mask"] = mask
    problem.q, problem.k = (x.round().clamp(-2, 2) for x in (problem.q, problem.k))
    judged(problem)
    clean = out(problem)["out"]
    mask[M // 2 + 2, N // 2] = torch.nan
    found = out(problem)["out"]
    assert found[:, :, M // 2 + 2].isnan().all()
    found[:, :, M // 2 + 2] = clean[:, :, M // 2 + 2]
    assert torch.equal(found, clean)


@pytest.mark.slow
def test_each_site_deleted_is_caught():
    """Includes a block that starts again, for rows that see nothing but finfo.min, and one that
    waits for a block other than its neighbour. In dq, turns replace a barrier."""
    problem = build(Dims(1, 1, 1, 131, 450, 16, 16), [], BF16)
    i, j = torch.arange(131)[:, None], torch.arange(450)
    shown = (j // 128 != 1) & (j > 70) & (i < 100)
    problem.kwargs["mask"] = mask_of("finfo.min", shown, BF16)

    def run():
        for needs_grad in (problem.needs_grad, ("k",)):
            replace(problem, needs_grad=needs_grad).run(fastattn.attention)

    assert survivors(run) == {"backward: nothing is on its way"}
