"""OpenVINO: a model of one ScaledDotProductAttention (operator set 13), in the row's precision.

It has no grouped heads. One row of each head that shares keys is a row of these keys, so that
decoding needs none. Where a CPU has bfloat16 alone, float16 is computed with its error. Its kernels
for decoding belong to models with a cache inside, which no operator offers alone."""

import numpy as np
import numpy_arrays
import openvino as ov  # ty: ignore[import-not-found]
from openvino import opset13  # ty: ignore[import-not-found]
from protocol import Declined, Prepared, Sizes, Tensors, decline_packed, decline_quantised

TYPES = {"float32": ov.Type.f32, "bfloat16": ov.Type.bf16, "float16": ov.Type.f16}


def version() -> str:
    return ov.__version__.split("-")[0]


def prepare(sizes: Sizes, tensors: Tensors, threads: int, variant: str) -> Prepared:
    decline_packed(sizes)
    decline_quantised(sizes)
    q, k, v = numpy_arrays.read(tensors)
    if sizes["H"] != sizes["Hk"]:
        if sizes["M"] != 1:
            raise Declined("has no grouped heads")
        q = q.reshape(*k.shape[:2], -1, sizes["D"])
    kind = TYPES[sizes["dtype"]]
    inputs = [opset13.parameter(list(x.shape), kind) for x in (q, k, v)]
    node = opset13.scaled_dot_product_attention(*inputs, causal=sizes["causal"])
    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    if sizes["dtype"] != "bfloat16":  # which is its default where a CPU has it, else float32
        settings["INFERENCE_PRECISION_HINT"] = kind.get_type_name()
    model = ov.Model([node], inputs, "attention")
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
    for i, x in enumerate((q, k, v)):
        request.set_input_tensor(i, _tensor(x, kind))

    def write(path: str) -> None:
        out = request.get_output_tensor()
        bits = out.element_type == ov.Type.bf16
        x = out.data.view(np.uint16) if bits else out.data
        numpy_arrays.write(x, path)

    exact = sizes["dtype"] == "float32"
    return Prepared(request.infer, write, "float32" if exact else "bfloat16")


def _tensor(x: np.ndarray, kind: ov.Type) -> ov.Tensor:
    tensor = ov.Tensor(kind, list(x.shape))
    tensor.data.view(x.dtype)[:] = x
    return tensor
