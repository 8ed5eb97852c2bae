"""Values and storage that broke other kernels: NaN, infinities, range limits, huge strides."""

import mmap
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import fastattn
from fastattn.backends.base import get
from tests.gpu_emulation import emulated
from tests.gpu_emulation.emulator import needs_emulator
from tests.semantics.test_weights import about_weights
from tests.support.backends import (
    INTERPRETED,
    declares,
    every_backend,
    every_dtype,
    everywhere,
    not_interpreted,
    on_variants,
    passed,
    small,
)
from tests.support.cases import DTYPES, FEATURE, Dims, build
from tests.support.error_budget import Verdict
from tests.support.large_logit_rows import LARGE, ROWS, far_problem
from tests.support.marks import parametrize

pytestmark = pytest.mark.usefixtures("one_thread")
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # a constant of mmap from Python 3.13 on


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@every_dtype
@every_backend
def test_nan_query_stays_in_its_row(name, dtype):
    declares(name, DTYPES[dtype])
    q, k, v = (randn(1, 2, 70, 16, dtype=DTYPES[dtype], seed=x) for x in range(3))
    for kwargs in ({}, dict(causal=True), dict(softcap=3.0), dict(window=(9, 0))):
        for isa in on_variants(name):
            clean = fastattn.attention(q, k, v, **kwargs, backend=name)
            spoiled = q.clone()
            spoiled[0, 1, 37, 5] = torch.nan
            out, lse = fastattn.attention(spoiled, k, v, **kwargs, return_lse=True, backend=name)
            assert out[0, 1, 37].isnan().all() and lse[0, 1, 37].isnan(), (kwargs, isa)
            out[0, 1, 37] = clean[0, 1, 37]
            assert torch.equal(out, clean), (kwargs, isa)


@every_backend
def test_an_infinite_mask_value_stays_in_its_row(name):
    """+inf in a mask gives NaN in that row only, as in torch."""
    q, k, v = (randn(1, 1, 70, 16, seed=x) for x in range(3))
    mask = randn(70, 70)
    clean = {isa: fastattn.attention(q, k, v, mask=mask, backend=name) for isa in on_variants(name)}
    mask[20, 33] = torch.inf
    for isa in on_variants(name):
        out = fastattn.attention(q, k, v, mask=mask, backend=name)
        assert out[0, 0, 20].isnan().all(), isa
        out[0, 0, 20] = clean[isa][0, 0, 20]
        assert torch.equal(out, clean[isa]), isa


# Backends with the normaliser as two numbers in the backward pass and in weights. "triton" runs in
# its interpreter, "cuda" in the emulator.
TWO_NUMBERS = ("reference", "cpu", "triton", "cuda")
FAR = [
    pytest.param(
        name,
        dtype,
        marks=[pytest.mark.interpreter] * INTERPRETED + [needs_emulator] * (name == "cuda"),
    )
    for name in TWO_NUMBERS
    for dtype in DTYPES
    if INTERPRETED == (name == "triton") and DTYPES[dtype] in get(name).support.dtypes
]


@pytest.mark.slow
@parametrize("value", LARGE, fast=1)
@parametrize("title", ROWS, fast=1)
@parametrize("name, dtype", FAR, fast=2)
def test_rows_far_from_zero(name, dtype, title, value):
    """Outputs, the LSE and all gradients; and the weights, which sum to 1, with their gradients."""
    problem, found = far_problem(title, value, dtype), []
    with emulated.everywhere() if name == "cuda" else nullcontext():
        chosen = None if name == "cuda" else name
        found += everywhere(chosen, Verdict(problem))
        if dtype in small(list(DTYPES), ["float32"]):  # in the interpreter, only float32
            problem.kwargs.pop("return_lse", None)
            found += about_weights(chosen, replace(problem, dlse=None), average=False)
    passed(found)


@every_dtype
@every_backend
def test_keys_past_the_end_are_never_read(name, dtype):
    """NaN, infinities, large numbers and zeros past key_lengths give bitwise the same results: a
    maximum may ignore NaN."""
    declares(name, DTYPES[dtype])
    lengths, results = [0, 1, 65, 130], []
    for garbage in (0.0, torch.nan, torch.inf, -3e4, 3e4):
        problem = build(Dims(4, 2, 1, 33, 130, 16, 24), (), DTYPES[dtype])
        problem.kwargs |= dict(key_lengths=torch.tensor(lengths), causal="bottom_right")
        for b, length in enumerate(lengths):
            problem.k[b, :, length:] = problem.v[b, :, length:] = garbage
        each = [problem.run(fastattn.attention, backend=name) for _ in on_variants(name)]
        results.append(each)
        for one, first in zip(each, results[0], strict=True):
            assert all(torch.equal(one[x], first[x]) for x in first), garbage
            for b, length in enumerate(lengths):
                assert not one["dk"][b, :, length:].any() and not one["dv"][b, :, length:].any()


@every_dtype
@every_backend
@pytest.mark.parametrize("rows", [1, 9])
def test_a_bool_mask_hides_a_nan_score(name, dtype, rows):
    """A bool mask replaces the score, rather than adding -inf to it."""
    declares(name, DTYPES[dtype])
    problem = build(Dims(1, 2, 2, rows, 37, 16, 16), (FEATURE["bool_mask"],), DTYPES[dtype])
    problem.kwargs["mask"][..., 3] = False
    for isa in on_variants(name):
        clean = problem.run(fastattn.attention, backward=False, backend=name)["out"]
        k = problem.k.index_fill(2, torch.tensor([3]), torch.nan)
        found = replace(problem, k=k).run(fastattn.attention, backward=False, backend=name)["out"]
        assert torch.equal(found, clean), isa


@every_backend
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("offset", [-6e4, -1e3, 1e3, 6e4])
def test_logits_far_from_zero(name, dtype, offset):
    """Shifting all logits does not change a softmax, by -60,000 or by 60,000.

    The logits are whole numbers, so every dtype computes them without error.
    """
    declares(name, DTYPES[dtype])
    dtype = DTYPES[dtype]
    n = 150
    q = torch.ones(1, 1, 9, 16, dtype=dtype)
    k = torch.zeros(1, 1, n, 16, dtype=dtype)
    k[..., 0] = 256 * round(offset / 256)  # exact in bfloat16, too
    k[..., 1] = (torch.arange(n) % 7 - 3).to(dtype)
    v = randn(1, 1, n, 16, dtype=dtype)
    probabilities = torch.softmax(k[0, 0, :, 1].double(), 0)
    want = (probabilities @ v[0, 0].double()).expand(9, -1)
    shift = k[0, 0, 0, 0].double()
    want_lse = shift + torch.logsumexp(k[0, 0, :, 1].double(), 0)
    eps = torch.finfo(dtype).eps
    for isa in on_variants(name):
        out, lse = fastattn.attention(q, k, v, scale=1.0, return_lse=True, backend=name)
        bound = dict(rtol=0, atol=(2 if dtype == torch.bfloat16 else 32) * eps, msg=str(isa))
        torch.testing.assert_close(out[0, 0].double(), want, **bound)
        bound = dict(rtol=4 * torch.finfo(lse.dtype).eps, atol=0, msg=str(isa))
        torch.testing.assert_close(lse[0, 0].double(), want_lse.expand(9), **bound)


@every_backend
def test_half_products_overflow(name):
    """q.k above 65504 does not overflow float16 before the scale makes it small."""
    q = torch.full((1, 1, 5, 64), 60.0, dtype=torch.float16)
    k = randn(1, 1, 70, 64, dtype=torch.float16, seed=1).sign() * 60
    k[0, 0, 0] = 60.0  # its product is 230400
    v = randn(1, 1, 70, 64, dtype=torch.float16)
    exact = fastattn.reference.attention(q.double(), k.double(), v.double(), scale=1e-4)
    for isa in on_variants(name):
        out = fastattn.attention(q, k, v, scale=1e-4, backend=name)
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-3, msg=str(isa))


@every_backend
def test_strides_past_32_bits(name):
    """Heads are 2^31 elements apart, in memory that is reserved but mostly never touched."""
    heads, n, dim, far = 2, 9, 8, 2**31 + 8
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, 4 * (far + n * dim), flags=flags)
    flat = torch.frombuffer(memory, dtype=torch.float32)
    k = flat.as_strided((1, heads, n, dim), (0, far, dim, 1))
    k.copy_(randn(1, heads, n, dim))
    q, mask = randn(1, heads, n, dim, seed=1), flat.as_strided((1, heads, n, n), (0, far, 1, 7))
    want = fastattn.reference.attention(*(x.double() for x in (q, k, k)), mask=mask.double())
    for isa in on_variants(name):
        out = fastattn.attention(q, k, k, mask=mask, backend=name)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5, msg=str(isa))


@not_interpreted
@every_backend
@pytest.mark.parametrize("batch, heads", [(70_000, 1), (1, 70_000), (300, 300)])
def test_more_heads_than_16_bits(name, batch, heads):
    q, k, v = (randn(batch, heads, 1, 2, seed=x) for x in range(3))
    out = fastattn.attention(q, k, v, backend=name)
    assert torch.equal(out, v)  # with one key, the output is its value


@every_backend
@pytest.mark.parametrize("scored", [False, True])
def test_inference_then_training(name, scored):
    """A call in inference mode caches nothing that breaks a later training call, and has its
    bits."""
    q, k, v = (randn(1, 2, 70, 8, seed=x) for x in range(3))
    given = dict(causal=True, backend=name)
    if scored:
        given |= dict(mask=randn(70, 70, seed=3), sinks=randn(2, seed=4), softcap=3.0)
        given |= dict(dropout_p=0.3, seed=5)
    with torch.inference_mode():
        first = fastattn.attention(q, k, v, **given)
    q.requires_grad_()
    out = fastattn.attention(q, k, v, **given)
    assert torch.equal(out, first) and out.requires_grad
    out.sum().backward()
    assert q.grad.isfinite().all()


@every_dtype
@every_backend
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_infinite_key_leaves_other_gradients_finite(name, dtype, softcap):
    """Tile lanes past the last row compute 0 * inf = NaN, which may not reach a sum over rows."""
    declares(name, DTYPES[dtype])
    q = randn(1, 1, 5, 8, dtype=DTYPES[dtype]).abs()
    k, v = (randn(1, 1, 9, 8, dtype=DTYPES[dtype], seed=seed) for seed in (1, 2))
    k[0, 0, 3] = -torch.inf
    leaves = [x.requires_grad_() for x in (k, v, torch.zeros(1, 1, 1, 9, dtype=k.dtype))]
    for isa in on_variants(name):
        out = fastattn.attention(q, k, v, mask=leaves[2], softcap=softcap, backend=name)
        grads = torch.autograd.grad(out.sum(), leaves)
        assert all(x.isfinite().all() for x in grads), isa


@not_interpreted
@every_backend
def test_window_edge_is_exact_where_float32_cannot_count(name):
    """The only nonzero value is at the window's left edge, 2^24 + 1 keys behind the row."""
    left, N = (1 << 24) + 1, (1 << 25) + 8
    q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1).expand(1, 1, N, 1)
    v = torch.zeros(1, 1, N, 1)
    v[0, 0, N - 1 - left] = 1
    out = fastattn.attention(q, k, v, causal="bottom_right", window=(left, 0), backend=name)
    assert out.item() * (left + 1) == pytest.approx(1, rel=1e-4)
