"""Without a C compiler or Python.h, Triton cannot launch: it gives the reason, and the next backend
runs.

No GPU is needed: torch is patched to report one, and the driver is a library of empty functions.
"""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import fastattn
from fastattn.backends import base
from fastattn.backends.native import cuda
from fastattn.backends.shared import gpu
from fastattn.backends.triton import launch_cache, runtime, toolchain
from fastattn.call import spec, validation

needs_triton = pytest.mark.skipif(
    launch_cache.interpreted() or not importlib.util.find_spec("triton"),
    reason="no Triton, or its interpreter",
)
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
    monkeypatch.setattr(gpu, "unavailable", lambda: None)
    monkeypatch.setattr(cuda.Cuda, "unavailable", lambda self: None)
    monkeypatch.setattr(runtime, "version", lambda: runtime.OLDEST)
    runtime.unavailable.cache_clear()
    yield monkeypatch
    runtime.unavailable.cache_clear()


@pytest.mark.skipif(launch_cache.interpreted(), reason="the interpreter compiles nothing")
def test_the_next_backend_runs_and_explain_has_the_reason(on_a_gpu):
    on_a_gpu.setattr(toolchain, "unavailable", lambda: "there is no Python.h")
    on_a_gpu.setattr(launch_cache, "_has_launcher", lambda: False)
    message = "Triton compiles C code to call the driver, and there is no Python.h"
    assert fastattn.available_backends()["triton"] == message
    assert base.choose(described()).name == "cuda"
    on_a_gpu.setattr(toolchain, "unavailable", lambda: "")
    runtime.unavailable.cache_clear()
    assert base.choose(described()).name == "triton"


@pytest.mark.skipif(launch_cache.interpreted(), reason="the interpreter compiles nothing")
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
