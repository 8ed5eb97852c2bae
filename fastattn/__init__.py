"""Fused exact attention for PyTorch: every feature composes with every other."""

from . import (
    reference,
    transforms,  # noqa: F401  teaches the operators vmap
)
from .backends import cpu as _cpu  # noqa: F401  registers; the order is the preference

# isort: split
from .backends import triton as _triton  # noqa: F401

# isort: split
from .backends import cuda as _cuda  # noqa: F401  after Triton's, whose kernels know newer GPUs

# isort: split
from .backends import reference as _reference  # noqa: F401

# isort: split
from . import nn
from .api import attention, attention_weights
from .backend import backends  # after the folder of that name, which it hides
from .conversion import convert, revert
from .inside import explain
from .multihead import MultiheadAttention
from .sdpa import scaled_dot_product_attention

__all__ = [
    "MultiheadAttention",
    "attention",
    "attention_weights",
    "backends",
    "convert",
    "explain",
    "nn",
    "reference",
    "revert",
    "scaled_dot_product_attention",
]
