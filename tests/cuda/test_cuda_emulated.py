"""The CUDA kernels in the emulator with its race checker: the cases of other backends, small."""

import re
from dataclasses import replace

import pytest
import torch

import fastattn
from tests.gpu_emulation.emulated import DTYPES as NAMES
from tests.gpu_emulation.emulated import everywhere, survivors
from tests.gpu_emulation.emulator import KERNELS, SCHEDULES, needs_emulator
from tests.support.backends import passed
from tests.support.cases import (
    DTYPES,
    SINGLES,
    Dims,
    build,
    square,
)
from tests.support.error_budget import Verdict
from tests.support.large_logits import complaints, far_logits
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator]
every_dtype = pytest.mark.parametrize("dtype", NAMES)


@pytest.mark.slow
def test_the_worst_rounding_is_another(emulated):
    problem = build(square(1, 2, 131, 32), (), torch.float16)
    right = problem.run(fastattn.attention)
    emulated.options = dict(pessimistic=True)
    found = problem.run(fastattn.attention)
    assert all(not torch.equal(x, right[name]) for name, x in found.items())


@pytest.mark.parametrize("cap", [0.5, 64.0, 64.5, 1e4])
@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0], ids=["tiny", "ordinary", "large"])
def test_a_cap_of_any_strength(emulated, cap, size):
    """For logits of any size, on both sides of the point where the formula changes."""
    problem = build(Dims(1, 2, 1, 37, 70, 32, 32), (), torch.bfloat16)
    problem.q.mul_(size)
    passed(Verdict(replace(problem, kwargs=dict(softcap=cap))).complaints(fastattn.attention))


@pytest.mark.parametrize("score", [torch.inf, torch.nan], ids=["infinite", "nan"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["uncapped", "softcap"])
def test_a_bool_mask_hides_any_score(emulated, softcap, score):
    """The scores of hidden keys are infinite or NaN, and every result is that of ordinary scores.
    Gradients are compared where the keys are finite: other keys are multiplied by 0."""
    problem = build(square(1, 2, 70, 16), (), torch.bfloat16)
    problem.q[..., 0] = 4.0
    hidden = torch.arange(70) % 3 == 1
    problem.kwargs |= dict(mask=~hidden, softcap=softcap)
    spoiled = replace(problem, k=problem.k.clone())
    spoiled.k[:, :, hidden, 0] = torch.nan if score != score else 3e38
    expected = problem.run(fastattn.attention)
    found = spoiled.run(fastattn.attention)
    names = expected if score == score else ("out", "dv")
    assert all(torch.equal(found[name], expected[name]) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("d", [32, 160], ids=["dk and dv together", "apart"])
@parametrize("needs_grad", ["q", "k", "v", "mask", "sinks", "kv", "qv"], fast=2)
def test_each_gradient_alone_is_the_same(emulated, needs_grad, d):
    features = [f for (f,) in SINGLES if f.name in ("key_bias_grad", "sinks")]
    problem = build(Dims(1, 2, 1, 70, 67, d, d), features, torch.bfloat16)
    every = problem.run(fastattn.attention)
    needs_grad = (needs_grad,) if needs_grad in ("mask", "sinks") else tuple(needs_grad)
    found = replace(problem, needs_grad=needs_grad).run(fastattn.attention)
    assert {x for x in found if x.startswith("d")} == {f"d{x}" for x in needs_grad}
    assert all(torch.equal(x, every[name]) for name, x in found.items())


@pytest.mark.slow
@parametrize("lazy", [False, True], ids=["eager", "lazy"], fast=1)
@parametrize("schedule", SCHEDULES, fast=1)
@parametrize("features", [f for f in SINGLES if f[0].name in ("causal", "dropout")], fast=1)
def test_every_schedule_gives_the_same_bits(emulated, features, schedule, lazy):
    problem = build(square(1, 2, 150, 40), features, torch.bfloat16)
    expected = problem.run(fastattn.attention)
    for seed in range(3):
        emulated.options = dict(schedule=schedule, lazy=lazy, seed=seed)
        found = problem.run(fastattn.attention)
        assert all(torch.equal(x, found[name]) for name, x in expected.items())


@every_dtype
@pytest.mark.parametrize("decode", [False, True], ids=["rows", "decode"])
def test_plain_kernels_use_the_rounding_error_of_the_lse(emulated, decode, dtype):
    """For q.k far from zero. test_special_values.py has logits that a mask moves there."""
    emulated.sm_count = 132 * decode
    sizes = dict(M=1, N=300, H=4) if decode else dict(M=37, N=150)
    passed(list(complaints(far_logits(DTYPES[dtype], **sizes))))
    assert decode == any("combine: the warps' sums are there" in x.sites for x in emulated.findings)


# --- every synchronisation is needed --------------------------------------------------------------

# Sites with a deletion that no test can notice, and why.
EMPTY = "the groups left at the end are empty: it waits for none"
FREE = {"forward: nothing is on its way": EMPTY, "backward: nothing is on its way": EMPTY}
FREE["mask: every warp knows its tile"] = "none is hidden here: test_cuda_dense_masks.py"


def run_problems():
    """Together these reach every site: several tiles, and a mask's gradient summed over rows."""
    features = [f for (f,) in SINGLES if f.name in ("key_bias_grad", "sinks")]
    for chosen in ((), features):
        problem = build(square(1, 1, 150, 40), chosen, torch.bfloat16)
        problem.run(fastattn.attention)
        replace(problem, needs_grad=("k",)).run(fastattn.attention)


@pytest.mark.slow
def test_every_site_is_reached():
    named = set()
    kinds = ("forward", "backward", "mask_gradient", "bwd_preprocess", "semaphore")
    kinds += ("../mask_tiles",)
    for kind in kinds:
        text = (KERNELS / "sm80" / f"{kind}.cuh").read_text()
        named |= set(re.findall(r'ptx::\w+(?:<\d>)?\("([^"]+)"', text))
    with everywhere() as backend:
        run_problems()
    assert named == {site for x in backend.findings for site in x.sites} and len(named) > 12


@pytest.mark.slow
def test_each_site_deleted_is_caught():
    assert survivors(run_problems) == set(FREE)
