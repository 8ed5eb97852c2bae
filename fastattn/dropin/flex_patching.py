"""patch for torch's flex_attention: a stand-in that runs `fastattn.flex_attention`.

`patching.py` counts patches, and calls `take` for the first and `release` for the last. The
stand-in replaces torch's function in its module and under every name that another module gave it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ..dispatch.library_ops import opaque_to_dynamo
from .flex import flex_attention as _ours
from .rebinding import Names

_active = False  # while False, a stand-in that was imported by name runs torch's function
_torchs: Callable[..., Any] | None = None  # the function that the patch replaces
_names = Names(__name__)


@opaque_to_dynamo
def flex_attention(*args: Any, **kwargs: Any) -> Any:
    """torch's flex_attention, which `fastattn.patch` runs on fastattn."""
    assert _torchs is not None
    if not _active or torch.compiler.is_exporting():
        return _torchs(*args, **kwargs)
    try:
        return _ours(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return _torchs(*args, **kwargs)  # torch computes it, or raises its own error after ours


def take() -> None:
    """Replace torch's function, unless another function is in its place."""
    global _active, _torchs
    with suppress(ImportError):
        from torch.nn.attention import flex_attention as module

        if _torchs is None and module.flex_attention.__module__ == module.__name__:
            _torchs = module.flex_attention
        if _torchs is None:  # another function is in its place since before the first patch
            return
        _names.rebind(_torchs, flex_attention)
        _active = True
        _replace_compiled(lambda held: flex_attention)


def release() -> None:
    """Put torch's function back."""
    global _active
    if _torchs is not None:
        _names.rebind(flex_attention, _torchs)
        _replace_compiled(None)
    _active = False


def _replace_compiled(call: Callable[[Any], Any] | None) -> None:
    """Replace what transformers' WrappedFlexAttention returns, a compiled form of torch's function;
    with None, put its own method back."""
    module = sys.modules.get("transformers.integrations.flex_attention")
    holder: Any = getattr(module, "WrappedFlexAttention", None)
    if holder is None:
        return
    own = vars(holder).get("_before_fastattn")
    if call is not None and own is None:
        holder._before_fastattn, holder.__call__ = holder.__call__, call
    elif call is None and own is not None:
        holder.__call__ = own
        del holder._before_fastattn
    # It compiles again what its module's name is bound to.
    if holder._instance is not None:
        vars(holder._instance).clear()
