"""Functions with captured tensors over ranks: out and gradients are those of one rank.
`test_distributed_rows.py` has functions beside every argument."""

import pytest
import torch

import fastattn
from fastattn import distributed
from fastattn.distributed import layout as layouts

B, H, HK, N, D = 2, 4, 2, 45, 16
MESH = (2, 2)
WAYS = (
    ("gather", 2, "zigzag"),
    ("gather", 3, "contiguous"),
    ("ring", 3, "contiguous"),
    ("ring", 4, "zigzag"),
    ("ulysses", 2, "contiguous"),
    ("usp", MESH, "zigzag"),
)


def functions(kind):
    """score_mod, mask_mod, and what they learn."""
    g = torch.Generator().manual_seed(2)
    table = torch.randn(H, 2 * N, generator=g, dtype=torch.float64).requires_grad_()
    bias = torch.randn(H, N, N, generator=g, dtype=torch.float64).requires_grad_()
    documents = torch.sort(torch.randint(0, 3, (B, N), generator=g)).values
    same = lambda b, h, i, j: (documents[b, i] == documents[b, j]) | (i == j)  # noqa: E731
    return {
        "table": (lambda s, b, h, i, j: s.tanh() * 3 + table[h, i - j + N], None, (table,)),
        "documents": (None, same, ()),
        "both": (lambda s, b, h, i, j: s + table[h, i - j + N] + b * 0.1 * j, same, (table,)),
        "bias": (lambda s, b, h, i, j: s + bias[h, i, j], same, (bias,)),
    }[kind]


def tensors():
    g = torch.Generator().manual_seed(1)
    shapes = (B, H, N, D), (B, HK, N, D), (B, HK, N, D), (B, H, N, D)
    return [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]


def train(attention, q, k, v, dout, kind, **arguments):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    score_mod, mask_mod, learned = functions(kind)
    out, lse = attention(
        q, k, v, score_mod=score_mod, mask_mod=mask_mod, return_lse=True, **arguments
    )
    loss = (out * dout).sum() + lse.cos().sum()
    return out.detach(), *torch.autograd.grad(loss, (q, k, v, *learned))


def run(group, kind, strategy, layout, arguments):
    own = [distributed.shard(x, layout=layout, group=group) for x in tensors()]
    about = dict(strategy=strategy, layout=layout, group=group)
    return train(distributed.attention, *own, kind, **about, **arguments)


@pytest.mark.parametrize("kind", ["table", "documents", "both", "bias"])
@pytest.mark.parametrize("strategy, count, layout", WAYS, ids=str)
def test_results_and_gradients(four, strategy, count, layout, kind):
    arguments = dict(causal=True, softcap=9.0) if kind == "both" else {}
    found = four.results(count, run, kind, strategy, layout, arguments)
    expected = train(fastattn.attention, *tensors(), kind, **arguments)
    rows = layouts.spans(layout, N, len(found))
    for at, right in enumerate(expected):
        each = [x[at] for x in found]
        if at < 4:
            torch.testing.assert_close(layouts.whole(each, rows, 2), right, rtol=1e-10, atol=1e-11)
        else:
            for x in each:
                torch.testing.assert_close(x, right, rtol=1e-10, atol=1e-11)
                assert torch.equal(x, each[0])


CU = torch.tensor([0, 20, 20, 31, 2 * N])


def packed(attention, q, k, v, dout, **arguments):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    score_mod, _, learned = functions("table")
    near = lambda b, h, i, j: i - j < 9 + b  # noqa: E731
    out = attention(q, k, v, CU, CU, score_mod=score_mod, mask_mod=near, **arguments)
    return out.detach(), *torch.autograd.grad((out * dout).sum(), (q, k, v, *learned))


def run_packed(group, strategy):
    own = [distributed.shard(x, dim=0, group=group) for x in map(flat, tensors())]
    return packed(distributed.attention_packed, *own, strategy=strategy, group=group)


def flat(x):
    return x.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("strategy, count", [("gather", 3), ("ulysses", 2)], ids=str)
def test_packed_batches(four, strategy, count):
    found = four.results(count, run_packed, strategy)
    expected = packed(fastattn.attention_packed, *map(flat, tensors()))
    for at, right in enumerate(expected):
        each = [x[at] for x in found]
        got = torch.cat(each) if at < 4 else each[0]
        torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-11)


def disagree(group, how):
    rank = torch.distributed.get_rank(group)
    own = [distributed.shard(x, group=group) for x in tensors()[:3]]
    given = {
        "program": dict(score_mod=lambda s, b, h, i, j: s + (i if rank else j)),
        "one": dict(mask_mod=(lambda b, h, i, j: i >= j) if rank else None),
        "raises": dict(score_mod=lambda s, b, h, i, j: s if not rank or i > j else -s),
    }[how]
    return distributed.attention(*own, group=group, **given)


@pytest.mark.parametrize(
    "how, words",
    [("program", "score_mod: got"), ("one", "mask_mod: got"), ("raises", "branch on an index")],
)
def test_ranks_that_differ_raise_on_every_rank(four, how, words):
    for x in four.run(2, disagree, how):
        assert isinstance(x, (TypeError, ValueError, RuntimeError))
        assert words in str(x)


def explain(group):
    own = [distributed.shard(x, group=group) for x in tensors()[:3]]
    return str(distributed.explain(*own, group=group, mask_mod=functions("documents")[1]))


@pytest.mark.slow
def test_explain(four):
    for x in four.run(2, explain):
        assert "on 2 ranks" in str(x)
