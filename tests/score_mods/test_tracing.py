"""Tracing: a program means what its function means for each pair of a row and a key."""

import itertools
import math
import sys
import threading

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.program import Program
from fastattn.score_mods.tracing import Traced, merge, trace_mask_mod, trace_score_mod
from tests.score_mods.gallery import (
    BIAS,
    DOCS,
    INDICES,
    MASKS,
    PADDING,
    SCALAR,
    SCORES,
    SLOPES,
    B,
    H,
    N,
)

PAIRS = list(itertools.product(range(B), range(H), range(N), range(N)))


def for_each_pair(function, score=None):
    """What the function itself returns of 0-d tensors, for each pair."""
    results = []
    for at in PAIRS:
        first = () if score is None else (score[at],)
        results.append(torch.as_tensor(function(*first, *map(torch.tensor, at))))
    return torch.stack(results).view(B, H, N, N)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    program, tensors = trace_mask_mod(MASKS[name])
    got = evaluate(program, tensors, **INDICES)
    assert got.dtype == torch.bool
    assert torch.equal(got.expand(B, H, N, N), for_each_pair(MASKS[name]))
    assert Program.parse(program.text()) == program


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    score = torch.randn(B, H, N, N, generator=torch.Generator().manual_seed(3))
    program, tensors = trace_score_mod(SCORES[name])
    got = evaluate(program, tensors, score=score, **INDICES).expand(B, H, N, N)
    expected = for_each_pair(SCORES[name], score).to(torch.float32)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-5)
    assert Program.parse(program.text()) == program
    leaf = score.double().requires_grad_()  # gradients by the score
    got = evaluate(program, tensors, score=leaf, **INDICES).expand(B, H, N, N)
    expected = for_each_pair(SCORES[name], leaf).double()
    grads = [
        torch.autograd.grad((x.nan_to_num().cos() + 0 * leaf).sum(), leaf)[0]
        for x in (got, expected)
    ]
    torch.testing.assert_close(*grads)


ERRORS = {
    "branch": (lambda b, h, i, j: i if i > j else j, TypeError, "torch.where"),
    "and": (lambda b, h, i, j: (i > j) and (j > 2), TypeError, "torch.where"),
    "min": (lambda b, h, i, j: min(i, j) > 2, TypeError, "torch.minimum"),
    "item": (lambda b, h, i, j: i.item() > 2, TypeError, r"\.item\(\)"),
    "int": (lambda b, h, i, j: int(i) > 2, TypeError, r"int\(\)"),
    "math": (lambda b, h, i, j: math.sqrt(i) > 2, TypeError, r"float\(\)"),
    "range": (lambda b, h, i, j: list(range(i)), TypeError, r"range\(\)"),
    "iteration": (lambda b, h, i, j: list(i), TypeError, "iteration"),
    "length": (lambda b, h, i, j: len(i) > 2, TypeError, r"len\(\)"),
    "int result": (lambda b, h, i, j: i - j, TypeError, "kind int.*comparison"),
    "float result": (lambda b, h, i, j: i / 2, TypeError, "kind float"),
    "no result": (lambda b, h, i, j: None, TypeError, "got NoneType"),
    "tensor result": (lambda b, h, i, j: DOCS, TypeError, r"shape \(12,\)"),
    "too few indices": (lambda b, h, i, j: PADDING[b], TypeError, "1 of its 2 indices"),
    "operator on a part": (lambda b, h, i, j: PADDING[b] & True, TypeError, r"shape \(12,\)"),
    "method of a part": (lambda b, h, i, j: PADDING[b].cumsum(0), NotImplementedError, "cumsum"),
    "too many indices": (lambda b, h, i, j: DOCS[i, j] > 0, IndexError, "too many indices: 2"),
    "index by float": (lambda b, h, i, j: DOCS[i / 2] > 0, IndexError, "is an int, not a float"),
    "index by bool": (lambda b, h, i, j: DOCS[i > j] > 0, IndexError, "torch.where"),
    "slice by index": (lambda b, h, i, j: DOCS[i:] > 0, TypeError, "slice"),
    "unknown method": (lambda b, h, i, j: i.cumsum(0) > 0, NotImplementedError, "cumsum"),
    "unknown function": (lambda b, h, i, j: torch.lgamma(i) > 0, NotImplementedError, "lgamma"),
    "whole tensor": (lambda b, h, i, j: i >= DOCS, TypeError, "captured tensors by b, h, i or j"),
    "long tensor": (lambda b, h, i, j: i >= BIAS, TypeError, "864 elements.*index it by b, h, i"),
    "and of a float": (lambda b, h, i, j: (i / 2) & (i > j), TypeError, "compare it"),
    "arguments": (lambda i, j: i >= j, TypeError, r"takes \(b, h, i, j\)"),
    "another type": (lambda b, h, i, j: i >= "3", TypeError, "ge got str"),
    "minus of bools": (lambda b, h, i, j: (i > 2) - (j > 2), TypeError, "bool minus a bool"),
    "narrow cast": (lambda b, h, i, j: i.to(torch.int8) > 2, NotImplementedError, "wraps"),
    "new shape": (lambda b, h, i, j: i.new_ones(3) > 2, TypeError, r"shape \(3,\)"),
    "sum": (lambda b, h, i, j: BIAS[b, h].sum() > 0, TypeError, "sum.*144 elements, expected 1 to"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    function, error, sentence = ERRORS[name]
    line = rf"test_tracing.py:{function.__code__.co_firstlineno}"
    with pytest.raises(error, match=sentence) as caught:
        trace_mask_mod(function)
    assert line in str(caught.value)
    assert not _get_current_function_mode_stack()
    assert torch.add(torch.ones(()), 1) == 2


ALONG = torch.cat([torch.linspace(-80, 80, 321), 10.0 ** torch.arange(-30, 31, 5)])
ALONG = torch.cat([ALONG, -ALONG, torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])])
OF_ONE_NUMBER = {
    "log1p": torch.log1p,
    "tan": torch.tan,
    "softplus": F.softplus,
    "softplus, steep": lambda x: F.softplus(x, 3.0, 4.0),
    "softplus, flat": lambda x: F.softplus(x, beta=0.5, threshold=1),
    "logsigmoid": F.logsigmoid,
    "erf": torch.special.erf,
}


@pytest.mark.parametrize("name", OF_ONE_NUMBER)
def test_functions_of_extreme_numbers(name):
    """Relative to the function's size, in float32: e^-80, too."""
    function = OF_ONE_NUMBER[name]
    traced = trace_score_mod(lambda s, b, h, i, j: function(s))
    got = evaluate(*traced, score=ALONG, **INDICES)
    expected = function(ALONG.double()).float()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-40, equal_nan=True)
    assert torch.equal(got.signbit() & (got == 0), function(ALONG).signbit() & (got == 0))


def test_a_captured_tensor_may_not_change():
    table = torch.zeros(N)

    def sets(s, b, h, i, j):
        table[i] = s
        return s

    with pytest.raises(TypeError, match="may not change"):
        trace_score_mod(sets)
    with pytest.raises(TypeError, match="changes a captured tensor"):
        trace_score_mod(
            lambda s, b, h, i, j: torch.tensor(1.0).add_(s) if False else SLOPES[0].add_(s)
        )
    assert not table.any()


def test_an_error_of_the_function_itself_is_kept():
    with pytest.raises(ZeroDivisionError):
        trace_mask_mod(lambda b, h, i, j: 1 // 0)
    with pytest.raises(TypeError, match="unsupported operand"):
        trace_mask_mod(lambda b, h, i, j: "a" - 1)


def test_a_symbol_is_of_one_call():
    kept = []
    trace_mask_mod(lambda b, h, i, j: kept.append(i) or i >= j)
    with pytest.raises(ValueError, match="another call"):
        trace_mask_mod(lambda b, h, i, j: kept[0] >= j)
    with pytest.raises(TypeError, match="outside of tracing"):
        torch.exp(kept[0])


def test_programs_are_the_same_for_any_tensors():
    def mod(table):
        return lambda s, b, h, i, j: s + table[h, i - j]

    one, two = (trace_score_mod(mod(torch.randn(3, 4))).program for _ in range(2))
    assert one == two and hash(one) == hash(two) and one.text() == two.text()
    assert trace_score_mod(mod(torch.ones(3, 4, dtype=torch.int64))).program != one


@pytest.mark.parametrize("context", ["no_grad", "inference", "autocast"])
def test_contexts(context):
    contexts = dict(
        no_grad=torch.no_grad(),
        inference=torch.inference_mode(),
        autocast=torch.autocast("cpu", torch.bfloat16),
    )
    expected = trace_score_mod(SCORES["t5"]).program
    with contexts[context]:
        assert trace_score_mod(SCORES["t5"]).program == expected


def test_threads():
    expected = trace_score_mod(SCORES["t5"]).program
    found = []

    def work():
        found.extend(trace_score_mod(SCORES["t5"]).program for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert len(found) == 80 and set(found) == {expected}


def test_merge_has_each_tensor_once():
    table = torch.arange(N)
    score = trace_score_mod(lambda s, b, h, i, j: s + SLOPES[h] * table[i])
    mask = trace_mask_mod(lambda b, h, i, j: (table[:][i] == table[j]) & PADDING[b, j])
    one, two, tensors = merge(score, mask)
    assert [x.data_ptr() for x in tensors] == [x.data_ptr() for x in (SLOPES, table, PADDING)]
    assert one.captured == two.captured == (("float", 1), ("int", 1), ("bool", 2))
    assert torch.equal(evaluate(two, tensors, **INDICES), evaluate(*mask, **INDICES))
    s = torch.randn(B, H, N, N)
    assert torch.equal(
        evaluate(one, tensors, score=s, **INDICES), evaluate(*score, score=s, **INDICES)
    )
    assert merge(None, mask)[0] is None and merge(score, None)[2] == score.tensors


def test_merge_keeps_tensors_with_gradients_apart():
    leaf = torch.randn(N, requires_grad=True)
    views = leaf[:], leaf[:]
    traced = [trace_score_mod(lambda s, b, h, i, j, x=x: s + x[i]) for x in views]
    assert len(merge(*traced)[2]) == 2


def test_out_of_range():
    table = torch.arange(5)
    traced = trace_mask_mod(lambda b, h, i, j: table[j - 2] > 0)
    i, j = INDICES["i"], INDICES["j"]
    with pytest.raises(IndexError, match=r"index 5 is out of range .* size 5 .* shape \(5,\)"):
        evaluate(*traced, **INDICES)
    seen = (j < 7) & (i >= 0)
    got = evaluate(*traced, **INDICES, seen=seen)
    assert got.shape == j.shape and got.flatten()[:7].tolist() == [True, True, False] + [True] * 4
    with pytest.raises(IndexError, match="index 5"):
        evaluate(*traced, **INDICES, seen=(j < 8) & (i == 2))


def test_values_keep_the_smallest_shape():
    shapes = {}
    for name, mod in dict(row=lambda b, h, i, j: i > 3, head=lambda b, h, i, j: h > 1).items():
        shapes[name] = tuple(evaluate(*trace_mask_mod(mod), **INDICES).shape)
    assert shapes == {"row": (1, 1, N, 1), "head": (1, H, 1, 1)}


def test_evaluate_under_vmap_and_jvp():
    traced = trace_score_mod(SCORES["relative"])
    score, tangent = torch.randn(2, B, H, N, N)
    batched = torch.vmap(lambda s: evaluate(*traced, score=s, **INDICES))(torch.stack([score] * 2))
    assert torch.equal(batched[1], evaluate(*traced, score=score, **INDICES))
    cap = trace_score_mod(SCORES["softcap"])
    _, got = torch.func.jvp(lambda s: evaluate(*cap, score=s, **INDICES), (score,), (tangent,))
    torch.testing.assert_close(got, tangent * (1 - torch.tanh(score / 20) ** 2))


def test_tracing_takes_few_calls():
    """Half more calls of Python functions than it makes now: it is a part of every call."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        traced = [trace_score_mod(function) for function in SCORES.values()]
    finally:
        sys.setprofile(None)
    assert all(isinstance(x, Traced) for x in traced)
    assert calls / len(SCORES) < 500


def test_a_number_changed_by_a_captured_tensor_is_captured():
    def mod(s, b, h, i, j):
        number = torch.tensor(1.0)
        number += SCALAR
        return s * number * torch.full((), fill_value=SCALAR)

    program, tensors = trace_score_mod(mod)
    assert len(tensors) == 2 and all(x.op != "constant" for x in program.values)


def test_a_tensor_that_is_indexed_twice_is_captured_once():
    assert [x is DOCS for x in trace_mask_mod(MASKS["documents"]).tensors] == [True]
