"""`fastattn.flash_attn.install` and `uninstall`: flash_attn is found, then no trace is left."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import textwrap

import pytest

from fastattn import flash_attn as fa
from fastattn.flash_attn import passes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="the real flash_attn is installed"
)
MODULES = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding")
OF_3 = ("flash_attn_interface", "flash_attn_3", "flash_attn_3.flash_attn_interface")
OF_4 = ("flash_attn.cute", "flash_attn.cute.interface", "flash_attn.cute.block_sparsity")
PACKAGES = {"flash-attn": ["flash_attn"], "flash-attn-4": ["flash_attn"]}
PACKAGES |= {"flash-attn-3": ["flash_attn_3", "flash_attn_interface"]}
LAYERS = {
    "flash_attn.layers.rotary": fa.rotary,
    "flash_attn.ops.triton.rotary": fa.rotary,
    "flash_attn.modules.mha": fa.mha,
    "flash_attn.ops.triton.layer_norm": fa.norms,
    "flash_attn.ops.rms_norm": fa.norms,
    "flash_attn.ops.triton.cross_entropy": fa.losses,
    "flash_attn.losses.cross_entropy": fa.losses,
    "flash_attn.ops.activations": fa.activations,
}


def found():
    """How the package looks to code that searches for it."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    ours = [x for x in (MODULES + OF_3) if "." not in x]
    of = importlib.metadata.packages_distributions()
    distributions = {x: of[x] for x in ours if x in of}
    loaded = [name for name in sys.modules if name.split(".")[0] in ours]
    return versions, distributions, loaded, [x for x in ours if importlib.util.find_spec(x)]


@pytest.fixture
def installed():
    before = list(sys.meta_path), set(sys.modules), found()
    fa.install()
    yield
    fa.uninstall()
    assert (list(sys.meta_path), found()) == (before[0], before[2])
    assert not {name for name in set(sys.modules) - before[1] if name.startswith("flash_attn")}


def test_the_installed_modules_are_imported(installed):
    package, interface, padding = (importlib.import_module(name) for name in MODULES)
    for name in fa.flash_attn_interface.__all__:
        assert getattr(package, name) is getattr(interface, name) is getattr(fa, name)
    for name in passes.__all__:
        assert getattr(interface, name) is getattr(passes, name)
        assert not hasattr(package, name)
    assert padding.unpad_input is fa.bert_padding.unpad_input
    assert package.__version__ == fa.__version__ and package.bert_padding is padding
    assert package.flash_attn_interface is interface


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, source", [(OF_3, fa.flash_attn_3), (OF_4, fa.cute)], ids=["3", "4"]
)
def test_the_modules_of_later_versions_are_imported(installed, names, source):
    """Each with all names, but __version__ of one with the version of its distribution."""
    versions = found()[0]
    for name in names:
        module = importlib.import_module(name)
        for public in source.__all__:
            assert getattr(module, public) is getattr(source, public)
        assert module.__version__ == versions["flash-attn-3" if names is OF_3 else "flash-attn-4"]
    package = importlib.import_module("flash_attn")
    assert package.flash_attn_func is fa.flash_attn_func and package.cute.flash_attn_func


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_modules_in_folders_are_imported(name, installed):
    module, source = importlib.import_module(name), LAYERS[name]
    assert source.__all__ and all(getattr(module, x) is getattr(source, x) for x in source.__all__)
    folder = sys.modules[name.rpartition(".")[0]]
    assert getattr(folder, name.rpartition(".")[2]) is module and importlib.util.find_spec(name)
    assert not hasattr(folder, "apply_rotary_emb") and folder.__path__ == []


@pytest.mark.slow
def test_names_that_are_not_served(installed):
    with pytest.raises(ImportError, match=r"cannot import name 'ParallelMHA' from 'flash_attn\."):
        from flash_attn.modules.mha import ParallelMHA  # noqa: F401
    for name in ("layers.patch_embed", "ops.fused_dense", "modules.mlp", "ops.layer_norm"):
        with pytest.raises(ModuleNotFoundError, match=rf"No module named 'flash_attn\.{name}'"):
            importlib.import_module(f"flash_attn.{name}")


@pytest.mark.slow
def test_importlib_metadata_lists_it(installed):
    for name in ("flash-attn", "flash_attn", "Flash_Attn"):
        assert importlib.metadata.version(name) == fa.__version__
    of = importlib.metadata.packages_distributions()
    for name, packages in PACKAGES.items():
        assert all(name in of[x] for x in packages)
    names = [x.metadata["Name"] for x in importlib.metadata.distributions()]
    assert [names.count(x) for x in PACKAGES] == [1, 1, 1] and "torch" in names
    for name in MODULES + OF_3 + OF_4:
        assert importlib.util.find_spec(name) is not None
    assert importlib.util.find_spec("flash_attn.models") is None


@pytest.mark.slow
def test_a_second_install_or_uninstall_changes_nothing(installed):
    finders = list(sys.meta_path)
    fa.install()
    assert sys.meta_path == finders
    fa.uninstall()
    fa.uninstall()
    assert found() == ({}, {}, [], [])
    fa.install()


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_interface"])
@pytest.mark.parametrize("imported", [False, True])
def test_install_refuses_if_another_is_installed(imported, name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("__version__ = '2.8.3'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if imported:
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    finders = list(sys.meta_path)
    with pytest.raises(RuntimeError, match=f"{name}: another package of this name is installed"):
        fa.install()
    assert sys.meta_path == finders
    monkeypatch.undo()
    sys.modules.pop(name, None)
    importlib.invalidate_caches()


ORDERS = {
    "before": "install()\nuninstall()\ninstall()\ninstall()\nimport transformers",
    "after": "import transformers.integrations.flash_attention\n"
    "assert available() == []\ninstall()",
}
PROGRAM = """
import logging
import torch
from fastattn.flash_attn import install, uninstall

def available():
    from transformers import utils
    from transformers.utils import import_utils, is_flash_attn_greater_or_equal
    checks = {{x: getattr(import_utils, f"is_flash_attn_{{x}}_available") for x in (2, 3, 4)}}
    assert checks[2]() == is_flash_attn_greater_or_equal("2.8.0")
    assert checks[2]() == utils.is_flash_attn_2_available()
    return [x for x, check in checks.items() if check()]

{order}
assert available() == [2, 3, 4]
from transformers import LlamaConfig, LlamaModel, modeling_utils
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
given = sizes | dict(vocab_size=9, attn_implementation="flash_attention_{version}")
model = LlamaModel(LlamaConfig(**given))
assert model.config._attn_implementation == "flash_attention_{version}"
model(torch.arange(6)[None])
uninstall()
assert available() == []
for version in (2, 3, 4):
    devices = modeling_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[version]["supported_devices"]
    assert "cpu" not in [name for _, name in devices]
assert not logging.getLogger("transformers.modeling_utils").filters
for use in (lambda: model(torch.arange(6)[None]), lambda: LlamaModel(LlamaConfig(**given))):
    try:
        use()
    except ImportError as error:
        said = "installed", "kernels", "flash_attn"
        assert any(x in str(error) for x in said), error
    else:
        raise AssertionError("transformers still finds flash_attn")
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "order, version", [("before", 2), ("after", 2), ("before", 3), ("after", 4)]
)
def test_transformers_finds_the_installed_flash_attn(order, version):
    pytest.importorskip("transformers", reason="transformers is not installed")
    program = textwrap.dedent(PROGRAM).format(order=ORDERS[order], version=version)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "done\n", run.stderr
    assert "not initialized on GPU" not in run.stderr and "only supports torch" not in run.stderr
