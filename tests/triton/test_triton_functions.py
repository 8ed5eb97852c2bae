"""score_mod and mask_mod in Triton's kernels: each operator, every pass, other features beside
them, blocks that a mask_mod hides. Operators are judged by the program on torch tensors, calls by
the CPU's kernels."""

import gc
import inspect
import linecache

import pytest
import torch

import fastattn
from fastattn.backends.triton import job, program_source, tile_configs
from fastattn.call import validation
from fastattn.call.spec import Options, Tensors
from fastattn.score_mods.mod_text import CAPTURED, ModText
from fastattn.score_mods.program import Program
from fastattn.score_mods.tracing import trace_score_mod
from tests.support.backends import INTERPRETED
from tests.support.marks import parametrize
from tests.support.program_operators import CASES, IDS, function_of, share_of_wrong_scores

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]
if not INTERPRETED:
    pytest.skip("runs Triton's interpreter: make test-interpreter", allow_module_level=True)
pytest.importorskip("triton")
G = torch.Generator().manual_seed(5)
B, H, M, N, D = 2, 2, 37, 45, 16
TABLE = torch.randn(H, M + N, generator=G)
SLOPES = torch.rand(H, generator=G)
DOCUMENTS = torch.arange(64) // 13
LENGTHS = torch.tensor([29, 41])
NEARER = torch.tensor([30.0, 2.0])


def relative(s, b, h, i, j):
    return s + TABLE[h, (i - j + N - 1).clamp(0, M + N - 1)]


def sloped(s, b, h, i, j):
    return s + SLOPES[h] * (j - i)


def bent(s, b, h, i, j):
    return s * torch.sigmoid(s) + 3 * torch.tanh(s / NEARER[b]) - (i - j).abs() ** 0.5


def documents(b, h, i, j):
    return (DOCUMENTS[i] == DOCUMENTS[j]) & (j < LENGTHS[b])


def by_head(b, h, i, j):
    return (h == 1) | ((i // 3 + j) % 4 < 2)


FUNCTIONS = {
    "relative": dict(score_mod=relative),
    "slopes": dict(score_mod=sloped),
    "bent": dict(score_mod=bent),
    "documents": dict(mask_mod=documents),
    "both": dict(score_mod=bent, mask_mod=by_head),
}
BESIDE = {
    "alone": {},
    "causal": dict(causal=True),
    "softcap": dict(softcap=2.0),
    "alibi": dict(alibi_slopes=SLOPES, causal="bottom_right"),
    "bool mask": dict(mask=torch.rand(H, M, N, generator=G) < 0.7),
    "float mask": dict(mask=torch.randn(1, 1, N, generator=G)),
    "dropout, sinks": dict(dropout_p=0.3, seed=4, sinks=torch.randn(H, generator=G)),
    "lengths, window": dict(key_lengths=LENGTHS, window=(20, 9)),
    "row_invariant": dict(row_invariant=True, window=(20, 9)),
    "place": dict(place=fastattn.Place(5, 3, 0, 0, 60, 63), causal=True),
}
ALONE = ("alone", "place")


def tensors(M=M, N=N, heads=1, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    shapes = (B, H, M, D), (B, heads, N, D), (B, heads, N, D)
    return [torch.randn(*x, generator=draw).to(dtype).requires_grad_() for x in shapes]


def results(given, backend, **functions):
    """The output, the LSE, gradients, and tangents of all of these."""
    q, k, v = given
    draw = torch.Generator().manual_seed(9)
    moves = [torch.randn(x.shape, generator=draw).to(x.dtype) for x in given]

    def call(q, k, v):
        return fastattn.attention(q, k, v, return_lse=True, backend=backend, **functions)

    out, lse = call(q, k, v)
    loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sin().sum()
    grads = torch.autograd.grad(loss, given, create_graph=True)
    moved = sum((x * y).sum() for x, y in zip(grads, moves))
    second = torch.autograd.grad(moved, given)
    along = torch.func.jvp(call, tuple(x.detach() for x in given), tuple(moves))[1]
    return [out, lse, *grads, *second, *along]


def close(found, expected, bound=3e-5):
    for x, y in zip(found, expected, strict=True):
        scale = 1 + y.detach()[y.isfinite()].abs().max()
        torch.testing.assert_close(x, y, rtol=0, atol=bound * float(scale))


@parametrize("whole, name, text", CASES, ids=IDS, fast=24)
def test_each_operator(whole, name, text):
    """The scores are those of the program on torch tensors, in the same precision."""
    q, k, _ = (x.detach()[:1, :, :33] / 4 for x in tensors(heads=H))
    assert share_of_wrong_scores(function_of(text, whole), q, k, backend="triton") < 2e-3


@parametrize(
    "functions, beside",
    [(x, y) for x in FUNCTIONS for y in BESIDE if x == "both" or y in ALONE],
    fast=2,
)
def test_beside_other_arguments(functions, beside):
    """Every other argument beside both functions, some beside each."""
    given = FUNCTIONS[functions] | BESIDE[beside]
    if beside == "row_invariant":  # no derivative of the second order
        q, k, v = tensors()
        found = [fastattn.attention(q, k, v, backend=x, **given) for x in ("triton", "cpu")]
        return close(found[:1], found[1:])
    close(results(tensors(), "triton", **given), results(tensors(), "cpu", **given))


@pytest.mark.parametrize("mask", [None, "bool", "add"])
@parametrize("functions", ["documents", "both", "window"], fast=1)
def test_blocks_that_a_mask_mod_hides_are_not_visited(functions, mask, monkeypatch):
    """Results with lists of blocks are those without."""
    given = FUNCTIONS.get(functions) or dict(mask_mod=lambda b, h, i, j: (i - j).abs() < 9)
    if mask:
        drawn = torch.rand(1, 1, M, N, generator=torch.Generator().manual_seed(3))
        given = given | dict(mask=drawn < 0.9 if mask == "bool" else drawn)
    given |= dict(backend="triton")
    q, k, v = tensors()
    found = []
    for structured in (True, False):
        monkeypatch.setattr(tile_configs, "structured", lambda *sizes, found=structured: found)
        for cached in (job.flags, job.scalars):
            cached.cache_clear()
        out = fastattn.attention(q, k, v, **given)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for cached in (job.flags, job.scalars):
        cached.cache_clear()
    close(*found)


def test_calls_of_similar_sizes_share_their_functions():
    """A growing cache does not compile anew at every token."""
    traced = trace_score_mod(lambda s, b, h, i, j: s + (i - j) * 0.1)
    flat = Program(traced.program.values, CAPTURED)
    text = ModText(score=flat).text()
    names = [
        program_source.functions(described(text, rows)).score_mod.__name__
        for rows in (100, 3000, 40000)
    ]
    assert len(set(names)) == 1


def test_sources_are_kept_as_long_as_their_functions():
    def kept():
        return {path for path in linecache.cache if path.startswith("<program_")}

    def made(number, rows=100):
        traced = trace_score_mod(lambda s, b, h, i, j: s + i * number, device=q.device)
        text = ModText(score=Program(traced.program.values, CAPTURED)).text()
        return program_source.functions(described(text, rows))

    q = torch.zeros(1)
    gc.collect()
    before = kept()
    found = [made(number) for number in range(7001, 7005)]
    assert len(kept() - before) == 4
    assert "i" in inspect.getsource(getattr(found[0].score_mod, "fn", found[0].score_mod))
    twin = made(7001, 100_000)  # another entry of the cache, with the same source
    assert twin.score_mod is not found[0].score_mod and len(kept() - before) == 4
    del found
    program_source.functions_of.cache_clear()
    gc.collect()
    assert len(kept() - before) == 1
    del twin
    gc.collect()
    assert not kept() - before


def described(text, rows):
    q = torch.empty(1, 1, rows, D, device="meta")
    return validation.describe(Tensors(q, q, q), Options(score_mod=text))


def test_whole_numbers_beyond_32_bits():
    """Products of indices that do not fit in 32 bits are computed in 64."""
    many = torch.tensor([1 << 40, 3])
    given = dict(mask_mod=lambda b, h, i, j: (many[j % 2] * (i + 1) * 4096) % 4097 > 1000)
    q, k, v = (x.detach() for x in tensors())
    found = [fastattn.attention(q, k, v, backend=x, **given) for x in ("triton", "reference")]
    close(found[:1], found[1:])


def test_a_derivative_that_is_not_finite_where_a_mask_hides():
    """The derivative of a root at 0 is not finite. Pairs with it that a mask hides have no part."""
    q, k, v = tensors()
    k = k.detach().index_fill(2, torch.tensor([3, 40]), 0.0).requires_grad_()
    shown = torch.ones(M, N, dtype=torch.bool).index_fill(1, torch.tensor([3, 40]), False)
    given = dict(mask=shown, score_mod=lambda s, b, h, i, j: s.abs() ** 0.5)
    found = []
    for backend in ("triton", "cpu"):
        out = fastattn.attention(q, k, v, backend=backend, **given)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(x.isfinite().all() for x in found[1])
    close(*found)
