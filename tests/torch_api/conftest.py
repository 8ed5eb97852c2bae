"""A call on each backend and patches of torch's function, for the tests of this folder."""

import sys

import pytest
import torch
from torch.nn import functional as F

import fastattn
from fastattn.dropin import patching

TORCHS = F.scaled_dot_product_attention
BACKENDS = [name for name, why in fastattn.available_backends().items() if why is None]


@pytest.fixture(autouse=True)
def fresh(one_thread):
    """No test runs what another one has compiled."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(params=BACKENDS)
def attention(request):
    """fastattn.attention on one backend."""

    def run(*tensors, **kwargs):
        return fastattn.attention(*tensors, backend=request.param, **kwargs)

    run.backend = request.param
    return run


@pytest.fixture
def undone():
    """After every test, F.scaled_dot_product_attention is torch's original function again."""
    yield
    assert F.scaled_dot_product_attention is TORCHS and not any(patching._holders.values())


@pytest.fixture
def calls(monkeypatch):
    """One entry for each call of our function."""
    found, ours = [], patching._ours

    def spy(*args, **kwargs):
        found.append(args)
        return ours(*args, **kwargs)

    monkeypatch.setattr(patching, "_ours", spy)
    return found
