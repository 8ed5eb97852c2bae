"""torch.onnx.export(dynamo=True) exports attention as operators that ONNX knows, with the same
values."""

import importlib.util

import pytest
import torch
from torch import nn

import fastattn

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's exporter warns of itself
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


def evaluate(program, inputs):
    from onnx.reference import ReferenceEvaluator

    model = ReferenceEvaluator(program.model_proto)
    names = [x.name for x in program.model_proto.graph.input]
    found = model.run(None, {name: x.numpy() for name, x in zip(names, inputs)})
    return [torch.from_numpy(x) for x in found]


def export(model, inputs, **options):
    return torch.onnx.export(model, inputs, dynamo=True, verbose=False, **options)


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
CALLS = {
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


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    kind, given, options = CALLS[name]
    model, inputs = kind(list(given), **options), tuple(given.values())
    found = evaluate(export(model, inputs), inputs[: 2 if kind is Weights else None])
    same(found, model(*inputs), 2e-3 if name == "float16" else 1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
def test_the_module(need_weights):
    module = fastattn.MultiheadAttention(E, 4, batch_first=True).eval()
    inputs = tuple(torch.randn(B, n, E) for n in (M, N, N))
    options = dict(key_padding_mask=torch.arange(N).expand(B, N) > 4, need_weights=need_weights)
    found = evaluate(export(module, inputs, kwargs=options), (*inputs, options["key_padding_mask"]))
    same(found, module(*inputs, **options))


def test_a_converted_encoder_of_any_batch_and_length():
    layer = nn.TransformerEncoderLayer(E, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    assert len(fastattn.convert(model).swapped) == 1
    program = export(model, (torch.randn(B, M, E),), dynamic_shapes=[{0: "batch", 1: "length"}])
    for shape in ((B, M, E), (3, 9, E), (1, 2, E)):
        x = torch.randn(shape)
        same(evaluate(program, (x,)), model(x))


def test_dropout_is_refused_with_a_sentence():
    module = fastattn.MultiheadAttention(E, 4, dropout=0.5).train()
    with pytest.raises(Exception, match=r"dropout_p: got 0\.5") as caught:
        export(module, (torch.randn(M, B, E),) * 3)
    assert "model.eval()" in str(caught.value.__cause__ or caught.value)


def test_torchs_own_exports_keep_the_operators():
    given = tensors()
    program = torch.export.export(Call(list(given)), tuple(given.values()))
    for graph in (program.graph, program.run_decompositions().graph):
        assert "fastattn.attention.default" in [str(node.target) for node in graph.nodes]
