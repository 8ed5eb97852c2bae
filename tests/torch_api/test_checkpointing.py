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
from tests.support.ways import multihead, out_alone, packed, with_lse

pytestmark = [not_interpreted, pytest.mark.usefixtures("nothing_is_small")]

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


def torchs(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # looked up at each call


WAYS = {  # and how often a forward pass runs attention kernels, and weights kernels
    "sdpa": (torchs, (1, 0)),
    "attention": (partial(fastattn.attention, causal=True), (1, 0)),
    "LSE": (with_lse, (1, 0)),
    "dropout": (partial(fastattn.attention, dropout_p=0.3), (1, 0)),
    "packed": (packed, (1, 0)),
    "multihead": (out_alone, (1, 0)),
    "weights": (multihead, (1, 1)),
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


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("saved", (OURS, TORCHS), ids=("ours", "torchs"))
def test_saved_results_are_not_recomputed(kernels, name, saved):
    attend, once = WAYS[name]
    model, asked = Block(attend), set()
    found = gradients(model, checkpointed(model, saved, asked))
    twice = tuple(2 * x for x in once)
    assert kernels() == (once if saved is OURS else twice)
    assert {x for x in asked if x.namespace == "fastattn"} == set(OURS[: sum(once)])
    assert not asked & set(TORCHS)
    torch.testing.assert_close(found, gradients(model, model))


@pytest.mark.parametrize("name", WAYS)
def test_a_list_of_operators(kernels, name):
    attend, once = WAYS[name]
    model = Block(attend)
    selective = partial(create_selective_checkpoint_contexts, OURS)
    run = partial(checkpoint, model, use_reentrant=False, context_fn=selective)
    gradients(model, run)
    assert kernels() == once


@pytest.mark.slow
@pytest.mark.parametrize("name", ("sdpa", "packed"))
def test_compiled(kernels, name):
    attend, once = WAYS[name]
    model = Block(attend)
    wanted = gradients(model, model)
    before = kernels()
    run = torch.compile(checkpointed(model, OURS, set()), backend="aot_eager", fullgraph=True)
    found = gradients(model, run)
    assert tuple(x - y for x, y in zip(kernels(), before)) == once
    torch.testing.assert_close(found, wanted)
