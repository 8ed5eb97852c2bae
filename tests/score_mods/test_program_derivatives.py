"""Derivatives of programs, against torch's autograd."""

import pytest
import torch
from hypothesis import assume, given, settings

from fastattn.score_mods.derivatives import RULES, Differentiation
from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.operators import OPS
from fastattn.score_mods.program import Program
from fastattn.score_mods.tracing import trace_score_mod
from tests.score_mods import gallery
from tests.score_mods.trees import TABLES, B, H, N, Tree, trees
from tests.support.program_operators import AT_EDGES, POINTS, at_edges, by_function, indices

BY_SCORE = {
    "add": lambda s, x: s * s + s * x,
    "sub": lambda s, x: x - s * s,
    "mul": lambda s, x: s * x * s,
    "neg": lambda s, x: -(s * x),
    "abs": lambda s, x: (s * x).abs(),
    "minimum": lambda s, x: torch.minimum(s * s, x),
    "maximum": lambda s, x: torch.maximum(s * s, x),
    "where": lambda s, x: torch.where(s > x, s * s, x * s),
    "remainder": lambda s, x: torch.remainder(s, x.abs() + 0.3),
    "remainder by": lambda s, x: torch.remainder(x, s.abs() + 0.3),
    "div": lambda s, x: x / (1 + s * s),
    "div by itself": lambda s, x: s / (2 + torch.sin(s)),
    "pow": lambda s, x: (s.abs() + 0.1) ** x,
    "pow of": lambda s, x: torch.pow(x.abs() + 0.1, s),
    "squared": lambda s, x: s**2 + s**3,
    "exp": lambda s, x: torch.exp(s * x),
    "exp2": lambda s, x: torch.exp2(s),
    "log": lambda s, x: torch.log(s.abs() + 0.1),
    "log2": lambda s, x: torch.log2(s.abs() + 0.1),
    "log1p": lambda s, x: torch.log1p(s.abs() * x.abs()),
    "softplus": lambda s, x: torch.nn.functional.softplus(s * x, 2.0, 1.5),
    "logsigmoid": lambda s, x: torch.nn.functional.logsigmoid(s * x),
    "tan": lambda s, x: torch.tan(s * x),
    "sqrt": lambda s, x: torch.sqrt(s.abs() + 0.1),
    "rsqrt": lambda s, x: torch.rsqrt(s.abs() + 0.1),
    "sin": lambda s, x: torch.sin(s * x),
    "cos": lambda s, x: torch.cos(s * x),
    "tanh": lambda s, x: torch.tanh(s * x),
    "sigmoid": lambda s, x: torch.sigmoid(s * x),
    "erf": lambda s, x: torch.erf(s * x),
    "rounded": lambda s, x: torch.floor(s) + torch.ceil(s) + torch.round(s) + torch.trunc(s) + s,
    "of no score": lambda s, x: x,
}
G = torch.Generator().manual_seed(3)
SCORES = torch.randn(1, 1, 6, 8, generator=G, dtype=torch.float64)
X = torch.randn(8, generator=G, dtype=torch.float64)
INDICES = indices(*SCORES.shape)


def derived(program, tensors, scores, indices):
    """f, f_x and f_xx by rules."""
    d, result = Differentiation(program.values), len(program.values) - 1
    at = [x for x, y in enumerate(program.values) if y.op == "score"]
    first = d.by(at[0], result) if at else None
    second = None if first is None else d.by(at[0], first)

    def value(x):
        if x is None:
            return torch.zeros(())
        part = Program(tuple(d.values[: x + 1]), program.captured)
        return evaluate(part, tensors, score=scores, **indices)

    return [value(x) for x in (result, first, second)]


def by_autograd(program, tensors, scores, indices):
    scores = scores.clone().requires_grad_()
    f = evaluate(program, tensors, score=scores, **indices).expand(scores.shape)
    found = [f.detach()]
    for _ in range(2):
        if f.requires_grad:
            (f,) = torch.autograd.grad(f.sum(), scores, create_graph=True)
        else:
            f = torch.zeros_like(scores)
        found.append(f.detach())
    return found


@pytest.mark.parametrize("name", BY_SCORE)
def test_each_rule(name):
    function = BY_SCORE[name]
    traced = trace_score_mod(lambda s, b, h, i, j: function(s, X[j]), dtype=torch.float64)
    found = derived(*traced, SCORES, INDICES)
    for got, right in zip(found, by_autograd(*traced, SCORES, INDICES)):
        torch.testing.assert_close(got.double().expand(right.shape), right)


def test_there_is_a_rule_for_each_operator_of_floats():
    """Roundings, signs and casts have the derivative 0."""
    of_floats = {
        name
        for name, op in OPS.items()
        if any(kinds and k == "float" for kinds, k in op.signatures)
    }
    zero = {"floor", "ceil", "trunc", "round", "sign", "floor_div", "to_float"}
    assert of_floats - zero == set(RULES)


@pytest.mark.parametrize("name", AT_EDGES)
def test_derivatives_at_infinities_zeros_and_kinks(name):
    function = at_edges(name)
    scores = torch.tensor(POINTS, dtype=torch.float64).view(1, 1, 1, -1)
    traced = trace_score_mod(lambda s, b, h, i, j: function(s), dtype=torch.float64)
    found = derived(*traced, scores, INDICES | dict(j=torch.arange(len(POINTS))))
    for order, right in enumerate(by_function(function, scores)):
        got = found[order].double().expand(right.shape)
        same = torch.isclose(got, right, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert same.all(), (order, scores[~same], got[~same], right[~same])


def test_each_operator_is_tested_at_the_edges():
    of_floats = {x for x, op in OPS.items() for kinds, k in op.signatures if "float" in kinds}
    of_others = {"to_int", "to_bool", "ge", "gt", "le", "lt", "eq", "ne"}
    assert of_floats - of_others <= {name.partition(",")[0] for name in AT_EDGES}


def test_equal_operands_share_the_derivative():
    traced = trace_score_mod(lambda s, b, h, i, j: torch.maximum(s, X[j]) + torch.minimum(s, X[j]))
    scores = X.expand(SCORES.shape)
    found = derived(*traced, scores, INDICES)
    assert torch.equal(found[1].expand(SCORES.shape), torch.ones_like(SCORES))


def test_a_branch_that_is_not_taken_has_no_effect():
    """Torch's autograd gives NaN there."""
    traced = trace_score_mod(lambda s, b, h, i, j: torch.where(i < 3, torch.log(i - 2.0) * s, s))
    found = derived(*traced, SCORES, INDICES)
    assert torch.equal(found[1].expand(SCORES.shape)[:, :, 3:], torch.ones(1, 1, 3, 8).double())


@given(trees("float", scores=True))
@settings(max_examples=60, deadline=None)
def test_random_trees(tree: Tree):
    traced = trace_score_mod(tree.function, dtype=torch.float64)
    tensors = [x.detach() for x in traced.tensors]
    scores = torch.randn(B, H, N, N, generator=G, dtype=torch.float64)
    right = by_autograd(traced.program, tensors, scores, gallery.INDICES)
    assume(all(x.isfinite().all() and x.abs().max() < 1e9 for x in right))
    found = derived(traced.program, tensors, scores, gallery.INDICES)
    for got, x in zip(found, right):
        torch.testing.assert_close(got.double().expand(x.shape), x, rtol=1e-6, atol=1e-6)
    assert TABLES["float"].requires_grad  # of the trees: the rules read values alone
