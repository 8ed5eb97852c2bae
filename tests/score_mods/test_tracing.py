"""Functions become programs that mean the same; what programs cannot do is refused by a sentence
with the user's line."""

import math
import time

import pytest
import torch

from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.program import Program
from fastattn.score_mods.tracing import merge, trace_mask_mod, trace_score_mod
from tests.support.flex_functions import (
    BIAS,
    GENERAL,
    MASK_MODS,
    SCORE_MODS,
    TABLE,
    B,
    H,
    indices,
    modified,
    visible,
)

M, N = 37, 41
WHERE = dict(zip("bhij", indices(M, N)))
ALL_SCORE_MODS = SCORE_MODS | GENERAL


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mods(name):
    program, tensors = trace_mask_mod(MASK_MODS[name])
    found = evaluate(program, tensors, **WHERE)
    assert found.dtype == torch.bool
    assert torch.equal(found.expand(B, H, M, N), visible(MASK_MODS[name], M, N))


@pytest.mark.parametrize("name", ALL_SCORE_MODS)
def test_score_mods(name):
    scores = torch.randn(B, H, M, N)
    program, tensors = trace_score_mod(ALL_SCORE_MODS[name])
    found = evaluate(program, tensors, score=scores, **WHERE)
    expected = modified(ALL_SCORE_MODS[name], scores)
    torch.testing.assert_close(found.expand(expected.shape), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*MASK_MODS, *ALL_SCORE_MODS])
def test_text_and_back(name):
    trace = trace_mask_mod if name in MASK_MODS else trace_score_mod
    function = (MASK_MODS | ALL_SCORE_MODS)[name]
    program, _ = trace(function)
    assert Program.parse(program.text()) == program
    assert hash(trace(function).program) == hash(program)  # no identity of a tensor


@pytest.mark.parametrize("number", [math.inf, -math.inf, 0.1, -0.0, 3, True, 1 << 40])
def test_constants_keep_their_bits(number):
    program, _ = trace_score_mod(lambda s, b, h, i, j: s * torch.where(i > j, number, j))
    again = Program.parse(program.text())
    assert again == program and repr(again) == repr(program)


def test_a_value_has_the_smallest_shape():
    program, tensors = trace_mask_mod(lambda b, h, i, j: TABLE[h, j] > 0)
    assert evaluate(program, tensors, **WHERE).shape == (H, 1, N)


def test_equal_values_are_one_and_unused_ones_none():
    def function(s, b, h, i, j):
        s * BIAS[0, 0, i, j]  # without effect
        return s + (i - j) * (i - j)

    program, _ = trace_score_mod(function)
    assert [x.op for x in program.values].count("sub") == 1
    assert "load" not in [x.op for x in program.values]


def test_programs_share_tensors():
    score = trace_score_mod(lambda s, b, h, i, j: s + TABLE[h, j] + BIAS[b, h, i, j])
    mask = trace_mask_mod(lambda b, h, i, j: BIAS[b, h, i, j] > 0)
    (first, none, second), tensors = merge(score, None, mask)
    assert none is None and len(tensors) == 2
    assert first.captured == second.captured == (("float", 2), ("float", 4))
    for program, own in ((first, score), (second, mask)):
        more = dict(score=torch.zeros(1)) if program is first else {}
        args = WHERE | more
        assert torch.equal(
            evaluate(program, tensors, **args), evaluate(own.program, own.tensors, **args)
        )


def test_derivatives_in_captured_tensors():
    table = TABLE.double().requires_grad_()
    program, tensors = trace_score_mod(lambda s, b, h, i, j: s * table[h, i - j + 60].tanh())
    scores = torch.randn(1, H, 3, 5, dtype=torch.float64, requires_grad=True)
    where = dict(zip("bhij", indices(3, 5, items=1)))

    def run(scores, table):
        return evaluate(program, [table], score=scores, **where)

    assert tensors[0] is table
    assert torch.autograd.gradcheck(run, (scores, table))


REFUSED = {
    "a branch": (lambda s, b, h, i, j: s if i >= j else -s, TypeError, "torch.where"),
    "and": (lambda s, b, h, i, j: s * (i > j and j > 2), TypeError, "torch.where"),
    "Python's math": (lambda s, b, h, i, j: s + math.exp(h), TypeError, "not math's"),
    "item": (lambda s, b, h, i, j: s + i.item(), TypeError, "no value is known yet"),
    "in place": (lambda s, b, h, i, j: s.add_(1), NotImplementedError, "works in place"),
    "an unknown function": (lambda s, b, h, i, j: torch.fft.fft(s), NotImplementedError, "fft_fft"),
    "a list": (lambda s, b, h, i, j: torch.stack([s, s])[0], NotImplementedError, "stack"),
    "an unknown method": (lambda s, b, h, i, j: s.cumsum(0), NotImplementedError, "cumsum"),
    "no result": (lambda s, b, h, i, j: None, TypeError, "got None"),
    "too few indices": (lambda s, b, h, i, j: s + BIAS[b, h], TypeError, "2 dimensions left"),
    "too many indices": (lambda s, b, h, i, j: s + TABLE[h, i, j], IndexError, "3 indices for 2"),
    "an index of floats": (lambda s, b, h, i, j: TABLE[h, s], TypeError, "index of kind float"),
    "an index out of range": (lambda s, b, h, i, j: s + TABLE[7, j], IndexError, r"\[-4, 4\)"),
    "a slice": (lambda s, b, h, i, j: s + TABLE[h, 1:][j], TypeError, "expected a whole number"),
    "a loop": (lambda s, b, h, i, j: sum(s), TypeError, "range"),
    "a whole tensor": (lambda s, b, h, i, j: s + TABLE, TypeError, "index it by b, h, i and j"),
    "a condition of floats": (lambda s, b, h, i, j: torch.where(s, 1, 2), TypeError, "of kind"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    function, error, said = REFUSED[case]
    line = function.__code__.co_firstlineno
    with pytest.raises(error, match=said) as caught:
        trace_score_mod(function)
    assert "score_mod at " in str(caught.value)
    if case != "no result":  # which has returned from that line
        assert f"test_tracing.py:{line}" in str(caught.value)
    trace_score_mod(SCORE_MODS["alibi"])  # nothing is left active


@pytest.mark.parametrize("function", [lambda b, h: True, lambda s, b, h, i, j: True, "no function"])
def test_other_arguments_are_refused(function):
    with pytest.raises(TypeError, match=r"expected mask_mod\(b, h, i, j\)"):
        trace_mask_mod(function)


def test_a_mask_mod_returns_bools():
    with pytest.raises(TypeError, match="result of kind float, expected bool"):
        trace_mask_mod(lambda b, h, i, j: (i - j) * 1.0)


def test_an_index_out_of_range_names_the_tensor():
    program, tensors = trace_score_mod(lambda s, b, h, i, j: s + TABLE[h, i + 1000])
    with pytest.raises(IndexError, match=r"captured tensor 0 of shape \(4, 128\)"):
        evaluate(program, tensors, score=torch.zeros(1), **WHERE)


def test_tracing_takes_microseconds():
    """A compiler takes seconds. The bound is ten times what an idle core takes."""
    function = SCORE_MODS["T5"]
    trace_score_mod(function)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        trace_score_mod(function)
        times.append(time.perf_counter() - begin)
    assert min(times) < 5e-3
