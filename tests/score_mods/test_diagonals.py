"""Programs of i - j have one value for each diagonal, and its gradient."""

import pytest
import torch
from hypothesis import given, settings

import fastattn
from fastattn.dropin import flex
from fastattn.score_mods import mod_call
from fastattn.score_mods.additive import as_sum
from fastattn.score_mods.diagonals import (
    diagonal_indices,
    is_of_difference,
    spread,
    sums_of_diagonals,
)
from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.tracing import trace_mask_mod, trace_score_mod
from tests.score_mods import gallery
from tests.score_mods.gallery import INDICES, N
from tests.score_mods.trees import trees


def check(program, tensors):
    """By diagonals, the values are those of all pairs, to the bit."""
    whole = evaluate(program, tensors, **INDICES)
    values = evaluate(program, tensors, **INDICES | diagonal_indices(N, N, torch.device("cpu")))
    assert torch.equal(*torch.broadcast_tensors(spread(values, N), whole))


def programs():
    for name, mask in gallery.MASKS.items():
        yield name, trace_mask_mod(mask)
    for name, score in gallery.SCORES.items():
        program, tensors = trace_score_mod(score)
        parts = as_sum(program)
        if parts and parts.bias:
            yield name, (parts.bias, tensors)


PROGRAMS = dict(programs())
OF_DIFFERENCES = {
    "causal",
    "window",
    "window by overlay",
    "window, both sides",
    "dilated",
    "alibi",
    "alibi, both sides",
    "alibi, computed",
    "relative",
    "t5",
    "sandwich",
    "offset",
    "of heads",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_known_functions(name):
    program, tensors = PROGRAMS[name]
    assert is_of_difference(program) == (name in OF_DIFFERENCES)
    if name in OF_DIFFERENCES:
        check(program, tensors)


LIKE = {
    "two indices, moved": lambda b, h, i, j: (i + 3) - (j - 2) > 1,
    "twice": lambda b, h, i, j: 2 * i > j + j,
    "from the left": lambda b, h, i, j: i * 3 - 3 * j == 3,
    "negated": lambda b, h, i, j: -i <= -j,
    "the smaller": lambda b, h, i, j: i - torch.minimum(i, j) < 2,
    "the larger of moved ones": lambda b, h, i, j: torch.maximum(i + 1, j + 2) - j < 4,
    "a choice of two": lambda b, h, i, j: torch.where(i > j, i, j) - j < 3,
    "of heads": lambda b, h, i, j: (i - j) % (h + 1) == 0,
    "of a table": lambda b, h, i, j: gallery.RELATIVE[h, i - j] > 0,
}
UNLIKE = {
    "a sum": lambda b, h, i, j: i + j > 7,
    "another factor": lambda b, h, i, j: 2 * i >= j,
    "a multiple": lambda b, h, i, j: i * j > 7,
    "the smaller": lambda b, h, i, j: torch.minimum(i, j) < 2,
    "the smaller of i and 3": lambda b, h, i, j: torch.minimum(i, torch.full_like(i, 3)) < j,
    "blocks": lambda b, h, i, j: i // 4 >= j // 4,
    "bits": lambda b, h, i, j: (i ^ j) == 0,
    "remainders": lambda b, h, i, j: i % 3 == j % 3,
    "a size": lambda b, h, i, j: (i - 3).abs() >= (j - 3).abs(),
    "a choice by place": lambda b, h, i, j: torch.where(i > 4, i, j) - j < 3,
    "a choice of one": lambda b, h, i, j: torch.where(i > j, i, 0 * i) - j < 3,
    "a table": lambda b, h, i, j: gallery.DOCS[i] == gallery.DOCS[j],
    "rows alone": lambda b, h, i, j: i > 3,
    "no index": lambda b, h, i, j: h > 1,
    "a negated row": lambda b, h, i, j: -i < j,
}


@pytest.mark.parametrize("name", LIKE)
def test_forms_of_a_difference(name):
    program, tensors = trace_mask_mod(LIKE[name])
    assert is_of_difference(program)
    check(program, tensors)


@pytest.mark.parametrize("name", UNLIKE)
def test_near_misses(name):
    assert not is_of_difference(trace_mask_mod(UNLIKE[name]).program)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(trees("bool", scores=False))
def test_no_other_program_is_taken_for_one(tree):
    program, tensors = trace_mask_mod(tree.function)
    if is_of_difference(program):
        check(program, tensors)


SIZES = [(2, 2), (3, 5), (5, 3), (64, 64), (65, 2), (2, 130), (129, 7)]


@pytest.mark.parametrize("rows, keys", SIZES, ids=str)
def test_sums(rows, keys):
    x = torch.randn(2, 3, rows, keys, dtype=torch.float64)
    found = sums_of_diagonals(x)
    at = torch.arange(rows).view(-1, 1), torch.arange(keys)
    place = (rows - 1 - at[0] + at[1]).flatten()
    expected = torch.zeros_like(found).index_add(-1, place, x.flatten(-2))
    torch.testing.assert_close(found, expected)
    values = torch.randn(2, 3, 1, rows + keys - 1, dtype=torch.float64)
    assert torch.equal(spread(values, keys).flatten(-2), values[:, :, 0, place])


def test_derivatives_and_vmap():
    values = torch.randn(2, 1, 1, 9, dtype=torch.float64, requires_grad=True)
    checks = dict(check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradcheck(lambda x: spread(x, 6), values, **checks)
    assert torch.autograd.gradgradcheck(lambda x: spread(x, 6), values)
    rows = torch.vmap(lambda x: spread(x[None], 6))(values.detach())
    assert torch.equal(rows[:, 0], spread(values.detach(), 6))


def test_gradients_have_the_same_bits_on_any_number_of_threads(threads):
    x, found = torch.randn(1, 2, 300, 200), []
    for count in (1, 2, 3):
        threads(count)
        found.append(sums_of_diagonals(x))
    assert all(torch.equal(found[0], y) for y in found)


def bias_of(table, keys):
    return lambda s, b, h, i, j: s + table[h, i - j + keys - 1]


@pytest.mark.parametrize("rows, keys", [(1, 9), (9, 1), (2, 9), (40, 70), (70, 40)], ids=str)
def test_a_call_and_its_gradients_are_those_of_all_pairs(rows, keys, monkeypatch):
    """Output and the gradients of q, k and v to the bit; the table's to rounding."""
    q = torch.randn(2, 3, rows, 16, requires_grad=True)
    k, v = torch.randn(2, 2, 3, keys, 16).requires_grad_().unbind()
    table = torch.randn(3, rows + keys - 1, requires_grad=True)
    sizes = []

    def counted(*args, **where):
        found = evaluate(*args, **where)
        sizes.append(found.numel())
        return found

    def run():
        out = fastattn.flex_attention(q, k, v, bias_of(table, keys))
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v, table))

    monkeypatch.setattr(flex, "runs_programs", lambda *given: False)  # as on a GPU
    monkeypatch.setattr(mod_call, "evaluate", counted)
    *found, of_table = run()
    assert sizes == [3 * (rows + keys - 1)]  # a value for each diagonal, or for all of one row
    monkeypatch.setattr(mod_call, "is_of_difference", lambda program: False)
    *expected, of_all_pairs = run()
    assert all(torch.equal(x, y) for x, y in zip(found, expected))
    torch.testing.assert_close(of_table, of_all_pairs, rtol=1e-4, atol=1e-5)


def test_hidden_pairs_may_be_out_of_range():
    """The table has no place for keys after a row."""
    q, k, v = torch.randn(3, 1, 2, 30, 16).unbind()
    table = torch.randn(30)

    def score(s, b, h, i, j):
        return s + table[torch.where(i >= j, i - j, 100)]

    with pytest.raises(IndexError, match="index 100 is out of range"):
        fastattn.flex_attention(q, k, v, score)
    found = fastattn.flex_attention(q, k, v, score, mask_mod=gallery.causal)
    at = torch.arange(30)
    bias = table[(at[:, None] - at).clamp(min=0)]
    expected = fastattn.attention(q, k, v, causal=True, mask=bias)
    torch.testing.assert_close(found, expected)
