"""torch.onnx.export, with dynamo=True and False, exports attention as standard ONNX operators that
give the same values."""

import importlib.util
import io

import pytest
import torch
from torch import nn

import fastattn
from fastattn.require_torch import TORCH_VERSION
from tests.support.marks import parametrize

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's exporter emits warnings
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("onnx", "onnxscript"))),
        reason="exporting to ONNX needs the packages onnx and onnxscript",
    ),
]
B, H, HK, M, N, D, E = 2, 4, 2, 5, 7, 8, 16


class Call(nn.Module):
    """fastattn.attention with `options`; its inputs are named in `names`."""

    def __init__(self, names, **options):
        super().__init__()
        self.names, self.options = names, options

    def forward(self, *tensors):
        given = dict(zip(self.names, tensors))
        q, k, v = (given.pop(x) for x in ("q", "k", "v"))
        return fastattn.attention(q, k, v, **given, **self.options)


class Weights(Call):
    def forward(self, q, k, v):
        return fastattn.attention_weights(q, k, **self.options)


def tensors(dtype=torch.float32, **more):
    shapes = dict(q=(B, H, M, D), k=(B, HK, N, D), v=(B, HK, N, D))
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()} | more


class Padded(nn.Module):
    """A module that calls an attention module with key_padding_mask and need_weights."""

    def __init__(self, module, need_weights):
        super().__init__()
        self.module, self.need_weights = module, need_weights

    def forward(self, q, k, v, mask):
        return self.module(q, k, v, mask, need_weights=self.need_weights)


def evaluate(proto, inputs):
    """Outputs of an ONNX model. inputs: tensors by name; names that the model lacks are ignored."""
    from onnx.reference import ReferenceEvaluator

    names = [x.name for x in proto.graph.input]
    found = ReferenceEvaluator(proto).run(None, {x: inputs[x].numpy() for x in names})
    return [torch.from_numpy(x) for x in found]


def export(exporter, model, given, dynamic=(), rest=()):
    """The ModelProto. dynamic: names of inputs for which dimensions 0 and 1 may have any size.
    rest: further positional arguments."""
    names, tensors = list(given), (*given.values(), *rest)
    free = {name: {0: "batch", 1: f"length_{name}"} for name in dynamic}
    if exporter == "dynamo":
        shapes = [free.get(name) for name in names] if dynamic else None
        options = dict(dynamo=True, verbose=False, dynamic_shapes=shapes)
        return torch.onnx.export(model, tensors, input_names=names, **options).model_proto
    import onnx

    file = io.BytesIO()
    options = dict(dynamo=False, dynamic_axes=free, opset_version=18)
    torch.onnx.export(model, tensors, file, input_names=names, **options)
    return onnx.load_from_string(file.getvalue())


exporters = pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])


def same(found, exact, tolerance=1e-5):
    exact = [x for x in exact if x is not None] if isinstance(exact, tuple) else [exact]
    assert len(found) == len(exact)
    for a, b in zip(found, exact):
        torch.testing.assert_close(a, b.detach(), rtol=tolerance, atol=tolerance)


everything = dict(
    mask=torch.randn(M, N),
    key_lengths=torch.tensor([N, 0]),
    alibi_slopes=torch.rand(H),
    sinks=torch.randn(H),
)
TABLE, OPEN = torch.randn(H, M + N), torch.rand(B, N) > 0.3
FUNCTIONS = dict(
    score_mod=lambda s, b, h, i, j: torch.tanh(s) + TABLE[h, i - j],
    mask_mod=lambda b, h, i, j: OPEN[b, j] | (i == j),
)
CALLS = {
    "functions": (Call, tensors(), FUNCTIONS),
    "functions of weights": (Weights, tensors(), FUNCTIONS),
    "plain": (Call, tensors(), dict()),
    "causal, with LSE": (Call, tensors(), dict(causal=True, return_lse=True)),
    "bottom right": (Call, tensors(), dict(causal="bottom_right", window=(2, None))),
    "bool mask with an empty row": (Call, tensors(mask=torch.eye(M, N) > 2), dict()),
    "everything": (Call, tensors(**everything), dict(causal=True, softcap=2.0, scale=0.3)),
    "float64": (Call, tensors(torch.float64), dict(return_lse=True)),
    "float16": (Call, tensors(torch.float16), dict(return_lse=True)),
    "weights": (Weights, tensors(), dict(causal=True)),
    "averaged weights": (Weights, tensors(), dict(average_heads=True)),
}


@exporters
@parametrize("name", CALLS, fast=1)
def test_calls(name, exporter):
    kind, given, options = CALLS[name]
    model = kind(list(given), **options)
    used = {x: given[x] for x in ("q", "k", "v")} if kind is Weights else given
    found = evaluate(export(exporter, model, used), used)
    same(found, model(*used.values()), 2e-3 if name == "float16" else 1e-5)


@exporters
@parametrize("need_weights", [False, True], fast=1)
def test_the_module(need_weights, exporter):
    if exporter == "dynamo" and not need_weights and TORCH_VERSION < (2, 9):
        pytest.skip("the exporter of torch 2.8 has no results that are None")
    module = fastattn.MultiheadAttention(E, 4, batch_first=True)
    model = Padded(module, need_weights).eval()
    given = {name: torch.randn(B, n, E) for name, n in (("q", M), ("k", N), ("v", N))}
    given["mask"] = torch.arange(N).expand(B, N) > 4
    same(evaluate(export(exporter, model, given), given), model(*given.values()))


@exporters
@parametrize("flags", [(), (None, False), (None, True, None, False, False)], ids=str, fast=1)
def test_the_module_alone(flags, exporter):
    """The old exporter passes flags that have a default as tensors."""
    module = fastattn.MultiheadAttention(E, 4, batch_first=True).eval()
    given = {name: torch.randn(B, n, E) for name, n in (("query", M), ("key", N), ("value", N))}
    inputs = *given.values(), *flags
    same(evaluate(export(exporter, module, given, rest=flags), given), module(*inputs))


def converted_encoder():
    layer = nn.TransformerEncoderLayer(E, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    assert len(fastattn.convert(model).swapped) == 1
    return model


def own_encoder():
    # Nested in a module: the old exporter passes keyword-only parameters of a model by position.
    return nn.Sequential(fastattn.nn.EncoderLayer(E, 4, 32))


@pytest.mark.slow
@exporters
@parametrize("build", [converted_encoder, own_encoder], ids=lambda x: x.__name__, fast=1)
def test_encoders_of_any_batch_and_length(build, exporter):
    model = build().eval()
    proto = export(exporter, model, {"src": torch.randn(B, M, E)}, dynamic=["src"])
    for shape in ((B, M, E), (3, 9, E), (1, 2, E)):
        x = torch.randn(shape)
        same(evaluate(proto, {"src": x}), model(x))


def sentence_of(exporter, model, given):
    with pytest.raises(Exception) as caught:
        export(exporter, model, given)
    return str(caught.value.__cause__ or caught.value)


class Packed(nn.Module):
    def forward(self, q, k, v, cu):
        return fastattn.attention_packed(q, k, v, cu, cu, max_q=4, max_k=4, causal=True)


@exporters
def test_dropout_is_refused_with_a_sentence(exporter):
    message = sentence_of(exporter, Call("qkv", dropout_p=0.5), tensors())
    assert "dropout_p: got 0.5" in message and "model.eval()" in message


@exporters
def test_packed_batches_are_refused_with_a_message(exporter):
    given = {name: torch.randn(N, H, D) for name in "qkv"} | {"cu": torch.tensor([0, 3, N])}
    message = sentence_of(exporter, Packed(), given)
    assert "cu_q: got a packed batch" in message and "key_lengths" in message


def test_torchs_own_exports_keep_the_operators():
    given = tensors()
    program = torch.export.export(Call(list(given)), tuple(given.values()))
    for graph in (program.graph, program.run_decompositions().graph):
        assert "fastattn.attention.default" in [str(node.target) for node in graph.nodes]
