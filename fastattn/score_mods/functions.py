"""Calls of torch's functions, methods and operators on symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import arithmetic, casts, logic, reductions  # each enters its functions
from .elements import by_element, is_part
from .registry import FUNCTIONS
from .symbols import ORDER, PARTS, Symbol, Trace, refused

__all__ = ["arithmetic", "call", "casts", "logic", "reductions"]

# Functions of a whole tensor; all others are of numbers, and have the results of each element.
OF_WHOLE = {"sum", "prod", "mean", "amax", "amin", "any", "all", "max", "min"}
OF_WHOLE |= {"norm", "linalg_norm", "linalg_vector_norm", "dot", "vdot", "inner", "linalg_vecdot"}
OF_WHOLE |= {"matmul", "mv", "mm", "rmatmul", "result_type", "is_floating_point"}
OF_WHOLE |= {"squeeze", "view", "view_as", "reshape", "expand", "flatten"}
OF_WHOLE |= {"new_ones", "new_zeros", "new_empty", "new_full", "new_tensor"}
OF_WHOLE |= {"ones_like", "zeros_like", "empty_like", "full_like"}
# Only the first argument of these is an operand: another one may say the dtype.
CASTS = {"to", "type", "type_as", "as_tensor", "tensor", "asarray", "scalar_tensor", "_to_copy"}
CASTS |= {"float", "double", "half", "bfloat16", "int", "long", "bool", "short", "char", "byte"}


def applied(t: Trace, name: str, args: tuple, kwargs: dict) -> object:
    """What a function of the table means of operands of any number of dimensions."""
    handler = FUNCTIONS[name]
    if name in CASTS and args and is_part(args[0]):
        of_one = lambda t, x: handler(t, x, *args[1:], **kwargs)  # noqa: E731
        return by_element(t, name, of_one, args[:1], {})
    if name not in OF_WHOLE and name not in CASTS:
        for x in (*args, *kwargs.values()):
            if is_part(x):
                return by_element(t, name, handler, args, kwargs)
    return handler(t, *args, **kwargs)


def call(t: Trace, name: str, args: tuple, kwargs: dict) -> object:
    """What the function `name` of torch means on symbols. Raises NotImplementedError if no program
    has it."""
    known, in_place = name, False
    if name not in FUNCTIONS and name.startswith("__") and name.endswith("__"):
        known = name[2:-2]
        in_place = known in IN_PLACE
    elif name not in FUNCTIONS and name.endswith("_"):
        known, in_place = name[:-1], True
    if known not in FUNCTIONS:
        raise refused(
            NotImplementedError,
            f"{name} of a score, an index or a part of a captured tensor is no operator of a "
            "program: write it by arithmetic, comparisons, torch.where, exp, log, tanh, sums and "
            "indexing, or compute it outside of the function and index the result",
        )
    if kwargs.get("out") is not None:
        raise refused(NotImplementedError, f"{name} with out=: use its result")
    try:
        result = applied(t, known, args, kwargs)
    except TypeError as error:
        handler = FUNCTIONS[known]
        if f"{getattr(handler, '__name__', '')}()" in str(error) or "lambda" in str(error):
            raise refused(TypeError, f"{name}: wrong arguments: {error}") from error
        raise
    if in_place:
        target = args[0]
        if not isinstance(target, Symbol) or not isinstance(result, Symbol):
            raise refused(
                TypeError, f"{name} changes a captured tensor: a score_mod or mask_mod may not"
            )
        if ORDER[result.kind] > ORDER[target.kind]:
            raise refused(TypeError, f"{name}: a {result.kind} does not fit into a {target.kind}")
        target.at = t.cast(result, target.kind).at
        return target
    return result


ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
ARITHMETIC += ("and", "or", "xor", "lshift", "rshift")
IN_PLACE = frozenset(f"i{name}" for name in ARITHMETIC)
COMPARISONS = ("ge", "gt", "le", "lt", "eq", "ne")
OPERATORS = (*ARITHMETIC, *(f"r{name}" for name in ARITHMETIC), *COMPARISONS)
OPERATORS += ("neg", "pos", "abs", "invert")


def _operator(name: str) -> Callable:
    handler = FUNCTIONS[name]

    def operator(self: Symbol, *others: object) -> object:
        for x in others:
            if isinstance(x, (*PARTS, Tensor)):
                return call(self.trace, name, (self, *others), {})
        return handler(self.trace, self, *others)

    return operator


def _method(self: Any, name: str) -> Callable:
    if name.startswith("__"):
        raise AttributeError(name)
    if not callable(getattr(Tensor, name, None)):  # true, as a function, in the user's condition
        of = self.described() if isinstance(self, PARTS) else "a score or an index"
        raise refused(AttributeError, f".{name} of {of}")
    return lambda *args, **kwargs: call(self.trace, name, (self, *args), kwargs)


def _known_method(name: str) -> Callable:
    return lambda self, *args, **kwargs: call(self.trace, name, (self, *args), kwargs)


def _no_index(self: Symbol, key: Any) -> Symbol:
    if key == () or key is Ellipsis:
        return self
    raise refused(IndexError, "a score or an index has no dimension to index")


for _name in OPERATORS:
    setattr(Symbol, f"__{_name}__", _operator(_name))
for _class in (Symbol, *PARTS):
    for _name in (*OPERATORS, "matmul", "rmatmul") if _class in PARTS else ():
        setattr(_class, f"__{_name}__", _known_method(_name))
    for _name in FUNCTIONS.keys() - set(OPERATORS) - set(dir(_class)):
        setattr(_class, _name, _known_method(_name))
    _class.__getattr__ = _method  # ty: ignore
Symbol.__getitem__ = _no_index  # ty: ignore
