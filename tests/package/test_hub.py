"""The repository for Hugging Face's hub: its copies of the package are complete, load from any path
under names of their own, and run beside each other and beside the installed package."""

import base64
import hashlib
import inspect
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastattn
from fastattn.backends.native import libraries
from tests.support import hub as support

pytestmark = pytest.mark.skipif(
    libraries.cpu_unavailable() is not None, reason="the native library was not built"
)

IMPORTER = "from __future__ import annotations\nimport importlib.util, json, sys\n"
IMPORTER += inspect.getsource(support.load)
CALLS = """
import importlib, sys
from pathlib import Path
import torch
from torch._subclasses import FakeTensorMode

cpu, triton = (load(Path(folder)) for folder in sys.argv[1:])
assert cpu.__name__ != triton.__name__ and "fastattn" not in sys.modules
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))

def results(function, **options):
    out = function(q, k, v, **options)
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

expected = results(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
ours = results(cpu.attention, causal=True, backend="cpu")
torch.testing.assert_close(ours, expected)
if triton.available_backends()["triton"] is None:
    torch.testing.assert_close(results(triton.attention, causal=True, backend="triton"), expected)
    # A function becomes source code that imports the kernels of its copy.
    options = dict(score_mod=lambda s, b, h, i, j: s * 0.5 + i - j)
    mine, its = (results(cpu.attention, backend=x, **options) for x in ("triton", "cpu"))
    torch.testing.assert_close(mine, its)

# torch.library replaces an operator of the same name silently.
def operators(package):
    every = torch._C._dispatch_get_all_op_names()
    return {x.partition("::")[2] for x in every if x.startswith(f"{package}::")}

assert not operators("fastattn") and operators(cpu.__name__) == operators(triton.__name__)
for copy in (cpu, triton):
    with torch.profiler.profile() as profile:
        copy.attention(q, k, v, backend="reference")
    with FakeTensorMode():
        assert copy.attention(*(torch.empty(1, 2, 20, 16) for _ in range(3))).shape == q.shape
    assert f"{copy.__name__}::attention" in {x.name for x in profile.events()}
assert importlib.import_module(f"{cpu.__name__}.kv_cache.cache").KVCache is cpu.KVCache
assert "fastattn" not in sys.modules

import fastattn
assert operators("fastattn") == operators(cpu.__name__)
for x, y in zip(ours, results(fastattn.attention, causal=True, backend="cpu")):
    assert torch.equal(x, y)
from fastattn.backends.native.libraries import cpu as installed
print(importlib.import_module(f"{cpu.__name__}.backends.native.libraries").cpu().path)
print(installed().path)
"""


@pytest.fixture(scope="module")
def hub():
    """The script that lays out the repository."""
    return support.script()


@pytest.fixture(scope="module")
def variants(hub, tmp_path_factory):
    """The folders of the variants in which the installed package is laid out."""
    to = tmp_path_factory.mktemp("hub") / "fastattn"
    support.lay_out(to)
    return to / "build" / hub.cpu_variant(), to / "build" / "torch-cuda"


@pytest.mark.slow
def test_copies_run_beside_each_other_and_beside_the_installed_package(variants, tmp_path):
    hidden = ("PYTHONPATH", "FASTATTN_LIBRARY")
    env = {name: x for name, x in os.environ.items() if name not in hidden}
    env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-c", IMPORTER + CALLS, *map(str, variants)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    mine, installed = map(Path, done.stdout.splitlines())
    assert mine.is_relative_to(variants[0]) and not installed.is_relative_to(variants[0])
    for folder in variants:  # nothing was written there, which `kernels` would refuse to load
        assert digest(folder) == json.loads((folder / "metadata.json").read_text())["digest"]


def digest(folder):
    """What the rules of the hub say of a variant's files: all but bytecode, and the metadata."""
    paths = [x for x in folder.rglob("*") if x.is_file() and x.suffix != ".pyc"]
    found = {str(x.relative_to(folder)): x.read_bytes() for x in paths}
    del found["metadata.json"]
    hashes = {x: base64.b64encode(hashlib.sha256(y).digest()) for x, y in found.items()}
    return dict(algorithm="sha256", files={x: y.decode() for x, y in hashes.items()})


def test_metadata_follow_the_rules_of_the_hub(hub, variants):
    identifiers = set()
    for folder in variants:
        metadata = json.loads((folder / "metadata.json").read_text())
        assert re.fullmatch("[a-z][-a-z0-9]*[a-z0-9]", metadata["name"])
        assert metadata["id"].isidentifier() and metadata["license"] == "mit"
        # transformers loads version 1 of a kernel, unless the name has a revision.
        assert metadata["version"] == hub.VERSION == 1
        assert metadata["python-depends"] == metadata["kernel-depends"] == []
        assert metadata["digest"] == digest(folder)
        assert (folder / "backends/measured/sm_90.json").is_file()
        identifiers.add(metadata["id"])
    assert len(identifiers) == 2


@pytest.mark.parametrize("version", ["2.8.0", "2.13.0+cpu", "2.14.1"])
def test_every_supported_torch_finds_the_variant_of_cpus(hub, variants, version):
    names = [x.name for x in variants]
    assert support.choose(names, version, platform.machine()) == hub.cpu_variant()
    assert support.choose(names, version, "riscv64") is None


@pytest.mark.parametrize(
    "name",
    [
        "torch-stable-abi99-cpu-x86_64-linux",  # a newer torch
        "torch-stable-abi28-cpu-aarch64-linux",
        "torch-stable-abi28-cu128-x86_64-linux",
        "torch28-cpu-x86_64-linux",  # that torch alone
        "torch-stable-abi28-x86_64-linux",
        "torch-stable-abi28-cpu-x86_64-darwin",
        "torch-cuda",
    ],
)
def test_other_names_are_not_found(name):
    assert support.choose([name], "2.13.0", "x86_64") is None


def test_the_stand_in_chooses_as_kernels_does():
    variants = pytest.importorskip("kernels.variants", reason="kernels is not installed")
    from kernels.backends import CPU
    from packaging.version import Version

    names = [
        *("torch-stable-abi28-cpu-x86_64-linux", "torch-stable-abi211-cpu-x86_64-linux"),
        *("torch213-cxx11-cpu-x86_64-linux", "torch213-cpu-x86_64-linux", "torch-cuda"),
        *("torch-cpu", "torch-universal", "torch-stable-abi28-cpu-aarch64-linux"),
    ]
    for version in ("2.8", "2.11", "2.13"):
        for left_out in range(len(names) + 1):
            left = names[left_out:]
            found, _ = variants._resolve_variant_for_system(
                [variants.parse_variant(x) for x in left],
                *(CPU(), "x86_64", "linux", Version(version), True, None),
            )
            expected = found[0].variant_str if found else None
            assert support.choose(left, version, "x86_64") == expected


def test_a_variant_has_every_module_but_the_programs(variants):
    package = Path(fastattn.__file__).parent
    modules = {x.relative_to(package) for x in package.rglob("*.py")}
    for folder in variants:
        missing = modules - {x.relative_to(folder) for x in folder.rglob("*.py")}
        assert {x.parts[0] for x in missing} == {"commands", "examples", "__main__.py"}


@pytest.mark.slow
def test_imports_are_those_that_the_hub_allows(hub, variants):
    for path in variants[1].rglob("*.py"):
        if "integrations" not in path.parts:
            assert not list(hub.foreign_imports(path))


def test_other_imports_are_found(hub, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import os, torch.nn\nimport numpy as np\nfrom . import api\nfrom triton import jit\n"
        "try:\n    import yaml\nexcept ImportError:\n    pass\n"
        "def f():\n    import scipy\n    from fastattn.api import attention\n"
    )
    found = [line.rpartition(" ")[2] for line in hub.foreign_imports(path)]
    assert sorted(found) == ["fastattn.api", "numpy", "yaml"]
