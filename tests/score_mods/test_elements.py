"""Captured rows as operands: sums, norms and products of their elements mean what torch's do."""

import math

import pytest
import torch
from torch.nn import functional as F

import fastattn
from fastattn.score_mods import kept_calls
from fastattn.score_mods.elements import MOST
from fastattn.score_mods.evaluate import evaluate
from fastattn.score_mods.tracing import trace_mask_mod, trace_score_mod
from tests.score_mods.gallery import INDICES, B, H, N
from tests.score_mods.test_tracing import for_each_pair
from tests.support.backends import INTERPRETED
from tests.support.marks import parametrize

G = torch.Generator().manual_seed(21)
POS = torch.randn(N, 3, generator=G, dtype=torch.float64)
WIDE = torch.randn(N, MOST, generator=G, dtype=torch.float64)
REL_Q, REL_K = torch.randn(2, B, H, N, 4, generator=G, dtype=torch.float64)
TURN = torch.randn(N, 3, 3, generator=G, dtype=torch.float64)
WEIGHT = torch.randn(3, generator=G, dtype=torch.float64)
NEIGHBOURS = torch.randint(0, N, (N, 4), generator=G)
FLAGS = torch.rand(N, 3, generator=G) > 0.5
TABLES = {"one": POS, "others": [REL_Q, REL_K]}

SCORES = {
    "sum": lambda s, b, h, i, j: s + (REL_Q[b, h, i] * REL_K[b, h, j]).sum(-1),
    "sum of all": lambda s, b, h, i, j: s + TURN[i].sum() + POS[j].sum(0) + NEIGHBOURS[i].sum(),
    "sum of bools": lambda s, b, h, i, j: s * FLAGS[i].sum() + (POS[i] > s).sum(dim=-1),
    "sum of two dimensions": lambda s, b, h, i, j: (
        s + (POS[i][:, None] - POS[j][None]).abs().sum((0, 1)) + TURN[j].sum(axis=0)[1]
    ),
    "sum of another dtype": lambda s, b, h, i, j: s + FLAGS[i].sum(dtype=torch.float64) / 7,
    "dot": lambda s, b, h, i, j: s + torch.dot(REL_Q[b, h, i], REL_K[b, h, j]),
    "inner": lambda s, b, h, i, j: s + torch.inner(POS[i], WEIGHT) + torch.linalg.vecdot(*POS[:2]),
    "matmul": lambda s, b, h, i, j: s + POS[i] @ POS[j] + WEIGHT @ POS[i] + POS[i] @ WEIGHT,
    "of a matrix": lambda s, b, h, i, j: (
        s + torch.matmul(TURN[i], POS[j])[1] + (POS[j] @ TURN[i])[2]
    ),
    "of matrices": lambda s, b, h, i, j: s + (TURN[i] @ TURN[j])[0, 2],
    "norm": lambda s, b, h, i, j: s - (POS[i] - POS[j]).norm() + POS[i].norm(p=1),
    "vector_norm": lambda s, b, h, i, j: s - torch.linalg.vector_norm(POS[i] - POS[j], dim=-1),
    "norm of a matrix": lambda s, b, h, i, j: s + TURN[i].norm() + torch.linalg.norm(TURN[j]),
    "norms of rows": lambda s, b, h, i, j: s + torch.norm(TURN[i], dim=1)[2],
    "largest norm": lambda s, b, h, i, j: s - torch.linalg.norm(POS[i] - POS[j], ord=math.inf),
    "norm of one": lambda s, b, h, i, j: s + POS[i][1:2].norm(),
    "mean": lambda s, b, h, i, j: s * (POS[i] * WEIGHT).mean(-1) + TURN[i].mean((0, 1)),
    "mean, kept": lambda s, b, h, i, j: s * TURN[i].mean(0, keepdim=True)[0, 2],
    "extremes": lambda s, b, h, i, j: s + (POS[i] - POS[j]).abs().amax(-1) - POS[i].amin(),
    "max, min": lambda s, b, h, i, j: s + POS[i].max() - torch.min(POS[j]) + NEIGHBOURS[i].max(),
    "max of two": lambda s, b, h, i, j: s + torch.max(POS[i], WEIGHT).sum() + s.max(POS[i]).mean(),
    "prod": lambda s, b, h, i, j: s + POS[i].prod() + torch.prod(NEIGHBOURS[j] - 3, 0),
    "of the score": lambda s, b, h, i, j: (
        torch.tanh(POS[i] * s).sum() + (s - WEIGHT).square().sum()
    ),
    "functions": lambda s, b, h, i, j: (
        s + F.relu(POS[i]).sum() + POS[j].clamp(min=0).exp().sum() + F.softplus(POS[i]).mean()
    ),
    "where": lambda s, b, h, i, j: s + torch.where(FLAGS[i], POS[i], POS[j]).sum(),
    "numbers first": lambda s, b, h, i, j: (
        s + ((1 - POS[i]) / (2 + POS[j] ** 2) + 2.0**WEIGHT).sum()
    ),
    "whole numbers": lambda s, b, h, i, j: (
        s + (NEIGHBOURS[i] // 3 - NEIGHBOURS[j] % 2).float().mean()
    ),
    "casts": lambda s, b, h, i, j: (
        s.type_as(POS) + NEIGHBOURS[i].to(s.dtype).mean() + FLAGS[j].to(POS).sum()
    ),
    "indices of elements": lambda s, b, h, i, j: (
        s + (POS[i] * 2)[0] + (POS[i] - s)[-1] + (TURN[i] * 2)[1:, ::2].sum() - (-POS[j])[..., 1]
    ),
    "unpacked": lambda s, b, h, i, j: (lambda x, y, z: s + x * y - z)(*POS[i]),
    "unpacked elements": lambda s, b, h, i, j: (lambda x, y, z: s + x * y - z)(*(POS[i] - POS[j])),
    "a loop": lambda s, b, h, i, j: s + sum((x - y) ** 2 for x, y in zip(POS[i], POS[j])),
    "tables": lambda s, b, h, i, j: (
        s + TABLES["one"][i].sum() * TABLES["others"][1][b, h, j].amax(-1) + len(TABLES)
    ),
    "of numbers": lambda s, b, h, i, j: (
        s.sum() + s.norm() + torch.max(s) + s.amax() + (i > j).any()
    ),
}  # fmt: skip
MASKS = {
    "near": lambda b, h, i, j: ((POS[i] - POS[j]) ** 2).sum(-1) < 2,
    "neighbours": lambda b, h, i, j: (NEIGHBOURS[i] == j).any() | (i == j),
    "any": lambda b, h, i, j: torch.any(FLAGS[i] & FLAGS[j]) & NEIGHBOURS[j].any(-1),
    "all": lambda b, h, i, j: (FLAGS[i] | ~FLAGS[j]).all(),
    "extremes of bools": lambda b, h, i, j: FLAGS[i].amax() ^ FLAGS[j].amin(0),
    "one of few keys": lambda b, h, i, j: (j == torch.tensor([0, 3, 7])).any(),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    score = torch.randn(B, H, N, N, generator=G, dtype=torch.float64)
    program, tensors = trace_score_mod(SCORES[name], dtype=torch.float64)
    got = evaluate(program, tensors, score=score, **INDICES).expand(B, H, N, N)
    expected = for_each_pair(SCORES[name], score).double()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    got = evaluate(*trace_mask_mod(MASKS[name]), **INDICES).expand(B, H, N, N)
    assert torch.equal(got, for_each_pair(MASKS[name]))


WITH_AT = ("matmul", "of a matrix", "of matrices")  # torch.compile does not follow @


@parametrize("name", [x for x in SCORES if x not in WITH_AT], fast=1)
def test_compiled(name):
    """In one graph, with the values of eager code: torch.compile may turn operands around."""
    torch._dynamo.reset()

    def traced(x):
        return x + 1, trace_score_mod(SCORES[name], dtype=torch.float64).program.text()

    given = torch.zeros(1)
    compiled = torch.compile(traced, backend="eager", fullgraph=True)(given)[1]
    ops = [
        sorted(x.split()[0] for x in text.split("\n")[1:]) for text in (compiled, traced(given)[1])
    ]
    assert ops[0] == ops[1]


def test_a_row_is_captured_once():
    """Each element is a load of the tensor itself. Tracing reads no element."""
    for name in ("norm", "unpacked", "a loop"):
        traced = trace_score_mod(SCORES[name])
        assert [x is POS for x in traced.tensors] == [True]


ERRORS = {
    "too long": (
        lambda s, b, h, i, j: s + (LONG[i] * LONG[j]).sum(),
        TypeError,
        "65 elements, expected 1 to 64.*outside of the function",
    ),
    "broadcast to many": (
        lambda s, b, h, i, j: s + (WIDE[i][:, None] * WIDE[j]).sum(),
        TypeError,
        "4096 elements",
    ),
    "empty": (lambda s, b, h, i, j: s + POS[i, :0].sum(), TypeError, "0 elements"),
    "shapes": (
        lambda s, b, h, i, j: s + (POS[i] * REL_Q[b, h, j]).sum(),
        TypeError,
        r"mul got shapes that do not broadcast: \(3,\), \(4,\)",
    ),
    "dot of shapes": (
        lambda s, b, h, i, j: s + POS[i] @ REL_Q[b, h, j],
        TypeError,
        r"\(3,\) and \(4,",
    ),
    "no tensor": (lambda s, b, h, i, j: s + torch.dot(POS[i], s), TypeError, "dot got a number"),
    "not reduced": (
        lambda s, b, h, i, j: s + POS[i] * 2,
        TypeError,
        r"got a tensor of shape \(3,\)",
    ),
    "a dimension": (lambda s, b, h, i, j: s + POS[i].sum(1), IndexError, "got the dimension 1"),
    "mean of ints": (lambda s, b, h, i, j: s + NEIGHBOURS[i].mean(), TypeError, "mean of kind int"),
    "norm of ints": (lambda s, b, h, i, j: s + NEIGHBOURS[i].norm(), TypeError, "norm of ints"),
    "another norm": (lambda s, b, h, i, j: s + POS[i].norm(p=3), NotImplementedError, "order 3"),
    "norm of matrices": (
        lambda s, b, h, i, j: s + torch.linalg.norm(TURN[i], 2),
        NotImplementedError,
        "vector_norm",
    ),
    "max with indices": (lambda s, b, h, i, j: s + POS[i].max(-1), NotImplementedError, "amax"),
    "a shape": (lambda s, b, h, i, j: s + POS[i].view(3, 1).sum(), TypeError, "3"),
    "elements by an index": (lambda s, b, h, i, j: s + (POS[i] * 2)[h], TypeError, "is a number"),
    "beyond the elements": (lambda s, b, h, i, j: s + (POS[i] * 2)[3], IndexError, "index 3"),
    "indices of elements": (lambda s, b, h, i, j: s + (POS[i] * 2)[0, 0], IndexError, "too many"),
    "in place": (lambda s, b, h, i, j: POS[i].add_(1).sum() + s, TypeError, "changes a captured"),
    "a branch": (lambda s, b, h, i, j: s if POS[i] > 0 else 0, TypeError, "a branch on a tensor"),
    "an index of a row": (lambda s, b, h, i, j: s + POS[NEIGHBOURS[i]].sum(), TypeError, "index"),
}
LONG = torch.zeros(N, MOST + 1)


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    function, error, sentence = ERRORS[name]
    with pytest.raises(error, match=sentence) as caught:
        trace_score_mod(function)
    assert "test_elements.py" in str(caught.value)


# ------------------------------------------------------------------------------- in calls

Q, K, V = torch.randn(3, B, H, N, 8, generator=G).unbind()
LEARNED = {  # a term of scores by an (N, 3) and a (3,) tensor, and the same on whole tensors
    "dot": (
        lambda s, x, w, i, j: s + torch.dot(x[i], x[j] * w),
        lambda s, x, w: s + (x * w) @ x.mT,
    ),
    "norm": (
        lambda s, x, w, i, j: s - (x[i] - x[j]).norm() * w.mean(),
        lambda s, x, w: s - distances(x) * w.mean(),
    ),
    "of the score": (
        lambda s, x, w, i, j: (torch.tanh(s + x[i] - w) * x[j]).sum(),
        lambda s, x, w: (torch.tanh(s[..., None] + x[:, None] - w) * x).sum(-1),
    ),
    "softplus": (
        lambda s, x, w, i, j: s * F.softplus(x[i] + x[j]).amax() + F.logsigmoid(s + w[0]),
        lambda s, x, w: s * F.softplus(x[:, None] + x).amax(-1) + F.logsigmoid(s + w[0]),
    ),
}


def distances(x):
    squares = (x[:, None] - x).square().sum(-1)
    same = torch.eye(len(x), dtype=torch.bool)
    return torch.where(same, 0.0, torch.where(same, 1.0, squares).sqrt())


def close(found, expected):
    for got, right in zip(found, expected, strict=True):
        got, right = got.detach().double(), right.detach()
        scale = 1 + float(right.abs().max())
        torch.testing.assert_close(got, right, rtol=0, atol=2e-5 * scale)


def passes(call, leaves):
    """The output, its gradients, and those of a function of these."""
    out = call(*leaves)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)
    return [out, *first, *second]


@pytest.mark.interpreter
@parametrize("name", LEARNED, fast=2)
def test_derivatives_by_captured_rows(name):
    term, whole = LEARNED[name]
    given = Q, K, V, POS.float(), WEIGHT.float()

    def call(q, k, v, x, w):
        return fastattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: term(s, x, w, i, j))

    def directly(q, k, v, x, w):
        return whole(q @ k.mT * q.shape[-1] ** -0.5, x, w).softmax(-1) @ v

    found = passes(call, [x.clone().requires_grad_() for x in given])
    expected = passes(directly, [x.double().requires_grad_() for x in given])
    close(found, expected)
    fixed, tangents = given[3:], torch.randn(3, *Q.shape, generator=G).unbind()
    moved = torch.func.jvp(lambda *x: call(*x, *fixed), given[:3], tuple(tangents))[1]
    wide = [x.double() for x in (*given, *tangents)]
    right = torch.func.jvp(lambda *x: directly(*x, *wide[3:5]), tuple(wide[:3]), tuple(wide[5:]))[1]
    close([moved], [right])
    batched = torch.vmap(lambda q: call(q, *given[1:]))(torch.stack([Q, 2 * Q]))
    torch.testing.assert_close(batched[0], found[0].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="of the CPU's kernels")
def test_second_derivatives_by_long_rows():
    """Of every pair of elements, without a pass for each."""
    x = torch.randn(N, MOST, generator=G).requires_grad_()
    mod = lambda s, b, h, i, j: s - (x[i] - x[j]).norm()  # noqa: E731
    leaves = [y.clone().requires_grad_() for y in (Q, K, V)]
    found = passes(lambda *_: fastattn.attention(*leaves, score_mod=mod), [*leaves, x])
    wide = [y.detach().double().requires_grad_() for y in (*leaves, x)]

    def directly(q, k, v, x):
        return (q @ k.mT * q.shape[-1] ** -0.5 - distances(x)).softmax(-1) @ v

    close(found, passes(directly, wide))


@pytest.mark.interpreter
def test_a_mask_of_a_tensor_with_a_gradient():
    """It has none by its elements, in no pass."""
    x = POS.float().requires_grad_()
    mod = lambda b, h, i, j: (x[i] - x[j]).norm() < 2  # noqa: E731
    leaves = [y.clone().requires_grad_() for y in (Q, K, V)]
    found = passes(lambda *given: fastattn.attention(*given, mask_mod=mod), leaves)
    mask = distances(x.detach().double()) < 2
    wide = [y.detach().double().requires_grad_() for y in leaves]

    def directly(q, k, v):
        s = q @ k.mT * q.shape[-1] ** -0.5
        return s.masked_fill(~mask, -math.inf).softmax(-1) @ v

    close(found, passes(directly, wide))


NUMBER = torch.tensor(2.0)
WITH_NUMBERS = {
    "softplus, beta": lambda s, b, h, i, j: torch.nn.functional.softplus(s, NUMBER),
    "softplus, threshold": lambda s, b, h, i, j: torch.nn.functional.softplus(s, 1, NUMBER - 2),
    "leaky_relu": lambda s, b, h, i, j: torch.nn.functional.leaky_relu(s, NUMBER),
    "norm": lambda s, b, h, i, j: s + torch.norm(POINTS[i], NUMBER),
}
POINTS = torch.randn(9, 3, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_a_tensor_as_a_number_is_read_in_each_call(name):
    q, k, v = torch.randn(3, 1, 2, 9, 16, generator=torch.Generator().manual_seed(3))
    found = []
    for value in (2.0, 1.0, 2.0):
        NUMBER.fill_(value)
        found.append(fastattn.attention(q, k, v, score_mod=WITH_NUMBERS[name]))
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    "function, kind, message",
    [
        (lambda i: 2.0 if POINTS[i].is_cuda else 1.0, AttributeError, "is_cuda of a captured"),
        (lambda i: POINTS[i].T.sum(), AttributeError, r"\.T of"),
        (lambda i: (POINTS[i] * 2)[3:].sum(), IndexError, "takes no element"),
        (lambda i: torch.linalg.norm(POINTS[i][:, None], 1, [0, 1]), NotImplementedError, "matrix"),
        (lambda i: (WIDE[i][:, None] @ WIDE[i][None]).sum(), TypeError, "with a larger product"),
    ],
)
def test_what_rows_do_not_have(function, kind, message):
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    with pytest.raises(kind, match=message):
        fastattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + function(i))


def test_functions_of_many_numbers_are_not_kept():
    """To compare them with those of the last call would take longer than to trace them."""
    numbers = [float(x) for x in range(300)]
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    before = len(kept_calls._kept)
    for value in (1.0, 2.0):
        numbers[7] = value
        out = fastattn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s * numbers[7])
        torch.testing.assert_close(out, fastattn.attention(q, k, v, scale=value / 4))
    assert len(kept_calls._kept) == before
