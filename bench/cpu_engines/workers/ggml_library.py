"""ggml (llama.cpp): a graph of one flash_attn_ext on its CPU backend, by ctypes.

Queries are float32, as in its models. The cache has the row's dtype, or in decoding the variant's
type. Values of a float16 cache are summed in float16 in decoding, with the error of eight bits at
many keys. A prompt's mask is a tensor, as it is there."""

import ctypes
import sysconfig
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy_arrays
from protocol import Declined, Prepared, Sizes, Tensors, decline_packed

# Numbers of enum ggml_type.
TYPES = {"float32": 0, "float16": 1, "f16": 1, "q4_0": 2, "q8_0": 8, "bfloat16": 30}
F32, F16 = TYPES["float32"], TYPES["float16"]
PRECISIONS = {"q8_0": "int8", "q4_0": "int4"}
VARIANTS = {"": ("", "f16", "q8_0"), "int8": ("q8_0",), "fp8": ("q8_0",), "int4": ("q4_0",)}
P, SIZE = ctypes.c_void_p, ctypes.c_size_t


class Parameters(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", ctypes.c_bool)]


def version() -> str:
    return metadata.version("libggml-python")


def _library() -> dict:
    """Its functions by name, with the types of results and arguments."""
    folder = Path(sysconfig.get_paths()["purelib"]) / "libggml"
    (folder,) = {path.parent for path in folder.glob("lib*/libggml-base.so")}
    base, cpu = (
        ctypes.CDLL(str(folder / f"libggml-{x}.so"), ctypes.RTLD_GLOBAL) for x in ("base", "cpu")
    )
    i32, i64, f32 = ctypes.c_int, ctypes.c_int64, ctypes.c_float
    types = {
        "ggml_init": (base, P, [Parameters]),
        "ggml_free": (base, None, [P]),
        "ggml_new_tensor": (base, P, [P, i32, i32, ctypes.POINTER(i64)]),
        "ggml_flash_attn_ext": (base, P, [P, P, P, P, P, f32, f32, f32]),
        "ggml_new_graph": (base, P, [P]),
        "ggml_build_forward_expand": (base, None, [P, P]),
        "ggml_nbytes": (base, SIZE, [P]),
        "ggml_quantize_chunk": (base, SIZE, [i32, P, P, i64, i64, i64, P]),
        "ggml_backend_alloc_ctx_tensors": (base, P, [P, P]),
        "ggml_backend_buffer_free": (base, None, [P]),
        "ggml_backend_free": (base, None, [P]),
        "ggml_backend_tensor_set": (base, None, [P, P, SIZE, SIZE]),
        "ggml_backend_tensor_get": (base, None, [P, P, SIZE, SIZE]),
        "ggml_backend_graph_compute": (base, i32, [P, P]),
        "ggml_backend_cpu_init": (cpu, P, []),
        "ggml_backend_cpu_set_n_threads": (cpu, None, [P, i32]),
    }
    found = {}
    for name, (library, result, arguments) in types.items():
        found[name] = library[name]
        found[name].restype, found[name].argtypes = result, arguments
    return found


def prepare(sizes: Sizes, tensors: Tensors, threads: int, variant: str) -> Prepared:
    decline_packed(sizes)
    if variant not in VARIANTS[sizes["storage"]]:
        raise Declined("is of another width")
    if variant and sizes["M"] != 1:
        raise Declined("is for decoding")
    if TYPES.get(variant) == TYPES[sizes["dtype"]]:
        raise Declined("is the same as ggml")
    q, k, v = numpy_arrays.read(tensors)
    return Graph(sizes, threads, variant or sizes["dtype"]).prepared(q, k, v)


class Graph:
    """Memory of the graph and its tensors, freed with it."""

    def __init__(self, sizes: Sizes, threads: int, kind: str):
        self.sizes, self.kind, self.f = sizes, kind, _library()
        self.context = self.f["ggml_init"](Parameters(1 << 20, None, True))
        self.backend = self.f["ggml_backend_cpu_init"]()
        self.f["ggml_backend_cpu_set_n_threads"](self.backend, threads)

    def prepared(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Prepared:
        f, (batch, heads, rows, dim), n = self.f, q.shape, k.shape[2]
        made = [self._tensor(F32, q.shape)]
        made += [self._tensor(TYPES[self.kind], x.shape) for x in (k, v)]
        mask = self._tensor(F16, (1, 1, rows, n)) if self.sizes["causal"] else None
        out = f["ggml_flash_attn_ext"](self.context, *made, mask, dim**-0.5, 0.0, 0.0)
        graph = f["ggml_new_graph"](self.context)
        f["ggml_build_forward_expand"](graph, out)
        self.buffer = f["ggml_backend_alloc_ctx_tensors"](self.context, self.backend)
        self._set(made[0], numpy_arrays.floats(q))
        for tensor, x in zip(made[1:], (k, v)):
            self._set(tensor, self._stored(x))
        if mask:
            hidden = np.triu(np.full((rows, n), -np.inf, np.float16), 1 + n - rows)
            self._set(mask, hidden)

        def call() -> None:
            if f["ggml_backend_graph_compute"](self.backend, graph):
                raise RuntimeError("ggml_backend_graph_compute failed")

        def write(path: str) -> None:
            x = np.empty((batch, rows, heads, dim), np.float32)
            f["ggml_backend_tensor_get"](out, x.ctypes.data, 0, x.nbytes)
            numpy_arrays.write(x.transpose(0, 2, 1, 3), path)

        summed_in_float16 = TYPES[self.kind] == F16 and rows == 1
        precision = "int8" if summed_in_float16 else PRECISIONS.get(self.kind, self.kind)
        return Prepared(call, write, precision)

    def _tensor(self, kind: int, shape: tuple[int, ...]) -> int:
        return self.f["ggml_new_tensor"](self.context, kind, 4, (ctypes.c_int64 * 4)(*shape[::-1]))

    def _set(self, tensor: int, x: np.ndarray) -> None:
        x = np.ascontiguousarray(x)
        assert self.f["ggml_nbytes"](tensor) == x.nbytes
        self.f["ggml_backend_tensor_set"](tensor, x.ctypes.data, 0, x.nbytes)

    def _stored(self, x: np.ndarray) -> np.ndarray:
        if self.kind in ("float32", "bfloat16"):
            return x
        if TYPES[self.kind] == F16:
            return numpy_arrays.floats(x).astype(np.float16)
        x = np.ascontiguousarray(numpy_arrays.floats(x))
        rows, dim = x.size // x.shape[-1], x.shape[-1]
        bytes_of = {"q8_0": 34, "q4_0": 18}[self.kind]  # of 32 numbers
        packed = np.empty(x.size // 32 * bytes_of, np.uint8)
        self.f["ggml_quantize_chunk"](
            TYPES[self.kind], x.ctypes.data, packed.ctypes.data, 0, rows, dim, None
        )
        return packed

    def __del__(self):
        if hasattr(self, "buffer"):
            self.f["ggml_backend_buffer_free"](self.buffer)
        self.f["ggml_backend_free"](self.backend)
        self.f["ggml_free"](self.context)
