"""patch for torch.nn.attention.varlen: stand-ins that run `varlen.py`'s functions.

`patching.py` counts patches, and calls `take` for the first and `release` for the last. A stand-in
replaces torch's function in its module and under every name that another module gave it, as that of
flex_attention does. The operator that torch's functions call, torch_attn::_varlen_attn, stays: its
autograd formula is torch's, which has no gradient of the LSE and no second derivative.

To import torch's module imports the compiler, which takes seconds. So a patch does not import it,
and replaces its functions when other code does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

import torch

from ..call.flash_conventions import in_names
from . import fused_kernels, varlen
from .rebinding import Names

MODULE = "torch.nn.attention.varlen"
_OURS = set(inspect.signature(varlen.varlen_attn).parameters) | {"out"}

_active = False  # while False, a stand-in that was imported by name runs torch's function


class _Torchs(NamedTuple):
    """A function of torch's, and what its signature says."""

    call: Callable[..., Any]
    positional: tuple[str, ...]
    required: tuple[str, ...]
    defaults: dict[str, Any]  # of all other arguments


def varlen_attn(*args: Any, **kwargs: Any) -> Any:
    """torch's varlen_attn, which `fastattn.patch` runs on fastattn."""
    return _run(_torchs["varlen_attn"], varlen.varlen_attn, args, kwargs)


def varlen_attn_out(*args: Any, **kwargs: Any) -> Any:
    """torch's varlen_attn_out, which `fastattn.patch` runs on fastattn."""
    return _run(_torchs["varlen_attn_out"], varlen.varlen_attn_out, args, kwargs)


_STAND_INS = {"varlen_attn": varlen_attn, "varlen_attn_out": varlen_attn_out}
_torchs: dict[str, _Torchs] = {}  # by name: the functions that the patch replaces
_names = {name: Names(__name__) for name in _STAND_INS}


def _run(
    torchs: _Torchs, ours: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = _by_name(torchs, args, kwargs)
    if given is None or not _active or _is_exporting():
        return torchs.call(*args, **kwargs)
    query = given.get("query")
    on_cpu = not isinstance(query, torch.Tensor) or query.device.type == "cpu"
    if not on_cpu and fused_kernels.why_none(query.device, query.dtype, query.shape[-1]):
        return torchs.call(*args, **kwargs)
    try:
        _refuse_unknown(torchs, given)
        return ours(**{name: x for name, x in given.items() if name in _OURS})
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if on_cpu:  # torch's runs no call there
            raise in_names(error, varlen.NAMES) from error.__cause__
    return torchs.call(*args, **kwargs)  # torch computes it, or raises its own error


def _is_exporting() -> bool:
    return torch.compiler.is_exporting()


# Code that is traced would not learn it in every version of torch: see `patching._chosen`.
_is_exporting._dynamo_marked_constant = True  # ty: ignore


def _by_name(
    torchs: _Torchs, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """All arguments by name; None if torch's function does not take such a call."""
    given = dict(zip(torchs.positional, args))
    rest = {**torchs.defaults, **dict.fromkeys(torchs.required)}
    taken = len(args) <= len(torchs.positional)
    if not taken or any(name in given or name not in rest for name in kwargs):
        return None
    given.update(kwargs)
    if any(name not in given for name in torchs.required):
        return None
    return {**torchs.defaults, **given}


def _refuse_unknown(torchs: _Torchs, given: dict[str, Any]) -> None:
    """Raise for an argument of a newer torch that does not have its default."""
    for name, x in given.items():
        if name in _OURS:
            continue
        default = torchs.defaults.get(name, inspect.Parameter.empty)
        if x is not default and (type(x) is not type(default) or x != default):
            raise NotImplementedError(
                f"{name}: got {type(x).__name__}, expected torch's default, {default!r}: fastattn "
                f"does not know this argument of {MODULE}"
            )


class _Finder(MetaPathFinder):
    """Finds torch's module as Python does, and replaces its functions once it is loaded."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == MODULE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if _active:
                _replace(module)

        spec.loader.exec_module = exec_module
        return spec


_finder = _Finder()


def take() -> None:
    """Replace torch's functions, now or when their module is imported."""
    global _active
    _active = True
    module = sys.modules.get(MODULE)
    if module is None:
        sys.meta_path.insert(0, _finder)
    else:
        _replace(module)


def release() -> None:
    """Put torch's functions back."""
    global _active
    _active = False
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name, torchs in _torchs.items():
        _names[name].rebind(_STAND_INS[name], torchs.call)


def _replace(module: Any) -> None:
    for name, stand_in in _STAND_INS.items():
        function: Any = getattr(module, name, None)
        # Another function in its place since before the first patch stays there.
        if name not in _torchs and getattr(function, "__module__", None) == MODULE:
            _torchs[name] = _described(function)
            # Libraries ask the signature which arguments this torch has.
            stand_in.__signature__ = inspect.signature(function)  # ty: ignore
        if name in _torchs:
            _names[name].rebind(_torchs[name].call, stand_in)


def _described(function: Callable[..., Any]) -> _Torchs:
    parameters = inspect.signature(function).parameters.values()
    named = {x.name: x.default for x in parameters}
    empty = inspect.Parameter.empty
    return _Torchs(
        function,
        tuple(x.name for x in parameters if x.kind is not x.KEYWORD_ONLY),
        tuple(name for name, default in named.items() if default is empty),
        {name: default for name, default in named.items() if default is not empty},
    )
