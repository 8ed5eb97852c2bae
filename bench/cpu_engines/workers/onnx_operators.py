"""ONNX Runtime: a graph of one operator. The variants are com.microsoft's MultiHeadAttention (MHA)
and GroupQueryAttention (GQA), and ONNX's own Attention of operator set 24.

GQA's cache is shared by past and present, so that only the last token is copied. Inputs and the
output are bound once."""

import numpy as np
import numpy_arrays
import onnxruntime  # ty: ignore[import-not-found]
from onnx import TensorProto, helper
from protocol import Declined, Prepared, Sizes, Tensors, decline, decline_packed, decline_quantised

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
MICROSOFT = "com.microsoft"


def version() -> str:
    return onnxruntime.__version__


def prepare(sizes: Sizes, tensors: Tensors, threads: int, variant: str) -> Prepared:
    decline_packed(sizes)
    decline_quantised(sizes)
    decline(sizes, dtype=tuple(TYPES) if variant != "MHA" else ("float32",))
    q, k, v = numpy_arrays.read(tensors)
    make = {"MHA": _mha, "GQA": _gqa, "Attention": _attention}[variant]
    node, inputs, outputs = make(sizes, q, k, v)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        _model(node, inputs, outputs), options, providers=["CPUExecutionProvider"]
    )
    binding, kept = session.io_binding(), {}
    for name, x in (inputs | outputs).items():
        shared = kept.get(name.replace("present", "past"))
        kept[name] = shared or onnxruntime.OrtValue.ortvalue_from_numpy(x)
    for name in inputs:
        binding.bind_ortvalue_input(name, kept[name])
    for name in outputs:
        binding.bind_ortvalue_output(name, kept[name])

    def call() -> None:
        session.run_with_iobinding(binding)

    def write(path: str) -> None:
        out = kept["out"].numpy()
        if out.ndim == 3:  # (B, M, H D)
            out = out.reshape(*out.shape[:2], sizes["H"], sizes["D"]).transpose(0, 2, 1, 3)
        numpy_arrays.write(out, path)

    return Prepared(call, write, sizes["dtype"])


def _mha(sizes, q, k, v):
    if sizes["H"] != sizes["Hk"]:
        raise Declined("has no grouped heads")
    rows = _tokens(q)
    node = helper.make_node(
        "MultiHeadAttention",
        ["q", "k", "v"],
        ["out"],
        domain=MICROSOFT,
        num_heads=sizes["H"],
        unidirectional=int(sizes["causal"]),
    )
    return node, {"q": rows, "k": _tokens(k), "v": _tokens(v)}, {"out": np.empty_like(rows)}


def _gqa(sizes, q, k, v):
    decode = sizes["M"] == 1
    if not decode and not sizes["causal"]:
        raise Declined("is causal")
    rows, keys = _tokens(q), k.shape[2]
    new = slice(-1, None) if decode else slice(None)
    inputs = {
        "q": rows,
        "k": _tokens(k[:, :, new]),
        "v": _tokens(v[:, :, new]),
        "past_k": k if decode else np.zeros_like(k),
        "past_v": v if decode else np.zeros_like(v),
        "last": np.full(len(q), keys - 1, np.int32),
        "total": np.array([keys], np.int32),
    }
    node = helper.make_node(
        "GroupQueryAttention",
        list(inputs),
        ["out", "present_k", "present_v"],
        domain=MICROSOFT,
        num_heads=sizes["H"],
        kv_num_heads=sizes["Hk"],
    )
    return node, inputs, {"out": np.empty_like(rows), "present_k": k, "present_v": v}


def _attention(sizes, q, k, v):
    node = helper.make_node("Attention", ["q", "k", "v"], ["out"], is_causal=int(sizes["causal"]))
    return node, {"q": q, "k": k, "v": v}, {"out": np.empty_like(q)}


def _tokens(x: np.ndarray) -> np.ndarray:
    """(B, H, N, D) as (B, N, H D)."""
    batch, heads, n, dim = x.shape
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(batch, n, heads * dim)


def _model(node, inputs, outputs) -> bytes:
    def values(arrays):
        return [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in arrays.items()
        ]

    graph = helper.make_graph([node], "attention", values(inputs), values(outputs))
    sets = [helper.make_opsetid("", 24), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=sets, ir_version=11).SerializeToString()
