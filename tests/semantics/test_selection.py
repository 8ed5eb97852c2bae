"""top_blocks and lightning_index against their dense forms. Numbers are small and whole, so sums
are exact in any order, and many scores are equal."""

import itertools
import math
import subprocess
import sys

import pytest
import torch

import fastattn
from fastattn.selection.highest import highest
from tests.support.backends import not_interpreted, variant, variants
from tests.support.cases import DTYPES
from tests.support.marks import parametrize

pytestmark = [pytest.mark.usefixtures("one_thread"), not_interpreted]
CAUSAL = (False, True, "bottom_right")


def whole(*shape, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=draw).to(dtype)


def hide(scores, causal, key_lengths, block=1):
    """-inf where a row may not look: scores (B,..,M,N), each column a block of keys."""
    B, M, columns = scores.shape[0], *scores.shape[-2:]
    length = torch.full((B,), KEYS) if key_lengths is None else key_lengths
    last = (length - 1)[:, None].expand(B, M)
    if causal:
        shift = (length - M)[:, None] if causal == "bottom_right" else 0
        last = torch.minimum(last, torch.arange(M) + shift)
    last = last.view(B, *(1,) * (scores.ndim - 3), M, 1)
    return scores.masked_fill(torch.arange(columns) * block > last, -torch.inf), last


def by_sorting(scores, count):
    """The definition: sort, first ones first; then in ascending order, -1 at the end."""
    n = scores.shape[-1]
    scores = torch.cat([scores, scores.new_full((*scores.shape[:-1], count), -torch.inf)], -1)
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    places = places[..., :count].masked_fill(values[..., :count] == -torch.inf, n)
    places = places.sort(-1).values
    return places.masked_fill(places == n, -1)


KEYS = 300
INDEX = {
    "one head": (1, 16, 13),
    "4 heads": (4, 37, 13),
    "17 heads": (17, 32, 9),
    "64 heads, D 128": (64, 128, 3),
    "70 heads, D 1": (70, 1, 5),
}


@parametrize("isa", variants("cpu"), fast=1)
@parametrize("dtype", DTYPES, fast=2)
@parametrize("sizes", INDEX, fast=2)
def test_the_indexer_is_its_dense_form(sizes, dtype, isa):
    H, D, M = INDEX[sizes]
    q, k = whole(2, H, M, D, dtype=DTYPES[dtype]), whole(2, KEYS, D, dtype=DTYPES[dtype])
    w = whole(2, H, M, seed=1)
    products = torch.relu(q.double() @ k.double()[:, None].mT)
    every_score = (products * w[..., None]).sum(1)
    cases = itertools.product(CAUSAL, (None, torch.tensor([KEYS - 7, 5])), (0, 3, 129, 400))
    with variant(isa):
        for causal, lengths, count in cases:
            found = fastattn.lightning_index(q, k, w, count, causal=causal, key_lengths=lengths)
            scores, _ = hide(every_score, causal, lengths)
            assert found.dtype == torch.int32
            assert torch.equal(found[:, 0], by_sorting(scores, count).int())


@pytest.mark.parametrize("layout", ("tokens", "columns first"))
def test_strides_of_the_indexer(layout):
    q, k, w = whole(2, 4, 13, 20), whole(2, KEYS, 20), whole(2, 4, 13)
    expected = fastattn.lightning_index(q, k, w, 17)
    if layout == "tokens":
        q, w = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, w))
        k = torch.cat([k, k], -1)[..., :20]
    else:
        q, k, w = (x.mT.contiguous().mT for x in (q, k, w))
    assert torch.equal(fastattn.lightning_index(q, k, w, 17), expected)
    assert torch.equal(fastattn.lightning_index(q, k[:, None], w, 17), expected)


def test_threads_choose_the_same_keys(threads):
    q, k, w = torch.randn(2, 8, 100, 32), torch.randn(2, 500, 32), torch.rand(2, 8, 100)
    one = fastattn.lightning_index(q, k, w, 40, causal="bottom_right")
    threads(3)
    assert torch.equal(one, fastattn.lightning_index(q, k, w, 40, causal="bottom_right"))


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_numbers_that_are_none_are_chosen_last(dtype):
    """Scores 2, NaN, infinity, 0, 0 and 1."""
    q, w = torch.ones(1, 1, 1, 1, dtype=DTYPES[dtype]), torch.ones(1, 1, 1)
    k = torch.tensor([2.0, torch.nan, torch.inf, 0.0, -0.0, 1.0], dtype=DTYPES[dtype])
    for count, expected in enumerate(
        ([], [2], [0, 2], [0, 2, 5], [0, 2, 3, 5], [0, 2, 3, 4, 5], list(range(6)))
    ):
        found = fastattn.lightning_index(q, k.view(1, -1, 1), w, count)
        assert found.flatten().tolist() == expected


def test_the_highest_scores():
    scores = torch.tensor([[1.0, 3, 3, torch.nan, -torch.inf, 3], [-0.0, 0, 0, 0, -1, -torch.inf]])
    for count in range(8):
        numbers = scores.masked_fill(scores.isnan(), -torch.inf)
        assert torch.equal(highest(scores, count), by_sorting(numbers, count).int())
    assert highest(scores[:, :0], 2).tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.slow
def test_the_scores_of_chosen_keys_have_gradients():
    draw = torch.Generator().manual_seed(3)
    shapes = (2, 3, 5, 4), (2, 11, 4), (2, 3, 5)
    leaves = [torch.randn(*s, generator=draw, dtype=torch.float64) for s in shapes]
    leaves = [x.requires_grad_() for x in leaves]

    def scores(q, k, w):
        given = dict(causal="bottom_right", key_lengths=torch.tensor([9, 4]), return_scores=True)
        indices, found = fastattn.lightning_index(q, k, w, 6, **given)
        x, y, z = (x.double() for x in (q, k, w))
        dense = (torch.relu(x @ y[:, None].mT) * z[..., None]).sum(1)
        shown = dense.gather(2, indices[:, 0].long().clamp(min=0))
        missing = indices[:, 0] < 0
        gap = (found[:, 0] - shown).detach().masked_fill(missing, 0).abs().max()
        assert float(gap) < (1e-12 if q.dtype == torch.float64 else 1e-5)
        assert (found[:, 0] == -torch.inf).equal(indices[:, 0] < 0)
        return found.masked_fill(found == -torch.inf, 0)

    assert torch.autograd.gradcheck(scores, leaves)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = [x.detach().to(dtype).requires_grad_() for x in leaves]
        exact = [x.detach().double().requires_grad_() for x in rounded]
        for x, y in zip(
            *(torch.autograd.grad(scores(*x).sin().sum(), x) for x in (rounded, exact))
        ):
            assert x.dtype == dtype
            torch.testing.assert_close(x.double(), y, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("block", (1, 7, 64, 400))
def test_blocks_are_their_dense_form(block, causal, shared):
    B, H, Hk, M, D = 2, 4, 2, 9, 8
    q, k = whole(B, H, M, D, dtype=torch.float64), whole(B, Hk, KEYS, D, dtype=torch.float64)
    for lengths, count in itertools.product((None, torch.tensor([131, 4])), (0, 2, 5, 50)):
        found = fastattn.top_blocks(
            q, k, block, count, causal=causal, key_lengths=lengths, shared=shared
        )
        means = []
        for b, j in itertools.product(range(B), range(0, KEYS, block)):
            end = min(j + block, KEYS if lengths is None else int(lengths[b]))
            mean = k[b, :, j:end].mean(1) if end > j else torch.zeros(Hk, D, dtype=k.dtype)
            means.append(mean)
        means = torch.stack(means).unflatten(0, (B, -1)).transpose(1, 2)
        scores = q @ means.repeat_interleave(H // Hk, 1).mT
        scores, last = hide(scores, causal, lengths, block)
        first = torch.arange(scores.shape[-1]) * block
        own = (first <= last) & (first + block > last) & (causal is not False)
        if shared:
            p = torch.softmax(scores.masked_fill(own, -torch.inf) / math.sqrt(D), -1)
            p = p.nan_to_num(0).unflatten(1, (Hk, H // Hk)).sum(2)
            scores = torch.where(scores[:, :: H // Hk] == -torch.inf, -torch.inf, p)
        scores = scores.masked_fill(own, torch.inf)
        if (
            shared or block > 1
        ):  # probabilities and means are not whole: equal ones may differ in a bit
            chosen = scores.gather(-1, found.long().clamp(min=0)).masked_fill(found < 0, -torch.inf)
            best = scores.gather(-1, by_sorting(scores, count).clamp(min=0))
            best = best.masked_fill(by_sorting(scores, count) < 0, -torch.inf)
            torch.testing.assert_close(chosen.sort(-1).values, best.sort(-1).values)
        else:
            assert torch.equal(found, by_sorting(scores, count).int())


def test_a_row_always_chooses_its_own_block():
    q, k = torch.randn(1, 4, 64, 8), torch.randn(1, 2, 64, 8)
    for shared in (False, True):
        found = fastattn.top_blocks(q, k, 16, 2, causal=True, shared=shared)
        own = torch.arange(64)[:, None] // 16
        assert (found == own).any(-1).all() and (found <= own).all()


INDICES = torch.randint(-1, 5, (2, 1, 3, 4), generator=torch.Generator().manual_seed(0))
OPERATORS = {
    "key_lists": lambda q, k, w: (INDICES, torch.tensor([17, 3]), 18, 4, "bottom_right"),
    "lightning_index": lambda q, k, w: (q.detach(), k.detach(), w.detach(), 4, None, "top_left"),
    "lightning_scores": lambda q, k, w: (q, k, w, INDICES[:, 0]),
    "lightning_scores_backward": lambda q, k, w: (
        *(torch.randn(2, 3, 4), q.detach(), k.detach(), w.detach(), INDICES[:, 0]),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_those_that_compilers_expect(name):
    leaves = torch.randn(2, 3, 3, 4), torch.randn(2, 11, 4), torch.randn(2, 3, 3)
    arguments = OPERATORS[name](*(x.requires_grad_() for x in leaves))
    torch.library.opcheck(getattr(torch.ops.fastattn, name).default, arguments)


@pytest.mark.slow
def test_compiled():
    q, k, w = torch.randn(1, 4, 20, 8), torch.randn(1, 20, 8), torch.rand(1, 4, 20)

    def call(q, k, w):
        indices, scores = fastattn.lightning_index(q, k, w, 5, causal=True, return_scores=True)
        return indices, scores.masked_fill(indices < 0, 0)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = []
    for run in (call, compiled):
        leaves = [x.clone().requires_grad_() for x in (q, k, w)]
        indices, scores = run(*leaves)
        found.append([indices, scores, *torch.autograd.grad(scores.sin().sum(), leaves)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


WRONG = {
    r"count: got -1, expected 0 or more": dict(count=-1),
    r"k: got shape \(2, 9, 3\), expected \(2, 9, 4\)": dict(k=torch.zeros(2, 9, 3)),
    r"k: got shape \(2, 2, 9, 4\), expected 3 dimensions \(B, N, D\)": dict(
        k=torch.zeros(2, 2, 9, 4)
    ),
    r"k: got torch.float64": dict(k=torch.zeros(2, 9, 4).double()),
    r"weights: got shape \(2, 5, 3\), expected \(2, 3, 5\)": dict(weights=torch.zeros(2, 5, 3)),
    r"q.dtype: got torch.int64": dict(q=torch.zeros(2, 3, 5, 4).long()),
    r"key_lengths: got 10, expected values in \[0, N\] = \[0, 9\]": dict(
        key_lengths=torch.tensor([0, 10])
    ),
    r"causal: got 'up'": dict(causal="up"),
}


@pytest.mark.parametrize("message", WRONG)
def test_hostile_arguments_of_the_indexer_raise(message):
    given = dict(q=torch.zeros(2, 3, 5, 4), k=torch.zeros(2, 9, 4), weights=torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match=message):
        fastattn.lightning_index(**given | dict(count=2) | WRONG[message])
    for name in ("q", "k", "weights", "key_lengths"):
        with pytest.raises(TypeError, match=f"{name}: got float"):
            fastattn.lightning_index(**given | dict(count=2) | {name: 1.0})


WRONG_BLOCKS = {
    r"block: got 0, expected 1 or more": dict(block=0),
    r"count: got -2": dict(count=-2),
    r"k: got 2 heads, expected a divisor of q's 3": dict(k=torch.zeros(1, 2, 9, 4)),
    r"k: got shape": dict(k=torch.zeros(1, 1, 9, 5)),
    r"key_lengths: got -1": dict(key_lengths=torch.tensor([-1])),
}


@pytest.mark.parametrize("message", WRONG_BLOCKS)
def test_hostile_arguments_of_blocks_raise(message):
    given = dict(q=torch.zeros(1, 3, 5, 4), k=torch.zeros(1, 1, 9, 4), block=4, count=2)
    with pytest.raises(ValueError, match=message):
        fastattn.top_blocks(**given | WRONG_BLOCKS[message])


@pytest.mark.parametrize("causal", (False, "bottom_right"))
@pytest.mark.parametrize("zero", ("B", "H", "H, Hk", "M", "N", "D", "count", "lengths"))
def test_sizes_of_zero(zero, causal):
    size = dict(B=2, H=4, Hk=2, M=3, N=8, D=4, count=5) | dict.fromkeys(zero.split(", "), 0)
    b, h, hk, m, n, d, count = (size[x] for x in ("B", "H", "Hk", "M", "N", "D", "count"))
    about = dict(causal=causal)
    if zero == "lengths":
        about |= dict(key_lengths=torch.zeros(b, dtype=torch.int64))
    q, k, w = torch.zeros(b, h, m, d), torch.zeros(b, n, d), torch.zeros(b, h, m)
    leaves = [x.requires_grad_() for x in (q, k, w)]
    found, scores = fastattn.lightning_index(*leaves, count, return_scores=True, **about)
    assert found.shape == scores.shape == (b, 1, m, count)
    shapes = [x.shape for x in torch.autograd.grad(scores.sum(), leaves)]
    assert shapes == [x.shape for x in leaves]
    for shared in (False, True):
        given = q.detach(), torch.zeros(b, hk, n, d), 4, count
        blocks = fastattn.top_blocks(*given, shared=shared, **about)
        assert blocks.shape == (b, hk if shared else h, m, count)
        none = zero in ("N", "lengths")
        assert (blocks == -1).all() if none else blocks.numel() == 0 or (blocks >= 0).any()


@pytest.mark.slow
def test_memory_is_that_of_the_choice():
    """2,000 rows and 60,000 keys: the scores would take 480 MB."""
    script = (
        "import resource, torch, fastattn\n"
        "torch.set_num_threads(1)\n"
        "q, k, w = torch.randn(1, 1, 2000, 4), torch.randn(1, 60000, 4), torch.rand(1, 1, 2000)\n"
        "fastattn.lightning_index(q[:, :, :8], k, w[:, :, :8], 16)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "fastattn.lightning_index(q, k, w, 16)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) < 20_000  # KiB


def test_calls_under_vmap_are_one_call(capfd):
    """Of the indexer, its scores and their gradients, and of the choice; keys are shared."""
    q, k = whole(3, 2, 4, 5, 7), whole(2, 9, 7, seed=1)
    weights, lengths = whole(2, 4, 5, 3, seed=2), torch.tensor([[9, 4], [3, 0], [1, 9]])

    def chosen(q, weights, lengths):
        given = dict(causal="bottom_right", key_lengths=lengths, return_scores=True)
        return fastattn.lightning_index(q, k, weights, 4, **given)

    def attended(q, weights, lengths):
        keys = k.unsqueeze(1)
        indices, scores = chosen(q, weights, lengths)
        return fastattn.attention_selected(q, keys, keys, indices), scores

    leaves = [x.requires_grad_() for x in (q, k, weights)]
    for f in (chosen, attended):
        mapped = torch.func.vmap(f, (0, 3, 0))(q, weights, lengths)
        each = zip(*(f(q[i], weights[..., i], lengths[i]) for i in range(3)))
        found, expected = (
            (*x, *torch.autograd.grad(x[1].clamp(min=-9).sin().sum(), leaves))
            for x in (mapped, tuple(map(torch.stack, each)))
        )
        torch.testing.assert_close(found, expected)
    scores = chosen(q[0], weights[..., 0], lengths[0])[1]
    incoming = torch.randn(3, *scores.shape)

    def gradients(x):
        return torch.autograd.grad(scores, leaves, x, retain_graph=True)

    each = zip(*map(gradients, incoming))
    torch.testing.assert_close(torch.func.vmap(gradients)(incoming), tuple(map(torch.stack, each)))
    assert "batching rule" not in capfd.readouterr().err
    with pytest.raises(ValueError, match="vmap: got a dimension of size 0"):
        torch.func.vmap(chosen, (0, 3, 0))(q[:0], weights[..., :0], lengths[:0])
