"""Triton is optional: its first kernel imports it, and its absence is reported with a reason."""

import importlib.metadata
import subprocess
import sys
import types

import pytest
import torch

import fastattn
from fastattn.backends.triton import runtime, tile_configs
from tests.support.backends import INTERPRETED

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


def test_a_missing_triton_is_a_reason(monkeypatch):
    for version, reason in ((None, "not installed"), ("3.3.1", "older than 3.4")):
        runtime.unavailable.cache_clear()
        monkeypatch.setattr(tile_configs, "triton_version", lambda version=version: version)
        assert reason in fastattn.available_backends()["triton"]
    runtime.unavailable.cache_clear()


def test_a_build_of_another_name_has_a_version(monkeypatch):
    def nameless(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nameless)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.7.0+vendor"))
    assert tile_configs.triton_version.__wrapped__() == "3.7.0+vendor"
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace())  # a folder named so
    assert tile_configs.triton_version.__wrapped__() is None


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import", "probe"])
def test_flops_are_counted_in_either_order_of_imports(first):
    code = """
import importlib.util, torch, fastattn
importlib.util.find_spec("torch.utils.flop_counter") if PROBE else None
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(1, 2, 9, 8)
with FlopCounterMode(display=False) as counter:
    fastattn.attention(q, q, q)
print(counter.get_total_flops())
"""
    code = code.replace("PROBE", str(first == "probe"))
    assert run(code).split() == [str(2 * 2 * 9 * 9 * 16)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_without_a_gpu_asking_for_triton_raises_with_the_reason():
    q = torch.randn(1, 1, 3, 8)
    with pytest.raises(NotImplementedError, match=r"triton: .*(GPU|not installed)"):
        fastattn.attention(q, q, q, backend="triton")
