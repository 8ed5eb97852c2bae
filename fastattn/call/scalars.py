"""Convert scalar arguments, numpy's among them, to plain Python numbers and texts.

A bool is refused as a number, and a number as a bool: True equals 1, so caches of calls could not
tell them apart. numpy's bools are bools.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any

from torch import SymFloat, SymInt, Tensor

BOOLS = "bool", "bool_"  # Python's, and numpy's, which older versions of it take for an index
_ALIGNMENTS = {
    False: "",
    True: "top_left",
    "top_left": "top_left",
    "bottom_right": "bottom_right",
}


def alignment(causal: Any) -> str:
    """The argument `causal` as one of "", "top_left" and "bottom_right"."""
    if not (type(causal).__name__ in BOOLS or isinstance(causal, str)) or causal not in _ALIGNMENTS:
        expected = 'False, True, "top_left" or "bottom_right"'
        raise ValueError(f"causal: got {causal!r}, expected {expected}")
    return _ALIGNMENTS[causal]


def flag(name: str, x: Any) -> Any:
    """x as a bool. Numbers, tensors and texts are none."""
    if type(x).__name__ not in BOOLS:
        raise TypeError(f"{name}: got {x!r} ({type(x).__name__}), expected True or False")
    return bool(x)


def real(name: str, x: Any) -> Any:
    """x as a float. A compiler's symbol is returned as it is."""
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
    """x as an int. A compiler's symbol is returned as it is."""
    if type(x) is int or isinstance(x, SymInt):
        return x
    try:
        if not isinstance(x, Tensor) and type(x).__name__ not in BOOLS:
            return operator.index(x)
    except TypeError:
        pass
    raise TypeError(f"{name}: got {x!r}, expected {expected}")
