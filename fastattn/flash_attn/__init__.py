"""flash-attn 2.8's functions on `fastattn.attention`: CPUs and GPUs, forward and backward. Those of
FlashAttention-3 are in `flash_attn_3`, of FlashAttention-4 in `cute`.

Use `from fastattn.flash_attn import flash_attn_func` in code that can be changed. For code that
cannot, `install()` makes `import flash_attn` find this package. README.md beside this file lists
what each function supports, and the differences from flash-attn.
"""

from ..public_names import set_module
from . import (
    activations,
    bert_padding,
    cute,
    flash_attn_3,
    flash_attn_interface,
    losses,
    mha,
    norms,
    rotary,
)
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .installing import __version__, install, uninstall

__all__ = [
    "__version__",
    "activations",
    "bert_padding",
    "cute",
    "flash_attn_3",
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "losses",
    "mha",
    "norms",
    "rotary",
    "uninstall",
]
set_module(__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
