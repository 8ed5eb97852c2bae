"""Scalar arguments as plain Python numbers, whatever kind they came as: numpy's are welcome.

A bool is no number here: True equals 1, and would pass for it where calls are remembered.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any

from torch import SymFloat, SymInt, Tensor


def real(name: str, x: Any) -> Any:
    """A float; of a compiler's symbols, the symbol."""
    if type(x) is float or isinstance(x, (SymFloat, SymInt)):
        return x
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        hint = f": float({name}) is one, without a gradient" if isinstance(x, Tensor) else ""
        raise TypeError(f"{name}: got {x!r} ({type(x).__name__}), expected a number{hint}")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"{name}: got {x!r}, expected a number that a float holds") from None


def whole(name: str, x: Any, expected: str) -> Any:
    """An int; of a compiler's symbols, the symbol."""
    if type(x) is int or isinstance(x, SymInt):
        return x
    try:
        if not isinstance(x, (bool, Tensor)):
            return operator.index(x)
    except TypeError:
        pass
    raise TypeError(f"{name}: got {x!r}, expected {expected}")
