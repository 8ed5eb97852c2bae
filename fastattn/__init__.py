"""Fused exact attention for PyTorch: every feature composes with every other."""

import importlib
from typing import TYPE_CHECKING, Any

from . import prerequisites  # noqa: F401

# isort: split
from . import (
    backends,  # noqa: F401  they register themselves
    decomposition,  # noqa: F401  registers the decompositions that exporters look up
    flash_attn,
    integrations,
    nn,
    operators,
    reference,
    roads,
)
from .api import attention, attention_packed, attention_weights
from .backend import available_backends
from .cache import KVCache
from .conversion import convert, revert
from .explaining import explain
from .forward_mode import attention_jvp
from .merging import merge
from .multihead import MultiheadAttention
from .patching import patch, sdpa, unpatch
from .place import Place
from .profiling import profile
from .public_names import set_module
from .torch_form import scaled_dot_product_attention

__all__ = [
    "KVCache",
    "MultiheadAttention",
    "Place",
    "attention",
    "attention_jvp",
    "attention_packed",
    "attention_weights",
    "available_backends",
    "convert",
    "explain",
    "flash_attn",
    "integrations",
    "merge",
    "nn",
    "patch",
    "profile",
    "reference",
    "revert",
    "scaled_dot_product_attention",
    "sdpa",
    "unpatch",
]
set_module(__name__)


def _call_on_dtensors(*call: Any) -> tuple[Any, ...]:
    from .distributed import dtensor  # imported on demand, as `distributed` below

    return dtensor.call(*call)


roads.HANDLERS["DTensor"] = operators.unseen(_call_on_dtensors)


def __dir__() -> list[str]:
    return sorted([*__all__, "distributed", "__version__"])


if TYPE_CHECKING:
    from . import distributed as distributed

    __version__: str
else:

    def __getattr__(name: str) -> Any:
        if name == "distributed":  # on demand: torch may be built without torch.distributed
            return importlib.import_module("fastattn.distributed")
        if name == "__version__":
            from importlib.metadata import PackageNotFoundError, version

            try:
                return version("fastattn")
            except PackageNotFoundError:  # imported from a folder, not installed
                return "unknown"
        raise AttributeError(f"module 'fastattn' has no attribute {name!r}")
