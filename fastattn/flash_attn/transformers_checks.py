"""Pass the checks that transformers 5 makes before it calls FlashAttention, beyond finding the
packages.

transformers requires CUDA in two places and refuses a CPU. Both are patched inside transformers,
in the objects that modules share, so earlier imports see the patch, too. `retract` undoes it.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

_CHECKS = "transformers.utils.import_utils"
_CALLS = "transformers.modeling_flash_attention_utils"
_MODELS = "transformers.modeling_utils"
VERSIONS = 2, 3, 4
_before: dict[str, Any] = {}  # the original code of each check; of _CALLS, devices by version


def answer() -> None:
    """Report FlashAttention-2, -3 and -4 as available, on CPUs too, in those of MODULES that are
    imported."""
    for name, tell in MODULES.items():
        if name in sys.modules:
            tell()


def _answer_checks() -> None:
    checks = sys.modules[_CHECKS]
    for version in VERSIONS:
        name = f"is_flash_attn_{version}_available"
        check = getattr(checks, name, None)
        if name in _before or check is None:
            continue
        available = inspect.unwrap(check)
        if inspect.signature(available, eval_str=True) != inspect.signature(_yes, eval_str=True):
            continue  # another transformers: on a CPU it still refuses, and says so
        _before[name] = available.__code__
        available.__code__ = _yes.__code__  # modules imported the function: change it in place
    _forget(checks)


def _answer_calls() -> None:
    matrix = getattr(sys.modules[_CALLS], "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)
    if _CALLS in _before or matrix is None:  # transformers 4 has no matrix: CUDA only
        return
    _before[_CALLS] = {x: matrix[x]["supported_devices"] for x in VERSIONS if x in matrix}
    for version, devices in _before[_CALLS].items():
        matrix[version]["supported_devices"] = (*devices, (_yes, "cpu"))
    logging.getLogger(_MODELS).addFilter(_is_true_here)


MODULES = {_CHECKS: _answer_checks, _CALLS: _answer_calls}


def retract(interfaces: Iterable[ModuleType]) -> None:
    """Undo `answer`. If transformers has loaded functions of one of these, make it look for
    FlashAttention again."""
    calls: Any = sys.modules.get(_CALLS)
    if _CALLS in _before and calls is not None:
        for version, devices in _before.pop(_CALLS).items():
            calls.FLASH_ATTENTION_COMPATIBILITY_MATRIX[version]["supported_devices"] = devices
        logging.getLogger(_MODELS).removeFilter(_is_true_here)
        if any(calls._flash_fn is x.flash_attn_func for x in interfaces):
            calls._loaded_implementation = calls._flash_fn = None
    checks = sys.modules.get(_CHECKS)
    if checks is not None:
        _before.pop(_CALLS, None)
        for name, code in _before.items():
            inspect.unwrap(getattr(checks, name)).__code__ = code
        _forget(checks)
    _before.clear()


def _yes(kernels_fallback_ok: bool = False) -> bool:
    return True


def _is_true_here(record: logging.LogRecord) -> bool:
    """Filter out transformers' warnings that FlashAttention does not support CPUs or float32."""
    text = str(record.msg)
    ours = any(f"Flash Attention {x}" in text or f"FlashAttention{x}" in text for x in VERSIONS)
    return not ours or not ("GPU" in text or "only supports torch" in text)


def _forget(checks: ModuleType) -> None:
    """Clear the cached results of transformers' checks."""
    for name, check in vars(checks).items():
        if "flash_attn" in name or name == "_package_distribution_mapping":
            getattr(check, "cache_clear", lambda: None)()
