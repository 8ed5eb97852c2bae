"""Selective activation checkpoints: a policy that saves our operators, by the recipe in
fastattn/integrations/README.md, keeps attention from running twice."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fastattn
from fastattn.backends import base
from tests.support.backends import not_interpreted

pytestmark = [not_interpreted, pytest.mark.usefixtures("one_thread", "nothing_is_small")]

OURS = [torch.ops.fastattn.attention.default, torch.ops.fastattn.weights.default]
TORCHS = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
]
B, N, H, D = 2, 37, 2, 8


class Block(nn.Module):
    """A layer around an attention function on (B,H,N,D)."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.qkv, self.out = attend, nn.Linear(H * D, 3 * H * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).view(B, N, 3, H, D).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v))


class Multihead(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        torch.manual_seed(0)
        self.layer = fastattn.MultiheadAttention(H * D, H, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        out, weights = self.layer(x, x, x, need_weights=self.need_weights)
        return out if weights is None else out.sum() + weights.square().sum()


def torchs(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # looked up at each call


def packed(q, k, v):
    cu = torch.tensor([0, N, 2 * N])
    q, k, v = (x.transpose(1, 2).reshape(B * N, H, D) for x in (q, k, v))
    return fastattn.attention_packed(q, k, v, cu, cu, max_q=N, max_k=N)


def with_lse(q, k, v):
    out, lse = fastattn.attention(q, k, v, return_lse=True)
    return out + lse[..., None]


MODELS = {  # a model; how often its forward runs attention kernels, and weights kernels
    "sdpa": (lambda: Block(torchs), (1, 0)),
    "attention": (lambda: Block(partial(fastattn.attention, causal=True)), (1, 0)),
    "LSE": (lambda: Block(with_lse), (1, 0)),
    "dropout": (lambda: Block(partial(fastattn.attention, dropout_p=0.3)), (1, 0)),
    "packed": (lambda: Block(packed), (1, 0)),
    "multihead": (lambda: Multihead(False), (1, 0)),
    "weights": (lambda: Multihead(True), (1, 1)),
}


@pytest.fixture
def kernels(monkeypatch):
    """The names of the CPU passes that ran."""
    ran = []
    cpu = type(base.get("cpu"))

    def spied(name, kernel):
        def spy(self, *args):
            ran.append(name)
            return kernel(self, *args)

        monkeypatch.setattr(cpu, name, spy)

    spied("forward", cpu.forward)
    spied("weights", cpu.weights)
    return lambda: (ran.count("forward"), ran.count("weights"))


def policy(asked, saved, context, operator, *args, **kwargs):
    asked.add(operator)
    must = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    return must[operator not in saved]


def gradients(model, run):
    x = torch.randn(B, N, H * D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(2)  # the seed of dropout
    with fastattn.sdpa():
        return torch.autograd.grad(run(x).square().sum(), [x, *model.parameters()])


def checkpointed(model, saved, asked):
    selective = partial(create_selective_checkpoint_contexts, partial(policy, asked, saved))
    return partial(checkpoint, model, use_reentrant=False, context_fn=selective)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("saved", (OURS, TORCHS), ids=("ours", "torchs"))
def test_saved_results_are_not_recomputed(kernels, name, saved):
    make, once = MODELS[name]
    model, asked = make(), set()
    found = gradients(model, checkpointed(model, saved, asked))
    twice = tuple(2 * x for x in once)
    assert kernels() == (once if saved is OURS else twice)
    assert {x for x in asked if x.namespace == "fastattn"} == set(OURS[: sum(once)])
    assert not asked & set(TORCHS)
    for x, y in zip(found, gradients(model, model), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", MODELS)
def test_a_list_of_operators(kernels, name):
    make, once = MODELS[name]
    model = make()
    selective = partial(create_selective_checkpoint_contexts, OURS)
    run = partial(checkpoint, model, use_reentrant=False, context_fn=selective)
    gradients(model, run)
    assert kernels() == once


@pytest.mark.parametrize("name", ("sdpa", "packed"))
def test_compiled(kernels, name):
    make, once = MODELS[name]
    model = make()
    wanted = gradients(model, model)
    before = kernels()
    run = torch.compile(checkpointed(model, OURS, set()), backend="aot_eager", fullgraph=True)
    found = gradients(model, run)
    assert tuple(x - y for x, y in zip(kernels(), before)) == once
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)
