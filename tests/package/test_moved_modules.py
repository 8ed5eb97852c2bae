"""Modules are found by the paths that they had in 0.1.0."""

import importlib
import subprocess
import sys

import pytest

import fastattn
from fastattn.moved_modules import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_module(old):
    module = importlib.import_module(MOVED[old])
    assert importlib.import_module(old) is module and sys.modules[old] is module
    assert module.__name__ == module.__spec__.name == MOVED[old]
    importlib.reload(importlib.import_module("fastattn.moved_modules"))  # installs nothing


@pytest.mark.parametrize("old", [x for x in MOVED if x.count(".") == 1])
def test_an_old_path_is_an_attribute(old):
    assert getattr(fastattn, old.partition(".")[2]) is importlib.import_module(MOVED[old])


def test_a_class_from_an_old_path_is_the_public_class():
    code = """
    import fastattn.cache, fastattn.multihead
    from fastattn.place import Place
    from fastattn import torch_form, distributed
    from fastattn.distributed.cost import size_of
    assert Place is fastattn.Place and fastattn.cache.KVCache is fastattn.KVCache
    assert fastattn.multihead.MultiheadAttention is fastattn.MultiheadAttention
    assert torch_form.scaled_dot_product_attention is fastattn.scaled_dot_product_attention
    assert fastattn.distributed.cost_model.size_of is size_of
    """
    subprocess.run([sys.executable, "-c", "\n".join(map(str.strip, code.splitlines()))], check=True)


@pytest.mark.parametrize("name", ["fastattn.no_such_module", "fastattn.dispatch.roads"])
def test_other_names_are_not_found(name):
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(name)
    with pytest.raises(AttributeError, match="no_such_module"):
        getattr(fastattn, "no_such_module")  # noqa: B009
