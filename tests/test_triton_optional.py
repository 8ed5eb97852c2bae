"""Triton is optional: imported by its first kernel, and absent with a reason."""

import subprocess
import sys

import pytest
import torch
from runners import INTERPRETED

import fastattn
from fastattn.backends import triton as backend

pytestmark = pytest.mark.skipif(INTERPRETED, reason="about a process that interprets nothing")


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_triton_is_imported_by_its_first_kernel_only():
    code = """
import sys, torch, fastattn
out = fastattn.attention(*(torch.randn(1, 2, 9, 8, requires_grad=True) for _ in "qkv"))
out.sum().backward()
fastattn.explain(*(torch.randn(1, 2, 9, 8) for _ in "qkv"))
print("triton" in sys.modules or "fastattn.kernels.forward" in sys.modules)
"""
    assert run(code).split() == ["False"]


def test_its_absence_is_a_reason(monkeypatch):
    backend.unavailable.cache_clear()
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in fastattn.backends()["triton"]
    backend.unavailable.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(backend.importlib.metadata, "version", lambda name: "3.5.1")
    assert "older than 3.6" in fastattn.backends()["triton"]
    monkeypatch.undo()
    backend.unavailable.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_without_a_gpu_asking_for_triton_raises_with_the_reason():
    q = torch.randn(1, 1, 3, 8)
    with pytest.raises(NotImplementedError, match=r"triton: .*(GPU|not installed)"):
        fastattn.attention(q, q, q, backend="triton")
