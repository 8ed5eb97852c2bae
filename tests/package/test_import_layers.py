"""Imports point down: a folder of the package imports only from folders on lower floors."""

import ast
import importlib
from functools import cached_property
from graphlib import TopologicalSorter
from operator import attrgetter
from pathlib import Path

import pytest

import fastattn
from tests.support.checkout import ROOT


class Graph:
    """modules: {"api": path, "backends.base": path, ...}, names below the package. Compiled files
    and the folder `kernels`, which an editable install adds, are not among them."""

    def __init__(self, folder):
        self.package = folder.name
        self.modules = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] != "kernels":
                name = ".".join(parts)
                self.modules[name.removesuffix(".__init__") if len(parts) > 1 else name] = path
        self.strings = {f"{self.package}.{name}" for name in self.modules}

    def imported(self, name, path):
        """The modules of this package that a module imports anywhere in its text, or names in a
        string, as arguments of `importlib.import_module`."""
        here = f"{self.package}.{name}".split(".")
        package = here if path.name == "__init__.py" and name != "__init__" else here[:-1]
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join(base + (node.module.split(".") if node.module else []))
                found |= {f"{base}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Constant) and node.value in self.strings:
                found.add(node.value)
        return {known for x in found if (known := self.resolve(x))} - {name}

    def resolve(self, dotted):
        """ "fastattn.api.call" -> "api": the longest prefix that is a module of this package."""
        parts = dotted.split(".")
        if parts[0] != self.package:
            return None
        for end in range(len(parts), 1, -1):
            if (name := ".".join(parts[1:end])) in self.modules:
                return name
        return "__init__"

    @cached_property
    def edges(self):
        """{module: the modules that it imports}."""
        return {name: self.imported(name, path) for name, path in self.modules.items()}


def folder_of(name):
    """The folder of a module below the package; a module that lies flat is its own."""
    return name.partition(".")[0]


GRAPH = Graph(Path(fastattn.__file__).parent)
MODULES = GRAPH.modules

# The modules that may import the oracle: the reference backend, exported graphs, a score_mod of a
# form that no kernel has, the command that compares with it, and the package's __init__, which
# exports it.
IMPORT_THE_ORACLE = {"backends.reference", "dispatch.onnx_decomposition", "dropin.flex", "__init__"}
IMPORT_THE_ORACLE |= {"commands.sample_calls"}
# Its forms of norm_rope and of a rotation, in float32, run where no kernel does.
IMPORT_THE_ORACLE |= {"rotation.form", "rotation.rotate"}


def floors():
    """Sets of folders, the highest first: each may import those of the sets below. DESIGN.md has a
    line for each."""
    block = (ROOT / "DESIGN.md").read_text().partition("## Floors")[2].split("```")[1]
    for line in block.strip().splitlines():
        yield {name.strip() for name in line.partition("  ")[0].split(",")}


FLOORS = tuple(floors())
FLOOR = {name: at for at, floor in enumerate(FLOORS) for name in floor}


def test_the_parser_sees_every_kind_of_import(tmp_path):
    text = "import fastattn.reference\nfrom . import nn\nfrom .backends.base import x\ndef f():\n"
    text += "    from fastattn.call.spec import Tensors\n    import fastattn\n"
    path = tmp_path / "api.py"
    path.write_text(
        text + "    import_module('fastattn.merging')\n    'fastattn.attention_packed'\n"
    )
    expected = {"reference", "nn", "backends.base", "call.spec", "__init__", "merging"}
    assert GRAPH.imported("api", path) == expected
    path.write_text("from ..call import spec\nfrom . import base\nfrom .base import choose\n")
    assert GRAPH.imported("backends.x", path) == {"call.spec", "backends.base"}


def test_every_folder_has_a_floor():
    unknown = {folder_of(name) for name in MODULES} ^ set(FLOOR)
    assert not unknown, f"give {sorted(unknown)} a floor in DESIGN.md, or take it from there"


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    above = {
        other
        for other in GRAPH.edges[name]
        if folder_of(other) != folder_of(name) and FLOOR[folder_of(other)] <= FLOOR[folder_of(name)]
    }
    assert not above, f"{name} imports {above}, which are not below it"


def test_no_modules_import_each_other():
    """A package's __init__ imports what it exports, and modules below import one another."""
    TopologicalSorter(GRAPH.edges).prepare()  # raises CycleError


BACKENDS = ["native.cpu", "native.cuda", "triton", "reference"]  # a module, or a folder


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_do_not_know_each_other(name):
    of = {x: {y for y in MODULES if f"{y}.".startswith(f"backends.{x}.")} for x in BACKENDS}
    imported = set().union(*(GRAPH.edges[x] for x in of[name]))
    others = {x for x in BACKENDS if x != name and of[x] & imported}
    assert not others, f"{name} imports {others}"


def test_shared_modules_know_no_backend():
    """They are of several backends: only `base` and marshalling lie below them."""
    shared = [x for x in MODULES if x.startswith("backends.shared.")]
    imported = set().union(*(GRAPH.edges[x] for x in shared))
    above = {x for x in imported if x.startswith(("backends.native", "backends.triton"))}
    assert above <= {"backends.native.marshalling"}, above


def test_only_its_backend_imports_the_oracle():
    importers = {name for name, others in GRAPH.edges.items() if "reference" in others}
    assert importers <= IMPORT_THE_ORACLE, f"{importers - IMPORT_THE_ORACLE} import the oracle"


def test_kernels_know_nothing_above_them():
    folders = {Path(folder) / "kernels" for folder in fastattn.__path__} | {ROOT / "kernels"}
    for path in (path for folder in folders for path in folder.glob("*.py")):
        known = GRAPH.imported(f"kernels.{path.stem}", path)
        assert known <= {"__init__"} and "import fastattn" not in path.read_text(), path


def test_no_public_callable_hides_a_module():
    public = {name for name in fastattn.__all__ if callable(getattr(fastattn, name))}
    assert not public & {folder_of(name) for name in MODULES}


def test_no_package_hides_its_modules():
    """`import fastattn.dispatch.operation` finds it as an attribute of `fastattn.dispatch`."""
    for name in sorted(x for x in MODULES if "." in x):
        try:
            module = importlib.import_module(f"fastattn.{name}")
        except ModuleNotFoundError as missing:  # engines, in environments of their own
            assert (name, missing.name) in {
                ("integrations.sglang_backend", "sglang"),
                ("integrations.vllm_backend", "vllm"),
            }
            continue
        assert attrgetter(name)(fastattn) is module, name
