"""Rules and their errors: got, expected, and what to do.

Scalars, numpy's among them, become plain numbers and texts. A bool is refused as a number, and a
number as a bool: True equals 1, so caches of calls could not tell them apart. numpy's bools are
bools.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor
from torch.autograd import forward_ad

from .sizes import holds


def need(ok: Any, name: str, got: object, expected: str) -> None:
    """Raise ValueError unless `ok`, a bool or a claim of sizes (`sizes`), holds."""
    if not holds(ok):
        raise ValueError(f"{name}: got {got}, expected {expected}")


def need_constant(why: str, **given: object) -> None:
    """Raise ValueError for tensors with a derivative, which the caller would drop: `why`."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            continue
        if torch.is_grad_enabled() and x.requires_grad:
            got, do = "that requires grad", "call it under torch.no_grad(), or "
        elif forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            got, do = "with a tangent", ""
        else:
            continue
        raise ValueError(
            f"{name}: got a tensor {got}, expected a constant: {why}; {do}pass {name}.detach()"
        )


def need_a_tensor(name: str, x: object, expected: str = "a torch.Tensor") -> None:
    """Raise TypeError unless x is a tensor."""
    if not isinstance(x, Tensor):
        holds = isinstance(x, (list, tuple)) or hasattr(x, "__array__")
        hint = f": torch.as_tensor({name}) makes one" if holds else ""
        raise TypeError(f"{name}: got {type(x).__name__}, expected {expected}{hint}")


def need_dense(name: str, x: Tensor) -> None:
    """Raise TypeError for nested, sparse and other tensors that strides do not describe."""
    if x.is_nested and x.layout == torch.jagged:
        raise TypeError(
            f"{name}: got a jagged tensor, expected a dense one: scaled_dot_product_attention and "
            "MultiheadAttention take it, attention_packed its values() and offsets()"
        )
    if x.is_nested:
        raise TypeError(
            f"{name}: got a nested tensor, expected a dense one: torch.nested.to_padded_tensor "
            "makes it, and key_lengths tells where each item ends"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name}: got a {x.layout} tensor, expected a dense one: use to_dense()")


def shape_of(x: Tensor) -> str:
    return f"shape {tuple(x.shape)}"


# ----------------------------------------------------------------------------------------- scalars


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
