"""torch.fx and __torch_function__: a symbolic trace has one node for each of our calls and modules,
as for torch's own, and tensor subclasses and modes see the public calls."""

import copy
import importlib
import io
import warnings

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import fastattn
from bench.peers import optional_deps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
B, H, M, D, E = 2, 4, 5, 4, 16


def generator():
    return torch.Generator().manual_seed(1)


def randn(*shape):
    return torch.randn(*shape, generator=generator())


# ---------------------------------------------------------------------------------------- functions

DENSE = randn(B, H, M, D)
PACKED, OFFSETS = randn(M, H, D), torch.tensor([0, 2, M])
CALLS = {  # (a function of x, x)
    "attention": (lambda x: fastattn.attention(x, x + 1, x, causal=True, scale=0.4), DENSE),
    "attention, LSE": (
        lambda x: sum_of(fastattn.attention(x, x, x, return_lse=True)),
        DENSE,
    ),
    "scaled_dot_product_attention": (
        lambda x: fastattn.scaled_dot_product_attention(x, x, x + 1, is_causal=True, scale=0.3),
        DENSE,
    ),
    "attention_weights": (
        lambda x: fastattn.attention_weights(x, x, average_heads=True, window=(1, 0)),
        DENSE,
    ),
    "attention_packed": (
        lambda x: fastattn.attention_packed(x, x, x, OFFSETS, OFFSETS, max_q=3, softcap=2.0),
        PACKED,
    ),
    "attention_jvp": (
        lambda x: sum_of(fastattn.attention_jvp(x, x, x, x + 1, None, x, causal=True)),
        DENSE,
    ),
    "merge, of tensors": (
        lambda x: sum_of(fastattn.merge([(x, x[..., 0]), (x + 1, x[..., 1])])),
        DENSE,
    ),
    "merge, of calls": (
        lambda x: sum_of(fastattn.merge([fastattn.attention(x, x, x, return_lse=True)] * 2)),
        DENSE,
    ),
}


def sum_of(pair):
    a, b = pair
    return a.sum() + b.sum()


def name_of(call):
    return call.split(",")[0]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_one_node(call):
    function, x = CALLS[call]
    traced = torch.fx.symbolic_trace(function)
    ours = getattr(fastattn, name_of(call))
    assert [node.target for node in traced.graph.nodes].count(ours) == 1
    assert traced(x).equal(function(x))
    again = copy.deepcopy(traced)
    again.graph.eliminate_dead_code()
    again.recompile()
    assert again(x).equal(function(x))


@pytest.mark.parametrize("call", CALLS)
def test_subclasses_and_modes_see_a_call_with_all_its_arguments(call):
    function, x = CALLS[call]
    ours, seen = getattr(fastattn, name_of(call)), []

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    found = function(x.as_subclass(Subclass))
    assert type(found) is Subclass and seen.count(ours) == 1
    assert found.as_subclass(torch.Tensor).equal(function(x))
    seen.clear()
    with Mode():
        assert function(x).equal(function(x))
    assert seen.count(ours) == 2


# ------------------------------------------------------------------------------------------ modules


class Layer(nn.Module):
    """A user's block, which torch.fx traces through."""

    def __init__(self, kind=nn.MultiheadAttention):
        super().__init__()
        self.norm = nn.LayerNorm(E)
        self.attend = kind(E, H, dropout=0.5, batch_first=True)
        self.linear = nn.Linear(E, E)

    def forward(self, x, mask=None):
        y = self.norm(x)
        out, _ = self.attend(y, y, value=y, key_padding_mask=mask, need_weights=False)
        return self.linear(x + out)


X = randn(B, M, E)


def converted(model):
    assert fastattn.convert(model).swapped
    return model


def layer():
    torch.manual_seed(0)
    return Layer().eval()


def test_the_graph_of_a_converted_model_is_that_of_the_stock_one():
    stock = torch.fx.symbolic_trace(layer())
    ours = torch.fx.symbolic_trace(converted(layer()))
    assert str(ours.graph) == str(stock.graph) and "call_module[target=attend]" in str(ours.graph)
    torch.testing.assert_close(ours(X), stock(X))
    assert fastattn.revert(ours).swapped == ("attend",)
    assert ours(X).equal(stock(X))
    assert fastattn.convert(stock).swapped == ("attend",)


class Own(fastattn.MultiheadAttention):
    pass


@pytest.mark.parametrize("kind", [fastattn.MultiheadAttention, Own])
def test_modules_built_as_ours_are_traced_too(kind):
    model = Layer(kind).eval()
    traced = torch.fx.symbolic_trace(model)
    mask = torch.arange(M).expand(B, M) > 3
    assert traced(X, mask).equal(model(X, mask))
    file = io.BytesIO()
    torch.save(traced, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)(X).equal(model(X))


class Pooling(nn.Module):
    """A call in which only a keyword argument comes from the graph."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(E, 4, batch_first=True)

    def forward(self, padding):
        return self.attend(X, X, X, key_padding_mask=padding, need_weights=False)[0]


def test_a_keyword_argument_alone_makes_a_node():
    model, padding = converted(Pooling()).eval(), torch.arange(M).expand(B, M) > 3
    assert torch.fx.symbolic_trace(model)(padding).equal(model(padding))


def test_the_mode_is_that_of_the_call_and_not_of_the_trace():
    traced = torch.fx.symbolic_trace(converted(layer()))
    assert traced.eval()(X).equal(traced(X))
    traced.train()
    assert not traced(X).equal(traced(X))


def test_hooks_run_with_the_program_and_not_while_it_is_traced():
    model, seen = converted(layer()), []

    def pre(module, args):
        seen.append("before")

    def hook(module, args, out):
        seen.append("after")
        return out[0] * 2, out[1]

    model.attend.register_forward_pre_hook(pre)
    model.attend.register_forward_hook(hook)
    traced = torch.fx.symbolic_trace(model)
    assert seen == []
    found = traced(X)
    assert seen == ["before", "after"] and found.equal(model(X))


def test_tracers_with_is_leaf_module_and_graph_transformers():
    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, fastattn.MultiheadAttention) or super().is_leaf_module(m, name)

    model = converted(layer())
    traced = torch.fx.GraphModule(model, Leaves().trace(model))
    again = torch.fx.Transformer(traced).transform()
    assert str(again.graph) == str(traced.graph) and again(X).equal(model(X))
    assert torch.fx.Interpreter(traced).run(X).equal(model(X))


def test_an_untraceable_module_raises_with_alternatives():
    module = converted(layer()).attend
    sentence = "one node.*is_leaf_module returns True.*fastattn.revert"
    with pytest.raises(TypeError, match=sentence):
        torch.fx.symbolic_trace(module)  # it is the root, which does not work for torch's either
    proxy = torch.fx.Proxy(torch.fx.Graph().placeholder("x"))
    with pytest.raises(TypeError, match=sentence):
        module(proxy, proxy, proxy)
    with pytest.raises(TypeError, match=sentence):
        module.forward(proxy, proxy, proxy)


@pytest.mark.parametrize("call", ["attention", "scaled_dot_product_attention"])
def test_compilers_take_subclasses_and_default_devices(call):
    class Subclass(torch.Tensor):
        pass

    function, x = CALLS[call]
    expected, x = function(x), x.as_subclass(Subclass)
    assert compiled(function)(x).as_subclass(torch.Tensor).equal(expected)
    with torch.device("cpu"):
        assert compiled(function)(x.as_subclass(torch.Tensor)).equal(expected)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="eager")


class Calling(nn.Module):
    def __init__(self, module, count):
        super().__init__()
        self.module, self.count = module, count

    def forward(self, x, y=None, z=None):
        return self.module(*(x, y, z)[: self.count])


ours = fastattn.nn
TOKENS = torch.arange(2 * M).view(2, M) % 9
MODULES = {
    "SelfAttention": (ours.SelfAttention(E, causal=True), X),
    "CausalSelfAttention": (ours.CausalSelfAttention(E, E, num_heads=2), X),
    "ConcatenatedHeads": (ours.ConcatenatedHeads(E, 8), X),
    "PackedSelfAttention": (ours.PackedSelfAttention(E, H), X),
    "CachedAttention": (ours.CachedAttention(E, H), X),
    "EncoderLayer": (ours.EncoderLayer(E, H, 32), X),
    "DecoderLayer": (ours.DecoderLayer(E, H, 32), X, X),
    "ScaledDotProductAttention": (ours.ScaledDotProductAttention(), X, X, X),
    "SharedHeadAttention": (ours.SharedHeadAttention(E, H), X, X, X),
    "TracedAttention": (ours.TracedAttention(E, H), X, X, X),
    "LuongAttention": (ours.LuongAttention(E), X, X),
    "BahdanauAttention": (ours.BahdanauAttention(E, E, 8), X, X),
    "RotaryEmbedding": (ours.RotaryEmbedding(D), DENSE),
    "SinusoidalPositionalEncoding": (ours.SinusoidalPositionalEncoding(E), X),
    "Transformer": (
        ours.Transformer(
            9, embed_dim=E, num_heads=H, num_encoder_layers=1, num_decoder_layers=1, ff_dim=E
        ),
        TOKENS,
        TOKENS,
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_modules_of_fastattn_nn(name):
    module, *given = MODULES[name]
    model = Calling(module, len(given)).eval()
    assert torch.fx.symbolic_trace(model)(*given).equal(model(*given))


# -------------------------------------------------------------------------------------- users of fx


@pytest.mark.filterwarnings("ignore:quantized_resize_cpu_")  # torch 2.15
def test_quantization_of_a_graph_leaves_attention_as_it_leaves_torchs():
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    def quantized(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = prepare_fx(model, get_default_qconfig_mapping(), (X,))
            prepared(X)
            return convert_fx(prepared)

    stock, ours = quantized(layer()), quantized(converted(layer()))
    assert type(ours.attend) is fastattn.MultiheadAttention
    assert [n.target for n in ours.graph.nodes] == [n.target for n in stock.graph.nodes]
    torch.testing.assert_close(ours(X), stock(X), rtol=0, atol=0.05)


def test_features_of_torchvision():
    try:
        optional_deps.library("torchvision")
    except ModuleNotFoundError as missing:
        pytest.skip(f"torchvision is not installed (`make test` installs it): {missing}")
    extraction = importlib.import_module("torchvision.models.feature_extraction")
    models = importlib.import_module("torchvision.models")
    sizes = dict(image_size=32, patch_size=16, num_layers=2, num_heads=2)
    model = models.VisionTransformer(**sizes, hidden_dim=16, mlp_dim=32, num_classes=3).eval()
    names = extraction.get_graph_node_names(model)
    wanted = "encoder.layers.encoder_layer_1.self_attention"
    image = torch.randn(1, 3, 32, 32, generator=generator())
    expected = extraction.create_feature_extractor(model, [wanted])(image)[wanted][0]
    assert extraction.get_graph_node_names(converted(model)) == names
    found = extraction.create_feature_extractor(model, [wanted])(image)[wanted][0]
    torch.testing.assert_close(found, expected)
