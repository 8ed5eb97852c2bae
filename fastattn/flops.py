"""What torch.utils.flop_counter counts for the operators.

That module imports Triton, where it is installed: a third of a second that most programs have no
use for. So nothing here imports it; the formulas are registered when somebody else does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

COUNTER = "torch.utils.flop_counter"


def forward(q, k, v, *args, out_shape=None, **kwargs) -> int:
    """Two products of 2 B H M N D flops each, as torch counts its own attention."""
    B, H, M, D = q
    return 2 * B * H * M * k[2] * (D + (v[3] if v is not None else 0))


def backward(n: int, *args, out_shape=None, **kwargs) -> int:
    """Scores again, dP and dV over Dv; dQ and dK over D. n: how many results the forward has."""
    (B, H, M, D), k, v = args[2 * n : 2 * n + 3]
    return 2 * B * H * M * k[2] * (3 * D + (2 * v[3] if v is not None else 0))


_waiting: dict[object, Callable[..., int]] = {}


def register(operator: object, formula: Callable[..., int]) -> None:
    """Count `operator` by `formula`, a function of its arguments' shapes."""
    if counter := sys.modules.get(COUNTER):
        counter.register_flop_formula(operator)(formula)
        return
    _waiting[operator] = formula
    if not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport())


class _OnImport:
    """Stands in the way of one import: lets it pass, and registers what waits."""

    def find_spec(self, name, path=None, target=None):
        if name != COUNTER:
            return None
        spec: Any = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            sys.meta_path.remove(self)
            for operator, formula in _waiting.items():
                module.register_flop_formula(operator)(formula)

        spec.loader.exec_module = exec_module
        return spec
