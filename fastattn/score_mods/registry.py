"""The table of torch's functions on symbols, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .symbols import Symbol, Trace

Handler = TypeVar("Handler", bound=Callable)
# torch.add, Tensor.add, Tensor.__add__ and add_ have one name.
FUNCTIONS: dict[str, Callable] = {}


def known_as(*names: str) -> Callable[[Handler], Handler]:
    """Enter a handler under `names`. It takes the trace, then the function's arguments."""

    def enter(f: Handler) -> Handler:
        FUNCTIONS.update(dict.fromkeys(names, f))
        return f

    return enter


def pair(t: Trace, name: str, x: Any, y: Any, least: str = "bool") -> tuple[Symbol, ...]:
    """Two operands of the kind that torch promotes them to, which is at least `least`."""
    return t.promoted(t.lift(x, name), t.lift(y, name), least=least)


def with_first(f: Callable, *first: Any) -> Callable:
    """`f` with its first arguments given. Dynamo does not trace a functools.partial that it finds
    in a table."""
    return lambda *args, **kwargs: f(*first, *args, **kwargs)
