"""Triton is optional: its first kernel imports it. Where it is absent, or where it cannot launch
without a C compiler or Python.h, there is a reason, and the next backend runs.

No GPU is needed: torch is patched to report one, and the driver is a library of empty functions.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch

import fastattn
from fastattn.backends import base
from fastattn.backends.native import cuda
from fastattn.backends.shared import gpu
from fastattn.backends.triton import launch_cache, runtime, tile_configs, toolchain
from fastattn.call import spec, validation
from tests.support.backends import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="about a process that interprets nothing")
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")
needs_compiler = pytest.mark.skipif(
    bool(toolchain.unavailable()), reason="no C compiler or no Python.h here"
)


@pytest.fixture
def no_header(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme=None: {"include": str(tmp_path)})
    return tmp_path / "Python.h"


@needs_compiler
def test_the_header_is_searched_in_pythons_include_folder(no_header):
    assert toolchain.unavailable().startswith(f"there is no {no_header}: install it (Debian")


@needs_compiler
def test_a_header_on_the_compilers_path_is_found(no_header, monkeypatch, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("include")
    (elsewhere / "Python.h").write_text("")
    monkeypatch.setenv("CPATH", str(elsewhere))
    assert toolchain.unavailable() == ""


@needs_compiler
def test_a_header_that_does_not_compile_is_reported(no_header):
    """For example if the headers of the C library are not installed."""
    no_header.write_text("#include <no_such_header.h>\n")
    message = toolchain.unavailable()
    assert f"does not compile {no_header} (" in message and "no_such_header.h" in message


@pytest.mark.parametrize("named", ["/no/such/cc", "gcc -O2", ""])
def test_a_compiler_in_CC_that_does_not_exist_is_reported(named, monkeypatch):
    """Triton uses all of CC as the name of one program, even if CC is empty."""
    monkeypatch.setenv("CC", named)
    assert toolchain.unavailable().startswith(f"CC={named} is no program: name a C compiler")


@needs_compiler
@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_compiler_is_searched_on_the_path(name, monkeypatch, tmp_path):
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain.unavailable().startswith("there is no C compiler on PATH: install gcc (")
    (tmp_path / name).write_text(f'#!/bin/sh\nexec "{found}" "$@"\n')
    (tmp_path / name).chmod(0o755)
    assert toolchain.unavailable() == ""


# -------------------------------------------------------------------------- the choice of a backend


def described():
    q = torch.zeros(1, 2, 5, 16, dtype=torch.bfloat16)
    s = validation.describe(spec.Tensors(q, q, q), spec.Options())
    return dataclasses.replace(s, device="cuda")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """torch accepts the GPU, and the CUDA library counts as built."""
    monkeypatch.setattr(gpu, "unavailable", lambda oldest=0: None)
    monkeypatch.setattr(cuda.Cuda, "unavailable", lambda self: None)
    monkeypatch.setattr(runtime, "version", lambda: runtime.OLDEST)
    runtime.unavailable.cache_clear()
    yield monkeypatch
    runtime.unavailable.cache_clear()


def test_the_next_backend_runs_and_explain_has_the_reason(on_a_gpu):
    on_a_gpu.setattr(toolchain, "unavailable", lambda: "there is no Python.h")
    on_a_gpu.setattr(launch_cache, "_has_launcher", lambda: False)
    message = "Triton compiles C code to call the driver, and there is no Python.h"
    assert fastattn.available_backends()["triton"] == message
    assert base.choose(described()).name == "cuda"
    on_a_gpu.setattr(toolchain, "unavailable", lambda: "")
    runtime.unavailable.cache_clear()
    assert base.choose(described()).name == "triton"


def test_the_header_is_searched_once(on_a_gpu):
    looks = []
    on_a_gpu.setattr(toolchain, "unavailable", lambda: looks.append(1) or "")
    for length in range(1, 6):
        base.choose(dataclasses.replace(described(), N=length))
    assert len(looks) == 1


# ------------------------------------------------------------------ Triton itself, on a fake driver

PROGRAM = """
import json, sys, sysconfig
import torch
from pathlib import Path

torch.version.cuda = "13.0"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda device=None: (9, 0)
real = sysconfig.get_paths
hidden = lambda *a, **options: real(*a, **options) | {"include": "/nowhere"}
sysconfig.get_paths = hidden if "hidden" in sys.argv else real

import fastattn
reason = fastattn.available_backends()["triton"]
imported = "triton" in sys.modules
launches = True
try:
    from triton.runtime import driver
    driver.active.utils.load_binary
except Exception as error:
    launches = False
print(json.dumps([reason, imported, launches]))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A folder with a libcuda.so.1 that has the functions which Triton's launcher calls."""
    folder = tmp_path_factory.mktemp("driver")
    where = Path(importlib.util.find_spec("triton").origin).parent / "backends" / "nvidia"
    names = set(re.findall(r"\bcu[A-Z]\w+(?=\()", (where / "driver.c").read_text()))
    source = "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names))
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=source.encode(), check=True)
    return folder


def run_with(driver, cache, *arguments, **environment):
    where = {"TRITON_LIBCUDA_PATH": str(driver), "LD_LIBRARY_PATH": str(driver)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | where | {"TRITON_CACHE_DIR": str(cache)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return (*json.loads(done.stdout), done.stderr)


@pytest.mark.slow
@needs_triton
@needs_compiler
def test_triton_launches_where_it_is_reported_available(driver, tmp_path):
    """Triton builds its launcher only with headers; a cached launcher needs none."""
    reason, imported, launches, stderr = run_with(driver, tmp_path, "hidden")
    assert "there is no /nowhere/Python.h" in reason and imported and not launches
    reason, imported, launches, stderr = run_with(driver, tmp_path)
    assert (reason, imported, launches) == (None, False, True), stderr
    reason, imported, launches, stderr = run_with(driver, tmp_path, "hidden", CC="/no/such/cc")
    assert (reason, imported, launches) == (None, True, True), stderr


# -- Triton is optional ----------------------------------------------------------------------------


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
