"""Tests for Triton alone: helpers that work around the interpreter's faults, ranges of blocks, the
order of programs, split keys, tensor descriptors, and the tiles used on GPUs."""

import itertools
from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.backends.triton import autotune, job, tile_configs
from fastattn.backends.triton.arguments import describable
from tests.support.backends import INTERPRETED, every_backend, everywhere, passed
from tests.support.cases import (
    DTYPES,
    FEATURE,
    PLAIN,
    Dims,
    build,
    name_of,
    negative_logits,
    square,
)
from tests.support.error_budget import Verdict

pytestmark = pytest.mark.usefixtures("one_thread")
if not INTERPRETED:
    pytest.skip("runs Triton's interpreter: make test-interpreter", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = triton.language
score = pytest.importorskip("fastattn.kernels.score")
tile = pytest.importorskip("fastattn.kernels.tile")


@triton.jit
def elementwise(x, y, z, out, WHAT: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    if WHAT == "narrow":
        value = tile.narrow(tl.load(x + i), out.dtype.element_ty)
    elif WHAT == "fma":
        value = tile.fma(tl.load(x + i), tl.load(y + i), tl.load(z + i))
    else:
        value = score.tanh(tl.load(x + i) * (2 * score.LOG2E))
    tl.store(out + i, value)


@triton.jit
def product(a, b, out, F: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    zero = tl.full([SIZE, SIZE], 0, tl.float32)
    tl.store(out + at, tile.dot(tl.load(a + at), tl.load(b + at), zero, F))


@triton.jit
def places(out, n, heads, together, BLOCK: tl.constexpr, DESCENDING: tl.constexpr):
    t, b, h = score.tile_of_program(n, BLOCK, heads, together, DESCENDING)
    at = out + tl.program_id(0) * 3
    tl.store(at, t)
    tl.store(at + 1, b)
    tl.store(at + 2, h)


@triton.jit
def ranges(
    out, start, size, call, length, diagonal,
    F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    item = score.Item(0, call.M, call.N, 0, 0, length, diagonal)
    if ROWS:
        found = score.row_range(start, size, item, call, BLOCK)
    else:
        found = score.key_range(start, start + size, item, call, BLOCK)
    for x in tl.static_range(4):
        tl.store(out + x, found[x])
    for part in tl.static_range(2):  # count the visits of each block, as WHOLE or at EDGES
        lo, hi = score.span(found, part)
        for x in tl.range(lo, hi, BLOCK):
            to = out + 4 + 2 * (score.block_at(x, found, BLOCK, F, part) // BLOCK) + part
            tl.store(to, tl.load(to) + 1)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ what the interpreter gets wrong


@every_backend
def test_products_of_bfloat16_are_exact(name):
    a, b = randn(32, 32).bfloat16(), randn(32, 32, seed=1).bfloat16()
    out = torch.empty(32, 32)
    product[(1,)](a, b, out, F=score.Flags(scaled=True), SIZE=32)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=0, atol=1e-5)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_rounded_to_nearest_even(name, dtype):
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-11, 0.0, -0.0, 1.0])
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.3895e38, 65504.0, 1e-30])
    x = torch.cat([ties, special, randn(243) * 100])
    out = torch.empty(256, dtype=dtype)
    elementwise[(1,)](x, x, x, out, WHAT="narrow", SIZE=256)
    assert torch.equal(out.nan_to_num(7.0), x.to(dtype).nan_to_num(7.0))


@every_backend
def test_fma_rounds_once(name):
    x, y = randn(256) * 1000, randn(256, seed=1)
    z, out = -(x * y), torch.empty(256)
    elementwise[(1,)](x, y, z, out, WHAT="fma", SIZE=256)
    assert torch.equal(out, (x.double() * y.double() + z.double()).float()) and out.any()


@every_backend
def test_tanh_is_accurate_near_zero_and_far_from_it(name):
    x = torch.cat([torch.logspace(-20, 2, 128), -torch.logspace(-6, 1, 128)])
    out = torch.empty(256)
    elementwise[(1,)](x, x, x, out, WHAT="tanh", SIZE=256)
    torch.testing.assert_close(out.double(), x.double().tanh(), rtol=8e-7, atol=0)


@every_backend
def test_a_softcap_far_above_the_logits_changes_nothing(name):
    """1 - 2 / (e^2x + 1) would lose a tenth of a logit here."""
    q, k, v = (randn(1, 2, 40, 16, seed=x).requires_grad_() for x in range(3))
    found = []
    for softcap in (None, 1e6):
        out = fastattn.attention(q, k, v, softcap=softcap, backend=name)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-6)


# -------------------------------------------------------------------------------- blocks, programs


@every_backend
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("together", [1, 2, 3, 100])
def test_every_tile_of_every_head_has_one_program(name, together, descending):
    n, block, batch, heads = 70, 16, 2, 3
    out = torch.full((5 * batch * heads, 3), -1, dtype=torch.int32)
    places[(len(out),)](out, n, heads, together, BLOCK=block, DESCENDING=descending)
    expected = itertools.product(range(5), range(batch), range(heads))
    assert sorted(map(tuple, out.tolist())) == sorted(expected)
    firsts = {out[i, 0].item() for i in range(min(together, batch * heads))}
    assert firsts == {4 if descending else 0}  # the longest tiles of these heads come first


BANDS = [(1000, 1000), (1000, 0), (0, 0), (3, 5), (20, 0), (0, 20), (17, 40), (40, 2)]


@every_backend
@pytest.mark.parametrize("rows", [False, True], ids=["keys_of_rows", "rows_of_keys"])
@pytest.mark.parametrize("left, right", BANDS)
def test_ranges_of_blocks_contain_the_visible_keys(name, rows, left, right):
    """For every pair (i, j): no visible pair is left out, no pair in a WHOLE block is hidden, and
    both loops together visit each block once."""
    block, size = 8, 16
    for M, N, length, bottom_right in itertools.product((1, 37), (41,), (0, 9, 41), (False, True)):
        call = score.Call(*[0] * len(score.Call._fields))._replace(M=M, N=N, left=left, right=right)
        shift = length - M if bottom_right else 0
        i, j = torch.arange(M)[:, None] + shift, torch.arange(N)[None, :]
        seen = (j >= i - left) & (j <= i + right) & (j < length)
        seen = seen.T if rows else seen
        for start in range(0, len(seen), size):
            out = torch.zeros(4 + 2 * 6, dtype=torch.int32)
            stop = size if rows else min(size, M - start)
            given = (out, start, stop, call, length, shift)
            ranges[(1,)](*given, F=score.Flags(scaled=True), ROWS=rows, BLOCK=block)
            first, full, tail, last = edges = out[:4].tolist()
            case = (M, N, length, shift, start, edges)
            assert first <= full <= tail and (first % block == 0 or first == last), case
            here = seen[start : start + size]
            outside = here.any(0)
            outside[first:last] = False
            assert not outside.any(), case
            assert here[:, full:tail].all() and (full == tail or tail <= here.shape[1]), case
            assert first < last or not here.any(), case  # no block unless needed
            if full < tail:
                assert full % block == 0 and (tail % block == 0 or tail == last), case
            for b, visits in enumerate(out[4:].view(-1, 2).tolist()):
                whole = full <= b * block < tail
                expected = [int(whole), int(first <= b * block < last and not whole)]
                assert visits == expected, (case, b)


# ------------------------------------------------------------------------------------- split keys


@every_backend
@pytest.mark.parametrize("splits", [2, 3, 7])
def test_splits_that_hold_no_key(name, splits, monkeypatch):
    """Lengths of 0 and 1 leave most splits, and some rows, with nothing."""
    monkeypatch.setattr(tile_configs, "splits", lambda *sizes: splits)
    features = (FEATURE["lengths"], FEATURE["sinks"], FEATURE["lse_loss"])
    for chosen in (features[:1], features, (FEATURE["window"],)):
        problem = build(Dims(4, 2, 1, 3, 170, 16, 16), chosen, torch.float32)
        problem.kwargs |= {"causal": "bottom_right"}
        passed(everywhere(name, Verdict(problem, backward=False)))
        passed(everywhere(name, Verdict(negative_logits(problem), backward=False)))


@every_backend
def test_more_packed_rows_than_a_tile(name):
    problem = build(Dims(1, 40, 2, 9, 170, 16, 16), (FEATURE["causal"],), torch.float32)
    passed(everywhere(name, Verdict(problem, backward=False)))


# ---------------------------------------------------------- tensor descriptors, and GPUs' own tiles

EVERYTHING = ("lengths", "bottom_right", "window", "alibi", "softcap", "float_mask", "sinks")
EVERYTHING = tuple(FEATURE[name] for name in (*EVERYTHING, "dropout", "gqa"))


@every_backend
@pytest.mark.parametrize("arch", [75, 80, 90])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("features", [PLAIN, (FEATURE["causal"],), EVERYTHING], ids=name_of)
def test_tiles_of_a_gpu(name, arch, dtype, features, monkeypatch):
    """The tiles of a T4, an A100 and an H100, the last with tensor descriptors."""
    monkeypatch.setattr(job, "architecture", lambda device: arch)
    seen = []
    monkeypatch.setattr(job.Job, "launch", spy(job.Job.launch, seen))
    problem = build(square(1, 2, 150, 64), features, DTYPES[dtype])
    passed(everywhere(name, Verdict(problem)))
    assert {flags.tma for flags in seen} == {arch == 90 and dtype == "bfloat16"}


def spy(launch, seen):
    def watched(job, *args, **kwargs):
        seen.append(job.flags)
        return launch(job, *args, **kwargs)

    return watched


@every_backend
@pytest.mark.parametrize("layout", ["offset_slices", "column_major", "expanded", "token_major"])
def test_descriptors_only_where_strides_allow(name, layout, monkeypatch):
    monkeypatch.setattr(job, "architecture", lambda device: 90)
    problem = build(square(1, 2, 70, 16), (FEATURE[layout],), torch.bfloat16)
    able = all(map(describable, (problem.q, problem.k, problem.v)))
    assert able == (layout in ("token_major", "expanded"))
    passed(everywhere(name, Verdict(problem)))


@every_backend
@pytest.mark.parametrize("others", ["plain", "left_window+softcap", "bottom_right+softcap"])
def test_descriptors_read_no_key_past_the_length(name, others, monkeypatch):
    """Keys past the lengths are NaN, in one item all of them."""
    monkeypatch.setattr(job, "architecture", lambda device: 90)
    features = (FEATURE["lengths"], *(FEATURE[x] for x in others.split("+") if x != "plain"))
    problem = build(square(4, 2, 70, 16), features, torch.bfloat16)
    assert problem.k.isnan().any()
    passed(everywhere(name, Verdict(problem)))


@every_backend
def test_a_scale_that_vanishes_in_base_two(name):
    q, v = randn(1, 1, 70, 16), randn(1, 1, 70, 16, seed=1)
    out = fastattn.attention(q, q, v, scale=1e-45, causal=True, backend=name)
    counts = torch.arange(1, 71.0)[:, None]
    torch.testing.assert_close(out, v.cumsum(2) / counts)


@every_backend
def test_a_scale_at_the_end_of_the_range(name):
    q, k, v = randn(1, 1, 9, 16) * 1e-38, randn(1, 1, 70, 16), randn(1, 1, 70, 16, seed=1)
    q = q.clamp(min=1.2e-38)  # normal numbers
    out = fastattn.attention(q, k, v, scale=3e38, backend=name)
    exact = fastattn.reference.attention(q.double(), k.double(), v.double(), scale=3e38)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=3e-5)


@every_backend
def test_strong_dropout_in_float16(name):
    """P / (1 - p) may overflow float16 although dV does not."""
    p, seed = 0.99999, 302
    kept = fastattn.reference.keep_mask((1, 1, 64, 1), p, seed).sum().item()
    assert kept
    q, k = torch.zeros(1, 1, 64, 16).half(), torch.zeros(1, 1, 1, 16).half()
    v = k.clone().requires_grad_()
    out = fastattn.attention(q, k, v, dropout_p=p, seed=seed, backend=name)
    (dv,) = torch.autograd.grad(out, v, torch.full_like(out, 1e-3))
    torch.testing.assert_close(dv, torch.full_like(dv, kept * 1e-3 / (1 - p)), rtol=2e-3, atol=0)


@every_backend
@pytest.mark.parametrize("average", [False, True], ids=["per_head", "mean"])
def test_no_query_heads_with_key_heads(name, average):
    q = torch.empty(1, 0, 3, 8)
    k, v = (torch.ones(1, 2, 4, 8, requires_grad=True) for _ in "kv")
    out = fastattn.attention(q, k, v, backend=name)
    dk, dv = torch.autograd.grad(out.sum(), (k, v))
    assert not dk.any() and not dv.any()
    weights = fastattn.attention_weights(q, k.detach(), average_heads=average, backend=name)
    assert weights.shape == ((1, 3, 4) if average else (1, 0, 3, 4)) and weights.isnan().all()


@every_backend
@pytest.mark.parametrize("features", ["causal+gqa", "dropout"])
def test_keys_and_values_have_gradients_of_their_own(name, features, monkeypatch):
    """dK and dV do not depend on whether the other is requested; only requested ones are made."""
    made = []
    monkeypatch.setattr(job.Job, "walk_rows", spied(job.Job.walk_rows, made))
    features = [FEATURE[x] for x in features.split("+")]
    problem = build(square(1, 2, 70, 16), features, torch.bfloat16)
    both = problem.run(fastattn.attention, backend=name)
    for wanted in ("k", "v"):
        alone = replace(problem, needs_grad=(wanted,)).run(fastattn.attention, backend=name)
        assert torch.equal(alone[f"d{wanted}"], both[f"d{wanted}"])
    assert made == [(True, True), (True, False), (False, True)]


@every_backend
def test_large_heads_have_a_launch_for_each(name, monkeypatch):
    problem = build(square(1, 2, 40, 16), [FEATURE["causal"]], torch.float32)
    together, made = problem.run(fastattn.attention, backend=name), []
    monkeypatch.setattr(job.Job, "walk_rows", spied(job.Job.walk_rows, made))
    monkeypatch.setattr(tile_configs, "apart", lambda *about: True)
    apart = problem.run(fastattn.attention, backend=name)
    assert made == [(True, True), (True, False), (False, True)]
    assert torch.equal(apart["dk"], together["dk"]) and torch.equal(apart["dv"], together["dv"])


@every_backend
def test_a_kernel_with_fewer_outputs_has_its_own_search(name, monkeypatch):
    """The best tile for dK alone may be too large for dK and dV together."""
    keys = []
    monkeypatch.setattr(job, "architecture", lambda device: 90)
    monkeypatch.setattr(autotune, "active", lambda device: True)
    monkeypatch.setattr(
        autotune, "best", lambda key, device, tile, *others: keys.append(key) or tile
    )
    problem = build(square(1, 1, 20, 16), (), torch.float32)
    for needs_grad in ("k", "kv"):
        replace(problem, needs_grad=tuple(needs_grad)).run(fastattn.attention, backend=name)
    assert len({key for key in keys if key.which in ("dk", "dkv")}) == 2


def spied(walk, made):
    def watched(job, dk, dv):
        made.append((dk is not None, dv is not None))
        return walk(job, dk, dv)

    return watched


@every_backend
def test_an_expanded_gradient_is_read_as_any_other(name, monkeypatch):
    """The gradient of out.sum() is one expanded number, which no tensor descriptor supports."""
    monkeypatch.setattr(job, "architecture", lambda device: 90)
    seen = []
    monkeypatch.setattr(job.Job, "launch", spy(job.Job.launch, seen))
    q, k, v = (randn(1, 2, 70, 16, seed=x).bfloat16().requires_grad_() for x in range(3))
    out = fastattn.attention(q, k, v, backend=name)
    found = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(map(torch.equal, found, expected)) and all(flags.tma for flags in seen)
