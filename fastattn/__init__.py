"""Fused exact attention for PyTorch: every feature composes with every other."""

import importlib
from typing import TYPE_CHECKING, Any

from . import require_torch  # noqa: F401

# isort: split
from . import (
    backends,  # noqa: F401  they register themselves
    flash_attn,
    integrations,
    mla,
    nn,
    reference,
)
from .api import attention, attention_packed, attention_weights
from .backends.base import available_backends
from .backends.native import libraries
from .call.spec import Place
from .dispatch import (
    dispatcher,
    library_ops,
    onnx_decomposition,  # noqa: F401  registers the decompositions that exporters look up
)
from .dropin.conversion import convert, revert
from .dropin.flex import flex_attention
from .dropin.multihead import MultiheadAttention
from .dropin.patching import patch, sdpa, unpatch
from .dropin.sdpa import scaled_dot_product_attention
from .forward_mode import attention_jvp
from .inspection.explain_call import explain
from .inspection.profiling import profile
from .kv_cache.cache import KVCache
from .merging import merge
from .public_names import set_module
from .rotation.norm_rope import norm_rope
from .score_mods.tracing import Mod
from .selection.attend import attention_selected
from .selection.blocks import top_blocks
from .selection.indexer import lightning_index

__all__ = [
    "KVCache",
    "Mod",
    "MultiheadAttention",
    "Place",
    "attention",
    "attention_jvp",
    "attention_packed",
    "attention_selected",
    "attention_weights",
    "available_backends",
    "convert",
    "explain",
    "flash_attn",
    "flex_attention",
    "integrations",
    "lightning_index",
    "merge",
    "mla",
    "nn",
    "norm_rope",
    "patch",
    "profile",
    "reference",
    "revert",
    "scaled_dot_product_attention",
    "sdpa",
    "top_blocks",
    "unpatch",
]
set_module(__name__)


def _call_on_dtensors(*call: Any) -> tuple[Any, ...]:
    from .distributed import dtensor  # imported on demand, as `distributed` below

    return dtensor.call(*call)


dispatcher.HANDLERS["DTensor"] = library_ops.opaque_to_dynamo(_call_on_dtensors)


def __dir__() -> list[str]:
    return sorted([*__all__, *_TORCHS, "distributed", "__build__", "__version__"])


# Makers of mask_mods of torch's. Importing their module takes longer than the other names do.
_TORCHS = ("and_masks", "or_masks")
# What transformers looks for in a kernel of the hub. Importing their module imports transformers.
_OF_THE_HUB = ("flash_attn_forward", "supports_flash_attn")

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import and_masks as and_masks
    from torch.nn.attention.flex_attention import or_masks as or_masks

    from . import distributed as distributed

    __version__: str
    __build__: dict[str, str]
else:

    def __getattr__(name: str) -> Any:
        if name == "distributed":  # on demand: torch may be built without torch.distributed
            return importlib.import_module(".distributed", __name__)
        if name in _TORCHS:
            return getattr(importlib.import_module("torch.nn.attention.flex_attention"), name)
        if name in _OF_THE_HUB:
            hub = importlib.import_module(".integrations.transformers_hub", __name__)
            return getattr(hub, name)
        if name == "__version__":
            from importlib.metadata import PackageNotFoundError
            from importlib.metadata import version as installed

            from .version import FALLBACK

            try:
                return installed(__name__)
            except PackageNotFoundError:  # imported from a folder, or under another name
                return FALLBACK
        if name == "__build__":
            return libraries.build()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
