"""A converted nn.TransformerEncoderLayer in inference: the results of its submodules' calls, and
these calls wherever something would notice that they are missing."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import fastattn
from fastattn.dropin.encoder_layer import TransformerEncoderLayer
from fastattn.inspection import capture

E, H, HIDDEN, L = 16, 4, 24, 6


def layer(**options):
    torch.manual_seed(0)
    options = dict(batch_first=True) | options
    made = nn.TransformerEncoderLayer(E, H, HIDDEN, **options).eval()
    for x in made.parameters():
        nn.init.normal_(x, std=0.3)
    fastattn.convert(made)
    return made


def sequence(batch, length=L, batch_first=True, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    shape = (batch, length, E) if batch_first else (length, batch, E)
    return torch.randn(shape, generator=g).to(dtype)


@pytest.fixture
def linear_calls(monkeypatch):
    """One entry for each call of nn.Linear.forward, which the shorter forward does not make."""
    calls, real = [], nn.Linear.forward

    def forward(self, x):
        calls.append(self)
        return real(self, x)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    return calls


def submodules_result(module, *args, **kwargs):
    """The result of torch's forward, which calls the submodules of a converted layer."""
    return nn.TransformerEncoderLayer.forward(module, *args, **kwargs)


LAYERS = [
    dict(zip(("batch_first", "norm_first", "bias"), x, strict=True))
    for x in itertools.product((True, False), repeat=3)
]
HIDES = torch.arange(L) >= torch.tensor([L, 3, 1, 5])[:, None]
CAUSAL = nn.Transformer.generate_square_subsequent_mask(L)
MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": HIDES},
    "hidden items": {"src_key_padding_mask": torch.arange(4)[:, None].expand(4, L) == 1},
    "causal": {"src_mask": CAUSAL, "is_causal": True},
    "bool": {"src_mask": CAUSAL < 0},
    "by head": {"src_mask": torch.linspace(-3, 3, 16 * L * L).view(16, L, L)},
    "both": {"src_mask": CAUSAL < 0, "src_key_padding_mask": HIDES},
    "kinds": {"src_mask": CAUSAL, "src_key_padding_mask": HIDES, "is_causal": True},
}


ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "ReLU in place": nn.ReLU(inplace=True),
    "GELU": nn.GELU(),
}


@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_the_result_is_that_of_the_submodules(masks, activation, options, linear_calls):
    module, masks = layer(activation=activation, **options), MASKS[masks]
    x = sequence(4, batch_first=options["batch_first"])
    before = x.clone()
    with torch.no_grad():
        got = module(x, **masks)
        assert not linear_calls and torch.equal(x, before)
        torch.testing.assert_close(got, submodules_result(module, x, **masks))
        assert len(linear_calls) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 8, 15, 16, 48, 49, 200])
def test_any_number_of_rows_errs_as_the_submodules_do(rows, dtype, linear_calls):
    for norm_first, bias in itertools.product((True, False), repeat=2):
        module = layer(norm_first=norm_first, bias=bias, activation="gelu").to(dtype)
        x = sequence(1, rows, dtype=dtype)
        with torch.inference_mode():
            got = module(x)
            assert not linear_calls
            theirs, in_double = submodules_result(module, x), copy.deepcopy(module).double()
            exact = submodules_result(in_double, x.double())
            torch.testing.assert_close(in_double(x.double()), exact)
        if dtype != torch.float32:
            assert torch.equal(got, theirs)
        error, others = ((y.double() - exact).abs().max() for y in (got, theirs))
        assert error <= 1.5 * others + 2 * torch.finfo(dtype).eps
        linear_calls.clear()


def counted(seen):
    return lambda *args: seen.append(args[0])


NAMES = ["self_attn", "self_attn.out_proj", "linear1", "linear2", "norm1", "norm2"]
NAMES += ["dropout", "dropout1", "dropout2", "activation"]


@pytest.mark.parametrize("kind", ["hook", "pre_hook"])
@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_submodules_are_called(name, kind):
    module, x, seen = layer(activation=nn.ReLU()), sequence(2), []
    with torch.no_grad():
        expected = module(x)
        getattr(module.get_submodule(name), f"register_forward_{kind}")(counted(seen))
        hidden = name == "self_attn.out_proj"  # torch's attention does not call it, either
        torch.testing.assert_close(module(x), expected)
    assert seen == ([] if hidden else [module.get_submodule(name)])


def test_hooks_of_all_modules_are_called():
    module, x, seen = layer(), sequence(2), []
    handle = nn.modules.module.register_module_forward_hook(counted(seen))
    try:
        with torch.no_grad():
            module(x)
    finally:
        handle.remove()
    assert {module, module.linear1, module.norm2, module.dropout} <= set(seen)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


CHANGES = {
    "a subclass": lambda x: setattr(x.linear2, "__class__", Doubled),
    "a parametrization": lambda x: parametrizations.weight_norm(x.linear1),
    "a forward": lambda x: setattr(x.linear1, "forward", lambda y: y.new_zeros(2, L, HIDDEN)),
    "a block": lambda x: setattr(x, "_ff_block", lambda y: x.linear2(x.linear1(y)).sin()),
    "a dropout": lambda x: setattr(x, "dropout", nn.Dropout(1.0)),
    "tanh": lambda x: setattr(x, "activation", nn.GELU(approximate="tanh")),
    "another activation": lambda x: setattr(x, "activation", torch.sigmoid),
    "training": lambda x: x.self_attn.train(),
    "a zero key": lambda x: setattr(x.self_attn, "add_zero_attn", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_submodules_are_called(change, linear_calls):
    module, x = layer(dropout=0.0), sequence(2)
    CHANGES[change](module)
    with torch.no_grad():
        assert torch.equal(module(x), submodules_result(module, x))  # by the same calls
    assert linear_calls


@pytest.mark.parametrize("mode", ["grad", "autocast", "function mode", "disabled", "train"])
def test_other_modes_call_the_submodules(mode, linear_calls):
    module, x = layer(dropout=0.0).train(mode == "train"), sequence(2)
    with torch.set_grad_enabled(mode == "grad"):
        if mode == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                out = module(x)
        elif mode == "function mode":
            with torch.device("cpu"):
                out = module(x)
        elif mode == "disabled":
            before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                out = module(x)
            finally:
                torch.backends.mha.set_fastpath_enabled(before)
        else:
            out = module(x)
    assert len(linear_calls) == 2 and out.requires_grad == (mode == "grad")


def test_views_and_single_sequences_call_the_submodules(linear_calls):
    module, x = layer(), sequence(2)
    with torch.no_grad():
        expected = module(x)
        assert not linear_calls
        torch.testing.assert_close(module(x.transpose(0, 1).contiguous().transpose(0, 1)), expected)
        torch.testing.assert_close(module(x[0]), expected[0])
        assert module(x[:0]).shape == (0, L, E)
    assert len(linear_calls) == 6


@torch.no_grad()
def test_traced_exported_and_mapped():
    module, x = layer(), sequence(3)
    model = nn.Sequential(module)
    expected = module(x)
    traced = torch.fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
    torch.testing.assert_close(traced(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated
        torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), expected)
    mapped = torch.func.vmap(module)(x[:, None])
    torch.testing.assert_close(mapped[:, 0], expected)


def test_wrong_arguments_raise_as_the_submodules_do():
    module, x = layer(), sequence(2)
    wrong = [
        (x, {"is_causal": True}),
        (x, {"src_mask": torch.zeros(3, L)}),
        (x, {"src_key_padding_mask": torch.zeros(2, L + 1, dtype=torch.bool)}),
        (x, {"src_mask": torch.zeros(L, L, dtype=torch.int64)}),
        (x[..., :8].contiguous(), {}),
        (x.double(), {}),
    ]
    with torch.no_grad():
        for given, masks in wrong:
            with pytest.raises((RuntimeError, AssertionError)) as expected:
                submodules_result(module, given, **masks)
            with pytest.raises(expected.type) as got:
                module(given, **masks)
            assert str(got.value) == str(expected.value)


def test_the_class_follows_that_of_the_attention():
    plain = nn.TransformerEncoderLayer(E, H, HIDDEN)
    names = list(plain.state_dict())
    assert fastattn.convert(plain).swapped == ("self_attn",)
    assert type(plain) is TransformerEncoderLayer and list(plain.state_dict()) == names
    fastattn.convert(plain)
    assert type(plain) is TransformerEncoderLayer
    fastattn.revert(plain)
    assert type(plain) is nn.TransformerEncoderLayer
    with capture.converted(plain):
        assert type(plain) is TransformerEncoderLayer
    assert type(plain) is nn.TransformerEncoderLayer


class Special(nn.TransformerEncoderLayer):
    """A subclass: its forward may have another meaning."""


def test_a_subclass_of_the_layer_keeps_its_class():
    module = Special(E, H, HIDDEN)
    assert fastattn.convert(module).swapped == ("self_attn",)
    assert type(module) is Special
