"""Compiled autograd: the backward of an eager forward, traced whole and compiled."""

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import fastattn
from tests.support.backends import not_interpreted
from tests.support.marks import parametrize
from tests.support.ways import in_sdpa, mapped, multihead, out_alone, packed, rand, with_lse

pytestmark = [
    not_interpreted,
    pytest.mark.usefixtures("nothing_is_small"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

B, H, N, D = 2, 2, 19, 8


def of_lse_alone(q, k, v):
    return fastattn.attention(q, k, v.detach(), return_lse=True)[1] + v.sum()


def with_mask(q, k, v):
    """Has every gradient that a call can have."""
    return fastattn.attention(q, k, v, mask=q[0, 0, :, :1] * k[0, 0, :, 0], sinks=v[0, :, 0, 0])


def jvp(q, k, v):
    out, out_t = fastattn.attention_jvp(q, k, v, k.detach(), q, None)
    return out * out_t


def func_jvp(q, k, v):
    def function(q, v):
        return fastattn.attention(q, k, v)

    out, out_t = torch.func.jvp(function, (q, v), (torch.ones_like(q), q))
    return out * out_t


def gradient_penalty(q, k, v):
    out = fastattn.attention(q, k, v)
    return torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]


FORWARDS = {
    "attention": fastattn.attention,
    "causal": lambda q, k, v: fastattn.attention(q, k, v, causal=True),
    "dropout": lambda q, k, v: fastattn.attention(q, k, v, dropout_p=0.3, seed=1),
    "LSE": with_lse,
    "LSE alone": of_lse_alone,
    "mask and sinks": with_mask,
    "packed": packed,
    "weights": lambda q, k, v: fastattn.attention_weights(q, k).mT @ v,
    "sdpa": in_sdpa,
    "MultiheadAttention": out_alone,
    "MultiheadAttention, weights": multihead,
    "vmap": mapped,
    "attention_jvp": jvp,
    "jvp": func_jvp,
    "second derivatives": gradient_penalty,
}


def gradients(forward, compiler=None):
    given = [rand(B, H, N, D, seed=i).requires_grad_() for i in range(3)]
    loss = forward(*given).square().sum()
    if compiler is None:
        loss.backward()
    else:
        with compiled_autograd._enable(compiler):
            loss.backward()
    return [x.grad for x in given]


def check(forward, compiler):
    torch.testing.assert_close(gradients(forward, compiler), gradients(forward))


@parametrize("name", FORWARDS, fast=1)
def test_tracing_gives_one_graph(name):
    check(FORWARDS[name], torch.compile(backend="eager", fullgraph=True))


@parametrize("name", ("attention", "MultiheadAttention, weights"), fast=1)
def test_in_one_graph_where_more_are_allowed(name):
    counter = CompileCounterWithBackend("eager")
    compiler = torch.compile(backend=counter)
    check(FORWARDS[name], compiler)
    check(FORWARDS[name], compiler)
    operators = [
        node.target
        for graph in counter.graphs
        for node in graph.graph.nodes
        if str(node.target).startswith("fastattn")
    ]
    assert len(operators) == counter.frame_count * (1 + (name != "attention")) and operators


@pytest.mark.slow
@pytest.mark.parametrize("name", ("attention", "packed"))
def test_compiled_by_inductor(name):
    check(FORWARDS[name], torch.compile(backend="inductor", fullgraph=True))


def test_forward_and_backward_compiled():
    forward = torch.compile(with_lse, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(compiled_autograd=True):
        found = gradients(forward)
    torch.testing.assert_close(found, gradients(with_lse))
