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
    PAIRS,
    PLAIN,
    SINGLES,
    Dims,
    build,
    name_of,
    negative_logits,
    square,
)
from tests.support.error_budget import Verdict
from tests.support.large_logits import complaints, far_logits
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_emulator]
every_dtype = pytest.mark.parametrize("dtype", NAMES)
SHAPES = (square(1, 2, 5, 3), square(2, 2, 63, 17), square(1, 1, 131, 32))
SMALL = (square(1, 2, 37, 17),)


@pytest.fixture
def emulated():
    """Every call runs on the emulator. A test sets its options."""
    with everywhere() as backend:
        yield backend


def run_all(problems):
    found = []
    for problem in problems:
        lines = Verdict(problem).complaints(fastattn.attention)
        found += [f"{problem.name} {line}" for line in lines]
    passed(found)


@every_dtype
@parametrize("features", [PLAIN, *SINGLES], ids=name_of, fast=1)
def test_features(emulated, dtype, features):
    run_all([build(dims, features, DTYPES[dtype]) for dims in SHAPES])


@parametrize("features", PAIRS, ids=name_of, fast=13)
def test_pairs_of_features(emulated, features):
    """Each in one dtype, in turn."""
    dtype = DTYPES[NAMES[PAIRS.index(features) % 2]]
    run_all([build(dims, features, dtype) for dims in SMALL])


@parametrize("features", [PLAIN, *SINGLES], ids=name_of, fast=2)
def test_features_where_hardware_rounds_worst(emulated, features):
    """Tensor cores truncate products instead of rounding them, and exp2 has an error of 2 ulp."""
    emulated.options = dict(pessimistic=True)
    dtype = DTYPES[NAMES[len(features[0].name if features else "") % 2]]
    run_all([build(square(1, 2, 131, 32), features, dtype)])


def test_the_worst_rounding_is_another(emulated):
    problem = build(square(1, 2, 131, 32), (), torch.float16)
    right = problem.run(fastattn.attention)
    emulated.options = dict(pessimistic=True)
    found = problem.run(fastattn.attention)
    assert all(not torch.equal(x, right[name]) for name, x in found.items())


# Memory layouts in which chunks of 8 elements cannot be copied at once.
def shifted(x):
    memory = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


def with_wide_rows(x):
    memory = torch.full((*x.shape[:3], x.shape[3] + 4), torch.nan, dtype=x.dtype)
    memory[..., : x.shape[3]] = x
    return memory[..., : x.shape[3]]


def with_heads_apart(x):
    size = x.shape[2] * x.shape[3]
    memory = torch.full((*x.shape[:2], size + 4), torch.nan, dtype=x.dtype)
    memory[..., :size] = x.flatten(2)
    return memory[..., :size].unflatten(-1, x.shape[2:])


every_way = pytest.mark.parametrize("way", [shifted, with_wide_rows, with_heads_apart])


@pytest.mark.slow
@every_way
@parametrize("what", ["q", "k", "v", "dout"], fast=1)
def test_a_tensor_that_is_not_aligned(emulated, what, way):
    """Rows consist of whole chunks, and not all chunks, or none, are 16-byte aligned."""
    problem = build(square(1, 2, 70, 24), (), torch.bfloat16)
    right = problem.run(fastattn.attention)
    moved = replace(problem, **{what: way(getattr(problem, what))})
    found = moved.run(fastattn.attention)
    assert all(torch.equal(x, right[name]) for name, x in found.items())


@every_way
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_a_tensor_that_is_not_aligned_in_decoding(emulated, what, way):
    """In decoding, a tile of queries has rows of several heads."""
    emulated.sm_count = 8
    problem = build(Dims(1, 4, 2, 3, 300, 24, 24), (), torch.bfloat16)
    right = problem.run(fastattn.attention, backward=False)
    moved = replace(problem, **{what: way(getattr(problem, what))})
    found = moved.run(fastattn.attention, backward=False)
    assert torch.equal(found["out"], right["out"])
    assert emulated.splits > 1


# Padded size -> pairs of head dims. The last pair is odd, so that its rows are not aligned.
HEAD_DIMS = {
    "32": [(32, 32), (8, 24), (31, 1)],
    "64": [(64, 64), (40, 64), (33, 61)],
    "96": [(96, 96), (80, 72), (95, 65)],
    "128": [(128, 128), (112, 128), (97, 127)],
    "192 and 128": [(192, 128), (144, 128), (191, 99)],
    "192": [(192, 192), (160, 160), (131, 191)],
    "256": [(256, 256), (200, 256), (255, 193)],
}


@pytest.mark.slow
@every_dtype
@parametrize("general", [False, True], ids=["plain", "general"], fast=1)
@parametrize("padded", HEAD_DIMS, fast=1)
def test_head_dims(emulated, padded, general, dtype):
    """In every kernel, with a band that ends inside tiles."""
    features = [f for (f,) in SINGLES if f.name in ("bottom_right", "softcap")[: 1 + general]]
    dims = [Dims(1, 2, 1, 70, 67, d, dv) for d, dv in HEAD_DIMS[padded]]
    run_all([build(x, features, DTYPES[dtype]) for x in dims])


WIDE = [PLAIN, *[x for x in SINGLES if x[0].name in ("causal", "gqa", "dropout")]]


@pytest.mark.slow
@parametrize("features", WIDE, ids=name_of, fast=1)
@parametrize("d, n", [(64, 261), (128, 133)], ids=["64", "128"], fast=1)
def test_several_tiles_of_wide_heads(emulated, d, n, features):
    """Of rows and of keys, some full. The width decides what backward stores, and where."""
    run_all([build(square(1, 1, n, d), features, torch.bfloat16)])


HIDING = [x for x in SINGLES if x[0].group in ("causal", "window", "lengths", "mask", "queries")]


@parametrize("features", [PLAIN, *HIDING], ids=name_of, fast=8)
def test_hidden_keys_do_not_change_results(emulated, features):
    dims = square(1, 2, 67, 16)
    run_all([negative_logits(build(dims, features, torch.bfloat16))])


def by_columns(x):
    return x.mT.contiguous().mT


MASK_WAYS = (shifted, with_wide_rows, with_heads_apart, by_columns)


@pytest.mark.slow
@parametrize("N", [134, 135], ids=["even", "odd"], fast=1)
@parametrize(
    "dtype",
    [torch.bool, torch.bfloat16, torch.float16, torch.float32],
    ids=lambda x: str(x)[6:],
    fast=1,
)
def test_a_mask_in_memory_of_any_kind(emulated, dtype, N):
    """Mask elements are read in pairs, in one word or not, or one by one, with the same bits. The
    last tiles of keys and of rows are not full."""
    of_rows = torch.float16 if dtype == torch.float16 else torch.bfloat16
    problem = build(Dims(2, 2, 1, 70, N, 32, 32), (), of_rows)
    values = torch.randn(2, 2, 70, N, generator=torch.Generator().manual_seed(3))
    mask = values > -0.5 if dtype == torch.bool else values.to(dtype)
    run_all([replace(problem, kwargs=dict(mask=mask))])

    def out(mask):
        found = replace(problem, kwargs=dict(mask=mask)).run(fastattn.attention, backward=False)
        return found["out"]

    right, row = out(mask), mask[:1, :, :1]
    for way in MASK_WAYS[dtype == torch.bool :]:  # NaN as a bool is true, which would hide nothing
        assert torch.equal(out(way(mask)), right), way.__name__
    assert torch.equal(out(row), out(row.expand_as(mask).contiguous()))
    assert torch.equal(out(mask[..., :1]), out(mask[..., :1].expand_as(mask).contiguous()))


@pytest.mark.parametrize("cap", [0.5, 64.0, 64.5, 1e4])
@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0], ids=["tiny", "ordinary", "large"])
def test_a_cap_of_any_strength(emulated, cap, size):
    """For logits of any size, on both sides of the point where the formula changes."""
    problem = build(Dims(1, 2, 1, 37, 70, 32, 32), (), torch.bfloat16)
    problem.q.mul_(size)
    run_all([replace(problem, kwargs=dict(softcap=cap))])


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
@pytest.mark.parametrize("M", [1, 16, 63, 64, 65, 128, 129])
@parametrize("N", [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129], fast=2)
def test_lengths_around_tiles(emulated, M, N):
    run_all([build(Dims(1, 1, 1, M, N, 24, 24), (), torch.float16)])


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


def test_dropout_is_that_of_the_other_backends():
    """Bit for bit: with v = I the output shows which weights were kept."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 45, 24, generator=g).bfloat16() for _ in range(2))
    v = torch.eye(45).bfloat16().expand(2, 3, 45, 45)
    options = dict(dropout_p=0.4, seed=77)
    with everywhere():
        ours = fastattn.attention(q, k, v, **options)
    theirs = fastattn.attention(q, k, v, **options, backend="cpu")
    assert torch.equal(ours == 0, theirs == 0) and 0.3 < (ours == 0).float().mean() < 0.5


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
