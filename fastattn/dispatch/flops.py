"""The FLOP formulas of the operators for torch.utils.flop_counter.

That module imports Triton if it is installed, which takes a third of a second that most programs do
not need. So this file does not import it: an import hook registers the formulas once another module
does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

from ..call.int4 import columns
from ..call.spec import DIFFERENTIABLE, INDEX

COUNTER = "torch.utils.flop_counter"
N_TANGENTS = len(DIFFERENTIABLE)
PACKED = ("cu_q", "cu_k", "key_lengths")


def forward(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Two products of 2 B H M N D flops each, as torch counts its own attention."""
    k, v = args[1:3]
    return 2 * _scores(args) * (columns(k) + (columns(v) if v is not None else 0))


def backward(n: int, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Scores again, dQ and dK over D; dP and dV over Dv. n: the number of results of forward."""
    k, v = args[2 * n + 1 : 2 * n + 3]
    return 2 * _scores(args[2 * n :]) * (3 * k.shape[3] + (2 * v.shape[3] if v is not None else 0))


def jvp(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Over D: the scores, and a product for each of q_t and k_t. Over Dv: the tangent of P times v,
    a product for v_t, and one for out unless it is known. args begin with the tangents, then out
    and normaliser, or None for both."""
    q_t, k_t, v_t, *_, out = args[: N_TANGENTS + 1]
    k, v = args[N_TANGENTS + 3 : N_TANGENTS + 5]
    of_keys = 1 + (q_t is not None) + (k_t is not None)
    of_values = 1 + (v_t is not None) + (out is None)
    return 2 * _scores(args[N_TANGENTS + 2 :]) * (of_keys * k.shape[3] + of_values * v.shape[3])


def second(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Twelve products, if q, k, v and dout all have tangents."""
    q_t, k_t, v_t = args[:3]
    dout_t = args[N_TANGENTS + 6]
    k, v = args[N_TANGENTS + 9 : N_TANGENTS + 11]
    of_keys = 3 + 2 * ((q_t is not None) + (k_t is not None))
    of_values = 2 + (v_t is not None) + 2 * (dout_t is not None)
    return 2 * _scores(args[N_TANGENTS + 8 :]) * (of_keys * k.shape[3] + of_values * v.shape[3])


def _scores(args) -> int:
    """The number of scores, masked ones included: B H M N, or in a packed batch the sum over its
    sequences. If the offsets have no values, all sequences count as equally long."""
    q, k = args[:2]
    given = {name: args[INDEX[name]] for name in PACKED if len(args) > INDEX[name]}
    cu_q, cu_k = given.get("cu_q"), given.get("cu_k")
    B, H, M, _ = q.shape
    if cu_q is None:
        return B * H * M * k.shape[2]
    try:
        keys = given["key_lengths"] if cu_k is None else cu_k.diff()
        return H * int((cu_q.diff() * keys).sum())
    except RuntimeError:  # fake tensors, and those on the meta device, have no values
        return H * M * k.shape[2] // max(1, cu_q.shape[0] - 1)


_waiting: dict[object, Callable[..., int]] = {}


def register(operator: object, formula: Callable[..., int]) -> None:
    """Count `operator` by `formula`, a function of its arguments."""
    if counter := sys.modules.get(COUNTER):
        counter.register_flop_formula(operator, get_raw=True)(formula)
        return
    _waiting[operator] = formula
    if not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport())


class _OnImport:
    """An import hook for COUNTER: after the import, it registers the waiting formulas."""

    def find_spec(self, name, path=None, target=None):
        if name != COUNTER:
            return None
        spec: Any = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            sys.meta_path.remove(self)
            for operator, formula in _waiting.items():
                module.register_flop_formula(operator, get_raw=True)(formula)

        spec.loader.exec_module = exec_module
        return spec
