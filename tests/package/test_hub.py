"""The repository for Hugging Face's hub: its copies of the package are complete, load from any path
under names of their own, and run beside each other and beside the installed package."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastattn
from fastattn.backends.native import libraries
from tests.support.checkout import ROOT

pytestmark = pytest.mark.skipif(
    libraries.cpu_unavailable() is not None, reason="the native library was not built"
)

# What the importer of `kernels` does with the folder of a variant.
IMPORTER = """
import importlib.util, json, sys

def load(folder):
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / ".ci"), *sys.path])
        return importlib.import_module("hub")


@pytest.fixture(scope="module")
def variants(hub, tmp_path_factory):
    """The folders of the variants in which the installed package is laid out."""
    to = tmp_path_factory.mktemp("hub") / "fastattn"
    folders = map(Path, importlib.import_module("fastattn.kernels").__path__)
    kernels = next(x for x in folders if (x / "tile.py").exists())
    hub.lay_out(Path(fastattn.__file__).parent, kernels, libraries.cpu().path.parent, to)
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


def test_a_variant_has_every_module_but_the_programs(variants):
    package = Path(fastattn.__file__).parent
    modules = {x.relative_to(package) for x in package.rglob("*.py")}
    for folder in variants:
        missing = modules - {x.relative_to(folder) for x in folder.rglob("*.py")}
        assert {x.parts[0] for x in missing} == {"examples", "__main__.py"}


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
