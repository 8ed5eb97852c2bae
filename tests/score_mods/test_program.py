"""Programs as data: text, folding, and random expressions against the functions themselves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.operators import OPS
from fastattn.score_mods.program import Program, Value
from fastattn.score_mods.tracing import trace_mask_mod, trace_score_mod
from tests.score_mods.gallery import INDICES, B, H, N
from tests.score_mods.trees import TABLES, Tree, trees


def directly(function, *score):
    """The function itself on broadcast tensors. A division of ints by zero has no value there."""
    torch.set_default_dtype(torch.float64)  # of i * 0.5 in torch; here floats have the score's
    try:
        return torch.as_tensor(function(*score, *INDICES.values())).expand(B, H, N, N)
    except RuntimeError as error:
        assert "ZeroDivisionError" in str(error)
        return None
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(tree=trees("bool", scores=False))
def test_random_masks(tree: Tree):
    expected = directly(tree.function)
    program, tensors = trace_mask_mod(tree.function)
    program.check()
    assert Program.parse(program.text()) == program
    got = evaluate(program, tensors, **INDICES, dtype=torch.float64)
    if expected is not None:
        assert torch.equal(got.expand(B, H, N, N), expected), tree.text


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(tree=trees("float", scores=True))
def test_random_scores_and_gradients(tree: Tree):
    table = TABLES["float"]
    generator = torch.Generator().manual_seed(1)
    score = torch.randn(B, H, N, N, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(B, H, N, N, generator=generator, dtype=torch.float64)
    expected = directly(tree.function, score)
    program, tensors = trace_score_mod(tree.function, dtype=torch.float64)
    program.check()
    assert Program.parse(program.text()) == program
    got = evaluate(program, tensors, score=score, **INDICES).expand(B, H, N, N)
    if expected is None:
        return
    torch.testing.assert_close(got, expected.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
    # The gradient of a clamped NaN is 0 in torch, and that of its input here.
    if got.requires_grad and expected.requires_grad and not expected.isnan().any():
        grads = [
            torch.autograd.grad((x * weight).sum(), (score, table), materialize_grads=True)
            for x in (got, expected.double())
        ]
        torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-7, equal_nan=True)


@given(number=st.floats() | st.integers(-(2**63), 2**63 - 1) | st.booleans())
def test_constants_are_exact(number):
    program = trace_score_mod(lambda s, b, h, i, j: torch.where(i == j, s, number)).program
    again = Program.parse(program.text())
    assert again == program and hash(again) == hash(program)


def test_programs_differ_by_the_sign_of_zero():
    one, two = (trace_score_mod(lambda s, b, h, i, j, x=x: s + x).program for x in (0.0, -0.0))
    assert one != two
    nan = trace_score_mod(lambda s, b, h, i, j: s * math.nan).program
    assert nan == trace_score_mod(lambda s, b, h, i, j: s * math.nan).program


def ops(function):
    return [x.op for x in trace_mask_mod(function).program.values]


def test_constants_are_folded_and_common_values_are_one():
    assert ops(lambda b, h, i, j: i + i.new_full((), 2) * 3 - 1 >= j) == [
        *("i", "j", "constant", "add", "constant", "sub", "ge")
    ]
    assert ops(lambda b, h, i, j: (i - j >= 2) | (i - j >= 2) & True).count("sub") == 1
    assert ops(lambda b, h, i, j: (i >= j) & i.new_ones((), dtype=torch.bool)) == ["i", "j", "ge"]
    assert ops(lambda b, h, i, j: (i >= j) & False) == ["constant"]
    assert ops(lambda b, h, i, j: ~~(i >= j)) == ["i", "j", "ge"]
    assert ops(lambda b, h, i, j: (i.exp() > 0) | True) == ["constant"]


def test_unused_captured_tensors_are_dropped():
    def mod(s, b, h, i, j):
        TABLES["vector"][i] + 1
        return s * TABLES["bool"][i, j]

    program, tensors = trace_score_mod(mod)
    assert program.captured == (("bool", 2),) and tensors[0] is TABLES["bool"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "captured",
        "captured\nscore int",
        "captured\nadd int 0 1",
        "captured\nexp float 0",
        "captured\nscore float\nexp float 1",
        "captured\nscore float\nexp float -1",
        "captured\ni int\nexp float 0",
        "captured\ni int\nload int @0 0",
        "captured int:1\nscore float\nload int @0 0",
        "captured int:2\ni int\nload int @0 0",
        "captured\nconstant int 0x1p+0",
        "captured\nconstant bool 1",
        "captured\nwhat float",
    ],
    ids=repr,
)
def test_text_of_no_program(text):
    with pytest.raises(ValueError):
        Program.parse(text)


def test_division_by_zero_is_zero():
    program = trace_mask_mod(lambda b, h, i, j: (i // j == 0) & (i % j == 0)).program
    got = evaluate(program, (), **INDICES)
    assert got[0, 0, :, 0].all()


def test_the_table_has_a_meaning_for_each_operator():
    inputs = {"score", "b", "h", "i", "j", "constant", "load", "to_float"}
    assert {name for name, op in OPS.items() if op.meaning is None} == inputs
    kinds = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}
    for name, op in OPS.items():
        for operands, result in op.signatures if op.meaning else ():
            args = [torch.ones(3, dtype=kinds[x]) for x in operands]
            got = op.meaning(*args)
            assert got.dtype == kinds[result], name
            if op.fold is not None:
                folded = op.fold(*({"float": 1.0, "int": 1, "bool": True}[x] for x in operands))
                assert folded == got[0].item(), name


def test_folding_means_what_torch_means():
    pairs = [(x, y) for x in range(-5, 6) for y in range(-5, 6)]
    for name, op in OPS.items():
        if op.fold is None or ("int", "int") not in dict(op.signatures):
            continue
        for x, y in pairs:
            folded = op.fold(x, y)
            if folded is not None:
                meant = op.meaning(torch.tensor(x), torch.tensor(y)).item()
                assert folded == meant, (name, x, y)


def test_values_are_plain_tuples():
    assert Value("i", (), "int") == ("i", (), "int", None, None)


def test_zeros_of_both_signs_are_two_constants():
    program = trace_score_mod(
        lambda s, b, h, i, j: torch.where(i == j, -0.0, 0.0 * s + 0.0)
    ).program
    got = evaluate(program, (), score=torch.ones(B, H, N, N), **INDICES)
    assert torch.equal(got.signbit()[0, 0], torch.eye(N).bool())


@pytest.mark.parametrize("index, is_inside", [(-5, False), (-4, True), (3, True), (4, False)])
def test_the_range_of_an_index(index, is_inside):
    """-4 to 3 for four elements; beyond it, an index raises only where a pair is seen."""
    table = torch.arange(4.0)
    places = torch.tensor([0, index])
    program, tensors = trace_score_mod(lambda s, b, h, i, j: s + table[places[j]])
    where = dict(INDICES, j=torch.arange(2), score=torch.zeros(1, 1, 1, 2))
    hidden = evaluate(program, tensors, seen=torch.tensor([True, False]), **where)
    assert hidden[..., 0].eq(0).all()
    if is_inside:
        assert evaluate(program, tensors, **where)[0, 0, 0, 1] == table[index]
        return
    for seen in (None, torch.tensor([False, True])):
        with pytest.raises(IndexError, match=f"index {index} is out of range"):
            evaluate(program, tensors, seen=seen, **where)


def test_gradients_of_narrow_tables_are_rounded_once():
    """1,000 times 1 in bfloat16, one after another, is 256."""
    table = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    program, tensors = trace_score_mod(lambda s, b, h, i, j: s + table[0 * j])
    j = torch.arange(1000)
    evaluate(program, tensors, score=torch.zeros(1000), **INDICES | dict(j=j)).sum().backward()
    expected = torch.tensor([1000.0]).to(torch.bfloat16)
    assert torch.equal(table.grad, expected)
