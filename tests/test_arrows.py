"""Imports go downward only: each module may import only from the layers below its own."""

import ast
from pathlib import Path

import pytest

import fastattn

PACKAGE = Path(fastattn.__file__).parent

DESIGN = Path(__file__).parents[1] / "DESIGN.md"


def floors():
    """Sets of modules, the highest first: each may import those of the sets below. DESIGN.md has a
    line for each group of floors: its name, then the floors from above, separated by >."""
    block = DESIGN.read_text().partition("## Floors")[2].split("```")[1]
    for line in block.strip().splitlines():
        _, names = line.split(maxsplit=1)
        yield from ({x.strip() for x in floor.split(",")} for floor in names.split(">"))


FLOORS = tuple(floors())
FLOOR = {name: at for at, floor in enumerate(FLOORS) for name in floor}

# The layers inside packages.
INSIDE = {
    "flash_attn": (
        {"flash_attn"},
        {"flash_attn.installing"},
        {"flash_attn.flash_attn_interface", "flash_attn.bert_padding", "flash_attn.passes"},
        {"flash_attn.caching"},
        {"flash_attn.translation"},
        {"flash_attn.checks", "flash_attn.transformers_checks"},
    ),
    "distributed": (
        {"distributed", "distributed.dtensor"},
        {"distributed.explaining"},
        {"distributed.calls", "distributed.packed", "distributed.sharding"},
        {"distributed.usp"},
        {"distributed.gather", "distributed.ring", "distributed.ulysses"},
        {"distributed.hops", "distributed.whole"},
        {"distributed.agreement"},
        {"distributed.collectives", "distributed.cost"},
        {"distributed.layout"},
    ),
    "integrations": (
        {"integrations"},
        {"integrations.diffusers", "integrations.transformers"},
        {"integrations.transformers_attention"},
        {"integrations.transformers_masks", "integrations.transformers_paged"},
    ),
    "nn": (
        {"nn"},
        {"nn.interchange"},
        {"nn.transformer"},
        {"nn.layers"},
        {"nn.cached"},
        {"nn.causal", "nn.heads", "nn.positions", "nn.seq2seq", "nn.single"},
        {"nn.core"},
    ),
    "examples": (
        {"examples.serve"},
        {"examples.attention_notebook", "examples.char_lm", "examples.translate"}
        | {"examples.digits_vit", "examples.complexity", "examples.meanflow"}
        | {"examples.long_context"},
        {"examples.complexity_plot"},
        {"examples.layers"},
        {"examples", "examples.common", "examples.memory", "examples.notebook_cells"},
    ),
}

# The modules that may import the oracle: the reference backend, exported graphs, and the package's
# __init__, which exports it.
KNOW_THE_ORACLE = {"backends.reference", "decomposition", "__init__"}


def modules():
    """{"api": path, "backends.cpu": path, ...}, without kernels and compiled files."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != "kernels":
            name = ".".join(parts)
            found[name.removesuffix(".__init__") if len(parts) > 1 else name] = path
    return found


MODULES = modules()
BY_STRING = {f"fastattn.{name}" for name in MODULES}


def imported(name, path):
    """The modules of this package that a module imports anywhere in its text, or names in a string,
    as arguments of `importlib.import_module`."""
    here = ("fastattn." + name).split(".")
    package = here if path.name == "__init__.py" and name != "__init__" else here[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(base + (node.module.split(".") if node.module else []))
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and node.value in BY_STRING:
            found.add(node.value)
    return {known for x in found if (known := resolve(x))}


def resolve(dotted):
    """ "fastattn.spec.Tensors" -> "spec": the longest prefix that is a module of this package."""
    parts = dotted.split(".")
    if parts[0] != "fastattn":
        return None
    for end in range(len(parts), 1, -1):
        if (name := ".".join(parts[1:end])) in MODULES:
            return name
    return "__init__"


def is_below(other, name):
    house, others = name.split(".")[0], other.split(".")[0]
    if house == others and house in INSIDE:
        at = {room: i for i, floor in enumerate(INSIDE[house]) for room in floor}
        return at[other] > at[name]
    return FLOOR[others] > FLOOR[house]


def test_the_parser_sees_every_kind_of_import(tmp_path):
    text = "import fastattn.spec\nfrom . import roads\nfrom .backend import x\ndef f():\n"
    path = tmp_path / "api.py"
    text += "    from fastattn.reference import attention\n    import fastattn\n"
    path.write_text(text + "    import_module('fastattn.check')\n    'fastattn.attention_packed'\n")
    assert imported("api", path) == {"spec", "roads", "backend", "reference", "__init__", "check"}
    assert imported("backends.cpu", path) >= {"spec", "reference"}


def test_every_module_has_a_floor():
    unknown = {name.split(".")[0] for name in MODULES} - set(FLOOR)
    assert not unknown, f"give {sorted(unknown)} a floor in DESIGN.md"


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    above = [
        other
        for other in imported(name, MODULES[name])
        if not is_below(other, name)
        and not (name.startswith("backends") and other.startswith("backends"))
    ]
    assert not above, f"{name} imports {above}, which are not below it"


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("backends.")])
def test_backends_do_not_know_each_other(name):
    """A file with another's name as its prefix, as `triton_tangents`, is a part of that backend."""
    others = {x for x in imported(name, MODULES[name]) if x.startswith("backends")}
    others = {x for x in others if not name.startswith(f"{x}_")}
    assert not others, f"{name} imports {others}"


def test_only_its_backend_knows_the_oracle():
    know = {name for name, path in MODULES.items() if "reference" in imported(name, path)}
    assert know <= KNOW_THE_ORACLE, f"{know - KNOW_THE_ORACLE} import the oracle"


def test_kernels_know_nothing_above_them():
    folders = {Path(folder) / "kernels" for folder in fastattn.__path__}
    folders.add(PACKAGE.parent / "kernels")
    for path in (path for folder in folders for path in folder.glob("*.py")):
        known = imported(f"kernels.{path.stem}", path)
        assert known <= {"__init__"} and "import fastattn" not in path.read_text(), path


def test_no_public_callable_hides_a_module():
    public = {name for name in fastattn.__all__ if callable(getattr(fastattn, name))}
    assert not public & {name.split(".")[0] for name in MODULES}
    assert "backends.cpu" in MODULES
    import fastattn.backends.cpu as module

    assert module.Cpu.name == "cpu"
