"""convert and revert: what is swapped, what is left and why, and that nothing else changes."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import fastattn
from tests.support.multihead_cases import E, H, L, N, spy_on_attention


class Model(nn.Module):
    """An encoder, a single attention module under two names, and modules without attention."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.25, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.pool = nn.MultiheadAttention(E, H, batch_first=True, add_zero_attn=True)
        self.again = nn.ModuleDict({"pool": self.pool})
        self.head = nn.Linear(E, 3)

    def forward(self, x):
        x = self.encoder(x)
        pooled, _ = self.again["pool"](x[:, :1], x, x)
        return self.head(self.pool(pooled, x, x)[0])


NAMES = ("encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "pool")


def snapshot(model):
    """The whole state of a module tree: the identity, class and attributes of each module."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[name] = (
            id(module),
            type(module),
            {
                x: dict(y) if x.startswith("_") and hasattr(y, "items") else y
                for x, y in vars(module).items()
            },
        )
    return found


def kinds(model):
    return [type(model.get_submodule(name)) for name in NAMES]


def test_each_plain_module_is_swapped_once_and_reported():
    model = Model()
    report = fastattn.convert(model)
    assert report.swapped == NAMES and report.left == {}
    assert kinds(model) == [fastattn.MultiheadAttention] * 3
    assert model.pool is model.again["pool"]
    assert len(model.pool._forward_pre_hooks) == 1
    assert str(report).splitlines()[0] == "swapped 3, left 0"
    assert "pool" in str(report)


def test_the_report_and_the_help_name_libraries_that_pass_it_by():
    model = Model()
    report = str(fastattn.convert(model))
    for text in (report, fastattn.convert.__doc__):
        for word in ("exact type", "torch.ao.quantization", "Opacus", "fastattn.revert"):
            assert word in text
    assert report.splitlines()[:4] == ["swapped 3, left 0", *(f"  swapped {x}" for x in NAMES)]
    assert len(report.splitlines()) == 5
    assert "Opacus" not in str(fastattn.revert(model))
    assert "Opacus" not in str(fastattn.convert(nn.Linear(1, 1)))


def test_quantization_by_exact_type_skips_it_until_it_is_reverted():
    quantization = pytest.importorskip("torch.ao.quantization")

    def prepared(model):
        model = copy.deepcopy(model).eval()
        model.qconfig = quantization.get_default_qconfig("x86")
        rules = quantization.get_default_custom_config_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantization.prepare(model, prepare_custom_config_dict=rules, inplace=True)
        return {type(model.get_submodule(name)).__module__ for name in NAMES}

    model = Model()
    expected = prepared(model)
    assert expected == {"torch.ao.nn.quantizable.modules.activation"}
    fastattn.convert(model)
    assert prepared(model) == {fastattn.MultiheadAttention.__module__}
    fastattn.revert(model)
    assert prepared(model) == expected


def test_revert_restores_every_object_and_attribute():
    model = Model()
    model.pool.register_forward_pre_hook(lambda module, args: None)
    model.pool.register_forward_hook(lambda module, args, out: None)
    model.encoder.layers[0].eval()
    before, parameters = snapshot(model), list(model.parameters())
    fastattn.convert(model)
    after = snapshot(model)
    assert {x: y[0] for x, y in after.items()} == {x: y[0] for x, y in before.items()}
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    report = fastattn.revert(model)
    assert report.swapped == NAMES and report.left == {}
    assert snapshot(model) == before
    assert fastattn.revert(model).swapped == ()


def test_same_results_before_between_and_after(monkeypatch):
    model, x = Model().eval(), torch.randn(N, L, E)
    with torch.no_grad():
        expected = model(x)
        calls = spy_on_attention(monkeypatch)
        fastattn.convert(model)
        torch.testing.assert_close(model(x), expected)
        assert len(calls) == 4
        fastattn.revert(model)
        assert torch.equal(model(x), expected)
        assert len(calls) == 4


def test_the_model_itself_may_be_the_attention():
    module = nn.MultiheadAttention(E, H)
    assert fastattn.convert(module).swapped == ("",)
    assert type(module) is fastattn.MultiheadAttention
    assert "the model itself" in str(fastattn.revert(module))
    assert type(module) is nn.MultiheadAttention


def test_tied_parameters_stay_tied():
    model = nn.ModuleList(nn.MultiheadAttention(E, H) for _ in range(2))
    model[1].in_proj_weight = model[0].in_proj_weight
    fastattn.convert(model)
    assert model[1].in_proj_weight is model[0].in_proj_weight
    assert len(list(model.parameters())) == 7


def test_hooks_still_run_with_what_they_expect():
    model, seen = nn.Sequential(nn.MultiheadAttention(E, H)), []
    module = model[0]
    module.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    module.register_forward_hook(lambda m, args, out: seen.append(out[0].shape))
    module.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append("backward"))
    fastattn.convert(model)
    x = torch.randn(L, N, E, requires_grad=True)
    module(x, x, x, need_weights=False)[0].sum().backward()
    assert seen == [{"need_weights": False}, (L, N, E), "backward"]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_converted_model_can_be_reverted(clone):
    model = Model()
    fastattn.convert(model)
    copied = clone(model)
    assert kinds(copied) == [fastattn.MultiheadAttention] * 3
    fastattn.revert(copied)
    assert kinds(copied) == [nn.MultiheadAttention] * 3
    assert not copied.pool._forward_pre_hooks
    assert kinds(model) == [fastattn.MultiheadAttention] * 3


def test_a_second_convert_changes_nothing_and_modules_built_as_ours_stay():
    model = nn.ModuleList([nn.MultiheadAttention(E, H), fastattn.MultiheadAttention(E, H)])
    report = fastattn.convert(model)
    assert report.swapped == ("0",) and "already" in report.left["1"]
    before = snapshot(model)
    report = fastattn.convert(model)
    assert report.swapped == () and report.left.keys() == {"0", "1"}
    assert snapshot(model) == before
    report = fastattn.revert(model)
    assert report.swapped == ("0",) and "built as" in report.left["1"]
    assert type(model[1]) is fastattn.MultiheadAttention
    assert len(model[1]._forward_pre_hooks) == 1


class Special(nn.MultiheadAttention):
    """A subclass: its forward may have another meaning."""


def plain():
    return nn.MultiheadAttention(E, H)


def patched():
    module = plain()
    module.forward = lambda *args, **kwargs: (args[0], None)
    return module


LEFT = {
    "subclass": lambda: Special(E, H),
    "parametrized": lambda: parametrizations.weight_norm(plain(), "in_proj_weight"),
    "quantizable": lambda: torch.ao.nn.quantizable.MultiheadAttention(E, H),
    "scripted": lambda: torch.jit.script(plain()),
    "forward was replaced": patched,
}


@pytest.mark.parametrize("why", LEFT)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_unsupported_modules_are_left_with_a_reason(why):
    model = nn.Sequential(nn.Linear(2, 2), LEFT[why](), plain())
    before = type(model[1])
    report = fastattn.convert(model)
    assert report.swapped == ("2",)
    assert list(report.left) == ["1"] and why in report.left["1"]
    assert why in str(report)
    assert type(model[1]) is before
    assert "1" in fastattn.revert(model).left


def test_a_parametrized_output_projection_is_used_as_torch_uses_it():
    torch.manual_seed(0)
    theirs = plain()
    parametrizations.orthogonal(theirs.out_proj, "weight")
    ours, x = copy.deepcopy(theirs), torch.randn(L, N, E)
    assert fastattn.convert(ours).swapped == ("",)
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x))


def test_pruning_hooks_are_kept_in_their_order():
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(prune.random_unstructured(plain(), "in_proj_weight", amount=0.5))
    theirs, ours = modules
    fastattn.convert(ours)
    with torch.no_grad():
        for module in modules:  # only the pruning hook updates in_proj_weight
            module.in_proj_weight_orig.mul_(2)
        x = torch.randn(L, N, E)
        torch.testing.assert_close(ours(x, x, x), theirs(x, x, x))


def test_revert_names_what_changed_class_after_convert():
    module = plain()
    fastattn.convert(module)
    parametrizations.weight_norm(module, "in_proj_weight")
    assert "its class changed" in fastattn.revert(module).left[""]
    parametrize.remove_parametrizations(module, "in_proj_weight")
    assert fastattn.revert(module).swapped == ("",)


@pytest.mark.slow
def test_compiled_before_or_after_convert_gives_the_same(monkeypatch):
    model, x = Model().eval(), torch.randn(N, L, E)
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    report = fastattn.convert(compiled)  # modules inside the compiled wrapper are found
    assert len(report.swapped) == 3
    calls = spy_on_attention(monkeypatch)
    torch.testing.assert_close(compiled(x), expected)
    assert calls, "the code compiled before convert is still in use"


def test_anything_but_a_module_is_refused():
    for function in (fastattn.convert, fastattn.revert):
        with pytest.raises(TypeError, match="got list, expected a torch"):
            function([plain()])
