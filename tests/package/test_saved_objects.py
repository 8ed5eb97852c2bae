"""Objects saved by older versions load after modules of the package moved, and work as before."""

import inspect
import pickle
import pickletools
import sys
import typing
import zipfile
from pathlib import Path

import pytest

import fastattn
from fastattn.require_torch import TORCH_VERSION
from tests.support import saved_objects
from tests.support.fresh_python import python

FILES = sorted((Path(__file__).parents[1] / "saved").glob("*.pt"))
LOADS = """
import sys, torch
kept = torch.load(sys.argv[1], weights_only=False)
import fastattn, importlib
torch.set_grad_enabled(False)
for name, (module, given, expected) in kept["modules"].items():
    found = module(*given)
    found = found[0] if isinstance(found, tuple) else found
    torch.testing.assert_close(found, expected, msg=lambda x: f"{name}: {x}")
for package, names in kept["names"].items():
    for name, x in names.items():
        assert x is getattr(importlib.import_module(package), name), (package, name)
assert kept["place"] == fastattn.Place(row=3, rows=9)
cache, q, expected = kept["cache"]
torch.testing.assert_close(cache.attention(q), expected)
print(len(kept["modules"]), "modules")
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_saved_files_load(file):
    """Files load in a process that has not imported the package."""
    done = python("-c", LOADS, file)
    assert done.stdout.split() == [str(len(saved_objects.modules())), "modules"]


WEIGHTS_ONLY = """
import pkgutil, sys, torch, fastattn
names = torch.serialization.get_unsafe_globals_in_checkpoint(sys.argv[1])
torch.serialization.add_safe_globals([(pkgutil.resolve_name(x), x) for x in names])
torch.load(sys.argv[1], weights_only=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_saved_files_load_with_weights_only(file):
    """Every name in the file is one that a program can allow."""
    python("-c", WEIGHTS_ONLY, file)


PROGRAMS = sorted((Path(__file__).parents[1] / "saved").glob("*.pt2"))
RUNS = """
import io, sys, torch, fastattn
extra = {"expected.pt": ""}
program = torch.export.load(sys.argv[1], extra_files=extra).module()
given, expected = torch.load(io.BytesIO(bytes.fromhex(extra["expected.pt"])))
for name, x, y in zip(("out", "lse", "weights", "packed"), program(*given), expected, strict=True):
    torch.testing.assert_close(x, y, msg=lambda text: f"{name}: {text}")
print("4 results")
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", PROGRAMS, ids=lambda path: path.stem)
def test_saved_programs_run(file):
    """A saved program contains the names of the operators' arguments."""
    if TORCH_VERSION < (2, 9):
        pytest.skip("torch 2.8 reads no programs that a later version saved")
    assert python("-c", RUNS, file).stdout.split() == ["4", "results"]


PUBLIC = [
    pytest.param(package, name, id=f"{package.__name__}.{name}")
    for package, names in saved_objects.PUBLIC.items()
    for name in names
]


@pytest.mark.parametrize("package, name", PUBLIC)
def test_a_public_name_belongs_to_its_package(package, name):
    x = getattr(package, name)
    assert x.__module__ == package.__name__ and x.__qualname__ == name
    assert pickle.loads(pickle.dumps(x)) is x


@pytest.mark.parametrize("package, name", PUBLIC)
def test_tools_can_inspect_public_names(package, name):
    """Type hints resolve in the module that a class names in __module__."""
    x = getattr(package, name)
    typing.get_type_hints(x)
    inspect.signature(x)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is of 3.11")
def test_overloads_are_found():
    assert len(typing.get_overloads(fastattn.attention)) == 3


# Private names that saved files contain: if one moves, its old module keeps an alias.
PRIVATE = {
    "fastattn.dropin.encoder_layer TransformerEncoderLayer",  # of a converted model
    "fastattn.dropin.multihead always_call_forward",  # a hook
    "fastattn.kv_cache.cache Items",
    "fastattn.kv_cache.block_pool Pool",
}


def test_files_have_public_names(tmp_path):
    saved_objects.save(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        (stream,) = (file.read(x) for x in file.namelist() if x.endswith("/data.pkl"))
    found = {arg for op, arg, _ in pickletools.genops(stream) if op.name == "GLOBAL"}
    named = {f"{p.__name__} {x}" for p, names in saved_objects.PUBLIC.items() for x in names}
    assert {x for x in found if x.startswith("fastattn")} - named == PRIVATE
