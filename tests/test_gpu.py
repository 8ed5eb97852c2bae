"""On a GPU: until kernels for one exist, the reference backend serves CUDA tensors, and says so."""

import pytest
import torch

import fastattn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:fastattn runs this attention call on the slow"),
]


def inputs(dtype=torch.float32, **kw):
    g = torch.Generator().manual_seed(0)
    shapes = (2, 4, 33, 24), (2, 2, 47, 24), (2, 2, 47, 16)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype=dtype, **kw) for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_agrees_with_the_cpu_forward_and_backward(dtype):
    features = dict(causal="bottom_right", softcap=5.0, dropout_p=0.3, seed=7)
    lengths = torch.tensor([47, 20])
    found = []
    for device in ("cpu", "cuda"):
        leaves = [x.requires_grad_() for x in inputs(dtype, device=device)]
        out = fastattn.attention(*leaves, key_lengths=lengths.to(device), **features)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        found.append([x.cpu() for x in (out, *grads)])
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for on_cpu, on_gpu in zip(*found, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=tolerance, atol=tolerance)


def test_lengths_are_clamped_without_waiting_and_checked_on_request(monkeypatch):
    q, k, v = inputs(device="cuda")
    beyond = torch.tensor([47, 99], device="cuda")
    clamped = fastattn.attention(q, k, v, key_lengths=beyond)
    torch.testing.assert_close(clamped, fastattn.attention(q, k, v))
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    with pytest.raises(ValueError, match="key_lengths: got 99, expected values in"):
        fastattn.attention(q, k, v, key_lengths=beyond)


def test_a_seed_lives_on_the_device():
    q, k, v = inputs(device="cuda")
    seed = torch.tensor([5], device="cuda")
    one = fastattn.attention(q, k, v, dropout_p=0.5, seed=seed)
    assert torch.equal(one, fastattn.attention(q, k, v, dropout_p=0.5, seed=5))
    with pytest.raises(ValueError, match=r"seed\.device"):
        fastattn.attention(q, k, v, dropout_p=0.5, seed=seed.cpu())
