"""Warnings about calls that are legal and most likely meant otherwise.

They are looked for when a kind of call is planned, once for many calls, and given once in a
process, to code outside of this package that calls one of `public`'s functions itself: torch's
functions mean what torch means.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from ..call.spec import EVERYTHING, AttentionSpec, Options
from ..namespace import PACKAGE

Function = TypeVar("Function", bound=Callable[..., Any])

_public: set[CodeType] = set()
given: set[str] = set()  # the warnings that were given


def public(function: Function) -> Function:
    """Have calls of this function looked at."""
    _public.add(function.__code__)  # ty: ignore
    return function


def advise(spec: AttentionSpec, o: Options) -> None:
    """Warn about a call of this spec."""
    for name, rule in RULES.items():
        text = rule(spec, o)
        if text is None or name in given or (level := _level()) is None:
            continue
        warnings.warn(text, stacklevel=level)
        given.add(name)


def _one_row(spec: AttentionSpec, o: Options) -> str | None:
    if spec.M != 1 or spec.N < 2 or o.causal != "top_left" or o.place != EVERYTHING:
        return None
    return (
        f"causal=True of one row and {spec.N} keys shows it the first key alone, since rows and "
        'keys are counted from their first; causal="bottom_right" shows the last row all keys, '
        "as decoding needs"
    )


# No model has so many heads with so few rows; without a batch they may be a batch's heads.
MANY_HEADS, FEW_ROWS, LEAST_DIM = 256, 128, 16


def _layout(spec: AttentionSpec, o: Options) -> str | None:
    sizes = B, H, M, D = spec.B, spec.H, spec.M, spec.D
    rows = 1 < M <= FEW_ROWS and 0 < spec.N <= M and M % spec.N == 0
    if spec.packed or not (B > 1 and H == spec.Hk >= MANY_HEADS and rows and D >= LEAST_DIM):
        return None
    return (
        f"q of shape {sizes} is read as (B, H, M, D), {H} heads of {M} rows; if it is "
        "(B, M, H, D), as flash-attn has it, give q.transpose(1, 2), and k and v likewise, or "
        "call fastattn.flash_attn.flash_attn_func"
    )


RULES = {"one row": _one_row, "layout": _layout}


def _level() -> int | None:
    """The stacklevel, in `advise`, of the code that called a public function; None if another
    function of this package called it, or none was called."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_code not in _public:
        frame, level = frame.f_back, level + 1
    caller = None if frame is None else frame.f_back
    if caller is None or caller.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
        return None
    return level + 1
