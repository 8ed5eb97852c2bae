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


def run(code):
    """Run it in a process that has imported no old path."""
    subprocess.run([sys.executable, "-c", "\n".join(map(str.strip, code.splitlines()))], check=True)


def test_an_old_path_is_an_attribute():
    run("""
    import fastattn, importlib, operator
    from fastattn.moved_modules import MOVED
    found = {x: operator.attrgetter(x.removeprefix("fastattn."))(fastattn) for x in MOVED}
    assert {x: module.__name__ for x, module in found.items()} == MOVED
    """)


def test_a_reload_adds_no_second_finder():
    run("""
    import fastattn, importlib, sys
    count = len(sys.meta_path)
    importlib.reload(importlib.reload(fastattn).moved_modules)
    importlib.reload(fastattn)
    assert len(sys.meta_path) == count, sys.meta_path
    """)


def test_a_class_from_an_old_path_is_the_public_class():
    run("""
    import fastattn.cache, fastattn.multihead
    from fastattn.place import Place
    from fastattn import torch_form, distributed
    from fastattn.distributed.cost import size_of
    assert Place is fastattn.Place and fastattn.cache.KVCache is fastattn.KVCache
    assert fastattn.multihead.MultiheadAttention is fastattn.MultiheadAttention
    assert torch_form.scaled_dot_product_attention is fastattn.scaled_dot_product_attention
    assert fastattn.distributed.cost_model.size_of is size_of
    """)


@pytest.mark.parametrize("name", ["fastattn.no_such_module", "fastattn.dispatch.roads"])
def test_other_names_are_not_found(name):
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(name)
    with pytest.raises(AttributeError, match="no_such_module"):
        getattr(fastattn, "no_such_module")  # noqa: B009
    with pytest.raises(AttributeError, match=r"'fastattn[.]nn' has no attribute 'hops'"):
        getattr(fastattn.nn, "hops")  # noqa: B009
