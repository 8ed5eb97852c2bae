"""patch() and sdpa() on the installed torch's varlen_attn: names that were bound to it, restoring,
compiled and exported code."""

import importlib.util
import inspect
import sys
import types

import pytest
import torch

import fastattn
from fastattn.dropin import varlen, varlen_patching
from tests.support.fresh_python import python

MODULE = varlen_patching.MODULE
module = pytest.importorskip(MODULE)
TORCHS = [module.varlen_attn]  # the patch replaces what is bound to a name of a module


def runs_torchs():
    """torch's function has no kernel for CPUs."""
    return pytest.raises(NotImplementedError, match="_flash_attention_forward")


def given():
    q = torch.randn(7, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    return q, q, q, cu, cu, 4, 4


@pytest.fixture
def importer():
    """A module that has imported the function by another name before the patch."""
    name = "a_module_that_imports_varlen_attn"
    made = sys.modules[name] = types.ModuleType(name)
    (made.attend,) = TORCHS
    yield made
    del sys.modules[name]


@pytest.mark.parametrize("name", sorted(varlen_patching._STAND_INS))
def test_every_argument_of_this_torch_is_known(name):
    if not hasattr(module, name):
        pytest.skip(f"this torch has no {name}")
    assert set(inspect.signature(getattr(module, name)).parameters) <= varlen_patching._OURS


def test_it_trains_on_a_cpu(importer):
    with runs_torchs():
        module.varlen_attn(*given())
    with fastattn.sdpa():
        assert module.varlen_attn is importer.attend is not TORCHS[0]
        tensors = given()
        importer.attend(*tensors).sum().backward()
        assert tensors[0].grad.any()
    assert module.varlen_attn is importer.attend is TORCHS[0]


def test_the_lse_and_out():
    tensors = given()
    with fastattn.sdpa():
        out, lse = module.varlen_attn(*tensors, return_aux=module.AuxRequest(lse=True))
        assert lse.shape == (2, 7)
        if hasattr(module, "varlen_attn_out"):
            room = torch.empty_like(out)
            assert module.varlen_attn_out(room, *tensors) is room and torch.equal(room, out)
    want = fastattn.attention_packed(*tensors[:5])
    torch.testing.assert_close(out, want)


def test_patches_are_counted(importer):
    fastattn.patch()
    with fastattn.sdpa():
        fastattn.patch()
        fastattn.unpatch()
    assert importer.attend is not TORCHS[0]
    fastattn.unpatch()
    assert module.varlen_attn is importer.attend is TORCHS[0]


def test_a_stand_in_that_was_imported_runs_torchs_after_unpatch():
    with fastattn.sdpa():
        function = module.varlen_attn
    with runs_torchs():
        function(*given())


@pytest.mark.parametrize("first", [False, True], ids=["a later patch", "the first patch"])
def test_another_function_in_its_place_stays(monkeypatch, first):
    def other():
        pass

    with fastattn.sdpa():
        pass
    with monkeypatch.context() as during:
        if first:
            during.setattr(varlen_patching, "_torchs", {})
        during.setattr(module, "varlen_attn", other)
        with fastattn.sdpa():
            assert module.varlen_attn is other
        assert module.varlen_attn is other
    with fastattn.sdpa():
        module.varlen_attn(*given())
    assert module.varlen_attn is TORCHS[0]


def test_a_torch_without_the_module(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, None)  # so Python refuses to import it
    q = torch.randn(1, 8, 256, 64)
    with fastattn.sdpa():
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        with pytest.raises(ImportError):
            importlib.import_module(MODULE)


@pytest.fixture
def not_imported(monkeypatch, tmp_path):
    """A module that stands for torch's, and was not imported yet."""
    name = "a_varlen_module"
    (tmp_path / f"{name}.py").write_text("def varlen_attn(query): return 'torch'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(varlen_patching, "MODULE", name)
    monkeypatch.setattr(varlen_patching, "_torchs", {})
    yield name
    sys.modules.pop(name, None)
    assert varlen_patching._finder not in sys.meta_path


def test_a_module_that_is_imported_during_a_patch(not_imported, importer):
    with fastattn.sdpa(), fastattn.sdpa():
        assert sys.meta_path.count(varlen_patching._finder) == 1
        late = importlib.import_module(not_imported)
        importer.attend = late.varlen_attn
        assert importer.attend is late.varlen_attn is varlen_patching.varlen_attn
    assert importer.attend is late.varlen_attn and late.varlen_attn(1) == "torch"
    with fastattn.sdpa():
        assert varlen_patching._finder not in sys.meta_path
        assert importer.attend is late.varlen_attn is varlen_patching.varlen_attn


def test_a_module_that_is_imported_after_a_patch(not_imported):
    with fastattn.sdpa():
        pass
    late = importlib.import_module(not_imported)
    assert late.varlen_attn(1) == "torch"


def test_a_module_that_is_found_in_a_patch_and_loaded_after_it(not_imported):
    with fastattn.sdpa():
        spec = importlib.util.find_spec(not_imported)
    late = sys.modules[not_imported] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(late)
    assert late.varlen_attn is not varlen_patching.varlen_attn


@pytest.mark.slow  # torch's module imports the compiler
def test_a_patch_does_not_import_torchs_module():
    python(
        "-c",
        "import sys, torch, fastattn\n"
        "fastattn.patch()\n"
        f"assert {MODULE!r} not in sys.modules and 'torch._dynamo' not in sys.modules\n"
        f"from {MODULE} import varlen_attn\n"
        "q, cu = torch.randn(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)\n"
        "varlen_attn(q, q, q, cu, cu, 4, 4)\n"
        "fastattn.unpatch()\n"
        f"assert varlen_attn is sys.modules[{MODULE!r}].varlen_attn\n"
        f"assert varlen_attn.__module__ == {MODULE!r}\n",
    )


@pytest.mark.slow
def test_in_compiled_code():
    """In one graph, and compiled again when the block ends."""
    tensors = given()

    def model(q):
        return module.varlen_attn(q, q, q, *tensors[3:], return_aux=module.AuxRequest(lse=True))

    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with fastattn.sdpa():
        found, want = compiled(tensors[0]), model(tensors[0])
        for x, y in zip(found, want):
            assert torch.equal(x, y)
        of_found, of_want = (torch.autograd.grad(x[0].sum(), tensors[0]) for x in (found, want))
        torch.testing.assert_close(of_found, of_want)
    with pytest.raises(Exception, match="_flash_attention_forward"):
        compiled(tensors[0])


@pytest.mark.slow
def test_out_in_compiled_code():
    if not hasattr(module, "varlen_attn_out"):
        pytest.skip("this torch has no varlen_attn_out")
    q, *rest = (x.detach() if isinstance(x, torch.Tensor) else x for x in given())

    def model(q):
        room = torch.empty_like(q)
        module.varlen_attn_out(room, q, *rest)
        return room

    with fastattn.sdpa():
        found = torch.compile(model, fullgraph=True, backend="eager")(q)
        assert torch.equal(found, model(q))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_code_has_torchs_operator(strict):
    class Model(torch.nn.Module):
        def forward(self, q, cu):
            return module.varlen_attn(q, q, q, cu, cu, 4, 4)

    q, cu = given()[0].detach(), given()[3]
    with fastattn.sdpa():
        text = str(torch.export.export(Model(), (q, cu), strict=strict).graph)
    assert "torch_attn._varlen_attn" in text and "fastattn" not in text


def test_errors_keep_their_cause(monkeypatch):
    def fails(*args, **kwargs):
        raise ValueError("q: got 1") from KeyError("cause")

    monkeypatch.setattr(varlen, "attention_packed", fails)
    with fastattn.sdpa(), pytest.raises(ValueError, match=r"^query: got 1$") as found:
        module.varlen_attn(*given())
    assert isinstance(found.value.__cause__, KeyError)
