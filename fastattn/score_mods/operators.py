"""The operators of programs: kinds, and what they mean in torch and of Python's numbers.

Integers are as if unbounded; int64 in practice. Division and remainder of ints by zero are 0.
A shift by less than 0 or by more than 63 counts as one by 0 or by 63.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch

KINDS = {"float": float, "int": int, "bool": bool}
F, I, B = "float", "int", "bool"


class Op(NamedTuple):
    signatures: tuple[tuple[tuple[str, ...], str], ...]  # the kinds of the operands; of the result
    meaning: Callable | None = None  # of torch tensors. None: an input, a constant or a load
    fold: Callable | None = None  # of Python's numbers, exact; or it returns None


def _of(*signatures: str) -> tuple:
    """ "ff>f" is (("float", "float"), "float")."""
    kinds = {"f": F, "i": I, "b": B}
    pairs = (x.split(">") for x in signatures)
    return tuple((tuple(kinds[x] for x in left), kinds[right]) for left, right in pairs)


def _nonzero(b: torch.Tensor) -> torch.Tensor:
    return torch.where(b == 0, torch.ones_like(b), b)


def floor_div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if b.dtype.is_floating_point:
        return torch.div(a, b, rounding_mode="floor")
    whole = torch.div(a, _nonzero(b), rounding_mode="floor")
    return torch.where(b == 0, torch.zeros_like(whole), whole)


def remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if b.dtype.is_floating_point:
        return torch.remainder(a, b)
    rest = torch.remainder(a, _nonzero(b))
    return torch.where(b == 0, torch.zeros_like(rest), rest)


def _shift(f: Callable) -> Callable:
    return lambda a, n: f(a, n.clamp(0, 63))


def _sign(x):
    return (x > 0) - (x < 0)


_NUMERIC = _of("ff>f", "ii>i")
_ONE = _of("f>f", "i>i")
_FLOAT = _of("f>f")
_COMPARE = _of("ff>b", "ii>b")
_INTS = _of("ii>i")
_BOOLS = _of("bb>b")

OPS: dict[str, Op] = {
    "score": Op(_of(">f")),
    "b": Op(_of(">i")),
    "h": Op(_of(">i")),
    "i": Op(_of(">i")),
    "j": Op(_of(">i")),
    "constant": Op(_of(">f", ">i", ">b")),
    "load": Op(()),  # of any number of int operands
    "add": Op(_NUMERIC, torch.add, operator.add),
    "sub": Op(_NUMERIC, torch.sub, operator.sub),
    "mul": Op(_NUMERIC, torch.mul, operator.mul),
    "neg": Op(_ONE, torch.neg, operator.neg),
    "abs": Op(_ONE, torch.abs, abs),
    "minimum": Op(_NUMERIC, torch.minimum, min),
    "maximum": Op(_NUMERIC, torch.maximum, max),
    "where": Op(_of("bff>f", "bii>i"), torch.where, lambda c, x, y: x if c else y),
    "floor_div": Op(_NUMERIC, floor_div, lambda a, b: a // b if b else 0),
    "remainder": Op(_NUMERIC, remainder, lambda a, b: a % b if b else 0),
    "sign": Op(_ONE, torch.sign, _sign),
    "div": Op(_of("ff>f"), torch.div),
    "pow": Op(_of("ff>f"), torch.pow),
    "exp": Op(_FLOAT, torch.exp),
    "exp2": Op(_FLOAT, torch.exp2),
    "log": Op(_FLOAT, torch.log),
    "log2": Op(_FLOAT, torch.log2),
    "log1p": Op(_FLOAT, torch.log1p),
    "sqrt": Op(_FLOAT, torch.sqrt),
    "rsqrt": Op(_FLOAT, torch.rsqrt),
    "sin": Op(_FLOAT, torch.sin),
    "cos": Op(_FLOAT, torch.cos),
    "tanh": Op(_FLOAT, torch.tanh),
    "sigmoid": Op(_FLOAT, torch.sigmoid),
    "floor": Op(_FLOAT, torch.floor),
    "ceil": Op(_FLOAT, torch.ceil),
    "trunc": Op(_FLOAT, torch.trunc),
    "round": Op(_FLOAT, torch.round),
    "erf": Op(_FLOAT, torch.erf),
    "shift_left": Op(
        _INTS, _shift(torch.bitwise_left_shift), lambda a, n: a << n if 0 <= n < 64 else None
    ),
    "shift_right": Op(
        _INTS, _shift(torch.bitwise_right_shift), lambda a, n: a >> n if 0 <= n < 64 else None
    ),
    "bit_and": Op(_INTS, torch.bitwise_and, operator.and_),
    "bit_or": Op(_INTS, torch.bitwise_or, operator.or_),
    "bit_xor": Op(_INTS, torch.bitwise_xor, operator.xor),
    "bit_not": Op(_of("i>i"), torch.bitwise_not, operator.invert),
    "and": Op(_BOOLS, torch.logical_and, operator.and_),
    "or": Op(_BOOLS, torch.logical_or, operator.or_),
    "xor": Op(_BOOLS, torch.logical_xor, operator.xor),
    "not": Op(_of("b>b"), torch.logical_not, operator.not_),
    "ge": Op(_COMPARE, torch.ge, operator.ge),
    "gt": Op(_COMPARE, torch.gt, operator.gt),
    "le": Op(_COMPARE, torch.le, operator.le),
    "lt": Op(_COMPARE, torch.lt, operator.lt),
    "eq": Op(_COMPARE, torch.eq, operator.eq),
    "ne": Op(_COMPARE, torch.ne, operator.ne),
    # The meaning of to_float is a cast to the score's dtype: `evaluate` has it.
    "to_float": Op(_of("i>f", "b>f"), None, float),
    "to_int": Op(_of("f>i", "b>i"), lambda x: x.to(torch.int64), int),
    "to_bool": Op(_of("f>b", "i>b"), lambda x: x != 0, bool),
}

# The kind of the result, by the name of the operator and the kinds of its operands.
RESULTS = {(name, kinds): kind for name, op in OPS.items() for kinds, kind in op.signatures}
