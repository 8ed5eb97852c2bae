"""Calls of torch's functions, methods and operators on symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import arithmetic, casts, logic  # each enters its functions
from .registry import FUNCTIONS
from .symbols import ORDER, Symbol, Table, Trace, refused

__all__ = ["arithmetic", "call", "casts", "logic"]


def call(t: Trace, name: str, args: tuple, kwargs: dict) -> object:
    """What the function `name` of torch means on symbols. Raises NotImplementedError if no program
    has it."""
    handler = FUNCTIONS.get(name)
    in_place = False
    if handler is None and name.startswith("__") and name.endswith("__"):
        handler = FUNCTIONS.get(name[2:-2])
        in_place = name[2:-2] in IN_PLACE
    elif handler is None and name.endswith("_"):
        handler, in_place = FUNCTIONS.get(name[:-1]), True
    if handler is None:
        raise refused(
            NotImplementedError,
            f"{name} of a score or an index is no operator of a program: write it by arithmetic, "
            "comparisons, torch.where, exp, log, tanh and indexing, or compute it outside of the "
            "function and index the result",
        )
    if kwargs.get("out") is not None:
        raise refused(NotImplementedError, f"{name} with out=: use its result")
    try:
        result = handler(t, *args, **kwargs)
    except TypeError as error:
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
    return lambda self, *other: handler(self.trace, self, *other)


def _method(self: Symbol, name: str) -> Callable:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: call(self.trace, name, (self, *args), kwargs)


def _known_method(name: str) -> Callable:
    return lambda self, *args, **kwargs: call(self.trace, name, (self, *args), kwargs)


def _no_index(self: Symbol, key: Any) -> Symbol:
    if key == () or key is Ellipsis:
        return self
    raise refused(IndexError, "a score or an index has no dimension to index")


def _refused_part(name: str) -> Callable:
    return lambda self, *other: self.trace.lift(self, name)


for _name in OPERATORS:
    setattr(Symbol, f"__{_name}__", _operator(_name))
    setattr(Table, f"__{_name}__", _refused_part(_name))
for _name in FUNCTIONS.keys() - set(OPERATORS) - set(dir(Symbol)):
    setattr(Symbol, _name, _known_method(_name))
Symbol.__getattr__ = _method  # ty: ignore
Symbol.__getitem__ = _no_index  # ty: ignore
