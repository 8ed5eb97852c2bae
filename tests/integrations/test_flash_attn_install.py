"""`fastattn.flash_attn.install` and `uninstall`: flash_attn is found, then no trace is left."""

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


def found():
    """How the package looks to code that searches for it."""
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        version = None
    distributions = importlib.metadata.packages_distributions().get("flash_attn")
    loaded = [name for name in sys.modules if name.split(".")[0] == "flash_attn"]
    return version, distributions, loaded, importlib.util.find_spec("flash_attn") is not None


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


def test_importlib_metadata_lists_it(installed):
    for name in ("flash-attn", "flash_attn", "Flash_Attn"):
        assert importlib.metadata.version(name) == fa.__version__
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    names = [x.metadata["Name"] for x in importlib.metadata.distributions()]
    assert names.count("flash-attn") == 1 and "torch" in names
    for name in MODULES:
        assert importlib.util.find_spec(name) is not None
    assert importlib.util.find_spec("flash_attn.layers") is None


def test_a_missing_module_is_named(installed):
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.layers"):
        importlib.import_module("flash_attn.layers.rotary")


def test_a_second_install_or_uninstall_changes_nothing(installed):
    finders = list(sys.meta_path)
    fa.install()
    assert sys.meta_path == finders
    fa.uninstall()
    fa.uninstall()
    assert found() == (None, None, [], False)
    fa.install()


@pytest.mark.parametrize("imported", [False, True])
def test_install_refuses_if_flash_attn_is_installed(imported, tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '2.8.3'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if imported:
        monkeypatch.setitem(sys.modules, "flash_attn", importlib.import_module("flash_attn"))
    finders = list(sys.meta_path)
    with pytest.raises(RuntimeError, match="flash_attn: another package of this name is installed"):
        fa.install()
    assert sys.meta_path == finders
    monkeypatch.undo()
    sys.modules.pop("flash_attn", None)
    importlib.invalidate_caches()


ORDERS = {
    "before": "install()\nuninstall()\ninstall()\ninstall()\nimport transformers",
    "after": "import transformers.integrations.flash_attention\n"
    "assert not is_available()\ninstall()",
}
PROGRAM = """
import logging
import torch
from fastattn.flash_attn import install, uninstall

def is_available():
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_greater_or_equal
    assert is_flash_attn_2_available() == is_flash_attn_greater_or_equal("2.8.0")
    return is_flash_attn_2_available()

{order}
assert is_available()
from transformers import LlamaConfig, LlamaModel, modeling_utils
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
given = sizes | dict(vocab_size=9, attn_implementation="flash_attention_2")
model = LlamaModel(LlamaConfig(**given))
assert model.config._attn_implementation == "flash_attention_2"
model(torch.arange(6)[None])
uninstall()
assert not is_available()
devices = modeling_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["supported_devices"]
assert "cpu" not in [name for _, name in devices]
assert not logging.getLogger("transformers.modeling_utils").filters
for use in (lambda: model(torch.arange(6)[None]), lambda: LlamaModel(LlamaConfig(**given))):
    try:
        use()
    except ImportError as error:
        assert "installed" in str(error) or "kernels" in str(error), error
    else:
        raise AssertionError("transformers still finds flash_attn")
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_transformers_finds_the_installed_flash_attn(order):
    pytest.importorskip("transformers", reason="transformers is not installed")
    program = textwrap.dedent(PROGRAM).format(order=ORDERS[order])
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "done\n", run.stderr
    assert "not initialized on GPU" not in run.stderr and "only supports torch" not in run.stderr
