"""Programs that one process saves and another loads: which of them run without fastattn there, and
torch's errors for the others. fastattn/integrations/README.md documents this for users."""

import io
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._decomp import get_decompositions
from torch.nn import functional as F

import fastattn
from tests.torch_api.test_fx import E, H, converted, layer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
X = torch.linspace(-1, 1, 2 * 5 * E).view(2, 5, E)


class Calling(nn.Module):
    """A module that calls `function` with q, k, v and options."""

    def __init__(self, function, **options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, x):
        x = x.unflatten(-1, (H, E // H)).transpose(1, 2)
        return self.function(x, x, x, **self.options)


def ours():
    return converted(layer())


def reverted():
    model = ours()
    assert fastattn.revert(model).swapped
    return model


def calling():
    return Calling(fastattn.attention, causal=True, window=(2, None))


def torchs_form():
    return Calling(fastattn.scaled_dot_product_attention, is_causal=True)


class Patched(Calling):
    """A call of torch's function; `save` runs it inside `fastattn.sdpa()`."""

    def __init__(self):
        super().__init__(lambda *qkv: F.scaled_dot_product_attention(*qkv))


def trace(model, file):
    with torch.no_grad():
        torch.jit.trace(model, (X,)).save(file)


def export(model, file):
    torch.export.save(torch.export.export(model, (X,)), file)


def decomposed(model):
    ours = [torch.ops.fastattn.attention, torch.ops.fastattn.weights]
    return torch.export.export(model, (X,)).run_decompositions(get_decompositions(ours))


def export_decomposed(model, file):
    torch.export.save(decomposed(model), file)


def trace_decomposed(model, file):
    trace(decomposed(model).module(), file)


NEEDS = "fastattn"  # the import that the loading process needs
PROGRAMS = {  # (the model, how it is saved, what the loading process needs)
    "trace": (ours, trace, NEEDS),
    "trace, reverted": (reverted, trace, None),
    "trace, decomposed": (ours, trace_decomposed, None),
    "trace of a call": (calling, trace, NEEDS),
    "trace of torch's form": (torchs_form, trace, NEEDS),
    "trace inside sdpa()": (Patched, trace, None),
    "export": (ours, export, NEEDS),
    "export, reverted": (reverted, export, None),
    "export, decomposed": (ours, export_decomposed, None),
    "export of a call": (calling, export, NEEDS),
    "export of a call, decomposed": (calling, export_decomposed, None),
    "export inside sdpa()": (Patched, export, None),
}
LOADS = """
import logging, sys, torch
folder, imports, *names = sys.argv[1:]
if imports == "fastattn":
    import fastattn
said, found, kept = [], {}, torch.load(f"{folder}/x.pt")
handler = logging.Handler()
handler.emit = lambda record: said.append(handler.format(record))  # with its traceback
logging.getLogger("torch.export").addHandler(handler)
for name in names:
    said.clear()
    try:
        if name.startswith("trace"):
            found[name] = torch.jit.load(f"{folder}/{name}")(kept)
        elif name.startswith("export"):
            found[name] = torch.export.load(f"{folder}/{name}").module()(kept)
        else:
            found[name] = torch._inductor.aoti_load_package(f"{folder}/{name}.pt2")(kept)
    except Exception as error:
        found[name] = " ".join([str(error), *said])
assert ("fastattn" in sys.modules) == (imports == "fastattn")
torch.save({name: x if isinstance(x, str) else x.detach() for name, x in found.items()},
           f"{folder}/found-{imports}.pt")
"""


def save(folder, programs):
    """Save every program under its name; return its outputs in this process."""
    torch.save(X, folder / "x.pt")
    expected = {}
    for name, (build, way, _) in programs.items():
        model = build()
        with warnings.catch_warnings(), fastattn.sdpa():
            warnings.simplefilter("ignore")  # torch's deprecation warnings
            way(model, folder / name)
        expected[name] = model(X).detach()
    return expected


def loaded(folder, imports, names):
    """{name: the output of the program in a new process, or the text of its error}."""
    command = [sys.executable, "-c", LOADS, str(folder), imports, *names]
    subprocess.run(command, check=True, cwd=folder, capture_output=True, timeout=300)
    return torch.load(folder / f"found-{imports}.pt")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    expected = save(folder, PROGRAMS)
    return expected, *(loaded(folder, imports, PROGRAMS) for imports in ("nothing", NEEDS))


def judged(name, takes, expected, alone, beside):
    if takes is None:
        torch.testing.assert_close(alone[name], expected[name])
    else:
        assert "fastattn" in alone[name] and "attention" in alone[name]  # the operator's name
    torch.testing.assert_close(beside[name], expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_another_process(name, programs):
    judged(name, PROGRAMS[name][2], *programs)


PACKAGES = {"package": (ours, NEEDS), "package, decomposed": (ours, None)}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles with g++")
def test_packages_of_aotinductor(tmp_path):
    def package(model, file):
        program = (
            decomposed(model) if "decomposed" in file.name else torch.export.export(model, (X,))
        )
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(program, package_path=f"{file}.pt2")

    programs = {name: (build, package, takes) for name, (build, takes) in PACKAGES.items()}
    expected = save(tmp_path, programs)
    found = [loaded(tmp_path, imports, programs) for imports in ("nothing", NEEDS)]
    for name, (_, _, takes) in programs.items():
        judged(name, takes, expected, *found)


def reloaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.slow
def test_sizes_without_a_bound_stay_free():
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    model, other = calling(), torch.randn(3, 7, E)
    program = torch.export.export(model, (X,), dynamic_shapes=shapes)
    torch.testing.assert_close(reloaded(program)(other), model(other))
    program = program.run_decompositions(get_decompositions([torch.ops.fastattn.attention]))
    assert "fastattn" not in str(program.graph)
    torch.testing.assert_close(reloaded(program)(other), model(other))


def test_packed_sizes_without_a_bound_stay_free():
    class Packed(nn.Module):
        def forward(self, x, cu):
            return fastattn.attention_packed(x, x, x, cu, cu, causal=True)

    tokens, sequences = torch.export.Dim("tokens"), torch.export.Dim("sequences")
    given = torch.randn(5, H, 8), torch.tensor([0, 2, 5])
    program = torch.export.export(Packed(), given, dynamic_shapes=({0: tokens}, {0: sequences}))
    other = torch.randn(9, H, 8), torch.tensor([0, 1, 5, 9])
    torch.testing.assert_close(reloaded(program)(*other), Packed()(*other))


def test_a_trace_warns_of_none_of_our_rules():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.jit.trace(calling(), (X,))
    assert not [x for x in caught if issubclass(x.category, torch.jit.TracerWarning)]


def test_the_page_for_users_has_a_decomposition_that_runs():
    page = Path(fastattn.integrations.__file__).with_name("README.md").read_text()
    (code,) = re.findall(r"```python\n(import torch\nfrom torch._decomp.*?)```", page, flags=re.S)
    names = {"torch": torch, "model": calling(), "inputs": (X,)}
    exec(code, names)
    assert "fastattn" not in str(names["program"].graph)
    torch.testing.assert_close(names["program"].module()(X), calling()(X))
