"""What transformers 5 asks before it calls flash-attn, beyond whether the package is there.

It asks for CUDA, twice, and on a CPU refuses. Both are answered where transformers keeps them, so
that it does not matter who has imported what already; `retract` puts everything back.
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
_before: dict[str, Any] = {}  # by module: what stood there


def answer() -> None:
    """flash-attn 2 is available, on a CPU too: said to those modules that have been imported."""
    for name, tell in MODULES.items():
        if name in sys.modules:
            tell()


def _answer_checks() -> None:
    if _CHECKS in _before:
        return
    checks = sys.modules[_CHECKS]
    available = inspect.unwrap(checks.is_flash_attn_2_available)
    _before[_CHECKS] = available.__code__
    available.__code__ = _yes.__code__  # many modules have the function: it stays the same object
    _forget(checks)


def _answer_calls() -> None:
    matrix = getattr(sys.modules[_CALLS], "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)
    if _CALLS in _before or matrix is None:  # transformers 4 has none, and keeps to CUDA
        return
    _before[_CALLS] = matrix[2]["supported_devices"]
    matrix[2]["supported_devices"] += ((_yes, "cpu"),)
    logging.getLogger(_MODELS).addFilter(_is_true_here)


MODULES = {_CHECKS: _answer_checks, _CALLS: _answer_calls}


def retract(interface: ModuleType) -> None:
    """As it was before `answer`. Where transformers holds functions of `interface`, it looks for
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
    """transformers warns that flash-attn 2 has no CPUs and no float32."""
    text = str(record.msg)
    return "Flash Attention 2" not in text or not ("GPU" in text or "only supports torch" in text)


def _forget(checks: ModuleType) -> None:
    """What was asked before is asked again."""
    for name, check in vars(checks).items():
        if "flash_attn" in name or name == "_package_distribution_mapping":
            getattr(check, "cache_clear", lambda: None)()
