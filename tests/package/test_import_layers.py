"""Imports point down: a folder of the package imports only from folders on lower floors."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fastattn
from tests.support import import_graph
from tests.support.checkout import ROOT
from tests.support.import_graph import Graph, folder_of

PACKAGE = Path(fastattn.__file__).parent
GRAPH = Graph(PACKAGE)
MODULES = GRAPH.modules

# At most so many modules lie side by side, so that the folders show what belongs together.
FLAT = {"fastattn": 16, "tests": 30}

# The modules that may import the oracle: the reference backend, exported graphs, a score_mod of a
# form that no kernel has, and the package's __init__, which exports it.
IMPORT_THE_ORACLE = {"backends.reference", "dispatch.onnx_decomposition", "dropin.flex", "__init__"}


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


def test_cycles_and_layers_of_a_graph():
    edges = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert import_graph.cycles(edges) == []
    assert import_graph.layers(edges) == [["a"], ["b"], ["c"]]
    assert import_graph.cycles(edges | {"c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_every_folder_has_a_floor():
    unknown = {folder_of(name) for name in MODULES} ^ set(FLOOR)
    assert not unknown, f"give {sorted(unknown)} a floor in DESIGN.md, or take it from there"


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    above = {
        other
        for other in GRAPH.imported(name, MODULES[name])
        if folder_of(other) != folder_of(name) and FLOOR[folder_of(other)] <= FLOOR[folder_of(name)]
    }
    assert not above, f"{name} imports {above}, which are not below it"


def test_no_modules_import_each_other():
    """A package's __init__ imports what it exports, and modules below import one another."""
    assert import_graph.cycles(GRAPH.edges) == []


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
        code = ast.parse(f"import fastattn.{name}")
        space = {}
        exec(compile(code, "<test>", "exec"), space)
        found = eval(f"fastattn.{name}", space)
        assert found is sys.modules[f"fastattn.{name}"], name


@pytest.mark.parametrize("folder", FLAT)
def test_few_modules_lie_flat(folder):
    assert len(list((ROOT / folder).glob("*.py"))) <= FLAT[folder]


def test_the_command_prints_floors():
    command = [sys.executable, "-m", "tests.support.import_graph"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"{len({folder_of(x) for x in MODULES})} folders, " in done.stdout
    assert "circle:" not in done.stdout
    layers = [x.split() for x in done.stdout.splitlines() if x.startswith("  ")]
    assert [{x.strip(",") for x in line} for line in layers] == list(FLOORS)
