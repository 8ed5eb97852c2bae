"""Gradients of captured tensors in Triton's kernels: by each kind of index, beside other arguments,
in each pass; the sums of their terms, which are exact in any order; indices out of range."""

import math

import pytest
import torch

import fastattn
from fastattn.backends.triton import captured_sums, tile_configs
from tests.support.backends import INTERPRETED
from tests.support.marks import parametrize

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]
if not INTERPRETED:
    pytest.skip("runs Triton's interpreter: make test-interpreter", allow_module_level=True)
triton = pytest.importorskip("triton")
import fastattn.kernels as kernels  # noqa: E402
import triton.language as tl  # noqa: E402

from tests.triton.test_triton_functions import (  # noqa: E402
    DOCUMENTS,
    B,
    H,
    M,
    N,
    close,
    tensors,
)

G = torch.Generator().manual_seed(5)

# What is added to scores, and the shape of x, the captured tensor.
INDICES = {
    "scalar": ((), lambda x, b, h, i, j: x * (i - j) * 0.1),
    "head": ((H,), lambda x, b, h, i, j: x[h] * (j - i) * 0.1),
    "item and head": ((B, H), lambda x, b, h, i, j: x[b, h] * torch.sin(i * j)),
    "row": ((64,), lambda x, b, h, i, j: x[i] * (j % 3)),
    "key": ((B, 64), lambda x, b, h, i, j: x[b, j]),
    "difference": ((H, M + N + 8), lambda x, b, h, i, j: x[h, i - j + N - 1]),
    "bucket": ((8, H), lambda x, b, h, i, j: x[((i - j).abs() // 4).clamp(max=7), h]),
    "documents": ((5, 5, 2), lambda x, b, h, i, j: x[DOCUMENTS[i], DOCUMENTS[j], h]),
    "twice": ((64,), lambda x, b, h, i, j: x[i] * x[j] + x[3]),
    "negative": ((64,), lambda x, b, h, i, j: x[-1 - j] + x[i - 64]),
    "parts": ((64, 3), lambda x, b, h, i, j: torch.dot(x[i], x[j]) / 4),
    "distance": ((64, 2), lambda x, b, h, i, j: -(x[i] - x[j]).norm()),
    "square": ((64,), lambda x, b, h, i, j: x[i] ** 2 * x[j].abs()),
}


def captured(name):
    draw = torch.Generator().manual_seed(3)
    return torch.randn(INDICES[name][0], generator=draw).requires_grad_()


def function(name, x):
    term = INDICES[name][1]
    return lambda s, b, h, i, j: s + term(x, b, h, i, j) * (1 + 0.1 * torch.tanh(s))


def gradients(name, backend, dtype=torch.float32, **given):
    """The output, and the gradients of x, q, k and v."""
    x, leaves = captured(name), tensors(dtype=dtype)
    out = fastattn.attention(*leaves, score_mod=function(name, x), backend=backend, **given)
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, *leaves])]


@parametrize("name", INDICES, fast=3)
def test_each_index(name):
    first, again = gradients(name, "triton"), gradients(name, "triton")
    close(first, gradients(name, "cpu"))
    assert all(torch.equal(x, y) for x, y in zip(first, again))


@pytest.mark.parametrize("name", ["head", "difference"])
def test_packed_and_weights(name):
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 30], [0, 21, 45]))
    found = []
    for backend in ("triton", "cpu"):
        x, (q, k, v) = captured(name), tensors()
        score = dict(score_mod=function(name, x), backend=backend)
        packed = [y[0].transpose(0, 1) for y in (q[:, :, :30], k, v)]
        about = dict(cu_q=cu_q, cu_k=cu_k, max_q=21, max_k=24)
        out = fastattn.attention_packed(*packed, **about, **score)
        weights = fastattn.attention_weights(q, k, **score)
        loss = out.square().sum() + weights.square().sum()
        found.append(torch.autograd.grad(loss, [x, q, k]))
    close(*found)


@pytest.mark.parametrize("sizes", [(0, N), (M, 0)], ids=["no row", "no key"])
def test_empty(sizes):
    x, leaves = captured("head"), tensors(M=sizes[0], N=sizes[1])
    out = fastattn.attention(*leaves, score_mod=function("head", x), backend="triton")
    assert not any(y.any() for y in torch.autograd.grad(out.sum(), [x, *leaves]))


def test_no_score_depends_on_what_is_captured():
    x = captured("row")

    def stepped(s, b, h, i, j):
        return s + torch.floor(x[i])

    for functions in (dict(score_mod=stepped), dict(mask_mod=lambda b, h, i, j: x[j] > -1)):
        q, k, v = tensors()
        out = fastattn.attention(q, k, v, backend="triton", **functions)
        of_x, of_q = torch.autograd.grad(out.square().sum(), [x, q], allow_unused=True)
        assert of_q.any() and (of_x is None or not of_x.any())


@pytest.mark.parametrize("value", [0.0, -1.0], ids=["infinite", "NaN"])
@pytest.mark.parametrize("backend", ["triton", "cpu"])
def test_hidden_pairs_have_no_part(backend, value):
    """Not even where the derivative is not finite, which is the case for a root of these values."""
    x = torch.tensor([2.0, value]).requires_grad_()
    q, k, v = tensors()
    given = dict(
        mask=torch.arange(N) != 4, score_mod=lambda s, b, h, i, j: s * x[(j == 4) * 1] ** 0.5
    )
    out = fastattn.attention(q, k, v, backend=backend, **given)
    first, second = torch.autograd.grad(out.square().sum(), x)[0]
    assert first.isfinite() and first and not second


# ---------------------------------------------------------------------------- indices out of range

SHORT = torch.randn(30, generator=G)
LOOK_BACK = torch.randn(12, generator=G)
HIDES = {  # arguments with which no pair is seen where SHORT[j - 7] is out of range
    "mask": dict(mask=torch.arange(N) < 30),
    "infinite mask": dict(mask=torch.where(torch.arange(N) < 30, 0.0, -torch.inf)),
    "mask_mod": dict(mask_mod=lambda b, h, i, j: j < 30),
    "lengths": dict(key_lengths=torch.tensor([29, 30])),
    "causal": dict(causal=True),
    "window": dict(window=(0, 0), place=fastattn.Place(0, 7, 0, 0, 37, 52)),
}


@pytest.mark.parametrize("rows", [M, 1])
@pytest.mark.parametrize("hides", HIDES)
def test_hidden_pairs_may_index_out_of_range(hides, rows):
    q, k, v = (x.detach() for x in tensors())
    given = HIDES[hides] | dict(score_mod=lambda s, b, h, i, j: s + SHORT[j - 7])
    close(*([fastattn.attention(q[:, :, :rows], k, v, backend=x, **given)] for x in BOTH))


@pytest.mark.parametrize("hides", HIDES)
def test_a_mask_mod_may_where_those_before_it_hide(hides):
    q, k, v = (x.detach() for x in tensors())
    given = dict(HIDES[hides])
    before, index = given.pop("mask_mod", None), lambda b, h, i, j: SHORT[j - 7] > 0
    given["mask_mod"] = fastattn.and_masks(*filter(None, (before, index)))
    close(*([fastattn.attention(q, k, v, backend=x, **given)] for x in BOTH))


BOTH = ("triton", "cpu")
SEES = {
    "mask": dict(mask=torch.arange(N) < 31),
    "lengths": dict(key_lengths=torch.tensor([29, 31])),
    "causal": dict(causal=True),
    "mask_mod": dict(mask_mod=lambda b, h, i, j: (j < 30) | ((h == 1) & (i == 36) & (j == 44))),
    "its own index": dict(score_mod=None, mask_mod=lambda b, h, i, j: LOOK_BACK[i] < 9),
    "an index that hides": dict(score_mod=None, mask_mod=lambda b, h, i, j: LOOK_BACK[i] > 9),
    "an index of nothing": dict(score_mod=None, mask_mod=lambda b, h, i, j: LOOK_BACK[:0][j] > 9),
    "a score of -inf": dict(
        score_mod=lambda s, b, h, i, j: torch.where(LOOK_BACK[i] > 9, 2 * s, -math.inf)
    ),
}


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("sees", SEES)
def test_a_seen_pair_may_not(sees, backend):
    q, k, v = (x.detach() for x in tensors())
    given = dict(score_mod=lambda s, b, h, i, j: s + SHORT[j], backend=backend) | SEES[sees]
    with pytest.raises(IndexError, match="indexes a captured tensor out of range at a pair"):
        fastattn.attention(q, k, v, **given)
    with pytest.raises(IndexError, match="indexes a captured tensor out of range at a pair"):
        fastattn.attention_weights(q, k, **given)


FUNCTIONS = {
    "score_mod": dict(score_mod=lambda s, b, h, i, j: s + SHORT[j]),
    "mask_mod that hides": dict(mask_mod=lambda b, h, i, j: SHORT[j] > 9),
}


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_indices_of_packed_sequences(function, backend):
    """They count within the sequence. Of its last keys only the second sequence has too many."""
    given = dict(backend=backend, **FUNCTIONS[function])
    packed = [x.detach()[0].transpose(0, 1) for x in tensors(M=45)]
    for middle in (20, 10):
        cu = torch.tensor([0, middle, 45], dtype=torch.int32)
        about = dict(cu_q=cu, cu_k=cu, max_q=35, max_k=35)
        if middle == 20:
            assert fastattn.attention_packed(*packed, **about, **given).isfinite().all()
            continue
        with pytest.raises(IndexError, match="indexes a captured tensor out of range at a pair"):
            fastattn.attention_packed(*packed, **about, **given)


# ---------------------------------------------------------------------------------------- the sums


@triton.jit
def add_all(sums, count, index, terms, SHIFT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    row, key = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)[None, :]
    at = row * KEYS + key
    kernels.program_functions.add_to_sums(
        sums, count, tl.load(index + at), tl.load(terms + at), SHIFT
    )


def summed(index, terms, count, shift):
    sums = captured_sums.new_sums(torch.empty(count), shift)
    add_all[(1,)](sums, count, index, terms, SHIFT=shift, ROWS=index.shape[0], KEYS=index.shape[1])
    return captured_sums.total(sums, shift, torch.float64)


@pytest.mark.parametrize("shift", [1, 2, 3, 4])
def test_sums_are_exact_in_any_order(shift):
    """Of numbers of every exponent, subnormal ones too."""
    draw = torch.Generator().manual_seed(shift)
    words = torch.randint(-(2**31), 2**31, (32, 64), generator=draw).to(torch.int32)
    terms = words.view(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    terms[:, ::5] = 1.5 * terms[:, ::5].sign()
    index = torch.randint(0, 7, terms.shape, generator=draw)
    tiny = torch.randint(0, 2**23, terms.shape, generator=draw).to(torch.int32).view(torch.float32)
    terms = torch.where(index == 6, tiny, terms)
    found = summed(index, terms, 7, shift)
    order = torch.randperm(terms.numel(), generator=draw)
    mixed = [x.flatten()[order].view(terms.shape) for x in (index, terms)]
    assert torch.equal(found, summed(*mixed, 7, shift))
    for at in range(7):
        exact = math.fsum(terms[index == at].tolist())
        assert found[at].item() == pytest.approx(exact, rel=1e-15, abs=0)
    cancelled = summed(index // 7, torch.cat([terms[:16], -terms[:16]]), 1, shift)
    assert cancelled.item() == 0.0


def test_terms_that_are_not_finite():
    inf, nan = math.inf, math.nan
    terms = torch.tensor([[1.0, 2, inf, 1, -inf, 1, inf, -inf, nan, 5] + [0.0] * 6])
    index = torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3, 4, 4] + [0] * 6])
    found = summed(index.repeat(2, 1), terms.repeat(2, 1), 5, 4)
    torch.testing.assert_close(
        found, torch.tensor([6.0, inf, -inf, nan, nan]).double(), equal_nan=True
    )


def test_an_index_out_of_range_is_the_nearest_in_range():
    terms = torch.ones(1, 16)
    index = torch.arange(-8, 8)[None]
    assert summed(index.repeat(2, 1), terms.repeat(2, 1), 3, 4).tolist() == [18.0, 2.0, 12.0]


@pytest.mark.parametrize("terms", [1, 2**10, 2**24, 2**24 + 1, 2**32, 2**33, 2**36, 2**38])
def test_no_sum_overflows(terms):
    shift = captured_sums.shift_of(terms)
    largest = (2**24 - 1) << (2**shift - 1)
    assert terms * largest < 2**63
    assert shift == 4 or 2 * terms * ((2**24 - 1) << (2 ** (shift + 1) - 1)) >= 2**63


def test_the_pass_is_not_tuned():
    """A second launch would add its terms again."""
    tile = tile_configs.config("dq_captured", 90, 2, 64, ())
    assert not tile_configs.candidates("dq_captured", tile)
