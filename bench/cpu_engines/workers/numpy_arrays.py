"""Arrays from files and to them, in an environment with numpy. bfloat16 is the bits, in uint16."""

import numpy as np
from protocol import Tensors

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def read(tensors: Tensors) -> list[np.ndarray]:
    """q, k and v."""
    return [np.fromfile(path, TYPES[dtype]).reshape(shape) for path, dtype, shape in _of(tensors)]


def _of(tensors: Tensors) -> list[tuple[str, str, list[int]]]:
    return [tensors[name] for name in "qkv"]


def floats(x: np.ndarray) -> np.ndarray:
    """The numbers in float32."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def write(x: np.ndarray, path: str) -> None:
    np.ascontiguousarray(floats(x)).tofile(path)
