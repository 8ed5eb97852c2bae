"""Pass the checks that transformers 5 makes before it calls flash-attn, beyond finding the package.

transformers requires CUDA in two places and refuses a CPU. Both are patched inside transformers,
in the objects that modules share, so earlier imports see the patch, too. `retract` undoes it.
"""

from __future__ import annotations

import inspect
import logging
import sys
from types import ModuleType
from typing import Any

_CHECKS = "transformers.utils.import_utils"
_CALLS = "transformers.modeling_flash_attention_utils"
_MODELS = "transformers.modeling_utils"
_before: dict[str, Any] = {}  # by module: the original value


def answer() -> None:
    """Report flash-attn 2 as available, on CPUs too, in those of MODULES that are imported."""
    for name, tell in MODULES.items():
        if name in sys.modules:
            tell()


def _answer_checks() -> None:
    if _CHECKS in _before:
        return
    checks = sys.modules[_CHECKS]
    available = inspect.unwrap(checks.is_flash_attn_2_available)
    if inspect.signature(available, eval_str=True) != inspect.signature(_yes, eval_str=True):
        return  # another version's: on a CPU it still refuses flash-attn, and says so
    _before[_CHECKS] = available.__code__
    available.__code__ = _yes.__code__  # modules imported the function: change it in place
    _forget(checks)


def _answer_calls() -> None:
    matrix = getattr(sys.modules[_CALLS], "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)
    if _CALLS in _before or matrix is None:  # transformers 4 has no matrix: CUDA only
        return
    _before[_CALLS] = matrix[2]["supported_devices"]
    matrix[2]["supported_devices"] += ((_yes, "cpu"),)
    logging.getLogger(_MODELS).addFilter(_is_true_here)


MODULES = {_CHECKS: _answer_checks, _CALLS: _answer_calls}


def retract(interface: ModuleType) -> None:
    """Undo `answer`. If transformers has loaded functions of `interface`, make it look for
    flash-attn again."""
    if _CALLS in _before:
        calls: Any = sys.modules[_CALLS]
        calls.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["supported_devices"] = _before[_CALLS]
        logging.getLogger(_MODELS).removeFilter(_is_true_here)
        if calls._flash_fn is interface.flash_attn_func:
            calls._loaded_implementation = calls._flash_fn = None
    if _CHECKS in _before:
        checks = sys.modules[_CHECKS]
        inspect.unwrap(checks.is_flash_attn_2_available).__code__ = _before[_CHECKS]
        _forget(checks)
    _before.clear()


def _yes(kernels_fallback_ok: bool = False) -> bool:
    return True


def _is_true_here(record: logging.LogRecord) -> bool:
    """Filter out transformers' warnings that flash-attn 2 does not support CPUs or float32."""
    text = str(record.msg)
    return "Flash Attention 2" not in text or not ("GPU" in text or "only supports torch" in text)


def _forget(checks: ModuleType) -> None:
    """Clear the cached results of transformers' flash-attn checks."""
    for name, check in vars(checks).items():
        if "flash_attn" in name or name == "_package_distribution_mapping":
            getattr(check, "cache_clear", lambda: None)()
